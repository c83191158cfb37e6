"""Batches that are state: environments that a policy acts in, beside its parameters."""

import re
from math import prod

import jax
import jax.numpy as jnp
import optax
import pytest

from cfp.analysis.analyze import build_frame
from cfp.analysis.layout import lay_out
from cfp.analysis.presets import presets
from cfp.analysis.roles import data_arguments
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.programs.registry import PROGRAMS
from cfp_test.support.checking import compile_choice, differences, make_mesh, prepare

MESH = (("x", 4),)
ENVS, STORED = 64, 96
TX = optax.adam(1e-2)


def frame_of(step, args):
    program, _ = trace(flatten_step(step, args), make_mesh(MESH))
    return build_frame(program, MESH)


def test_worlds_that_a_policy_acts_in_are_the_batch_and_stay_where_they_are():
    """State that a loop steps forward is not taken for what an update changes."""
    case = prepare("rollout", PROGRAMS["rollout"], MESH)
    frame = case.frame
    names = frame.program.arg_names
    assert {names[p] for p in data_arguments(frame)} == {"worlds"}
    choice = presets(frame)["data_parallel"]
    layout = lay_out(frame, choice)
    sharded = {names[i]: layout.arg_spec(i) for i in range(len(names))}
    assert {n: s for n, s in sharded.items() if any(s)} == {"worlds": (("x",), ())}
    run = compile_choice(case, choice)
    gathers = re.findall(
        r"= \w+\[([\d,]*)\]\S* all-gather(?:-start)?\(", run.compiled.as_text()
    )
    # Rows of all times are joined once, after the loop; in it a device has its own
    # worlds, but where JAX picks a logit for each row.
    sizes = [prod(map(int, shape.split(","))) for shape in gathers]
    assert sum(sizes) <= 5 * 64 * (8 + 1 + 1 + 1) + 64 * 4
    assert differences(case, run()) == {}


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
