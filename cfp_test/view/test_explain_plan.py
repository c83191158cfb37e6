"""Plans in words: why, and in what two of them differ.

Texts are in `golden/`; `--update-golden` writes them anew.
"""

import json
from dataclasses import replace

import pytest

from cfp.analysis.layout import Storage
from cfp.errors import CfpError
from cfp.plan.parts import AlikeBlocks, Role, StrategyFigures
from cfp.plan.plan import Plan
from cfp.printable import USUAL_COLUMNS, distinct_ends, numbered
from cfp.settings import ConstraintLevel
from cfp.view.rows import chosen_text
from cfp.view.text import diff_data, diff_text, explain_text, page_html
from cfp.view.words import strategy_text
from cfp_test.view.plans import RACE, ROWS, make_plan, move, row
from cfp_test.view.reported import DEEP, HOSTILE, KIB, MOVES, figured, untimed

DATA, OWN, ZERO1, FAILED = RACE
OVER = replace(DATA, note="over the memory budget")
TWIN = replace(DATA, samples_ms=OWN.samples_ms, time_ms=OWN.time_ms)
COLUMNS = replace(ROWS, role=Role.COLUMNS, dim=1)
SUMMED = replace(ROWS, role=Role.CONTRACTED, dim=-1)
SCATTERED = replace(ROWS, axis="y", role=Role.CONTRACTED, dim=-1, scattered_dim=1)


def sending_otherwise(place):
    """A deep plan of which one segment sends other collectives."""
    rows = [replace(one, moves=MOVES) for one in DEEP.rows]
    rows[place] = replace(rows[place], moves=(move("all-to-all", 8),))
    return replace(DEEP, rows=tuple(rows))


def among(choose, *names, plan=None):
    """A plan whose first kind of segments has the options that `choose` makes."""
    plan = plan or figured([*names] or ["a", "b"])
    kind = plan.figures.kinds[0]
    kinds = (replace(kind, options=tuple(choose(kind.options))),)
    return replace(plan, figures=replace(plan.figures, kinds=kinds))


def tied(**changes):
    """A plan whose runner-up has the figures of the choice, but for changes."""

    def two(options):
        taken, other, *_ = options
        same = {"step_ms": taken.step_ms, "memory_bytes": taken.memory_bytes}
        return taken, replace(other, **{**same, **changes})

    return among(two)


def predicted(other_ms):
    rows = [replace(one, samples_ms=(), time_ms=None, note="") for one in (DATA, OWN)]
    rows = [
        replace(one, predicted_ms=ms)
        for one, ms in zip(rows, (other_ms, 10.2), strict=True)
    ]
    return replace(make_plan([], rows), measured_ms=None, rung="estimated")


def strategy(*blocks, storage=None, kernel="", remat=False) -> StrategyFigures:
    """A strategy of groups of blocks: their names, and what axes shard there."""
    return StrategyFigures(
        blocks=tuple(
            AlikeBlocks(names=tuple(names.split(", ")), strategy=roles)
            for names, *roles in blocks
        ),
        storage=storage,
        kernels=(("attention", kernel),) if kernel else (),
        rematerialized=remat,
    )


def chosen_among(*strategies: StrategyFigures) -> Plan:
    """A plan whose first strategies, the choice and its runner-up, are others."""

    def others(options):
        first = map(lambda o, s: replace(o, strategy=s), options, strategies)
        return (*first, *options[len(strategies) :])

    return among(others, plan=DEEP)


WHOLE = strategy(("a",))
TIGHT = figured(["a", "b"], budget_bytes=450 * KIB)
WIDE = figured(["a", "b"], budget_bytes=None)
MANY = ", ".join(f"up_{i}/Residual_{i}/Conv_0" for i in range(24))
FEW = ", ".join(f"down_{i}/Residual_{i}/Conv_0" for i in range(12))
MANY_RUNNER = strategy((MANY,), (FEW, COLUMNS), storage=Storage.USED)
MANY_CHOICE = strategy((MANY, ROWS), (FEW, ROWS), storage=None)
UP = [row(0, 0, "Net/up")]

