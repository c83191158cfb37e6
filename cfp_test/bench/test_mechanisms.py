"""The list of mechanisms names files and functions that are there."""

import dataclasses
from pathlib import Path

import pytest

import cfp
from cfp.planner_settings import DetailedSettings
from cfp.settings import defaults_of
from cfp_test.bench.mechanisms_list import MECHANISMS

_ROOT = Path(cfp.__file__).parent


@pytest.mark.parametrize("one", MECHANISMS, ids=lambda one: one.name)
def test_a_mechanism_is_where_it_is_said_to_be(one):
    assert (_ROOT / one.room).is_file()
    for change in one.off:
        assert [*change.patches()], f"{change} replaces nothing"
    fields = {field.name for field in dataclasses.fields(DetailedSettings)}
    assert one.asked.keys() <= fields
    one.rules(defaults_of("gpu"))
