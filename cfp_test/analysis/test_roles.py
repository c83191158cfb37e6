"""The dim that data parallelism shards in each contraction: the batch."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.analysis.analyze import build_frame
from cfp.analysis.contractions import is_contraction
from cfp.analysis.roles import axis_walk, batch_rows, data_arguments
from cfp.analysis.strategies import AxisChoice, describe
from cfp.context import PlannerSettings
from cfp.plan.describe import axis_roles
from cfp.plan.parts import Detail, Role, roles_text
from cfp.profiling.hlo import collectives_in
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.programs.common import integers, normal, squares, training
from cfp_test.support.checking import make_mesh
from cfp_test.support.covering import at_night

SIZES = (("x", 4),)
WEIGHTS = {"a": normal(0, 16, 32), "b": normal(1, 32, 16)}


def frame_of(fn, args):
    program, _ = trace(flatten_step(fn, args, {}), make_mesh(SIZES))
    return build_frame(program, SIZES)


def sharded(step, role="data"):
    """For each contraction the dims of result and operands that are split."""
    frame = frame_of(*step)
    found = []
    for block, choice in zip(frame.blocks, axis_walk(frame, role, 4), strict=True):
        op = frame.program.ops[block.anchor]
        if is_contraction(op):
            found.append(describe(op, frame.mesh, (choice,)).partition(" @")[0])
    return found


def net(p, x):
    return jnp.tanh(x @ p["a"]) @ p["b"]


def in_parts(take):
    """Gradients summed over four parts of eight rows."""

    def train_step(p, x):
        def add(i, total):
            grads = jax.grad(lambda p: squares(net(p, take(x, i))))(p)
            return jax.tree.map(jnp.add, total, grads)

        total = jax.lax.fori_loop(0, 4, add, jax.tree.map(jnp.zeros_like, p))
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, total)

    return train_step


ROWS = ["SR = SR x RR", "SR = SR x RR"]


@pytest.mark.parametrize(
    ("take", "shape"),
    [
        (lambda x, i: jax.lax.dynamic_slice_in_dim(x, 8 * i, 8), (32, 16)),
        (lambda x, i: x.reshape(4, 8, 16)[i], (32, 16)),
        (lambda x, i: x.reshape(8, 4, 16)[:, i], (32, 16)),
        (lambda x, i: x[i], (4, 8, 16)),
    ],
    ids=["slices", "reshaped", "every fourth", "stacked"],
)
def test_rows_of_every_part_of_a_batch(take, shape):
    assert sharded((in_parts(take), (WEIGHTS, normal(2, *shape)))) == ROWS


def gradient(w, x):
    return jax.grad(lambda w: squares(jnp.tanh(x @ w)))(w)


def gradient_of_tokens(w, x):
    def loss(w):
        y = (x.reshape(-1, 16) @ w).reshape(x.shape)
        return squares(jnp.einsum("bsd,btd->bst", y, y))

    return jax.grad(loss)(w)


def halves(x):
    return x.reshape(2, -1, *x.shape[1:])


def every_second(x):
    return x.reshape(-1, 2, *x.shape[1:]).swapaxes(0, 1)


def summed(parts, of=gradient):
    def step(w, x):
        zero = jnp.zeros_like(w)
        return w - jax.lax.scan(lambda t, part: (t + of(w, part), 0), zero, parts(x))[0]

    return step


def unrolled(w, x):
    one, other = halves(x)
    return w - gradient(w, one) - gradient(w, other)


def on_half_of(w, x):
    return w - jax.vmap(gradient, (None, 0))(w, halves(x)).sum(0)


@pytest.mark.parametrize(
    ("step", "shape", "samples", "rows"),
    [
        (lambda w, x: w - gradient(w, x), (24, 16), 24, 24),
        (lambda w, x: w - gradient(w, x), (5, 16), 5, 5),
        (lambda w, x: w - gradient(w, x), (1, 16), 1, 0),
        (summed(halves), (24, 16), 24, 12),
        (summed(halves), (10, 16), 10, 5),
        (summed(every_second), (10, 16), 10, 5),
        (summed(lambda x: x), (2, 5, 16), 10, 5),
        (summed(halves, gradient_of_tokens), (10, 4, 16), 10, 5),
        (unrolled, (10, 16), 10, 5),
        (on_half_of, (24, 16), 24, 12),
    ],
)
def test_rows_of_a_batch_are_those_of_a_microbatch(step, shape, samples, rows):
    """Four devices divide 12, and 5 not even with padding."""
    frame = frame_of(step, (normal(0, 16, 16), normal(1, *shape)))
    assert batch_rows(frame, samples) == rows


def test_a_loop_over_rows_beside_the_net():
    """The net's products stay split along the rows, which the loop takes one by one."""

    def loss(p, x):
        by_row = jax.lax.map(lambda row: jnp.tanh(row @ p["a"]).sum(), x)
        return squares(net(p, x)) + by_row.mean()

    step = training(loss, WEIGHTS, normal(2, 32, 16))
    assert sharded(step) == ["R = R x RR", *ROWS]


