"""Programs with fewer repeats: what is left computes what a shallower model does."""

import functools
import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from cfp.analysis.analyze import analyze
from cfp.analysis.layout import Storage
from cfp.analysis.truncate import (
    find_stretches,
    treatments,
    truncate_program,
)
from cfp.cost.memory import can_rematerialize
from cfp.presets.presets import presets
from cfp.profiling.builder import build
from cfp.program.constrain import partition_spec
from cfp.program.signature import aval
from cfp.program.step import flatten_step
from cfp.program.trace import planning_mesh
from cfp.search.jobs import whole_job
from cfp.settings import ConstraintLevel
from cfp.targets import model_target
from cfp_test.analysis.stacks import (
    ADAM,
    BATCH,
    KEPT,
    WIDTH,
    analysed,
    plain,
    stack_of,
    trained,
)
from cfp_test.models.tiny import TINY
from cfp_test.support.covering import at_night

NUMBER = re.compile(r"\d+")
LAYER = re.compile(r"[Ll]ayers?[_/]\d+")


@pytest.fixture(scope="module")
def mesh():
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    return planning_mesh(mesh)


@pytest.fixture(scope="module")
def stack(mesh):
    """Analyses of stacks, each made once: tests and choices only read them."""
    return functools.cache(
        lambda loss, layers, optimizer=ADAM: analysed(
            *stack_of(loss, layers, optimizer), mesh
        )
    )


def model(name, layers, mesh):
    target = model_target(name, {**TINY[name], "layers": layers})
    step = flatten_step(target.step, target.args, donate_argnums=target.donate)
    return analysed(step, None, mesh)


# ------------------------------------------------------------- small models of one file


def with_two_kinds(params, x):
    """Every other layer is gated, and adds to the loss: two layers are one repeat."""
    side = 0.0
    for place, name in enumerate(sorted(params["layers"], key=int)):
        layer = params["layers"][name]
        hidden = x @ layer["up"] + layer["bias"]
        if place % 2:
            hidden = hidden * jax.nn.sigmoid(jnp.cos(x) @ layer["up"])
            side += 0.1 * jnp.mean(hidden**4)
        x = x + jnp.tanh(hidden) @ layer["down"]
    return jnp.mean((x @ params["head"]) ** 2) + side


def with_side_losses(params, x):
    """Every layer adds to the loss, as layers of experts do."""
    side = 0.0
    for name in sorted(params["layers"], key=lambda name: int(name)):
        layer = params["layers"][name]
        hidden = jnp.tanh(x @ layer["up"] + layer["bias"])
        side += 0.1 * jnp.mean(hidden**4)
        x = x + hidden @ layer["down"]
    return jnp.mean((x @ params["head"]) ** 2) + side


def with_shared_weight(params, x):
    """Every layer reads one weight, whose gradient is a sum over layers."""
    for name in sorted(params["layers"], key=lambda name: int(name)):
        layer = params["layers"][name]
        hidden = jnp.tanh((x * params["shared"]) @ layer["up"] + layer["bias"])
        x = x + hidden @ layer["down"]
    return jnp.mean((x @ params["head"]) ** 2)


def computed_again(params, x):
    """The norm before a layer, rematerialized, is made in its backward pass."""

    @jax.checkpoint
    def apply(layer, x):
        normed = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
        return x + jnp.tanh(normed @ layer["up"] + layer["bias"]) @ layer["down"]

    for name in sorted(params["layers"], key=lambda name: int(name)):
        x = apply(params["layers"][name], x)
    return jnp.mean((x @ params["head"]) ** 2)


def conditioned(params, x):
    """Every layer reads what is made of one weight first, and adds to its gradient."""
    scale = jnp.tanh(x @ params["head"])
    for name in sorted(params["layers"], key=lambda name: int(name)):
        layer = params["layers"][name]
        hidden = jnp.tanh((x + scale) @ layer["up"] + layer["bias"])
        x = x + hidden @ layer["down"]
    return jnp.mean(x**2)


def with_loops(params, x):
    """Every layer runs over its rows in a loop, with constants in it."""

    def row(made, x):
        made = jnp.tanh(0.5 * made + jnp.where(jnp.arange(WIDTH) < 3, x, 0.1))
        return made, made

    for name in sorted(params["layers"], key=lambda name: int(name)):
        layer = params["layers"][name]
        _, rows = jax.lax.scan(row, jnp.zeros(WIDTH), x)
        x = x + jnp.tanh(rows @ layer["up"] + layer["bias"]) @ layer["down"]
    return jnp.mean((x @ params["head"]) ** 2)