EXPLAINED = {
    "a deep plan": DEEP,
    "the first segment sends otherwise": sending_otherwise(0),
    "one in the middle sends otherwise": sending_otherwise(48),
    "a faster option that fits": WIDE,
    "timed alone": replace(WIDE, race=(OWN,)),
    "timed with its twin": replace(WIDE, race=(OWN, TWIN, FAILED)),
    "alone in fitting": replace(WIDE, race=(OWN, OVER)),
    "not timed": replace(WIDE, race=(FAILED,)),
    "a tie with the runner-up": tied(),
    "a slower runner-up": tied(step_ms=9.501),
    "a smaller runner-up": tied(memory_bytes=500 * KIB),
    "a choice that alone fits": among(
        lambda o: (replace(o[0], memory_bytes=400 * KIB), *o[1:]), plan=TIGHT
    ),
    "one strategy, measured": among(lambda o: o[:1], plan=TIGHT),
    "one strategy, estimated": replace(
        among(lambda o: o[:1], plan=TIGHT), search={"strategies_estimated": 1.0}
    ),
    "a faster one that does not fit": make_plan(
        [], [DATA, OWN, replace(OVER, name="wide", time_ms=5.0)]
    ),
    "the only one that fits": make_plan([], [OWN, OVER]),
    "a tie in the race": make_plan([], [replace(DATA, time_ms=10.2), *RACE[1:]]),
    "timed again": make_plan([], [replace(DATA, time_ms=9.2), *RACE[1:]]),
    "a tie by prediction": predicted(10.1),
    "as fast by prediction": predicted(9.51),
    "the best by prediction": predicted(10.3),
    "one program under two names": make_plan(UP, [TWIN, OWN, FAILED]),
    "one program under two names, and another": make_plan(UP, [TWIN, OWN, *RACE[2:]]),
    "kinds of strategies": chosen_among(
        strategy(("a, b", ROWS, SCATTERED), ("c",), storage=Storage.USED),
        replace(WHOLE, rematerialized=True),
        strategy(("a",), kernel="flash"),
    ),
    "many blocks": chosen_among(MANY_CHOICE, MANY_RUNNER),
}


def test_explanations(golden):
    texts = {name: explain_text(plan) for name, plan in EXPLAINED.items()}
    golden("explained", texts)
    for text in texts.values():
        assert max(map(len, text.splitlines())) <= USUAL_COLUMNS


def test_explanations_leave_out_what_is_neither_faster_nor_smaller():
    text = explain_text(DEEP)
    assert "slow & large" in DEEP.to_json() and "slow & large" not in text
    assert "1 strategy not shown: no faster, in no less memory (all: --json)." in text
    slow = among(
        lambda o: [replace(one, taken=one.name == "slow & large") for one in o]
    )
    assert "|* | slow & large" in explain_text(slow)


def test_explanations_come_back_from_a_file():
    for plan in (EXPLAINED["kinds of strategies"], EXPLAINED["many blocks"]):
        again = Plan.from_json(json.loads(plan.to_json()))
        assert explain_text(again) == explain_text(plan)


@pytest.mark.parametrize("name", EXPLAINED)
def test_a_page_says_why_as_the_text_does(name):
    """And of each strategy what it is, and what other segments send."""
    plan = EXPLAINED[name]
    said = " ".join(page_html(plan).split())
    assert chosen_text(plan) in said
    for one in (MANY_RUNNER, MANY_CHOICE) if name == "many blocks" else ():
        assert strategy_text(one) in said
    if name.endswith("sends otherwise"):
        assert said.count("ut in segment") == 2


def resized(batch: int) -> Plan:
    types = tuple(f"float32[{batch},{8 + i}]" for i in range(6))
    return replace(
        DEEP, arg_names=tuple("abcdef"), arg_types=types, arg_specs=((),) * 6
    )


def of_places(whole: set[tuple[int, int]]) -> Plan:
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