def test_sequences_of_a_recurrent_net_whose_first_dim_is_time():
    params = {"x": normal(0, 8, 16), "h": normal(1, 16, 16), "y": normal(2, 16, 8)}

    def loss(p, batch):
        def cell(h, x):
            h = jnp.tanh(x + h @ p["h"])
            return h, h

        _, hidden = jax.lax.scan(cell, jnp.zeros((8, 16)), batch["x"] @ p["x"])
        return squares(hidden @ p["y"], batch["y"])

    batch = {"x": normal(3, 12, 8, 8), "y": normal(4, 12, 8, 8)}
    step = training(loss, params, batch)
    assert sharded(step) == ["RSR = RSR x RR", "SR = SR x RR", "RSR = RSR x RR"]


def test_a_loop_that_turns_what_it_carries():
    def loss(p, x):
        return squares(jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ p).T, x))

    step = training(loss, normal(0, 16, 16), normal(1, 16, 16))
    assert sharded(step) == ["SR = SR x RR"]


def test_gradients_of_depthwise_kernels_are_made_of_rows():
    def loss(p, x):
        dims = ("NWC", "WIO", "NWC")
        return squares(
            jax.lax.conv_general_dilated(
                x, p, (1,), "SAME", dimension_numbers=dims, feature_group_count=16
            )
        )

    step = training(loss, normal(0, 3, 1, 16), normal(1, 8, 12, 16))
    assert sharded(step) == ["SRR = SRR x RRR"]


def test_rows_that_are_picked_or_sorted():
    def loss(p, batch):
        y = net(p, batch["x"][jax.random.permutation(batch["key"], 32)])
        top, _ = jax.lax.top_k(y, 8)
        return squares(jnp.sort(top, axis=0) @ p["c"])

    batch = {"x": normal(3, 32, 16), "key": jax.random.key(0)}
    step = training(loss, {**WEIGHTS, "c": normal(4, 8, 16)}, batch)
    assert sharded(step) == [*ROWS, "SR = SR x RR"]


def test_what_is_combined_with_a_batch_is_one():
    """Times are drawn in the step; queries that are learned, copied for each row."""
    params = {**WEIGHTS, "time": normal(2, 16, 32), "shift": normal(3, 32, 16)}
    params |= {"learned": normal(4, 4, 16), "query": normal(5, 16, 16)}

    def loss(p, batch):
        time = jax.random.uniform(batch["key"], (8, 1)) * jnp.arange(1.0, 17.0)
        shift = jnp.tanh(time @ p["time"]) @ p["shift"]
        x = net(p, batch["x"] + shift[:, None])
        learned = jnp.broadcast_to(p["learned"], (8, 4, 16)) @ p["query"]
        return squares(jnp.einsum("bqd,bkd->bqk", learned, x))

    step = training(loss, params, {"x": normal(6, 8, 4, 16), "key": jax.random.key(0)})
    wide = "SRR = SRR x RR"
    scores = "SRR = SRR x SRR"
    assert sorted(sharded(step)) == sorted([*ROWS, wide, wide, wide, scores])