def with_rows(params, x):
    """Every layer reads its row of a table that is made once for all."""
    names = sorted(params["layers"], key=lambda name: int(name))
    rows = jnp.tile(jnp.tanh(x[:1]), (len(names), 1))
    for place, name in enumerate(names):
        layer = params["layers"][name]
        hidden = jnp.tanh((x * rows[place]) @ layer["up"] + layer["bias"])
        x = x + hidden @ layer["down"]
    return jnp.mean((x @ params["head"]) ** 2)


def dropped_again(params, x):
    """A key is split for all layers, and their dropout rematerialized."""

    @jax.checkpoint
    def apply(layer, x, key):
        hidden = jnp.tanh(x @ layer["up"] + layer["bias"])
        kept = jax.random.bernoulli(key, 0.9, hidden.shape)
        return x + jnp.where(kept, hidden / 0.9, 0) @ layer["down"]

    names = sorted(params["layers"], key=lambda name: int(name))
    seed = jax.random.key(x[0, 0].astype(jnp.uint32))
    for name, key in zip(names, jax.random.split(seed, len(names)), strict=True):
        x = apply(params["layers"][name], x, key)
    return jnp.mean((x @ params["head"]) ** 2)


def with_all_outputs(params, x):
    """The head reads what every layer makes: no layer can be left out."""
    made = []
    for name in sorted(params["layers"], key=lambda name: int(name)):
        layer = params["layers"][name]
        x = x + jnp.tanh(x @ layer["up"] + layer["bias"]) @ layer["down"]
        made.append(x)
    return jnp.mean((jnp.stack(made).prod(axis=0) @ params["head"]) ** 2)


def linen_stack(layers):
    """Layers of flax's older kind, dropout included, rematerialized."""

    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x):
            hidden = jnp.tanh(linen.Dense(2 * WIDTH)(linen.LayerNorm()(x)))
            hidden = linen.Dropout(0.1, deterministic=False)(hidden)
            return x + linen.Dense(WIDTH)(hidden)

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            for _ in range(layers):
                x = linen.remat(Layer)()(x)
            return linen.Dense(WIDTH)(x)

    def loss(params, x):
        key = jax.random.key(x[0, 0].astype(jnp.uint32))
        return jnp.mean(Net().apply(params, x, rngs={"dropout": key}) ** 2)

    keys = {"params": jax.random.key(0), "dropout": jax.random.key(0)}
    params = jax.eval_shape(Net().init, keys, jnp.ones((BATCH, WIDTH)))
    return trained(loss, params, ADAM)


def nnx_stack(layers):
    """Layers of flax's newer kind, rematerialized."""

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return x + self.down(jnp.tanh(self.up(self.norm(x))))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([Layer(rngs) for _ in range(layers)])
            self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            for layer in self.layers:
                x = nnx.remat(Layer.__call__)(layer, x)
            return self.head(x)

    graph, params = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))
    return trained(lambda p, x: jnp.mean(nnx.merge(graph, p)(x) ** 2), params, ADAM)


WEIGHT = r"state/0/layers/\d+/up"
CLIPPED = optax.chain(optax.clip_by_global_norm(1e-3), optax.adamw(1e-2))


# --------------------------------------------------------------------- running programs


def renumbered(names):
    """Names with the number of their layer among those there are of the same name."""
    kinds = {}
    for name in names:
        number = NUMBER.findall(name)
        layer = [int(n) for n in number if name.count(f"layer_{n}") or "layers" in name]
        kinds.setdefault(NUMBER.sub("#", name), {})[name] = layer[-1:]
    return {
        name: f"{kind} {place}"
        for kind, found in kinds.items()
        for place, name in enumerate(sorted(found, key=lambda n: (found[n], n)))
    }


