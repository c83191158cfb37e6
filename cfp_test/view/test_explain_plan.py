"""Plans in words: why, and in what two of them differ."""

import json
from dataclasses import replace

import pytest

from cfp.analysis.layout import SegmentKernels, Storage
from cfp.errors import CfpError
from cfp.plan.figures import AlikeBlocks, StrategyFigures, VariantFigures
from cfp.plan.parts import Role
from cfp.plan.plan import Plan
from cfp.printable import USUAL_COLUMNS, distinct_ends
from cfp.settings import ConstraintLevel
from cfp.view.model import strategy_text, view_of
from cfp.view.page import page_html
from cfp.view.text import diff_data, diff_text, explain_data, explain_text, plan_text
from cfp_test.report.plans import RACE, ROWS, layers, make_plan, move, row
from cfp_test.view.reported import DEEP, HARMFUL, HOSTILE, KIB, MOVES, figured, untimed


def test_a_plan_explains_itself():
    lines = explain_text(DEEP).splitlines()
    assert lines[4:] == [
        "Memory: 3.00 MiB as compiled, at most 650.00 KiB on each device.",
        "Times of collectives: each launched by itself, by rates that were measured on "
        "these devices; in a",
        "  segment's time those that are combined may share a launch.",
        "",
        "Segments 0-95 (96 alike): parameters sharded; 1.500 ms each, measured",
        "  Net/layer_0-95/up  at net/layers.py:7",
        "    sharded: x: rows (dim 0, size 8)",
        "    tensors: f32[8/x,16] x f32[16,32/y] -> f32[8/x,32/y]",
        "    collectives: all-gather over x, 3.00 KiB in 2 calls, 0.125 ms; "
        "all-reduce over x,y, 1.00 KiB,",
        "      0.250 ms; but in segment 0: none",
        "  why: the fastest that fits of 4 measured: predicted step 9.500 ms, memory "
        "600.00 KiB, zero1",
        "  runner-up: #2: predicted step 10.500 ms (+10.5%), memory 500.00 KiB "
        "(-16.7%); unlike the choice:",
        "    block of #2 x: rows (dim 0, size 8)",
    ]
    assert "Next: data_parallel or zero1, 12.250 ms, against 10.250 ms." in " ".join(
        " ".join(lines).split()
    )


@pytest.mark.parametrize("place", [0, 48], ids=["first", "middle"])
def test_collectives_of_a_few_segments_are_in_all_renderings(place):
    """The figures are those of most, and what others send stands below."""
    rows = [replace(one, moves=MOVES) for one in DEEP.rows]
    rows[place] = replace(rows[place], moves=(move("all-to-all", 8),))
    plan = replace(DEEP, rows=tuple(rows))
    other = f"ut in segment {place}: all-to-all over x, 8.00 KiB"
    explained = " ".join(explain_text(plan).split())
    assert f"1.00 KiB, 0.250 ms; b{other} why:" in explained
    html, _, _ = page_html(plan).partition('<section id="collectives">')
    assert f"B{other}." in html and html.count("all-gather") == 1
    assert f"b{other}" in plan_text(plan, width=200)


def test_a_faster_option_that_does_not_fit_is_no_runner_up_and_one_that_fits_is():
    wide = figured(["a", "b"], budget_bytes=None)
    said = " ".join(explain_text(wide).split())
    assert "it won the race, though another strategy was predicted to be faster" in said
    assert (
        "runner-up: fastest: predicted step 9.000 ms (-5.3%), memory 900.00 KiB" in said
    )


def test_a_program_that_was_timed_alone_won_no_race():
    wide = figured(["a", "b"], budget_bytes=None)
    data, planned, _, failed = RACE
    over = replace(data, note="over the memory budget")
    twin = replace(data, samples_ms=planned.samples_ms, time_ms=planned.time_ms)
    though = ", though another strategy was predicted to be faster"
    for race, how in (
        ([planned], "it is part of the only program that was timed"),
        ([planned, twin, failed], "it is part of the only program that was timed"),
        ([planned, over], "it is part of the only program that was timed and fit"),
        ([failed], "it is part of what was chosen"),
    ):
        said = " ".join(explain_text(replace(wide, race=tuple(race))).split())
        assert how + though in said and "it won the race" not in said


