"""Rules of planning: the platform's defaults, and what takes their place."""

from typing import Any

import jax
import pytest

import cfp
from cfp.context import _rules
from cfp.planner_settings import DetailedSettings
from cfp.profiling.key import flag_names, normalise_xla_flags
from cfp.settings import WITHOUT_TRITON, ConstraintLevel, defaults_of

EVERY = tuple(ConstraintLevel)
LESS = (ConstraintLevel.ACTIVATIONS, ConstraintLevel.ARGUMENTS)
ALONE = (ConstraintLevel.EVERYTHING,)


@pytest.mark.parametrize(
    ("platform", "described", "compiles", "no_budget", "levels"),
    [
        ("gpu", False, False, True, EVERY),
        ("gpu", False, False, False, EVERY),
        ("gpu", True, True, True, LESS),
        ("gpu", True, True, False, EVERY),
        ("gpu", True, False, True, EVERY),
        ("gpu", True, False, False, EVERY),
        ("cpu", False, False, True, ALONE),
        ("cpu", False, False, False, ALONE),
        ("cpu", True, True, True, ALONE),
    ],
)
def test_presets_race_at_levels(platform, described, compiles, no_budget, levels):
    here = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    mesh = cfp.described("4xh200") if described else here
    predictor: Any = object() if compiles else None

    def found(**settings):
        asked = DetailedSettings(**settings)
        rules = _rules(defaults_of(platform), asked, mesh, predictor, no_budget)
        return rules.levels

    assert {*found()} == {*levels}
    for one in EVERY:  # What is asked for holds.
        assert found(constraint_levels=(one,)) == (one,)


WITH_TRITON = dict.fromkeys(WITHOUT_TRITON, "True")


@pytest.mark.parametrize(
    ("platform", "flags", "settings", "base"),
    [
        ("cpu", "", {}, {}),
        ("gpu", "", {}, WITHOUT_TRITON),
        ("gpu", "--xla_gpu_autotune_level=1", {}, WITHOUT_TRITON),
        ("gpu", "--xla_gpu_enable_triton_gemm=true", {}, {}),
        # What the leader does not race with is left as the compiler has it.
        ("gpu", "", {"compiler_options": {}}, {}),
        ("gpu", "", {"compiler_options": {"other": {"xla_a": "1"}}}, {}),
        ("gpu", "", {"compiler_options": {"own": WITH_TRITON}}, WITHOUT_TRITON),
        ("gpu", "", {"choose": ("sharding",)}, {}),
    ],
)
def test_products_are_compiled_without_triton_where_the_leader_races_with_it(
    platform, flags, settings, base
):
    here = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    asked = DetailedSettings(**settings)
    names = flag_names(normalise_xla_flags(flags))
    rules = _rules(defaults_of(platform), asked, here, None, True, names)
    assert rules.base_options == base
    with_other_values = [
        one for one in rules.compiler_options.values() if one.keys() & {*WITH_TRITON}
    ]
    assert with_other_values == ([WITH_TRITON] if base else [])


def test_described_devices_have_products_as_the_compiler_has_them():
    described: Any = cfp.described("4xh200")
    rules = _rules(defaults_of("gpu"), DetailedSettings(), described, None, True)
    assert rules.base_options == {}
    assert {*rules.compiler_options} == {"no latency hiding", "large collectives"}
