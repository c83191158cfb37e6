"""Other people's programs: planned, run twice, and checked against one device."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from cfp_test.programs.planned import RACED, check_program
from cfp_test.programs.registry import PROGRAMS, programs_on

MESHES = {"x4": (("x", 4),), "x2y2": (("x", 2), ("y", 2))}
EVERYWHERE = [
    pytest.param(name, sizes, id=f"{name}-{mesh}")
    for mesh, sizes in MESHES.items()
    for name in programs_on(sizes)
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Equal segments of several programs are measured once."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(("name", "mesh"), [("structures", "x4"), ("serving", "x2y2")])
def test_some_programs(name, mesh, cache):
    found = check_program(name, PROGRAMS[name], MESHES[mesh], cache)
    assert found.failed == {}
    assert found.winner == "planned"


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "sizes"), EVERYWHERE)
def test_all_programs(name, sizes, cache):
    assert check_program(name, PROGRAMS[name], sizes, cache).failed == {}


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["conv_net", "scan_mlp", "graph_net", "equinox"])
def test_what_wins_the_race(name, mesh, cache):
    found = check_program(name, PROGRAMS[name], MESHES[mesh], cache, RACED)
    assert found.failed == {}


def test_the_check_finds_what_differs(cache):
    traces = itertools.count(1)

    def make():
        def step(x):  # Another large constant each time it is traced.
            table = np.arange(2000, dtype=np.float32) * next(traces)
            return {"x": x * 2, "trace": x.sum() * table}

        return step, (jnp.arange(8.0),)

    found = check_program("counting", make, MESHES["x4"], cache)
    assert found.failed.keys() == {"0: trace", "1: trace"}
