"""Example programs: planned or under random choices, and compared with one device."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from cfp.analysis.presets import presets
from cfp_test.programs.planned import RACED, check_program
from cfp_test.programs.registry import PROGRAMS, programs_on
from cfp_test.support.checking import compile_choice, differences, draw, prepare

MESHES = {"x4": (("x", 4),), "x2y2": (("x", 2), ("y", 2))}
EVERYWHERE = [
    pytest.param(name, sizes, id=f"{name}-{mesh}")
    for mesh, sizes in MESHES.items()
    for name in programs_on(sizes)
]

# One program of each kind, the quick ones.
DAILY = {
    "x4": "tied_head scan_mlp cond shard_map moe_sort dropout".split(),
    "x2y2": "odd_sizes microbatch partly_manual segments serving".split(),
}
SEEDS = range(5)


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


def check_choices(name, sizes, seeds):
    """Compares random choices, and with several seeds the presets, with one device."""
    case = prepare(name, PROGRAMS[name], sizes)
    choices = {str(seed): draw(case.frame, seed) for seed in seeds}
    if len(seeds) > 1:
        choices |= presets(case.frame)
    for label, choice in choices.items():
        assert differences(case, compile_choice(case, choice)()) == {}, label


@pytest.mark.parametrize("name, mesh", [(n, m) for m in DAILY for n in DAILY[m]])
def test_a_random_choice(name, mesh):
    check_choices(name, MESHES[mesh], [7])


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "sizes"), EVERYWHERE)
def test_random_choices_and_presets(name, sizes):
    check_choices(name, sizes, SEEDS)


def test_the_check_finds_what_differs(cache):
    traces = itertools.count(1)

    def make():
        def step(x):  # Another large constant each time it is traced.
            table = np.arange(2000, dtype=np.float32) * next(traces)
            return {"x": x * 2, "trace": x.sum() * table}

        return step, (jnp.arange(8.0),)

    found = check_program("counting", make, MESHES["x4"], cache)
    assert found.failed.keys() == {"0: trace", "1: trace"}


def test_a_result_that_rounds_hides_no_fault_of_another():
    def make():
        def step(x):
            return {"cancels": (x - 1) * 1e3, "usual": x * 2}

        return step, (jnp.linspace(1.0001, 1.001, 64),)

    case = prepare("rounded", make, MESHES["x4"])
    [rounding, exact] = case.rounding
    assert rounding > 1e-4 and exact < 1e-6
    cancels, usual = case.expected
    near = cancels * (1 + rounding)
    assert differences(case, [near, usual]) == {}
    assert differences(case, [near, usual * 1.001]).keys() == {"usual"}