def run(analysis, mesh, job):
    """All results by name, of arguments that are the same for equal names."""
    program = analysis.frame.program
    named = dict(zip(program.args, program.arg_names, strict=True))
    names = renumbered(named[v] for v in job.part.inputs)
    args = []
    for v, spec in zip(job.part.inputs, job.in_specs, strict=True):
        kind = aval(program, v)
        rng = np.random.default_rng(list(names[named[v]].encode()))
        if jnp.issubdtype(kind.dtype, jnp.floating):
            x = abs(rng.normal(size=kind.shape) * 0.1)
        else:
            x = rng.integers(0, 2, kind.shape)
        sharding = NamedSharding(mesh, partition_spec(spec))
        args.append(jax.device_put(np.asarray(x, kind.dtype), sharding))
    built = build(program, mesh, job)
    outputs = built.compiled(*args)  # pyright: ignore
    names_of = dict(zip(program.outputs, program.output_names, strict=True))
    # Of a sum that does without its parts the last value has another id, and no name.
    known = [names_of.get(v, "sum") for v in job.part.outputs]
    made = renumbered(known) | {known[-1]: "loss"}
    results = zip(known, jax.tree.leaves(outputs), strict=True)
    return {made[name]: np.asarray(x) for name, x in results}, built


def outputs_of(analysis, part):
    """The names of a part's results."""
    program = analysis.frame.program
    named = dict(zip(program.outputs, program.output_names, strict=True))
    return [named.get(v, "") for v in part.outputs]


def layers_left(analysis, truncated, weight):
    """Counts the layers of which a weight is still an argument."""
    program = analysis.frame.program
    named = dict(zip(program.args, program.arg_names, strict=True))
    return sum(1 for v in truncated.part.inputs if re.fullmatch(weight, named[v]))


def by_kind(analysis):
    return [segment.kind for segment in analysis.segments]


def by_name(preset):
    return lambda analysis: presets(analysis.frame)[preset]


def all_again(analysis):
    """Fully sharded, with all forward passes rematerialized."""
    frame = analysis.frame
    again = [s.index for s in analysis.segments if can_rematerialize(frame, s)]
    assert len(again) > KEPT
    return replace(presets(frame)["fully_sharded"], remat=tuple(again))


