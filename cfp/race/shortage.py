"""The error if no program fits in memory: its largest parts, and remedies."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from cfp.analysis.analyze import Analysis
from cfp.analysis.flow import scope_path
from cfp.analysis.layout import Choice, lay_out
from cfp.cost.memory import (
    argument_bytes,
    can_rematerialize,
    residuals_under,
    result_bytes,
    value_bytes,
)
from cfp.errors import CfpError, MemoryBudgetError
from cfp.printable import format_bytes, merged_name
from cfp.profiling.record import CompiledBytes
from cfp.race.programs import RaceResult
from cfp.search.choices import whole_choice
from cfp.search.problem import Problem
from cfp.search.solver import leanest, solve

_NUMBER = re.compile(r"\d+")
_MOST_NAMED = 4
# Of all memory: what takes less is not named, and not looked into.
_WORTH_NAMING = 0.005
_WORTH_A_LOOK = 0.15

ARGUMENTS = "arguments"
RESULTS = "results that take no donated argument's place"
TEMPORARIES = "temporaries"
CODE = "code"
RESERVE = "what the allocator may add"


def over_budget(
    analysis: Analysis, problem: Problem, reserve_bytes: int = 0
) -> MemoryBudgetError:
    """The error for a budget, and its reserve, that nothing fits in by prediction."""
    best = leanest(problem)
    needed = best.memory_bytes + reserve_bytes
    choice = whole_choice(analysis, problem, best)
    held = problem.fixed_bytes + problem.state_bytes(best.picks)
    results = result_bytes(lay_out(analysis.frame, choice))
    use = {
        ARGUMENTS: held - results,
        RESULTS: results,
        TEMPORARIES: best.memory_bytes - held,
        RESERVE: reserve_bytes,
    }
    budget = format_bytes((problem.budget_bytes or 0) + reserve_bytes)
    first = (
        f"No plan fits in {budget} of memory on each device. The smallest budget that "
        f"would do is about {format_bytes(needed, up=True)}, by prediction."
    )
    error = _error(analysis, first, needed, use, choice)
    fastest = solve(replace(problem, budget_bytes=None))
    error.fastest_ms = fastest and fastest.cost_ms
    return error


def no_winner(
    analysis: Analysis,
    results: Sequence[RaceResult],
    budget_bytes: int | None,
    reserve_bytes: int = 0,
) -> CfpError:
    """The error for a race that nothing finished, in a budget and its reserve.

    Args:
        results: of all that was compiled, or failed.
        budget_bytes: what a program may need on each device.
        reserve_bytes: what the allocator may add.
    """
    # Of what could not be compiled it is not known what it needs.
    compiled = [r for r in results if r.peak_bytes]
    failed = [r for r in compiled if r.fits] if compiled else results
    if failed or not compiled:
        reasons = "; ".join(f"{r.name}: {r.reason}" for r in failed)
        reasons = reasons or "None was compiled."
        return CfpError(f"No plan ran on the devices. {reasons}")
    best = min(compiled, key=lambda r: r.peak_bytes)
    needed = best.peak_bytes + reserve_bytes
    programs = len({r.record.key for r in compiled if r.record is not None})
    smallest = f"Of {programs} compiled plans the smallest, {best.name},"
    most = (budget_bytes or 0) + reserve_bytes
    first = (
        f"{smallest if programs > 1 else f'The plan {best.name!r}, compiled,'} needs "
        f"{format_bytes(needed, up=True)} on each device, "
        f"{format_bytes(needed - most, up=True)} more than the budget of "
        f"{format_bytes(most)}."
    )
    use = {**compiled_use(best.size), RESERVE: reserve_bytes}
    error = _error(analysis, first, needed, use, best.candidate.choice)
    known = [r.candidate.predicted_ms for r in compiled if r.candidate.predicted_ms]
    error.fastest_ms = min(known, default=None)
    broken = defaultdict[str, list[str]](list)
    for one in results:
        if one.record and one.record.status not in ("ok", "out_of_memory"):
            broken[one.note.partition("\n")[0]].append(repr(one.name))
    for why, names in [*broken.items()][:_MOST_NAMED]:
        error = error.with_line(f"{', '.join(names)} failed otherwise: {why}")
    return error


def least_short(
    errors: Mapping[str, MemoryBudgetError],
    late: Sequence[str] = (),
) -> MemoryBudgetError:
    """Returns the error of the variant with the smallest need.

    Args:
        errors: by the variants' names.
        late: variants that time was too short for.
    """
    needs = {name: one.smallest_feasible_bytes for name, one in errors.items()}
    best = min(needs, key=needs.__getitem__)
    least = errors[best]
    others = ", ".join(
        f"{name} {format_bytes(size, up=True)}"
        for name, size in needs.items()
        if name != best
    )
    if others:
        least = least.with_line(
            f"That is {best}. Others need as much or more: {others}.", behind_first=True
        )
    if late:
        least = least.with_line(
            f"There was no time to plan {', '.join(late)}: with a longer --time-budget "
            "one may fit."
        )
    return least


def compiled_use(size: CompiledBytes) -> dict[str, int]:
    """Splits a compiled program's memory by use, in bytes on each device."""
    return {
        ARGUMENTS: size.argument_bytes,
        RESULTS: size.output_bytes - size.alias_bytes,
        TEMPORARIES: size.temp_bytes,
        CODE: size.code_bytes,
    }


