"""Plans in words: why, and in what two of them differ."""

from dataclasses import replace

import pytest

from cfp.errors import CfpError
from cfp.report.differing import diff_data, diff_text
from cfp.report.told import WIDTH, explain_data, explain_text
from cfp_test.report.plans import layers, make_plan
from cfp_test.reported import DEEP, HARMFUL, HOSTILE, KIB, figured


def test_a_plan_explains_itself():
    lines = explain_text(DEEP).splitlines()
    assert lines[4:] == [
        "Memory: 3.00 MiB of 650.00 KiB on each device.",
        "",
        "Segments 0-95 (96 alike): parameters sharded; 1.500 ms each, measured",
        "  Net/layer_0-95/up  at net/layers.py:7",
        "    sharded: x: rows (dim 0 of 8)",
        "    tensors: f32[8/x,16] x f32[16,32/y] -> f32[8/x,32/y]",
        "    collectives: 2 x all-gather over x, 3.00 KiB together, 0.125 ms, "
        "all-reduce over x,y, 1.00 KiB,",
        "      0.250 ms",
        "  why: predicted to be the fastest of 4 measured: step 9.500 ms, zero1",
        "  runner-up: #2: step 10.500 ms (+10.5%), memory 500.00 KiB (-16.7%); #2 in "
        "words",
    ]
    assert "Runner-up: data_parallel, 12.250 ms, against 10.250 ms." in " ".join(
        " ".join(lines).split()
    )


def test_a_faster_option_that_does_not_fit_is_no_runner_up_and_one_that_fits_is():
    wide = figured(["a", "b"], budget_bytes=None)
    told = " ".join(explain_text(wide).split())
    assert "it won the race, though another strategy was predicted to be faster" in told
    assert "runner-up: fastest: step 9.000 ms (-5.3%), memory 900.00 KiB" in told


@pytest.mark.parametrize("plan", [DEEP, HOSTILE, make_plan(layers([0, 1, 0]), [])])
def test_an_explanation_fits_a_terminal(plan):
    text = explain_text(plan)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert all(c.isprintable() or c == "\n" for c in text)


def test_one_block_is_found_by_a_part_of_its_name_or_a_pattern():
    data = explain_data(HOSTILE, "quotes")
    assert [b["block"] for b in data["blocks"]] == [HARMFUL[1]]
    assert [b["block"] for b in explain_data(DEEP, "*layer_9*/up")["blocks"]] == [
        f"Net/layer_{i}/up" for i in (9, *range(90, 96))
    ]
    [only] = explain_data(DEEP, "Net/layer_3/up")["blocks"]
    assert explain_data(DEEP, "NET/Layer_3/UP")["blocks"] == [only]
    assert len(explain_data(DEEP, "layer_0-95/up")["blocks"]) == 96
    assert only["runner_up"]["step_ms"] == 10.5
    assert only["taken"]["memory_bytes"] == 600 * KIB
    assert only["source"] == "net/layers.py:7"


def test_a_block_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(CfpError, match="Net/layer_11/up") as error:
        explain_text(DEEP, "Net/layer_111/up")
    assert "No block has 'Net/layer_111/up' in its name" in str(error.value)


def test_a_plan_does_not_differ_from_itself():
    assert diff_text(DEEP, DEEP) == "first -> second\nThe plans do not differ.\n"


def test_differences_are_told_once_for_repeated_layers():
    other = replace(
        DEEP,
        measured_ms=8.5,
        arg_specs=((("x",), ()),) * 96,
        rows=tuple(replace(r, sharded="replicated") for r in DEEP.rows[:-1])
        + DEEP.rows[-1:],
        options={"xla_flag": "true"},
        environment={"device_kind": "slide rule"},
    )
    lines = diff_text(DEEP, other, ("a.json", "b.json")).splitlines()
    assert lines == [
        "a.json -> b.json",
        "",
        "Figures",
        "  measured: 10.250 ms -> 8.500 ms",
        "",
        "Versions and devices",
        "  device_kind: abacus -> slide rule",
        "",
        "Compiler options",
        "  xla_flag: - -> true",
        "",
        "Arguments, by how each dim is sharded",
        "  params/Net/layer_0-95/up: float32[16,32] None, y -> float32[16,32] x, None",
        "",
        "Blocks",
        "  Net/layer_0-94/up: x: rows (dim 0 of 8); parameters sharded -> replicated; "
        "parameters sharded",
    ]


def test_collectives_are_compared_by_bytes_and_time():
    found = diff_data(DEEP, figured(["Net/layer_0/up", "Net/layer_1/up"]))
    assert found["collectives"] == {
        "all-gather over x": ("285.00 KiB, 11.875 ms", "3.00 KiB, 0.125 ms"),
        "all-reduce over x,y": ("95.00 KiB, 23.750 ms", "1.00 KiB, 0.250 ms"),
    }