OTHER = replace(
    DEEP,
    measured_ms=8.5,
    arg_specs=((("x",), ()),) * 96,
    rows=tuple(replace(r, strategy=()) for r in DEEP.rows[:-1]) + DEEP.rows[-1:],
    options={"xla_flag": "true"},
    environment={"device_kind": "slide rule"},
)
LARGER = replace(
    DEEP,
    arg_types=("float32[64,32]", *DEEP.arg_types[1:]),
    rows=(replace(DEEP.rows[0], strategy=(replace(ROWS, size=32),)), *DEEP.rows[1:]),
)
EMPTY = replace(DEEP, environment={**DEEP.environment, "xla_flags": "", "measure": "3"})
FLAGS = replace(DEEP, environment={**DEEP.environment, "xla_flags": "--a"})
DIFFS = {
    "itself": (DEEP, DEEP),
    "another constraint level": (DEEP, replace(DEEP, level=ConstraintLevel.ARGUMENTS)),
    "all else": (DEEP, OTHER),
    "fewer layers": (DEEP, figured(["Net/layer_0/up", "Net/layer_1/up"])),
    "a larger batch": (DEEP, LARGER),
    "a larger batch of six arguments": (resized(8), resized(16)),
    "some blocks of three by three": (
        *(of_places(set()), of_places({(0, 0), (0, 1), (0, 2), (2, 0), (2, 2)})),
    ),
    "two rows of three by three": (
        of_places(set()),
        of_places({(i, j) for i in (0, 1) for j in range(3)}),
    ),
    "no flags": (DEEP, EMPTY),
    "flags": (EMPTY, FLAGS),
    "memory by prediction": (
        DEEP,
        replace(DEEP, peak_bytes=None, predicted_bytes=2048 * KIB, rung="estimated"),
    ),
    "times of collectives in one alone": (DEEP, untimed(DEEP)),
}


def test_differences(golden):
    golden("differences", {name: diff_text(*pair) for name, pair in DIFFS.items()})


def test_differences_as_data_list_all():
    assert [*diff_data(resized(8), resized(16))] == [f"type of {n}" for n in "abcdef"]
    changed = {f"type of {DEEP.arg_names[0]}": (DEEP.arg_types[0], "float32[64,32]")}
    assert diff_data(DEEP, LARGER) == changed


def test_one_block_is_found_by_a_part_of_its_name_or_a_pattern():
    only = explain_text(HOSTILE, "quotes")
    assert only.count("    sharded: ") == 1
    # Segments that are alike stand once.
    every = explain_text(DEEP, "layer_0-95/up")
    for block in ("*layer_9*/up", "Net/layer_3/up", "NET/Layer_3/UP"):
        assert explain_text(DEEP, block) == every
    assert "  Net/layer_0-95/up  at net/layers.py:7\n    sharded: x: rows" in every
    assert "|* | zero1" in every and "10.500" in every


def test_a_block_is_found_by_an_argument_that_it_reads():
    rows = [row(i, i, "net", arguments=(f"net/{n}/w",)) for i, n in enumerate("ab")]
    text = explain_text(make_plan(rows, RACE), "net/B/")
    assert "    arguments: net/b/w\n" in text and "net/a/w" not in text


def test_a_block_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(CfpError, match=r"No block .*There are: Net/layer_0-95/up"):
        explain_text(DEEP, "Net/layer_111/up")


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
    ],
)
def test_ends_of_names_tell_blocks_apart(names, ends):
    assert distinct_ends(names) == ends


def test_equal_names_have_numbers():
    assert numbered(["a/b", "c", "a/b"]) == ["a/b#1", "c", "a/b#2"]


def test_a_short_text_names_each_block():
    names = [f"layers/{i}/{name}/kernel" for i in range(2) for name in ("q", "k", "v")]
    rows = [
        row(place // 3, 0, name, block=place, strategy=(ROWS,))
        for place, name in enumerate(names)
    ]
    assert "q/kernel, k/kernel, v/kernel (x: rows)" in repr(make_plan(rows, RACE))
