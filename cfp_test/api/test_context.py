"""Rules of planning: the platform's defaults, and what takes their place."""

from typing import Any

import jax
import pytest

import cfp
from cfp.context import _rules
from cfp.planner_settings import DetailedSettings
from cfp.settings import ConstraintLevel, defaults_of

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
