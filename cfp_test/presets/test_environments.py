"""Batches that are state: environments that a policy acts in, beside its parameters."""

import jax
import jax.numpy as jnp
import optax
import pytest

from cfp.analysis.analyze import build_frame
from cfp.analysis.layout import lay_out
from cfp.presets.presets import presets
from cfp.presets.roles import data_arguments
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.support.checking import make_mesh
from cfp_test.support.covering import at_night

MESHES = {"x4": (("x", 4),), "x2y2": (("x", 2), ("y", 2))}
ENVS, TURNS, PLACES, ACTIONS, HIDDEN, STORED = 64, 6, 6, 4, 32, 96
TX = optax.adam(1e-2)


def policy(p, seen):
    h = jnp.tanh(jnp.tanh(seen @ p["in"] + p["bias"]) @ p["mid"])
    return h @ p["actor"], (h @ p["critic"])[..., 0]


def observe(env, mean):
    return jnp.concatenate([env["place"], env["speed"]], -1) - mean


def act(env, action, key):
    """Moves one environment."""
    push = jnp.zeros(PLACES).at[action].set(1.0)
    speed = 0.9 * env["speed"] + push + 0.1 * jax.random.normal(key, push.shape)
    place = env["place"] + 0.1 * speed
    is_over = jnp.abs(place).max() > 1.0
    env = {"place": place, "speed": speed, "age": env["age"] + 1}
    env = jax.tree.map(lambda v: jnp.where(is_over, jnp.zeros_like(v), v), env)
    return env, -jnp.square(place).sum(), is_over


def rollout(state, key):
    """Each environment's turns, one after another."""

    def turn(env, key):
        seen = observe(env, state["mean"])
        logits, value = policy(state["params"], seen)
        one, other = jax.random.split(key)
        action = jax.random.categorical(one, logits)
        own = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
        env, reward, is_over = jax.vmap(act)(env, action, jax.random.split(other, ENVS))
        return env, (seen, action, own, value, reward, is_over)

    return jax.lax.scan(turn, state["env"], jax.random.split(key, TURNS))


def advantages(last, values, rewards, is_over):
    def back(carry, turn):
        advantage, after = carry
        value, reward, is_over = turn
        goes_on = 1.0 - is_over
        error = reward + 0.99 * after * goes_on - value
        advantage = error + 0.95 * 0.99 * goes_on * advantage
        return (advantage, value), advantage

    start = (jnp.zeros_like(last), last)
    return jax.lax.scan(back, start, (values, rewards, is_over), reverse=True)[1]


def loss(p, batch):
    seen, action, before, advantage, wanted = batch
    logits, value = policy(p, seen)
    own = jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], -1)[..., 0]
    ratio = jnp.exp(own - before)
    clipped = jnp.clip(ratio, 0.8, 1.2)
    gain = jnp.minimum(ratio * advantage, clipped * advantage).mean()
    return jnp.square(value - wanted).mean() - gain


def update(state, batch, key, parts):
    """One step of the optimizer; or several, each on a part of what was shuffled."""

    def one(carry, batch):
        params, opt = carry
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt = TX.update(grads, opt)
        return (optax.apply_updates(params, updates), opt), value

    start = state["params"], state["opt"]
    if parts == 1:
        return one(start, batch)
    order = jax.random.permutation(key, TURNS * ENVS)
    flat = jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:])[order], batch)
    cut = jax.tree.map(lambda v: v.reshape(parts, -1, *v.shape[1:]), flat)
    return jax.lax.scan(one, start, cut)


def make(parts=1, apart=False):
    """A step of PPO whose only argument is its state; or several are.

    There is other state without gradients: means of what is seen, slow copies of the
    parameters, and a store of what was seen that is read at random.
    """

    def train_step(state):
        key, one, other, third = jax.random.split(state["key"], 4)
        env, (seen, action, own, value, reward, is_over) = rollout(state, one)
        last = policy(state["slow"], observe(env, state["mean"]))[1]
        advantage = advantages(last, value, reward, is_over)
        batch = seen, action, own, advantage, advantage + value
        (params, opt), value = update(state, batch, other, parts)
        again = state["store"][jax.random.randint(third, (ENVS,), 0, STORED)]
        odd = jnp.square(policy(state["params"], again)[1]).mean()
        return {
            "params": params,
            "opt": opt,
            "env": env,
            "mean": 0.9 * state["mean"] + 0.1 * seen.mean((0, 1)),
            "slow": jax.tree.map(
                lambda a, b: 0.9 * a + 0.1 * b, state["slow"], state["params"]
            ),
            "store": jnp.concatenate([seen[-1], state["store"]])[:STORED],
            "key": key,
        }, (value, odd)

    def with_several(params, opt, env, rest):
        state, values = train_step({"params": params, "opt": opt, "env": env, **rest})
        params, opt, env = (state.pop(name) for name in ("params", "opt", "env"))
        return (params, opt, env, state), values

    sizes = {
        "in": (2 * PLACES, HIDDEN),
        "bias": (HIDDEN,),
        "mid": (HIDDEN, HIDDEN),
        "actor": (HIDDEN, ACTIONS),
        "critic": (HIDDEN, 1),
    }
    keys = jax.random.split(jax.random.key(0), len(sizes))
    params = {
        name: 0.2 * jax.random.normal(key, size)
        for key, (name, size) in zip(keys, sizes.items(), strict=True)
    }
    rows = {"place": jnp.zeros((ENVS, PLACES)), "speed": jnp.ones((ENVS, PLACES))}
    rest = {
        "mean": jnp.zeros(2 * PLACES),
        "slow": jax.tree.map(jnp.copy, params),
        "store": jnp.ones((STORED, 2 * PLACES)),
        "key": jax.random.key(1),
    }
    env = {**rows, "age": jnp.zeros(ENVS, jnp.int32)}
    if apart:
        return with_several, (params, TX.init(params), env, rest)
    state = {"params": params, "opt": TX.init(params), "env": env, **rest}
    return train_step, (state,)


