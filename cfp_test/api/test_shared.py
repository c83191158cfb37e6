"""Arguments that are given away, and share memory with others under another object.

Without a copy each of these ends the process.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import cfp
from cfp.program import dispatch

SETTINGS = cfp.PlannerSettings(race=False)


@pytest.fixture(scope="module")
def averaged(mesh, tmp_path_factory):
    """A step with weights and their moving average, whole on every device."""
    return cfp.parallelize(
        average,
        mesh=mesh,
        donate_argnums=0,
        preset="data_parallel",
        cache_dir=tmp_path_factory.mktemp("cache"),
        settings=SETTINGS,
    )


def average(state, x):
    w = state["w"] - (x @ state["w"]).mean()
    return {"w": w, "ema": 0.5 * state["ema"] + 0.5 * state["w"]}, w.sum()


def weights():
    return jnp.arange(64.0).reshape(8, 8)


def twins(mesh, how):
    """The same memory under two objects, or three."""
    w, d = weights(), mesh.devices.flat[0]
    whole = NamedSharding(mesh, PartitionSpec())
    return {
        "object": lambda: (w, w),
        "device": lambda: (w, jax.device_put(w, d)),
        "mesh": lambda: (
            jax.device_put(w, whole),
            jax.device_put(jax.device_put(w, d), whole),
        ),
        "one of four": lambda: (jax.device_put(w, whole), jax.device_put(w, d)),
        "piece": lambda: (w, w.addressable_shards[0].data),
    }[how]()


HOW = ("object", "device", "mesh", "one of four", "piece")


@pytest.mark.parametrize("how", HOW)
def test_both_given_away(averaged, mesh, how):
    w, ema = twins(mesh, how)
    x = jnp.ones((4, 8))
    expected = average({"w": weights(), "ema": weights()}, x)
    found = averaged({"w": w, "ema": ema}, x)
    assert cfp.compare(found, expected)[0].relative_l2 < 1e-6


@pytest.mark.filterwarnings("ignore:'average' is planned again:UserWarning")
@pytest.mark.parametrize("how", HOW)
def test_one_given_away_and_the_other_read(averaged, mesh, how):
    w, x = twins(mesh, how)
    expected = average({"w": weights(), "ema": weights() + 1}, weights())
    found = averaged({"w": w, "ema": weights() + 1}, x)
    assert cfp.compare(found, expected)[0].relative_l2 < 1e-6


def test_keys_and_their_numbers(mesh, tmp_path):
    def step(key, numbers):
        return jax.random.split(key)[0], numbers + 1

    run = cfp.parallelize(
        step, mesh=mesh, donate_argnums=(0, 1), cache_dir=tmp_path, settings=SETTINGS
    )
    key = jax.random.key(3)
    expected = jax.random.key_data(jax.random.split(key)[0])
    following, numbers = run(key, jax.random.key_data(key))
    np.testing.assert_array_equal(jax.random.key_data(following), expected)
    np.testing.assert_array_equal(numbers, [1, 4])


def test_a_training_loop_asks_no_array_for_its_buffers(averaged, monkeypatch):
    """To ask for buffers waits for what makes them."""
    asked = []
    buffers = dispatch._buffers
    monkeypatch.setattr(
        dispatch, "_buffers", lambda leaf: asked.append(leaf.shape) or buffers(leaf)
    )
    state = {"w": weights(), "ema": weights()}
    for turn in range(3):
        state, _ = averaged(state, jnp.ones((4, 8)))
        assert len(asked) == 2, turn
    # What was made of a result may share memory with it.
    w, d = state["w"], jax.devices()[0]
    again = {"w": w, "ema": jax.device_put(w.addressable_shards[0].data, d)}
    expected = average(jax.device_get(again), jnp.ones((4, 8)))
    found = averaged(again, jnp.ones((4, 8)))
    assert len(asked) == 4
    assert cfp.compare(found, expected)[0].relative_l2 < 1e-6


def test_a_result_that_stands_there_twice(mesh, tmp_path):
    def step(state, x):
        w = state["w"] + x.sum()
        return {"w": w, "ema": w}

    run = cfp.parallelize(
        step, mesh=mesh, donate_argnums=0, cache_dir=tmp_path, settings=SETTINGS
    )
    state = {"w": weights(), "ema": weights()}
    for _ in range(3):
        state = run(state, jnp.ones(4))
    np.testing.assert_array_equal(state["ema"], weights() + 12)