def test_rows_that_a_step_draws_are_a_batch():
    """Points of a domain; a generator's noise beside data that it does not meet."""

    def by_points(p, key):
        points = 2.0 * jax.random.uniform(key, (32, 16)) - 1.0
        return squares(net(p, points))

    step = training(by_points, WEIGHTS, jax.random.key(0))
    assert sharded(step) == ROWS

    def judged(p, batch):
        noise = jax.random.normal(jax.random.split(batch["key"])[1], (32, 16))
        return squares(net(p, noise)) - squares(batch["x"] @ p["c"])

    batch = {"x": normal(3, 8, 16), "key": jax.random.key(0)}
    step = training(judged, {**WEIGHTS, "c": normal(4, 16, 16)}, batch)
    assert sharded(step) == [*ROWS, "SR = SR x RR"]


def test_rows_that_are_drawn_from_a_buffer():
    """New rows go into the buffer; what is learned from are others, and more."""

    def train_step(state, new):
        p, place = state["p"], state["place"]
        buffer = jax.lax.dynamic_update_slice_in_dim(state["buffer"], new, place, 0)
        key, drawing = jax.random.split(state["key"])
        x = buffer[jax.random.randint(drawing, (32,), 0, 64)]
        grads = jax.grad(lambda p: squares(net(p, x)))(p)
        p = jax.tree.map(lambda p, g: p - 0.1 * g, p, grads)
        return {"p": p, "buffer": buffer, "place": place + 8, "key": key}

    state = {"p": WEIGHTS, "buffer": normal(2, 64, 16)}
    state |= {"place": jnp.int32(0), "key": jax.random.key(0)}
    assert sharded((train_step, (state, normal(3, 8, 16)))) == ROWS


def test_weights_of_what_is_drawn_from_a_key_alone():
    """Noise is no weight, though its key is no batch."""

    def loss(p, key):
        return squares(net(p, jax.random.normal(key, (32, 16))))

    step = training(loss, WEIGHTS, jax.random.key(0, impl="rbg"))
    assert sharded(step, "tensor") == ["RS = RR x RS", "RR = RS x SR"]


def test_a_batch_whose_leaves_have_several_sizes():
    def loss(p, graph):
        x = jnp.tanh(graph["nodes"] @ p["a"])
        messages = x[graph["edges"][:, 0]] @ p["b"]
        return squares(jax.ops.segment_sum(messages, graph["edges"][:, 1], 12))

    graph = {"nodes": normal(3, 12, 16), "edges": integers(4, 12, 24, 2)}
    step = training(loss, WEIGHTS, graph)
    assert sharded(step) == ROWS


def test_what_is_no_batch():
    """Weights that are not trained; positions beside tokens come second."""

    def train_step(p, base, batch):
        def loss(p):
            x = base["embed"][batch["tokens"]] + base["places"][batch["places"]]
            return squares(net(p, x @ base["w"]))

        return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p))

    base = {
        "embed": normal(3, 64, 8),
        "places": normal(4, 6, 8),
        "w": normal(5, 8, 16),
    }
    batch = {"places": jnp.arange(6), "tokens": integers(6, 64, 8, 6)}
    batch["mask"] = jnp.ones((8, 6))
    frame = frame_of(train_step, (WEIGHTS, base, batch))
    names = frame.program.arg_names
    found = {names[p]: rank for p, rank in data_arguments(frame).items()}
    assert found == {"batch/mask": 0, "batch/places": 1, "batch/tokens": 0}


def test_data_that_are_handed_back_are_a_batch():
    """And weights that are, because they are not trained, are none."""
    frozen = {"table": normal(3, 64, 16), "layer": [normal(4, 16, 16), normal(5, 16)]}

    def train_step(p, x, y, table, layer):
        def loss(p):
            made = net(p, x) @ table.T @ table
            return squares(jnp.tanh(made @ layer[0] + layer[1]), y)

        new = jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p))
        return new, {"x": x}, x, table, layer

    args = WEIGHTS, normal(2, 8, 16), normal(6, 8, 16), *frozen.values()
    frame = frame_of(train_step, args)
    names = frame.program.arg_names
    found = {names[p]: rank for p, rank in data_arguments(frame).items()}
    assert found == {"x": 0, "y": 0}
    assert sharded((train_step, args))[:2] == ROWS


def test_predictions_beside_what_they_are_of():
    """An evaluation: nothing is state, and its data are a result."""

    def evaluate(p, x):
        return net(p, x), x

    assert sharded((evaluate, (WEIGHTS, normal(2, 8, 16)))) == ROWS