def test_a_time_of_an_earlier_race_says_so():
    plan = make_plan([], RACE)
    again = replace(plan, search={**plan.search, "race_cached": 1.0})
    assert ", measured;" in plan_text(plan)
    assert ", measured in an earlier race (2 samples);" in repr(again)


@pytest.mark.parametrize(
    ("changes", "is_tie"),
    [
        ({}, True),
        ({"step_ms": 9.501}, False),
        ({"memory_bytes": 500 * KIB}, False),
    ],
)
def test_a_runner_up_with_the_figures_of_the_choice_is_a_tie(changes, is_tie):
    plan = figured(["a", "b"])
    kind = plan.figures.kinds[0]
    taken, other, *_ = kind.options
    same = {"step_ms": taken.step_ms, "memory_bytes": taken.memory_bytes}
    other = replace(other, **{**same, **changes})
    kinds = (replace(kind, options=(taken, other)),)
    plan = replace(plan, figures=replace(plan.figures, kinds=kinds))
    for said in (explain_text(plan), page_html(plan)):
        said = " ".join(said.split())
        assert ("of 2 measured, in a tie with the runner-up" in said) == is_tie


def test_one_of_something_is_no_plural():
    plan = figured(["a"])
    kind = plan.figures.kinds[0]
    kinds = (replace(kind, options=kind.options[:1]),)
    plan = replace(plan, figures=replace(plan.figures, kinds=kinds))
    for search in ({"strategies_estimated": 1.0}, {"strategies_measured": 1.0}):
        html = page_html(replace(plan, search={**search, "search_seconds": 1.0}))
        assert "1 strategies" not in html and html.count("1 strategy") == 3
        assert "<dt>Model</dt>" not in html


def test_a_choice_that_alone_fits_is_no_surprise_and_no_fastest():
    """Others that are faster and too large decide nothing."""
    tight = figured(["a", "b"], budget_bytes=450 * KIB)
    kind = tight.figures.kinds[0]
    taken, *others = kind.options
    small = replace(taken, memory_bytes=400 * KIB)
    kinds = (replace(kind, options=(small, *others)),)
    plan = replace(tight, figures=replace(tight.figures, kinds=kinds))
    for said in (explain_text(plan), page_html(plan)):
        assert "the fastest that fits of 4 measured" in " ".join(said.split())
        assert "it won the race" not in said
    alone = (replace(kind, options=(taken,)),)
    plan = replace(tight, figures=replace(tight.figures, kinds=alone))
    assert "it is the only strategy that was measured" in explain_text(plan)
    plan = replace(plan, search={"strategies_estimated": 1.0})
    assert "it is the only strategy that was estimated" in explain_text(plan)


def test_programs_that_were_timed_and_do_not_fit_are_not_counted_as_slower():
    [data, planned, *_] = RACE
    over = replace(data, name="wide", time_ms=5.0, note="over the memory budget")
    said = view_of(make_plan([], [data, planned, over]))
    assert "the fastest of 2 programs that were timed and fit. Next: data" in said.why
    assert said.chosen.startswith("the fastest of 2 that fit, raced on the whole step;")
    alone = view_of(make_plan([], [planned, over]))
    assert alone.why == "Why: no other program was timed and fit."
    assert alone.chosen == "of those timed on the whole step the only one that fits"


@pytest.mark.parametrize("plan", [DEEP, HOSTILE, make_plan(layers([0, 1, 0]), [])])
def test_an_explanation_fits_a_terminal(plan):
    text = explain_text(plan)
    assert max(map(len, text.splitlines())) <= USUAL_COLUMNS
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


def test_another_constraint_level_is_a_difference():
    assert DEEP.level != ConstraintLevel.ARGUMENTS
    other = replace(DEEP, level=ConstraintLevel.ARGUMENTS)
    assert f"constraint level: {DEEP.level} -> arguments" in diff_text(DEEP, other)


def test_differences_are_shown_once_for_repeated_layers():
    other = replace(
        DEEP,
        measured_ms=8.5,
        arg_specs=((("x",), ()),) * 96,
        rows=tuple(replace(r, strategy=()) for r in DEEP.rows[:-1]) + DEEP.rows[-1:],
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
        "  params/Net/layer_0-95/up: None, y -> x, None",
        "",
        "Blocks",
        "  Net/layer_0-94/up: x: rows (dim 0); parameters sharded -> replicated; "
        "parameters sharded",
    ]


