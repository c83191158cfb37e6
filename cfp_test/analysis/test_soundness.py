"""Whatever is chosen, a step computes what it computes on one device."""

import pytest

from cfp.presets.presets import presets
from cfp_test.programs.registry import PROGRAMS, programs_on
from cfp_test.support.checking import compile_choice, differences, draw, prepare
from cfp_test.support.covering import at_night

MESHES = {"x4": (("x", 4),), "x2y2": (("x", 2), ("y", 2))}
SEEDS = range(5)
# One of each kind, on one mesh; the quick ones.
QUICK = {
    "x4": (
        "mlp tied_head scan_mlp cond while custom_vjp shard_map grouped_conv outside "
        "moe_sort dropout two_updates"
    ).split(),
    "x2y2": (
        "odd_sizes microbatch nested_scan ensemble partly_manual segments sorting fft "
        "windows serving"
    ).split(),
}
DAILY = {
    "x4": "tied_head scan_mlp cond shard_map moe_sort dropout".split(),
    "x2y2": "odd_sizes microbatch partly_manual segments serving".split(),
}
EVERYWHERE = [
    pytest.param(name, sizes, id=f"{name}-{mesh}")
    for mesh, sizes in MESHES.items()
    for name in programs_on(sizes)
]


def check(case, choices):
    """Compiles and runs choices, all of which must compute the same."""
    assert choices
    found = {
        label: differences(case, compile_choice(case, choice)())
        for label, choice in choices.items()
    }
    assert {label: far for label, far in found.items() if far} == {}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, mesh) for mesh, names in DAILY.items() for name in names),
        *at_night(
            (name, mesh)
            for mesh, names in QUICK.items()
            for name in names
            if name not in DAILY[mesh]
        ),
    ],
)
def test_a_random_choice(name, mesh):
    case = prepare(name, PROGRAMS[name], MESHES[mesh])
    check(case, {7: draw(case.frame, 7)})


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "sizes"), EVERYWHERE)
def test_random_choices(name, sizes):
    case = prepare(name, PROGRAMS[name], sizes)
    check(case, {seed: draw(case.frame, seed) for seed in SEEDS})


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "sizes"), EVERYWHERE)
def test_presets(name, sizes):
    case = prepare(name, PROGRAMS[name], sizes)
    check(case, presets(case.frame))