def test_what_a_search_carries_is_its_batch():
    """Nothing but the state has rows: the texts so far, and what is known of each."""
    params = {**WEIGHTS, "embed": normal(2, 64, 16), "head": normal(3, 16, 64)}

    def search(p, state, place):
        known = net(p, state["known"] + p["embed"][state["texts"][:, :, 0]])
        scores = state["scores"][:, :, None] + jax.nn.log_softmax(known @ p["head"])
        scores, best = jax.lax.top_k(scores.reshape(8, -1), 4)
        beam, token = best // 64, best % 64
        texts = jnp.take_along_axis(state["texts"], beam[:, :, None], 1)
        known = jnp.take_along_axis(known, beam[:, :, None], 1)
        texts = jax.lax.dynamic_update_index_in_dim(texts, token, place, 2)
        return {"known": known, "texts": texts, "scores": scores}, place + 1

    state = {"known": normal(4, 8, 4, 16), "scores": normal(5, 8, 4)}
    state["texts"] = integers(6, 64, 8, 4, 12)
    step = search, (params, state, jnp.int32(1))
    assert sharded(step) == ["SRR = SRR x RR"] * 3


def test_rows_that_a_net_adds_to_are_a_batch():
    """Its result looks like a new value of its input, which is no state for that."""

    def serve(p, x):
        return x + net(p, x)

    assert sharded((serve, (WEIGHTS, normal(2, 8, 16)))) == ROWS


# What is computed once, for all rows of a batch: embeddings of positions.


def embedded(kind):
    """Tokens, or what comes as vectors, with something added that has no batch."""
    params = {
        "tokens": normal(0, 64, 32),
        "positions": normal(1, 16, 32),
        "types": normal(2, 2, 32),
        "waves": normal(3, 8, 32),
        "bias": normal(4, 16, 2),
        "up": normal(5, 32, 64),
        "down": normal(6, 64, 32),
    }
    batch = {"text": integers(7, 64, 8, 16), "x": normal(8, 8, 16, 32)}
    numbers = jnp.arange(16)

    def hidden(p, batch):
        x = batch["x"] if kind == "vectors" else p["tokens"][batch["text"]]
        if kind == "waves":
            x = x + jnp.sin(numbers[:, None] * jnp.arange(1.0, 9.0)) @ p["waves"]
        elif kind != "bias":
            x = x + p["positions"][numbers]
        if kind == "types":
            x = x + p["types"][jnp.zeros(16, int)]
        if kind == "bias":  # of distances, added to scores
            heads = x.reshape(8, 16, 2, 16)
            scores = jnp.einsum("bqhd,bkhd->bhqk", heads, heads)
            bias = p["bias"][jnp.abs(numbers[:, None] - numbers)]
            weights = jax.nn.softmax(scores + bias.transpose(2, 0, 1))
            x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, heads).reshape(x.shape)
        x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True))
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]

    def train_step(p, batch):
        loss, grads = jax.value_and_grad(lambda p: squares(hidden(p, batch)))(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), loss

    return train_step, (params, batch)


@pytest.mark.parametrize(
    "kind", ["positions", "bias", *at_night(["types", "waves", "vectors"])]
)
def test_what_is_computed_once_for_the_batch_leaves_it_sharded(kind, tmp_path):
    """Data parallel only reduces gradients and the loss; no activations travel."""
    step, args = embedded(kind)

    def found(preset):
        plan = cfp.plan(
            step,
            *args,
            mesh=make_mesh(SIZES),
            preset=preset,
            settings=PlannerSettings(race=False),
            cache_dir=tmp_path,
        )
        return collectives_in(plan.compile(step, *args).as_text())

    largest = max(4 * leaf.size for leaf in args[0].values())
    activations = 4 * args[1]["x"].size
    assert largest < activations
    reduced = found("data_parallel")
    assert {c.kind for c in reduced} == {"all-reduce"}
    gradients = 4 * sum(leaf.size for leaf in args[0].values())
    assert sum(c.bytes * c.count for c in reduced) < gradients + activations / 4
    gathered = [c.bytes for c in found("fully_sharded") if c.kind != "all-reduce"]
    assert gathered and max(gathered) <= largest


