"""Explanations of a search, and time against memory, as people and scripts see them."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from rich import box
from rich.console import Console

from cfp.analysis.analyze import analyze
from cfp.analysis.layout import SegmentKernels, Storage
from cfp.analysis.strategies import AxisChoice
from cfp.cost.choice import SegmentChoice, segment_candidate
from cfp.errors import CfpError
from cfp.presets.presets import presets
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp.report.explained import (
    explanation_data,
    explanation_view,
    plot_trade_off,
    trade_off_data,
    trade_off_view,
)
from cfp.report.figures import _Trials, option_names, strategy_figures
from cfp.search.explain import explain
from cfp.search.problem import Option, Problem
from cfp.search.tradeoff import trade_off
from cfp.view.model import strategy_text
from cfp_test.support.checking import make_mesh

LAYERS, ROWS, WIDTH = 4, 16, 32
SIZES = (("x", 4),)
MIB = 2**20


def step(weights, x):
    def loss(weights):
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return (h**2).mean()

    grads = jax.grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]


@pytest.fixture(scope="module")
def analysis():
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * (LAYERS + 1)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    program, _ = trace(flatten_step(step, (weights, x)), make_mesh(SIZES))
    return analyze(program, SIZES)


@pytest.fixture(scope="module")
def problem(analysis):
    """Layers: data parallel, that rematerialized, fully sharded, or none of these.

    The first has a kind of its own, as its input's gradient is not asked for; here
    it costs nothing.
    """
    by_name = presets(analysis.frame)

    def options(index):
        data = segment_candidate(analysis, index, by_name["data_parallel"])
        full = segment_candidate(analysis, index, by_name["fully_sharded"])
        odd = SegmentChoice(
            segment_candidate(analysis, index, by_name["tensor_parallel"]).strategies,
            Storage.SHARDED,
        )
        again = SegmentChoice(data.strategies, data.storage, remat=True)
        return tuple(
            Option(
                candidate=candidate,
                time_ms=time_ms,
                state_bytes=state * MIB,
                residual_bytes=residual * MIB,
                temp_bytes=MIB,
            )
            for candidate, time_ms, state, residual in (
                (data, 2.0, 40, 20),
                (again, 3.0, 40, 0),
                (full, 5.0, 10, 20),
                (odd, 9.0, 10, 10),
            )
        )

    kinds = tuple(s.kind for s in analysis.segments)
    assert kinds == (0,) + (1,) * LAYERS
    first, layer = map(options, analysis.representatives)
    free = replace(first[0], time_ms=0.0, state_bytes=0, residual_bytes=0, temp_bytes=0)
    return Problem(
        kinds=kinds,
        options=((free,), layer),
        edge_ms={},
        budget_bytes=4 * 41 * MIB + 20 * MIB,
    )


def text_of(view):
    console = Console(width=200, color_system=None)
    with console.capture() as captured:
        console.print(view)
    return captured.get()


def rows(text, heading):
    """The cells of the lines of the table under a heading."""
    lines = text[text.index(heading) :].splitlines()
    table = [line for line in lines if line.startswith("|") and "-+-" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_choices_have_names_and_words(analysis, problem):
    _, names = option_names(analysis, problem.options)
    assert names == [
        "data_parallel",
        "data_parallel (rematerialized)",
        "fully_sharded",
        "strategy 4 (no preset)",
    ]
    data, again, full, odd = (o.candidate for o in problem.options[1])

    def words(one, base=None):
        before = base and strategy_figures(analysis, 1, base)
        return strategy_text(strategy_figures(analysis, 1, one), before)

    assert words(data).endswith("x: rows (dim 0, size 16); parameters as used")
    assert words(again, data) == "rematerialized"
    assert words(data, again) == "not rematerialized"
    assert words(full, data) == "parameters sharded"
    assert "x: columns (dim 1, size 32)" in words(odd, full)
    assert "parameters" not in words(odd, full)
    assert words(odd, odd) == ""


def test_dims_of_one_size_are_told_apart():
    """Heads and their dims, of which an output projection contracts both."""

    def mixed(w, x):
        return jnp.tanh(jnp.einsum("bhd,hdo->bo", x, w["out"])) @ w["down"]

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    weights = {"out": shape(4, 4, 4), "down": shape(4, 8)}
    program, _ = trace(flatten_step(mixed, (weights, shape(8, 4, 4))), make_mesh(SIZES))
    found = analyze(program, SIZES)
    [blocks] = [segment.blocks for segment in found.segments]
    rules = [program.ops[found.frame.blocks[b].anchor].rule for b in blocks]
    summed = [sorted(rule.reduction) for rule in rules]
    assert [*map(len, summed)] == [2, 1]
    heads, dims = (
        strategy_figures(
            found,
            0,
            SegmentChoice(
                ((AxisChoice(factor),), (AxisChoice(summed[1][0]),)), Storage.USED
            ),
        )
        for factor in summed[0]
    )
    assert strategy_text(heads) == strategy_text(dims)
    said = "out x: contracted (size 4), another dim of that size"
    assert strategy_text(dims, heads) == said


def test_the_explanation_of_a_plan_that_memory_binds(analysis, problem):
    """184 MiB hold one layer that keeps its values and three that do not."""
    found = explain(problem, step_bytes=20 * MIB)
    assert found.best.cost_ms == 2 + 3 * 3
    text = text_of(explanation_view(analysis, problem, found, box.ASCII))
    _, again, data, full, odd = rows(text, "Segments 1-4: ")
    assert again[:7] == [
        *("*", "data_parallel (rematerialized)", "3 of 4", "3.000"),
        *("12.000", "+9.1%", "161.00 MiB"),
    ]
    assert data[:7] == [
        *("*", "data_parallel", "1 of 4", "2.000"),
        *("(8.000)", "does not fit", "needs 241.00 MiB"),
    ]
    assert data[7] == "but: not rematerialized"
    assert full[:5] == ["", "fully_sharded", "-", "5.000", "20.000"]
    assert odd[1:5] == ["strategy 4 (no preset)", "-", "9.000", "36.000"]
    assert "Memory: the best choice needs 181.00 MiB of 184.00 MiB." in text
    assert "without a budget the step would take 8.000 ms, in 241.00 MiB" in text
    assert "With 20.00 MiB more: 10.000 ms, 9.1% faster." in text
    assert "With 20.00 MiB less: 12.000 ms, 9.1% slower." in text
    as_data = explanation_data(analysis, problem, found)
    assert as_data["plan"] is None
    assert as_data["best"] == {"step_ms": 11.0, "memory_bytes": 181 * MIB}
    assert as_data["memory"]["binds"] is True
    assert as_data["memory"]["less"]["step_ms"] == 12
    _, kind = as_data["kinds"]
    assert kind["segments"] == [1, 2, 3, 4]
    assert [a["step_ms"] for a in kind["chosen"]] == [12, None]
    assert [a["unlimited_step_ms"] for a in kind["chosen"]] == [12, 8]


def test_the_explanation_of_a_plan_that_only_the_race_prefers(analysis, problem):
    found = explain(problem, picks=[0] + [2] * LAYERS, step_bytes=200 * MIB)
    text = text_of(explanation_view(analysis, problem, found, box.ASCII))
    assert "had predicted 20.000 ms for it, and 11.000 ms for the best" in text
    marks = {row[1]: row[0] for row in rows(text, "Segments 1-4: ")}
    assert marks["fully_sharded"] == ""
    assert marks["data_parallel (rematerialized)"] == marks["data_parallel"] == "*"
    assert "200.00 MiB less" not in text


def test_the_explanation_of_a_plan_that_only_the_compiler_made_fit(analysis, problem):
    tight = replace(problem, budget_bytes=80 * MIB)
    found = explain(tight, picks=[0] + [1] * LAYERS)
    text = text_of(explanation_view(analysis, tight, found, box.ASCII))
    needed = found.plan.memory_bytes / MIB
    assert needed > 80
    assert f"fits in 80.00 MiB: this is about a budget of {needed:.2f} MiB." in text


def test_a_plan_faster_than_all_that_fits_is_shown_by_its_own_time(analysis, problem):
    """The compiler made it fit; by prediction it does not."""
    found = explain(problem, picks=[0] + [0] * LAYERS)
    assert found.plan.memory_bytes > problem.budget_bytes
    assert found.plan.cost_ms < found.best.cost_ms
    text = text_of(explanation_view(analysis, problem, found, box.ASCII))
    assert f"is predicted to beat its {found.plan.cost_ms:.3f} ms" in text
    assert "this is about" not in text


def test_the_curve_as_a_table(analysis, problem):
    found = trade_off(problem)
    budget = problem.budget_bytes
    text = text_of(trade_off_view(analysis, problem, found, budget, box.ASCII))
    table = rows(text, "Step time against memory")[1:]
    assert [row[2] for row in table][-1] == "8.000"
    (within,) = [row for row in table if row[0]]
    assert within[:4] == ["*", "181.00 MiB", "11.000", "3"]
    assert within[4].startswith(
        "1: 3 x data_parallel (rematerialized) + 1 x data_parallel"
    )
    assert "strategy 4 (no preset) of kind 1: " in text
    assert "* the fastest within the budget of 184.00 MiB" in text
    assert "There may be more" not in text
    as_data = trade_off_data(analysis, problem, found, budget)
    assert as_data["complete"] is True
    assert [p["step_ms"] for p in as_data["points"]] == [float(r[2]) for r in table]
    few = trade_off(problem, 2)
    text = text_of(trade_off_view(analysis, problem, few, MIB, box.ASCII))
    assert "Nothing fits in the budget of 1.00 MiB." in text
    assert "There may be more" in text


def test_the_curve_as_a_plot(problem, tmp_path):
    found = trade_off(problem)
    plot_trade_off(problem, found, tmp_path / "curve.svg", problem.budget_bytes)
    assert (tmp_path / "curve.svg").stat().st_size > 1000
    with pytest.raises(CfpError, match="Cannot draw"):
        plot_trade_off(problem, found, tmp_path / "curve.abc", None)


def test_without_a_search_what_raced_is_told():
    def candidate(*kernels: SegmentKernels) -> SimpleNamespace:
        return SimpleNamespace(choice=SimpleNamespace(kernels=[*enumerate(kernels)]))

    some = candidate(SegmentKernels(attention="chunked"))
    both = (some, 9.5), (candidate(), 9.0)
    for raced, said in (
        (both, "timed: the step took 9.500 ms with it, 9.000 ms without"),
        (both[1:], "nothing was searched for this plan"),
    ):
        trials = _Trials(SimpleNamespace(), None, raced)
        assert trials.outcome(0, lambda kernels: kernels.attention == "chunked") == said


def test_kernels_that_were_tried_are_told_by_the_segments_of_their_kind():
    """Several kinds are told apart by their segments; one is not."""
    none, some = SegmentKernels(), SegmentKernels(attention="chunked")
    tried = [
        SimpleNamespace(candidate=SimpleNamespace(kernels=k)) for k in (none, some)
    ]
    drawn = SimpleNamespace(options=[SimpleNamespace(step_ms=ms) for ms in (9.0, 9.5)])

    def outcome(*kinds: int) -> str:
        found = SimpleNamespace(kinds=[drawn] * 2, segment_kinds=kinds)
        trials = _Trials(found, SimpleNamespace(options=[tried] * 2))
        return trials.outcome(0, lambda kernels: kernels.attention == "chunked")

    said = "the step is predicted at 9.500 ms with it, 9.000 ms without"
    assert outcome(0, 0, 1) == f"tried in segment 0-1: {said}"
    assert outcome(0, 0) == f"tried: {said}"
