"""The schema of saved plans: plans that are written keep it, and mutants do not."""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

import cfp
from cfp.plan.figures import VariantFigures, WorthFigures
from cfp.plan.file import FORMAT, PlanFile
from cfp_test.report.plans import as_data, layers, make_plan
from cfp_test.view.reported import DEEP, HOSTILE

PATH = Path(cfp.__file__).parent / "plan.schema.json"
SCHEMA = json.loads(PATH.read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def test_the_schema_is_that_of_the_models():
    """If it is not: write the text below into the file."""
    dialect = "https://json-schema.org/draft/2020-12/schema"
    schema = {"$schema": dialect, **PlanFile.model_json_schema()}
    assert PATH.read_text() == json.dumps(schema, indent=1) + "\n"


def test_the_schema_is_one_and_of_this_format():
    VALIDATOR.check_schema(SCHEMA)
    assert SCHEMA["properties"]["format"]["const"] == FORMAT


@pytest.mark.parametrize("plan", [DEEP, HOSTILE, make_plan(layers([0, 1]), [])])
def test_plans_keep_the_schema(plan):
    VALIDATOR.validate(as_data(plan))


def test_what_a_plan_was_chosen_among_keeps_the_schema():
    """Variants measured, estimated and refused; a choice that nothing replaces."""
    fields = {"step_ms": 9.5, "estimated_ms": 8.0, "note": ""}
    nothing = {"step_ms": None, "estimated_ms": None}
    figures = replace(
        DEEP.figures,
        variants=(
            VariantFigures(name="x=4", taken=True, **fields),
            VariantFigures(name="x=2,y=2", taken=False, **nothing, note="too large"),
        ),
        worth=(
            WorthFigures(name="kernels", with_ms=9, without_ms=None, is_measured=True),
        ),
    )
    VALIDATOR.validate(as_data(replace(DEEP, figures=figures)))


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
        {"figures": {"blocks": 3}},
    ],
    ids=str,
)
def test_mutants_break_the_schema(mutation):
    assert not VALIDATOR.is_valid({**as_data(DEEP), **mutation})


@pytest.mark.parametrize("part", sorted(SCHEMA["required"]))
def test_no_part_may_be_missing(part):
    data = as_data(make_plan(layers([0, 1]), []))
    del data[part]
    assert not VALIDATOR.is_valid(data)