def test_collectives_are_compared_by_bytes_and_time():
    found = diff_data(DEEP, figured(["Net/layer_0/up", "Net/layer_1/up"]))
    assert found["collectives"] == {
        "all-gather over x": ("285.00 KiB, 11.875 ms", "3.00 KiB, 0.125 ms"),
        "all-reduce over x,y": ("95.00 KiB, 23.750 ms", "1.00 KiB, 0.250 ms"),
    }


def test_another_batch_is_another_size_and_shards_nothing_otherwise():
    first = DEEP.rows[0]
    larger = replace(
        DEEP,
        arg_types=("float32[64,32]", *DEEP.arg_types[1:]),
        rows=(
            replace(first, strategy=(replace(ROWS, size=32),)),
            *DEEP.rows[1:],
        ),
    )
    found = diff_data(DEEP, larger)
    assert found["sizes"] == {DEEP.arg_names[0]: (DEEP.arg_types[0], "float32[64,32]")}
    assert not found["blocks"] and not found["arguments"]


def test_what_another_batch_resizes_is_one_line():
    def of(batch: int):
        names = tuple("abcdef")
        types = tuple(f"float32[{batch},{8 + i}]" for i in range(6))
        return replace(DEEP, arg_names=names, arg_types=types, arg_specs=((),) * 6)

    lines = diff_text(of(8), of(16)).splitlines()
    title = lines.index("Arguments of other types or sizes")
    folded = "  dim 0: 8 -> 16: a, b, c, d and 2 more (--json lists all)"
    assert lines[title + 1 :] == [folded]
    assert len(diff_data(of(8), of(16))["sizes"]) == 6


COLUMNS = replace(ROWS, role=Role.COLUMNS, dim=1)
SUMMED = replace(ROWS, role=Role.CONTRACTED, dim=-1)
SCATTERED = replace(ROWS, axis="y", role=Role.CONTRACTED, dim=-1, scattered_dim=1)


def strategy(*blocks, storage=None, kernel="", remat=False) -> StrategyFigures:
    """A strategy of groups of blocks: their names, and what axes shard there."""
    return StrategyFigures(
        blocks=tuple(
            AlikeBlocks(names=tuple(names.split(", ")), strategy=roles)
            for names, *roles in blocks
        ),
        storage=storage,
        kernels=SegmentKernels(attention=kernel),
        rematerialized=remat,
    )


def with_strategies(plan: Plan, *strategies: StrategyFigures) -> Plan:
    """A plan whose first strategies, the choice and its runner-up, are others."""
    kind = plan.figures.kinds[0]
    first = map(lambda o, s: replace(o, strategy=s), kind.options, strategies)
    options = (*first, *kind.options[len(strategies) :])
    kinds = (replace(kind, options=options),)
    return replace(plan, figures=replace(plan.figures, kinds=kinds))


WHOLE = strategy(("a",))


@pytest.mark.parametrize(
    ("taken", "runner", "unlike"),
    [
        (
            strategy(("a, b", ROWS, SCATTERED), ("c",), storage=Storage.USED),
            strategy(("a, c",), ("b", ROWS, SCATTERED), storage=Storage.SHARDED),
            "a replicated; parameters sharded",
        ),
        (replace(WHOLE, rematerialized=True), WHOLE, "not rematerialized"),
        (WHOLE, replace(WHOLE, rematerialized=True), "rematerialized"),
        (strategy(("a",), kernel="flash"), WHOLE, "computed as it is written"),
        (WHOLE, strategy(("a",), kernel="flash"), "flash attention"),
        (
            # As heads and their dims, of which there are as many.
            strategy(("a, b", SUMMED), ("c", replace(SUMMED, factor=9))),
            strategy(("a, c", replace(SUMMED, factor=9)), ("b", SUMMED)),
            "a x: contracted (size 8), another dim of that size",
        ),
        (strategy(("a", ROWS)), strategy(("a", ROWS)), ""),
    ],
)
def test_of_a_runner_up_only_what_differs_is_listed(taken, runner, unlike):
    plan = with_strategies(DEEP, taken, runner)
    again = Plan.from_json(json.loads(plan.to_json()))
    for one in (plan, again):
        said = " ".join(explain_text(one).split())
        same = "; the same as the choice"
        assert said.endswith(f"; unlike the choice: {unlike}" if unlike else same)


