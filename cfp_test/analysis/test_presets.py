"""Compiled presets: the collectives that a person expects of each."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh

import cfp
from cfp.analysis.analyze import analyze
from cfp.analysis.layout import constraints, lay_out
from cfp.analysis.presets import presets
from cfp.context import PlannerSettings
from cfp.models import build
from cfp.profiling.hlo import collectives_in
from cfp.program.step import flatten_step
from cfp.program.trace import trace

pytestmark = pytest.mark.usefixtures(
    "compiled_once", "analyzed_once", "compared_on_one"
)

LAYERS, BATCH, SEQ, HIDDEN = 2, 8, 32, 64
OPTIONS = {
    "layers": LAYERS,
    "batch": BATCH,
    "seq": SEQ,
    "hidden": HIDDEN,
    "heads": 4,
    "vocab": 256,
    "dtype": "float32",
}
ACTIVATION_BYTES = 4 * BATCH * SEQ * HIDDEN
NO_RACE = PlannerSettings(race=False)


def collectives(plan, fn, args):
    """(kind, bytes, count) of a step compiled under a plan."""
    found = collectives_in(plan.compile(fn, *args).as_text())
    return [(c.kind, c.bytes, c.count) for c in found]


def total(found, kind):
    return sum(size * count for k, size, count in found if k == kind)


@functools.cache
def gpt():
    """A step and its arguments, made once: a step that is made anew is another."""
    return build("gpt", **OPTIONS)


def planned(preset, mesh, tmp_path, made=None, **how):
    """A plan by a preset, without a race; of the GPT if nothing else is given."""
    fn, args = made or gpt()
    how |= {"preset": preset, "mesh": mesh, "cache_dir": tmp_path, "settings": NO_RACE}
    how.setdefault("donate_argnums", () if made else (0,))
    return cfp.plan(fn, *args, **how), fn, args


def parameter_bytes(args):
    return sum(4 * leaf.size for leaf in jax.tree.leaves(args[0].params))


def test_data_parallel_only_reduces_gradients(mesh, tmp_path):
    plan, fn, args = planned("data_parallel", mesh, tmp_path)
    found = collectives(plan, fn, args)
    assert {kind for kind, _, _ in found} == {"all-reduce"}
    # Every gradient once; what else is reduced are a few scalars of the loss.
    gradients = parameter_bytes(args)
    assert gradients <= total(found, "all-reduce") <= gradients + 1024


def test_fully_sharded_gathers_parameters(mesh, tmp_path):
    plan, fn, args = planned("fully_sharded", mesh, tmp_path)
    found = collectives(plan, fn, args)
    large = sum(
        4 * leaf.size for leaf in jax.tree.leaves(args[0].params) if leaf.size > 64
    )
    assert total(found, "all-gather") >= large
    assert "all-to-all" not in {kind for kind, _, _ in found}
    state = jax.tree.leaves(plan.in_shardings[0])
    leaves = jax.tree.leaves(args[0])
    for sharding, leaf in zip(state, leaves, strict=True):
        if leaf.ndim and any(size % 4 == 0 for size in leaf.shape):
            assert "x" in sharding.spec, leaf.shape


def test_zero1_shards_the_optimizer_and_not_the_parameters(mesh, tmp_path):
    plan, _, args = planned("zero1", mesh, tmp_path)
    state = plan.in_shardings[0]
    assert all(s.is_fully_replicated for s in jax.tree.leaves(state.params))
    moments = zip(
        jax.tree.leaves(state.opt_state[0].mu),
        jax.tree.leaves(args[0].opt_state[0].mu),
        strict=True,
    )
    for sharding, leaf in moments:
        if any(size % 4 == 0 for size in leaf.shape):
            assert not sharding.is_fully_replicated


def decoder_layer(p, x):
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, p[n]) for n in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bqhe,bkhe->bhqk", q, k))
    x = x + jnp.einsum(
        "bqhe,hed->bqd", jnp.einsum("bhqk,bkhe->bqhe", weights, v), p["o"]
    )
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def forward(params, tokens):
    """A decoder as Megatron-LM splits it: plain, forward only."""
    x = params["embedding"][tokens]
    for p in params["layers"]:
        x = decoder_layer(p, x)
    return x


def scanned_forward(params, tokens):
    """The same, its layers in a loop."""
    x = params["embedding"][tokens]
    return jax.lax.scan(lambda x, p: (decoder_layer(p, x), None), x, params["layers"])[
        0
    ]


def forward_args():
    def struct(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    heads = struct(HIDDEN, 4, 16)
    layer = {
        "q": heads,
        "k": heads,
        "v": heads,
        "o": struct(4, 16, HIDDEN),
        "up": struct(HIDDEN, 256),
        "down": struct(256, HIDDEN),
    }
    params = {"embedding": struct(256, HIDDEN), "layers": [layer] * LAYERS}
    return params, jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32)


def test_megatron_reduces_twice_a_layer_forward(mesh, tmp_path):
    made = forward, forward_args()
    plan, *_ = planned("tensor_parallel", mesh, tmp_path, made)
    found = collectives(plan, *made)
    # Two a layer, and one behind the lookup in the table that is split by rows.
    assert found == [("all-reduce", ACTIVATION_BYTES, 2 * LAYERS + 1)]
    specs = plan.in_shardings[0]["layers"][0]
    assert specs["q"].spec == jax.P(None, "x")
    assert specs["o"].spec == jax.P("x")
    assert specs["up"].spec == jax.P(None, "x")
    assert specs["down"].spec == jax.P("x")


def test_megatron_reduces_twice_in_every_turn_of_a_loop(mesh, tmp_path):
    params, tokens = forward_args()
    stacked = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((LAYERS, *leaf.shape), leaf.dtype),
        params["layers"][0],
    )
    args = {**params, "layers": stacked}, tokens
    made = scanned_forward, args
    plan, *_ = planned("tensor_parallel", mesh, tmp_path, made)
    found = collectives(plan, *made)
    assert {(kind, size) for kind, size, _ in found} == {
        ("all-reduce", ACTIVATION_BYTES)
    }
    assert sum(count for _, _, count in found) == 2 * LAYERS + 1
    specs = plan.in_shardings[0]["layers"]
    assert specs["q"].spec == jax.P(None, None, "x")
    assert specs["down"].spec == jax.P(None, "x")


def test_megatron_by_pins(mesh, tmp_path):
    """Weights pinned as Megatron stores them, and the batch kept whole."""
    pins = {
        "attention/*/kernel": jax.P(None, "x"),
        "attention/out/kernel": jax.P("x"),
        "mlp/up/kernel": jax.P(None, "x"),
        "mlp/down/kernel": jax.P("x"),
        "batch/*": jax.P(),
    }
    made = gpt()
    plan, fn, args = planned("tensor_parallel", mesh, tmp_path, made, pins=pins)
    layer = plan.in_shardings[0].params["layer_0"]
    assert layer["attention"]["query"]["kernel"].spec == jax.P(None, "x")
    assert layer["mlp"]["down"]["kernel"].spec == jax.P("x")
    assert all(s.is_fully_replicated for s in jax.tree.leaves(plan.in_shardings[1]))
    kinds = {kind for kind, _, _ in collectives(plan, fn, args)}
    assert "all-gather" not in kinds and "all-to-all" not in kinds


@pytest.mark.parametrize(
    "pin, preset, cast",
    [
        ((("x",), ()), "data_parallel", (("x",), ())),
        (((), ("x",)), "data_parallel", ((), ("x",))),
        (None, "fully_sharded", (("x",), ())),
        # A cast of the part that is used costs less than of the whole.
        (((), ()), "tensor_parallel", ((), ("x",))),
    ],
)
def test_a_parameter_is_cast_as_it_is_stored_before_it_is_gathered(pin, preset, cast):
    def loss(weights, x):
        up, down = (w.astype(jnp.bfloat16) for w in weights)
        return jnp.tanh(x @ up @ down).astype(jnp.float32).sum()

    def step(weights, x):
        return jax.tree.map(jnp.subtract, weights, jax.grad(loss)(weights, x))

    weights = jnp.zeros((8, 32)), jnp.zeros((32, 8))
    args = weights, jnp.zeros((16, 8), jnp.bfloat16)
    for fn in (step, loss) if pin else (step,):  # Without an update, only a pin shards.
        program, _ = trace(flatten_step(fn, args), AbstractMesh((2,), ("x",)))
        frame = analyze(program, (("x", 2),), {0: pin} if pin else None).frame
        layout = lay_out(frame, presets(frame)[preset])
        assert pin is None or layout.arg_spec(0) == pin
        users = (program.ops[op] for op, _ in program.users[program.args[0]])
        (made,) = (op.results[0] for op in users if op.kind == "convert")
        assert layout.spec(made) == constraints(layout).values[made] == cast


def test_what_shards_nothing_is_not_called_data_parallel():
    """There are no rows but those of weights."""

    def step(state):
        product = state["weights"]["in"] @ state["weights"]["out"]
        return {**state, "norm": jnp.sum(product**2)}

    frame = frame_of_state(step, {"norm": jnp.float32(0)})
    found = presets(frame)
    assert "data_parallel" not in found
    layout = lay_out(frame, found["replicated"])
    assert not any(any(layout.arg_spec(i)) for i in range(len(frame.program.args)))


def test_rows_of_state_are_a_batch_where_nothing_is_trained():
    def step(state):
        acted = jnp.tanh(state["places"] @ state["weights"]["in"])
        moved = state["places"] + acted @ state["weights"]["out"]
        return {**state, "places": moved}

    frame = frame_of_state(step, {"places": jnp.zeros((64, 8))})
    layout = lay_out(frame, presets(frame)["data_parallel"])
    names = frame.program.arg_names
    specs = {name: layout.arg_spec(i) for i, name in enumerate(names)}
    assert specs.pop("state/places") == (("x",), ())
    assert not any(any(spec) for spec in specs.values())


def frame_of_state(step, state):
    weights = {"in": jnp.zeros((8, 32)), "out": jnp.zeros((32, 8))}
    args = ({**state, "weights": weights},)
    program, _ = trace(flatten_step(step, args), AbstractMesh((2,), ("x",)))
    return analyze(program, (("x", 2),)).frame


def small_step(where):
    """A step by Adam whose update is in a branch, its own or a wrapper's, or is not."""
    tx = optax.adam(1e-3)
    if where == "apply_if_finite":
        tx = optax.apply_if_finite(tx, 5)

    def step(state, x):
        params, opt = state

        def loss_of(p):
            return ((jnp.tanh(x @ p["up"]) @ p["down"] - x) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)

        def update():
            changes, new = tx.update(grads, opt, params)
            return optax.apply_updates(params, changes), new

        if where == "cond":
            kept = jax.lax.cond(jnp.isfinite(loss), update, lambda: (params, opt))
        else:
            kept = update()
        return kept, loss

    params = {"up": jnp.ones((64, 256)) / 64, "down": jnp.ones((256, 64)) / 256}
    return step, ((params, tx.init(params)), jnp.ones((128, 64)))


@pytest.mark.parametrize("where", ["cond", "apply_if_finite"])
@pytest.mark.parametrize("preset", ["tensor_parallel", "zero1", "fully_sharded"])
def test_updates_in_branches_send_what_others_do(mesh, tmp_path, preset, where):
    """State that a branch returns is not gathered to be chosen."""

    def sent(where):
        made = small_step(where)
        found = collectives(*planned(preset, mesh, tmp_path, made, donate_argnums=0))
        # Numbers that say if all is finite count for nothing.
        return sorted(one for one in found if one[1] > 64)

    plain = sent("step")
    assert plain and sent(where) == plain