def test_a_lookups_rows_are_the_dims_of_its_indices():
    """Not columns, though the indices are its second operand."""
    frame = frame_of(*embedded("positions"))
    [lookup, *_] = frame.blocks
    [choice, *_] = axis_walk(frame, "data", 4)
    op = frame.program.ops[lookup.anchor]
    assert roles_text(axis_roles(frame, op, (choice,))) == "x: rows (dim 0, size 8)"
    columns = next(f for (f,) in op.rule.results[0] if op.rule.sizes[f] == 32)
    text = roles_text(axis_roles(frame, op, (AxisChoice(columns),)))
    assert text == "x: columns (dim 2, size 32)"


@pytest.mark.parametrize("order", ["data first", "weight first"])
def test_rows_are_those_of_the_data_in_either_order(order):
    """Libraries that map over the batch, such as Equinox, write the weight first."""

    def step(w, x):
        def loss(w):
            made = x @ w.T if order == "data first" else jax.vmap(lambda v: w @ v)(x)
            return (made**2).mean()

        return w - jax.grad(loss)(w)

    frame = frame_of(step, (jnp.ones((32, 16)), jnp.ones((64, 16))))
    [block] = [one for one in frame.blocks if one.weight >= 0]
    op = frame.program.ops[block.anchor]
    sizes = {op.rule.sizes[f]: f for (f,) in op.rule.results[0]}
    texts = [
        roles_text(axis_roles(frame, op, (AxisChoice(sizes[size]),))).partition(" (")[0]
        for size in (64, 32)
    ]
    assert texts == ["x: rows", "x: columns"]


def test_a_factor_of_both_operands_is_a_batch_only_if_the_batch_has_it():
    """Attention heads are a dim, with a size that says which."""

    def step(w, x):
        def loss(w):
            heads = jnp.einsum("bsd,dhk->bshk", x, w)
            return jnp.tanh(jnp.einsum("bqhk,bshk->bhqs", heads, heads)).mean()

        return w - jax.grad(loss)(w)

    frame = frame_of(step, (jnp.ones((32, 4, 16)), jnp.ones((8, 64, 32))))
    [block] = [one for one in frame.blocks if one.weight < 0]
    op = frame.program.ops[block.anchor]
    texts = [
        roles_text(axis_roles(frame, op, (AxisChoice(factor),)), Detail.ROLES)
        for factor in (op.rule.results[0][0][0], op.rule.results[0][1][0])
    ]
    assert texts == ["x: batch", "x: dim 1, size 4"]


def test_a_dim_of_an_op_without_products_is_only_a_dim():
    """An optimizer's weights have no batch, and another word is no other strategy."""

    def step(w, use):
        return w, jnp.where(use, w, jnp.tanh(w))

    frame = frame_of(step, (jnp.ones((64, 32)), jnp.ones((64, 32), bool)))
    [block] = frame.blocks
    op = frame.program.ops[block.anchor]
    assert op.rule is not None
    roles = axis_roles(frame, op, (AxisChoice(op.rule.results[0][1][0]),))
    texts = [roles_text(roles, detail) for detail in Detail]
    assert texts == ["x: dim 1, size 32", "x: dim 1", "x: dim 1, size 32"]
    assert roles == tuple(replace(one, role=Role.BATCH) for one in roles)


def test_a_weight_with_a_scale_of_its_own_is_a_weight():
    """Fake quantization: the scale is state, or made of the weight as the step runs."""

    def quantized(w, scale):
        scale = scale * jnp.abs(w).max()
        return jnp.clip(w / scale, -1.0, 1.0) * scale

    def scaled(p, batch):
        w = {n: quantized(p[n], p["scale"]) for n in WEIGHTS}
        return squares(net(w, batch)) * p["scale"]

    plain = sharded(
        training(lambda p, x: squares(net(p, x)), WEIGHTS, normal(2, 32, 16)), "tensor"
    )
    params = {**WEIGHTS, "scale": jnp.float32(0.5)}
    found = sharded(training(scaled, params, normal(2, 32, 16)), "tensor")
    assert found[:2] == plain[:2] == ["RS = RR x RS", "RR = RS x SR"]