def half_again(analysis):
    """The same in the first half of the layers."""
    choice = all_again(analysis)
    return replace(choice, remat=choice.remat[: len(choice.remat) // 2])


def check_like(make, layers, weight, choose, mesh, level=ConstraintLevel.EVERYTHING):
    """The truncated deep program and the shallow one compute and send the same."""
    long = make(layers)
    chosen = choose(long)
    truncated = truncate_program(long, treatments(long, chosen), KEPT)
    assert truncated is not None
    assert all(long.frame.program.ops[op].parent < 0 for op in truncated.part.ops)
    left = layers_left(long, truncated, weight)
    assert 0 < left < layers - 4
    short = make(left)
    jobs = [
        whole_job(a, choice, (), "", level, truncated=what)
        for a, choice, what in ((short, choose(short), None), (long, chosen, truncated))
    ]
    (expected, whole), (found, less) = (
        run(a, mesh, job) for a, job in zip((short, long), jobs, strict=True)
    )
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_allclose(
            found[name], expected[name], rtol=2e-5, atol=1e-6, err_msg=name
        )
    assert less.collectives == whole.collectives


# Sharded and whole state, constrained most, least and in between.
WAYS = [
    ("fully_sharded", ConstraintLevel.EVERYTHING),
    ("data_parallel", ConstraintLevel.ARGUMENTS),
    ("fully_sharded", ConstraintLevel.ACTIVATIONS),
]
STEPS = [
    *((plain, CLIPPED), (with_two_kinds, ADAM), (with_side_losses, ADAM)),
    *((with_shared_weight, ADAM), (with_loops, ADAM), (with_rows, ADAM)),
]


@pytest.mark.parametrize(
    ("loss", "optimizer", "preset", "level"),
    [
        *((plain, ADAM, *way) for way in WAYS),
        # What is left out follows from the program alone.
        *((*step, *WAYS[0]) for step in STEPS),
        *(
            pytest.param(*step, *way, marks=pytest.mark.nightly)
            for step in STEPS
            for way in WAYS[1:]
        ),
        *(
            pytest.param(plain, ADAM, preset, level, marks=pytest.mark.nightly)
            for preset in ("data_parallel", "fully_sharded")
            for level in ConstraintLevel
            if (preset, level) not in WAYS
        ),
    ],
)
def test_what_is_left_computes_what_a_shallow_model_does(
    mesh, stack, loss, optimizer, preset, level
):
    def make(layers):
        return stack(loss, layers, optimizer)

    layers = 16 if loss is with_two_kinds else 11
    check_like(make, layers, WEIGHT, by_name(preset), mesh, level)


@pytest.mark.parametrize(
    ("loss", "choose"),
    [
        (with_side_losses, all_again),
        (plain, half_again),
        *at_night([(plain, all_again), (conditioned, all_again)]),
    ],
)
def test_what_is_left_can_be_computed_again(mesh, stack, loss, choose):
    def make(layers):
        return stack(loss, layers)

    check_like(make, 14 if choose is half_again else 11, WEIGHT, choose, mesh)


def test_results_that_depend_on_nothing_stay(mesh):
    """Such as the state of an optimizer that has no use for some of it."""

    def make(layers):
        step, args = stack_of(plain, layers, ADAM)

        def with_constants(state, x):
            made, value = step(state, x)
            return made, jnp.zeros(3), jnp.arange(4) * 2, value

        return analysed(with_constants, args, mesh)

    check_like(make, 11, WEIGHT, by_name("data_parallel"), mesh)


@pytest.mark.nightly  # What makes them differ has a small model above.
@pytest.mark.parametrize("name", ["gpt", "moe", "bert", "llama"])
def test_what_is_left_of_a_model_is_a_shallow_one(mesh, name):
    def make(layers):
        return model(name, layers, mesh)

    layers = 14 if name == "moe" else 11  # Every other layer is one of experts.
    weight = r"state/params/layer_\d+/attention/query(/kernel)?"
    check_like(make, layers, weight, by_name("tensor_parallel"), mesh)


def again_stack(layers):
    return stack_of(computed_again, layers, ADAM)


def dropped_stack(layers):
    return stack_of(dropped_again, layers, ADAM)


@pytest.mark.parametrize(
    "make", [again_stack, dropped_stack, *at_night([linen_stack, nnx_stack])]
)
def test_what_is_computed_again_costs_what_it_does_in_a_shallow_model(mesh, make):
    """It may be computed with another repeat's weights, so that values differ."""

    def work(analysis, part):
        program = analysis.frame.program
        ops = [program.ops[op] for op in part.ops]
        return Counter(
            str(program.values[op.results[0]])
            for op in ops
            if op.kind in ("dot_general", "tanh", "rsqrt", "select", "while")
        )

    def job(analysis, truncated):
        choice = presets(analysis.frame)["fully_sharded"]
        return whole_job(analysis, choice, (), "", truncated=truncated)

    long = analysed(*make(11), mesh)
    truncated = truncate_program(long, by_kind(long), KEPT)
    assert truncated is not None
    names = outputs_of(long, truncated.part)
    left = max(Counter(LAYER.sub("", n) for n in names if LAYER.search(n)).values())
    assert 0 < left < 6
    short = analysed(*make(left), mesh)
    jobs = [(short, job(short, None)), (long, job(long, truncated))]
    counts = [work(a, one.part) for a, one in jobs]
    assert counts[0] == counts[1]
    built = [build(a.frame.program, mesh, one) for a, one in jobs]
    reduced = [
        sum(c.bytes * c.count for c in one.collectives if c.kind != "all-gather")
        for one in built
    ]
    assert reduced[0] == reduced[1] > 0


def test_what_reads_all_layers_is_not_truncated(stack):
    analysis = stack(with_all_outputs, 13)
    assert find_stretches(by_kind(analysis), KEPT)
    assert truncate_program(analysis, by_kind(analysis), KEPT) is None


def test_stacked_state_is_not_truncated(mesh):
    """All of it is updated, whichever layers there are."""
    _, ((params, _), x) = stack_of(plain, 13, ADAM)

    def loss(params, rows, x):
        for place in range(13):
            layer = params["layers"][str(place)]
            hidden = jnp.tanh((x * rows[place]) @ layer["up"] + layer["bias"])
            x = x + hidden @ layer["down"]
        return jnp.mean((x @ params["head"]) ** 2)

    def step(state, x):
        params, rows = state
        gradients = jax.grad(loss)(params, rows.astype(jnp.bfloat16), x)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        return params, rows * 0.9

    analysis = analysed(step, ((params, jnp.ones((13, WIDTH))), x), mesh)
    assert find_stretches(by_kind(analysis), KEPT)
    assert truncate_program(analysis, by_kind(analysis), KEPT) is None


def with_weights_used_again(params, x):
    """An op that uses a layer's weight again stands apart, and adds to its gradient."""
    layers = [params["layers"][name] for name in sorted(params["layers"], key=int)]
    for layer in layers:
        x = x + jnp.tanh(x @ layer["up"] + layer["bias"]) @ layer["down"]
    for layer in layers:
        x = x + jnp.tanh(x @ layer["up"][:, :WIDTH])
    return jnp.mean((x @ params["head"]) ** 2)


def with_norms(layers):
    """A step that returns the norms of all gradients in one array."""
    _, ((params, _), x) = stack_of(plain, layers, ADAM)

    def step(params, x):
        value, gradients = jax.value_and_grad(plain)(params, x)
        norms = [jnp.sum(g**2) for g in jax.tree.leaves(gradients)]
        made = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        return made, jnp.stack(norms), value

    return step, (params, x)


def with_weights_twice(layers):
    return stack_of(with_weights_used_again, layers, ADAM)


@pytest.mark.parametrize("make", [with_weights_twice, with_norms])
def test_what_would_lose_its_use_is_not_truncated(mesh, make):
    """It would not be computed then, though its segment stays."""
    analysis = analysed(*make(13), mesh)
    assert find_stretches(by_kind(analysis), KEPT)
    assert truncate_program(analysis, by_kind(analysis), KEPT) is None


def test_few_repeats_stay(stack):
    analysis = stack(plain, KEPT)
    assert truncate_program(analysis, by_kind(analysis), KEPT) is None


def left_out(analysis, choice):
    """The repeated segments that are left out under a choice."""
    truncated = truncate_program(analysis, treatments(analysis, choice), KEPT)
    stay = () if truncated is None else truncated.segments
    every = [s.index for s in analysis.segments]
    return [index for index in every if index not in stay] if stay else []


def test_only_repeats_that_are_treated_alike_stand_for_each_other(stack):
    analysis = stack(plain, 13)
    choice = presets(analysis.frame)["data_parallel"]
    gone = left_out(analysis, choice)
    stretch = [gone[0] - 2, gone[0] - 1, *gone, gone[-1] + 1, gone[-1] + 2]
    assert len(stretch) == len(gone) + KEPT and gone == stretch[2:-2]
    half = len(stretch) // 2
    assert half > KEPT
    for differs in (
        {"remat": tuple(stretch[:half])},
        {"storage": sharded_groups(analysis, choice, stretch[:half])},
    ):
        other = left_out(analysis, replace(choice, **differs))
        runs = stretch[:half], stretch[half:]
        assert other == [i for run in runs for i in run[2:-2]]
    one = replace(choice, remat=(stretch[4],))
    assert left_out(analysis, one) == stretch[7:-2]


def sharded_groups(analysis, choice, indices):
    """A choice's storage, with the groups of some segments sharded."""
    storage = list(choice.storage)
    for index in indices:
        for group in analysis.segments[index].groups:
            storage[group] = Storage.SHARDED
    return tuple(storage)


def test_repeats_that_are_pinned_differently_are_not_left_out(mesh, stack):
    free = stack(plain, 13)
    names = free.frame.program.arg_names
    weights = [place for place, name in enumerate(names) if re.fullmatch(WEIGHT, name)]
    assert len(weights) == 13
    choice = presets(free.frame)["data_parallel"]
    gone = left_out(free, choice)
    # By name they are of layers 0, 1, 10, 11, 12, 2, 3 and so on.
    some, one = (weights[:6], [5, 6, 7]), (weights[3:4], [3, 4, 5, 6, 7, 8])
    for pinned, left in ((weights, gone), some, one):
        pins = dict.fromkeys(pinned, ((), ("x",)))
        analysis = analyze(free.frame.program, tuple(mesh.shape.items()), pins)
        found = left_out(analysis, presets(analysis.frame)["data_parallel"])
        assert found == left


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=3), st.integers(1, 9))),
    st.integers(2, 5),
)
def test_stretches_repeat_and_do_not_overlap(runs, kept):
    kinds = [kind for period, count in runs for kind in period * count]
    found = find_stretches(kinds, kept)
    taken = []
    for stretch in found:
        repeats = [[kinds[i] for i in stretch.repeat(n)] for n in range(stretch.count)]
        assert stretch.count > kept
        assert all(repeat == repeats[0] for repeat in repeats)
        taken += [i for n in range(stretch.count) for i in stretch.repeat(n)]
        middle = stretch.middle(kept)
        assert len(middle) == stretch.count - kept
        assert middle.start >= 1 and middle.stop < stretch.count
    assert len(taken) == len(set(taken))
    longest = max((count for period, count in runs if period), default=0)
    assert found or longest <= kept