def _error(
    analysis: Analysis,
    first: str,
    needed_bytes: int,
    use: Mapping[str, int],
    choice: Choice,
) -> MemoryBudgetError:
    """The error with all lines of its message.

    Args:
        first: what does not fit.
        needed_bytes: what the leanest needs.
        use: what that is for, in bytes.
        choice: what it chooses.
    """
    parts = sorted(
        ((name, size) for name, size in use.items() if size > 0), key=lambda p: -p[1]
    )
    uses = [
        f"{name} {format_bytes(size)} ({size / needed_bytes:.0%})"
        for name, size in parts
        if size >= _WORTH_NAMING * needed_bytes
    ]
    lines = [first]
    if uses:
        lines.append(f"That memory is for: {', '.join(uses)}.")
    large = {name for name, size in parts if size >= _WORTH_A_LOOK * needed_bytes}
    lines += _inside(analysis, choice, large)
    lines.append(_advice(analysis, choice, [name for name, _ in parts], large))
    return MemoryBudgetError(
        "\n  ".join(lines), smallest_feasible_bytes=needed_bytes, contributors=parts
    )


def _inside(analysis: Analysis, choice: Choice, large: set[str]) -> Iterator[str]:
    """Describes what the largest parts consist of, as far as that is known."""
    frame, program = analysis.frame, analysis.frame.program
    layout = lay_out(frame, choice)
    if ARGUMENTS in large:
        sizes = [argument_bytes(layout, place) for place in range(len(program.args))]
        named = largest_text(zip(program.arg_names, sizes, strict=True))
        yield f"The largest arguments, on each device: {named}."
    kept = [
        (
            scope_path(program.ops[program.values[v].producer].scope),
            value_bytes(layout, v),
        )
        for segment in analysis.segments
        for v in sorted(
            residuals_under(
                layout,
                segment,
                segment.index in choice.remat,
                choice.kernels_of(segment.index),
            )
        )
    ]
    if TEMPORARIES in large and kept:
        total = format_bytes(sum(size for _, size in kept))
        yield (
            f"Of the temporaries up to {total} are what the forward pass keeps for the "
            f"backward pass, the largest: {largest_text(kept)}."
        )


def largest_text(sizes: Iterable[tuple[str, int]]) -> str:
    """The largest of some things in words; those of alike layers stand together."""
    alike: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name, size in sizes:
        alike[_NUMBER.sub("#", name), size].append(name)
    ranked = sorted(alike.items(), key=lambda item: -item[0][1] * len(item[1]))
    return ", ".join(
        f"{merged_name(names)} "
        + (f"{len(names)} x " if len(names) > 1 else "")
        + format_bytes(size)
        for (_, size), names in ranked[:_MOST_NAMED]
    )


def _advice(
    analysis: Analysis, choice: Choice, parts: Sequence[str], large: set[str]
) -> str:
    """Suggests remedies, by what takes most memory."""
    advice = "Raise the budget"
    if large != {RESERVE}:  # Each of more devices has as much for its allocator.
        advice += ", use more devices"
    if not parts or parts[0] == TEMPORARIES or TEMPORARIES in large:
        advice += (
            ", make the batch smaller, or, if the step takes microbatches, let it "
            "through in parts (--microbatches, cfp.plan_fastest)"
        )
    if RESULTS in large:
        advice += ", or donate the state (--donate 0, donate_argnums=0)"
    able = [s.index for s in analysis.segments if can_rematerialize(analysis.frame, s)]
    if not able:
        return f"{advice}."
    return (
        f"{advice}. {len(choice.remat)} of {len(able)} possible segments are "
        "rematerialized; jax.checkpoint in the model (zoo: --remat) keeps less."
    )