def test_blocks_that_are_left_out_of_a_text_keep_what_shards_them():
    """A cut in the middle gave the first blocks what the last are sharded by."""
    many = ", ".join(f"up_{i}/Residual_{i}/Conv_0" for i in range(24))
    few = ", ".join(f"down_{i}/Residual_{i}/Conv_0" for i in range(12))
    runner = strategy((many,), (few, COLUMNS), storage=Storage.USED)
    before = strategy((many, ROWS), (few, ROWS), storage=None)
    said = " ".join(explain_text(with_strategies(DEEP, before, runner)).split())
    shown = [f"{s}_{i}/Residual_{i}/Conv_0" for s in ("up", "down") for i in range(4)]
    assert said.endswith(
        f"unlike the choice: {', '.join(shown[:4])} and 20 more replicated; "
        f"{', '.join(shown[4:])} and 8 more x: columns (dim 1, size {COLUMNS.size}); "
        "parameters as used"
    )
    page = page_html(with_strategies(DEEP, runner, before))
    for one in (runner, before):
        assert strategy_text(one) in page


def test_ranges_in_differences_are_exact():
    def of(whole: set[tuple[int, int]]) -> Plan:
        places = [(i, j) for i in range(3) for j in range(3)]
        rows = [
            row(
                place,
                0,
                f"Net/down_{i}/Conv_{j}",
                block=place,
                strategy=() if (i, j) in whole else (ROWS,),
            )
            for place, (i, j) in enumerate(places)
        ]
        return make_plan(rows, [])

    lines = diff_text(of(set()), of({(0, 0), (0, 1), (0, 2), (2, 0), (2, 2)}))
    assert [line.split(":")[0] for line in lines.splitlines() if "Net/" in line] == [
        "  Net/down_0/Conv_0-2",
        "  Net/down_2/Conv_0,2",
    ]
    lines = diff_text(of(set()), of({(i, j) for i in (0, 1) for j in range(3)}))
    assert "  Net/down_0-1/Conv_0-2: x: rows" in lines


def test_what_reads_the_same_in_both_plans_is_no_difference():
    empty = replace(DEEP, environment={**DEEP.environment, "xla_flags": ""})
    assert diff_text(DEEP, empty).endswith("The plans do not differ.\n")
    assert not diff_data(empty, DEEP)["environment"]
    flags = replace(DEEP, environment={**DEEP.environment, "xla_flags": "--a"})
    assert "  xla_flags: - -> --a\n" in diff_text(empty, flags)


def test_memory_that_is_predicted_is_compared_with_its_source():
    other = replace(DEEP, peak_bytes=None, predicted_bytes=2048 * KIB, rung="estimated")
    found = diff_data(DEEP, other)["figures"]
    assert found["memory on each device"] == ("3.00 MiB", "2.00 MiB, estimated")


def test_a_segment_faster_than_its_collectives_one_by_one_says_why():
    segments = tuple(replace(one, time_ms=0.25) for one in DEEP.segments)
    quick = replace(DEEP, segments=segments)
    said = " ".join(explain_text(quick).split())
    assert "0.250 ms each, measured (its collectives one after another 0.375 ms" in said
    assert "one after another" not in explain_text(DEEP)


def test_times_of_collectives_that_only_one_plan_knows_are_no_difference():
    assert not diff_data(DEEP, untimed(DEEP))["collectives"]


def test_the_winner_of_a_tie_is_not_called_the_fastest():
    [data, planned, *rest] = RACE
    sooner = replace(data, time_ms=10.2)
    said = " ".join(explain_text(make_plan([], [sooner, planned, *rest])).split())
    assert "Why: it is as fast as the fastest of 2 programs that were timed" in said
    assert "10.200 ms, against 10.250 ms" in said


def test_a_time_from_before_the_winner_was_timed_again_is_no_tie():
    [data, planned, *rest] = RACE
    before = replace(data, time_ms=9.2)
    said = " ".join(explain_text(make_plan([], [before, planned, *rest])).split())
    assert "it is the fastest, timed again, of 2 programs that were timed" in said
    assert "9.200 ms in earlier turns, against 10.250 ms" in said


