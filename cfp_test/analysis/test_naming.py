"""Names of blocks where scopes say nothing: parameters' paths, and source lines."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from cfp.analysis.analyze import analyze, update_blocks
from cfp.program.step import flatten_step
from cfp.program.trace import trace

X = jnp.ones((8, 4, 16))
PLACES = ["q", "k", "v", "o"]


def names_of(step, *args):
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    program, _ = trace(flatten_step(step, args), mesh)
    return [block.name for block in analyze(program, (("x", 4),)).frame.blocks]


def mix(q, k, v):
    scores = jax.nn.softmax(jnp.einsum("bsd,btd->bst", q, k))
    return scores @ v


def plain_layer(x, p):
    return mix(x @ p["q"], x @ p["k"], x @ p["v"]) @ p["o"]


def weights(*lead):
    return {name: jnp.ones((*lead, 16, 16)) for name in PLACES}


def sgd(loss):
    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def layers_of(names):
    """The names without source lines, which say the file alone here."""
    assert all(n.startswith("test_naming.py:") for n in names if ":" in n)
    return [name for name in names if ":" not in name]


def test_plain_functions_are_named_by_their_parameters():
    def loss(params, x):
        for p in params["layers"]:
            x = plain_layer(x, p)
        return (x @ params["head"]).sum()

    params = {"layers": [weights(), weights()], "head": jnp.ones((16, 32))}
    names = names_of(sgd(loss), params, X)
    assert layers_of(names) == [f"layers/{i}/{p}" for i in range(2) for p in PLACES] + [
        "head"
    ]
    ends = [name.split(" ")[1] for name in names if ":" in name]
    products = ("bsd,btd->bst", "dot_general")
    assert ends == [f"{name}#{layer}" for layer in (1, 2) for name in products]


def test_stacked_layers_in_a_scan():
    def loss(params, x):
        def body(x, p):
            return plain_layer(x, p), None

        return jax.lax.scan(jax.checkpoint(body), x, params)[0].sum()

    assert layers_of(names_of(sgd(loss), weights(3), X)) == PLACES


def test_scopes_come_first_and_parameters_tell_apart():
    def loss(params, x):
        with jax.named_scope("attention"):
            x = plain_layer(x, params["layers"])
        with jax.named_scope("head"):
            return (x @ params["out"]).sum()

    names = names_of(sgd(loss), {"layers": weights(), "out": jnp.ones((16, 4))}, X)
    assert names == [
        *(f"attention/layers/{p}" for p in "qkv"),
        "attention/bsd,btd->bst",
        "attention",
        "attention/layers/o",
        "head",
    ]


class Attention(nnx.Module):
    q: nnx.Linear
    k: nnx.Linear
    v: nnx.Linear
    o: nnx.Linear

    def __init__(self, rngs):
        for name in PLACES:
            setattr(self, name, nnx.Linear(16, 16, rngs=rngs))

    def __call__(self, x):
        return self.o(mix(self.q(x), self.k(x), self.v(x)))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Attention(rngs), Attention(rngs)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("way", ["modules", "state"])
def test_modules_without_scopes(way):
    net = Net(nnx.Rngs(0))
    made = net, nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param)

    def update(net, optimizer, x):
        grads = nnx.grad(lambda net: jnp.sin(net(x)).sum())(net)
        optimizer.update(net, grads)
        return net, optimizer

    graph, state = nnx.split(made)

    def by_state(state, x):
        return nnx.state(update(*nnx.merge(graph, state), x))

    if way == "modules":
        names = names_of(update, *made, X)
    else:
        names = names_of(by_state, state, X)
    assert layers_of(names) == [f"blocks/{i}/{p}" for i in range(2) for p in PLACES]


def test_what_no_step_updates_is_named_too():
    net = eqx.nn.MLP(16, 16, 32, 2, key=jax.random.key(0))
    names = names_of(lambda net, x: jax.vmap(jax.vmap(net))(x), net, X)
    # Equinox's scopes are the classes of modules: eqx.nn.MLP/eqx.nn.Linear.
    assert names == [f"layers/{i}" for i in range(3)]


def test_what_reads_no_parameter_is_named_by_its_line():
    (name,) = names_of(lambda x: jnp.tanh(x[0]) @ jnp.sin(x[0]).T, X)
    assert name.startswith("test_naming.py:") and name.endswith(" dot_general")


def test_no_block_is_named_after_the_batch_beside_parameters():
    def loss(params, x):
        alike = jnp.tanh(x[0] @ x[0].T)
        return jnp.mean((alike @ x[0] @ params["w"]) ** 2)

    names = names_of(sgd(loss), {"w": jnp.ones((16, 16))}, X)
    assert layers_of(names) == ["w"] and len(names) == 3


def test_state_that_is_handed_on_names_no_block():
    def step(hidden, x, params):
        return jnp.tanh(x @ params["in"] + hidden @ params["again"])

    params = {"in": jnp.ones((16, 16)), "again": jnp.ones((16, 16))}
    names = names_of(step, jnp.ones((8, 16)), jnp.ones((8, 16)), params)
    assert names == ["in", "again"]


def test_an_einsum_is_named_without_its_dots():
    def loss(params, x):
        with jax.named_scope("scores"):
            return jnp.einsum("...qd,...kd->...qk", x @ params["w"], x).sum()

    names = names_of(sgd(loss), {"w": jnp.ones((16, 16))}, X)
    assert "scores/qd,kd->qk" in names and not any("..." in name for name in names)


def frame_of(step, *args):
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    program, _ = trace(flatten_step(step, args), mesh)
    return analyze(program, (("x", 4),)).frame


@pytest.mark.parametrize("is_clipped", [False, True])
def test_blocks_of_the_optimizers_update_are_told_from_others(is_clipped):
    """Lamb's have weights' norms, and what is chosen by them; none of the model's."""
    tx = optax.lamb(1e-3)
    if is_clipped:
        tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
    params = {"a": jnp.ones((16, 32)), "b": jnp.ones((32, 16))}

    def step(params, opt, mask, x):
        def loss(p):
            return ((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt = tx.update(grads, opt, params)
        shown = jnp.where(mask, 2.0, 0.0)  # of data, and without products
        return optax.apply_updates(params, updates), opt, value, shown

    frame = frame_of(step, params, tx.init(params), jnp.ones((64, 64), bool), X[0])
    kinds = [frame.program.ops[block.anchor].kind for block in frame.blocks]
    updates = update_blocks(frame)
    others = [kind for index, kind in enumerate(kinds) if index not in updates]
    assert sorted(others) == ["dot_general", "dot_general", "select"]
    assert [kinds[index] for index in sorted(updates)] == ["select"] * 4


def test_what_only_shows_gradients_updates_nothing():
    def step(params, x):
        grads = jax.grad(lambda p: ((x @ p) ** 2).mean())(params)
        return jnp.where(grads > 0, grads, 0.0).sum(0)

    assert not update_blocks(frame_of(step, jnp.ones((16, 32)), X[0]))