def frame_of(step, args, mesh=MESHES["x4"]):
    program, _ = trace(flatten_step(step, args), make_mesh(mesh))
    return build_frame(program, mesh)


@pytest.mark.parametrize(
    ("apart", "parts"), [(True, 1), (False, 3), *at_night([(True, 3), (False, 1)])]
)
def test_environments_are_the_batch(parts, apart):
    frame = frame_of(*make(parts, apart))
    names = {frame.program.arg_names[p] for p in data_arguments(frame)}
    inner = {"place", "speed", "age"}
    assert names == {f"env/{n}" if apart else f"state/env/{n}" for n in inner}


def test_what_is_trained_without_rows_has_no_batch():
    """The noise that a step draws is all that it trains on."""

    def step(state):
        key, other = jax.random.split(state["key"])

        def loss(p):
            made = jnp.tanh(jax.random.normal(other, (8, 12)) @ p["in"]) @ p["out"]
            return jnp.square(made - state["mean"]).mean(), made.mean(0)

        grads, made = jax.grad(loss, has_aux=True)(state["params"])
        updates, opt = TX.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        mean = 0.9 * state["mean"] + 0.1 * made
        return {"params": params, "opt": opt, "mean": mean, "key": key}

    params = {"in": jnp.ones((12, 32)), "out": jnp.ones((32, 16))}
    state = {"params": params, "opt": TX.init(params), "mean": jnp.ones(16)}
    frame = frame_of(step, ({**state, "key": jax.random.key(0)},))
    names = [frame.program.arg_names[p] for p in frame.group_of_arg]
    assert "state/mean" in names
    assert data_arguments(frame) == {}


def batch_of(step, state):
    frame = frame_of(step, (state,))
    return {frame.program.arg_names[p] for p in data_arguments(frame)}


def head(p, x):
    return jnp.tanh(x @ p["a"]) @ p["b"] + p["c"]


HEAD = {"a": jnp.ones((8, 32)), "b": jnp.ones((32, 8)), "c": jnp.ones(8)}


def trained(loss, params, opt):
    updates, opt = TX.update(jax.grad(loss)(params), opt)
    return optax.apply_updates(params, updates), opt


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_environments_with_keys_of_their_own_are_the_batch(make_key):
    def step(state):
        keys = jax.vmap(jax.random.split)(state["keys"])
        noise = jax.vmap(lambda key: jax.random.normal(key, (8,)))(keys[:, 1])
        place = state["place"]
        params, opt = trained(
            lambda p: jnp.square(head(p, place)).mean(), state["params"], state["opt"]
        )
        place = 0.9 * place + noise + head(state["params"], place)
        return {"params": params, "opt": opt, "place": place, "keys": keys[:, 0]}

    keys = jax.random.split(make_key(0), ENVS)
    state = {"params": HEAD, "opt": TX.init(HEAD), "place": jnp.ones((ENVS, 8))}
    assert "state/place" in batch_of(step, {**state, "keys": keys})


@pytest.mark.parametrize("acts", ["before", "after"])
def test_acting_with_the_new_parameters_trains_no_environment(acts):
    def step(state):
        params, opt = trained(
            lambda p: jnp.square(head(p, state["store"][:32])).mean(),
            state["params"],
            state["opt"],
        )
        seen = state["place"]
        action = head(params if acts == "after" else state["params"], seen).argmax(-1)
        place = 0.9 * seen + 0.1 * jax.nn.one_hot(action, 8)
        store = jnp.concatenate([seen, state["store"]])[:STORED]
        return {"params": params, "opt": opt, "place": place, "store": store}

    state = {"params": HEAD, "opt": TX.init(HEAD), "place": jnp.ones((ENVS, 8))}
    assert batch_of(step, {**state, "store": jnp.ones((STORED, 8))}) == {"state/place"}


def test_tables_that_a_step_hands_back_are_no_batch():
    """Positions' cosines and frozen weights have dims of products, too."""

    def step(state):
        key, other = jax.random.split(state["key"])

        def loss(p):
            x = jax.random.normal(other, (16, 32, 8)) * state["cosines"]
            return jnp.square(head(p, x) @ state["frozen"]).mean()

        params, opt = trained(loss, state["params"], state["opt"])
        return {**state, "params": params, "opt": opt, "key": key}

    tables = {"cosines": jnp.ones((32, 8)), "frozen": jnp.ones((8, 6))}
    state = {"params": HEAD, "opt": TX.init(HEAD), "key": jax.random.key(0)}
    assert batch_of(step, {**state, **tables}) == set()


@pytest.mark.parametrize("parts", [1, 3])
def test_data_parallelism_shards_environments_and_no_parameters(parts):
    frame = frame_of(*make(parts))
    choice = presets(frame)["data_parallel"]
    assert all(one.inner >= 0 for strategy in choice.blocks for one in strategy)
    layout = lay_out(frame, choice)
    names = frame.program.arg_names
    specs = {name: layout.arg_spec(i) for i, name in enumerate(names)}
    sharded = {name for name, spec in specs.items() if any(spec)}
    assert {"state/env/place", "state/env/speed"} <= sharded
    assert not [n for n in sharded if n.startswith(("state/params", "state/opt"))]
    assert specs["state/env/place"] == (("x",), ())