def test_the_winner_of_a_predicted_tie_is_not_called_the_best():
    """No whole step was timed."""
    [data, planned, *_] = [
        replace(one, samples_ms=(), time_ms=None, note="") for one in RACE
    ]
    for other_ms, said in ((10.1, "as good as the best"), (10.3, "the best")):
        rows = [
            replace(data, predicted_ms=other_ms),
            replace(planned, predicted_ms=10.2),
        ]
        plan = replace(make_plan([], rows), measured_ms=None, rung="estimated")
        why = f"it is {said} by prediction; no whole step was timed."
        assert why in view_of(plan).why
        place = "as fast as the fastest" if other_ms < 10.2 else "the fastest"
        page = page_html(plan)
        assert f"Nothing was run: the plan is {place} by" in page


def test_one_program_under_two_names_is_no_runner_up():
    [data, planned, *rest] = RACE
    twin = replace(data, samples_ms=planned.samples_ms, time_ms=planned.time_ms)
    rows = [row(0, 0, "Net/up")]
    alone = explain_text(make_plan(rows, [twin, planned, RACE[-1]]))
    assert "no other program was timed; data_parallel gave the same program" in alone
    assert "Next:" not in alone
    said = " ".join(explain_text(make_plan(rows, [twin, planned, *rest])).split())
    assert "fastest of 2 programs that were timed; data_parallel gave the same" in said
    assert "Next: zero1, 12.250 ms, against 10.250 ms" in said
    table = plan_text(make_plan(rows, [twin, planned, *rest]), width=160)
    assert [line for line in table.splitlines() if "10.250 |" in line] == [
        line
        for line in table.splitlines()
        if "the same program as data_parallel" in line
    ]


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        (
            ["a/0/q/kernel", "a/0/k/kernel", "head/kernel"],
            ["q/kernel", "k/kernel", "head/kernel"],
        ),
        (
            ["B_0/Dense_0", "B_1/Dense_0", "B_1/Dense_1"],
            ["B_0/Dense_0", "B_1/Dense_0", "Dense_1"],
        ),
        (["kernel", "a/kernel"], ["kernel", "a/kernel"]),
        (["a/b", "a/b", "c"], ["b", "b (2)", "c"]),
    ],
)
def test_ends_of_names_tell_blocks_apart(names, ends):
    assert distinct_ends(names) == ends


def test_a_short_text_names_each_block():
    names = [f"layers/{i}/{name}/kernel" for i in range(2) for name in ("q", "k", "v")]
    rows = [
        row(place // 3, 0, name, block=place, strategy=(ROWS,))
        for place, name in enumerate(names)
    ]
    assert "q/kernel, k/kernel, v/kernel x: rows" in repr(make_plan(rows, RACE))


def test_rematerialization_that_was_not_tried_is_told_under_a_budget():
    said = "rematerialization: not tried, the plan fits by prediction without it"
    fits = figured(["a", "b"], budget_bytes=650 * KIB)
    assert said in " ".join(repr(fits).split())
    kind = fits.figures.kinds[0]
    first, *rest = kind.options
    again = replace(first, strategy=replace(first.strategy, rematerialized=True))
    tried = (replace(kind, options=(first, again, *rest)),)
    some = replace(fits.segments[0], rematerialized=True)
    for plan in (
        figured(["a", "b"]),
        figured(["a", "b"], budget_bytes=550 * KIB),
        replace(fits, figures=replace(fits.figures, kinds=tried)),
        replace(fits, segments=(some, *fits.segments[1:])),
    ):
        assert "not tried" not in repr(plan)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_what_variants_were_not_chosen_among_is_told(platform):
    variant = VariantFigures(
        name="x=4", step_ms=1.0, estimated_ms=None, note="", taken=True
    )
    plan = replace(figured(["a", "b"]), environment={"platform": platform})
    assert "not tried:" not in repr(plan)  # Nothing but the plan was asked for.
    figures = replace(plan.figures, variants=(variant,))
    plan = replace(plan, figures=figures)
    has_none = platform == "cpu"
    said = " ".join(repr(plan).split()).partition("not tried: ")[2]
    none = "kernels and compiler options (none by default on cpu)"
    assert said.startswith(f"{none}; " * has_none + "rematerialization (without a memo")
    limited = replace(plan, figures=replace(figures, budget_bytes=550 * KIB))
    assert "rematerialization (without" not in repr(limited)
    few = replace(plan, figures=replace(figures, chosen=("sharding",)))
    assert "not tried:" not in repr(few)
