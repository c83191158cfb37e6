"""The schema of saved plans: plans that are written keep it, and mutants do not."""

import json
from pathlib import Path

import jsonschema
import pytest

import cfp
from cfp.plan.plan import FORMAT
from cfp_test.report.plans import as_data, layers, make_plan
from cfp_test.reported import DEEP, HOSTILE

SCHEMA = json.loads((Path(cfp.__file__).parent / "plan.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def test_the_schema_is_one_and_of_this_format():
    VALIDATOR.check_schema(SCHEMA)
    assert SCHEMA["properties"]["format"]["const"] == FORMAT


@pytest.mark.parametrize("plan", [DEEP, HOSTILE, make_plan(layers([0, 1]), [])])
def test_plans_keep_the_schema(plan):
    VALIDATOR.validate(as_data(plan))


def test_everything_that_is_written_is_in_the_schema():
    assert set(as_data(DEEP)) == set(SCHEMA["properties"])


@pytest.mark.parametrize(
    "mutation",
    [
        {"format": 2},
        {"mesh_axes": [["x"]]},
        {"mesh_axes": [["x", 1]]},
        {"arguments": [{"path": "a"}]},
        {"output_specs": ["x"]},
        {"constraints": [{"spec": [], "values": [-1], "uses": []}]},
        {"race": {}},
        {"search": {"rounds": "small"}},
        {"sites": {"sites": [], "equations": 1, "digest": "a"}},
        {"figures": {}},
    ],
    ids=str,
)
def test_mutants_break_the_schema(mutation):
    assert not VALIDATOR.is_valid({**as_data(DEEP), **mutation})


@pytest.mark.parametrize("part", sorted(SCHEMA["required"]))
def test_no_part_may_be_missing(part):
    data = as_data(DEEP)
    del data[part]
    assert not VALIDATOR.is_valid(data)
