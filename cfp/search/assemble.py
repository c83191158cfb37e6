"""The search problem that the profiles make up, and what its solutions mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from math import ceil

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice, Storage, lay_out
from cfp.analysis.specs import spec_ways
from cfp.analysis.strategies import Strategy
from cfp.errors import DeviceError, MemoryBudgetError
from cfp.presets import preset
from cfp.profiling.collectives import Rates
from cfp.profiling.record import ProfileRecord
from cfp.search.estimate import Estimator
from cfp.search.ilp import smallest_budget, solve_ilp
from cfp.search.measure import segment_bytes, segment_layout
from cfp.search.problem import Option, Problem, Solution, solution
from cfp.search.wanted import Wanted, between, handover_ms, layout_of
from cfp.units import format_bytes


def build_problem(
    analysis: Analysis,
    wanted: list[Wanted],
    records: Mapping[str, ProfileRecord],
    rates: Rates,
    budget_bytes: int | None,
    alone: bool = False,
) -> Problem:
    """The search problem over everything that was measured.

    Args:
        analysis: the program's analysis.
        wanted: what was to be measured.
        records: what was measured.
        rates: the devices' rates, for resharding between segments.
        budget_bytes: memory of one device, or None.
        alone: take what segments take alone for what they cost.

    Raises:
        DeviceError: no candidate of some segment could be measured.
    """
    frame, segments = analysis.frame, analysis.segments
    options: list[list[Option]] = [[] for _ in analysis.representatives]
    reasons: dict[int, str] = {}
    for item in wanted:
        record = records.get(item.job.key.digest)
        if record is None:
            continue
        if not record.ok:
            reasons[item.kind] = f"{record.status}: {record.reason}"
            continue
        index = analysis.representatives[item.kind]
        layout = segment_layout(frame, segments, index, item.candidate)
        remat = item.candidate.remat
        kept = segment_bytes(frame, segments[index], layout, remat)
        residual = item.kept_bytes(records, kept.residual_bytes)
        options[item.kind].append(
            Option(
                candidate=item.candidate,
                time_ms=record.time_ms if alone else item.time_ms(records),
                state_bytes=kept.state_bytes,
                residual_bytes=residual,
                temp_bytes=max(0, record.temp_bytes - residual),
            )
        )
    for kind, found in enumerate(options):
        if not found:
            raise DeviceError(
                f"No strategy of segment kind {kind} could be measured "
                f"({reasons.get(kind, 'nothing was profiled')}). Run the profile pass, "
                "use more devices, or a smaller batch."
            )
    return Problem(
        kinds=tuple(s.kind for s in segments),
        options=tuple(tuple(found) for found in options),
        edge_ms=_edges(analysis, options, rates),
        fixed_bytes=_fixed_bytes(analysis),
        budget_bytes=budget_bytes,
    )


def _fixed_bytes(analysis: Analysis) -> int:
    """Arguments that are no state, such as a batch, as data parallelism has them."""
    frame = analysis.frame
    roles = ("data",) * len(frame.mesh)
    layout = lay_out(frame, preset(frame, roles, Storage.USED))
    return sum(
        ceil(
            frame.program.values[value].size_bytes
            / spec_ways(layout.arg_spec(position), frame.mesh)
        )
        for position, value in enumerate(frame.program.args)
        if position not in frame.group_of_arg
    )


def _edges(
    analysis: Analysis, options: list[list[Option]], rates: Rates
) -> dict[tuple[int, int], list[list[float]]]:
    """Resharding between neighbours, from the first pair of each two kinds."""
    frame, segments = analysis.frame, analysis.segments
    estimator = Estimator(frame, rates)
    edges: dict[tuple[int, int], list[list[float]]] = {}
    for left, right in pairwise(segments):
        pair = (left.kind, right.kind)
        if pair in edges:
            continue
        before, after = options[left.kind], options[right.kind]
        lefts = [layout_of(analysis, left.index, o.candidate) for o in before]
        rights = [layout_of(analysis, right.index, o.candidate) for o in after]
        ahead = between(analysis, left.index, right.index)
        back = between(analysis, right.index, left.index)
        edges[pair] = [
            [
                handover_ms(estimator, a, b, ahead) + handover_ms(estimator, b, a, back)
                for b in rights
            ]
            for a in lefts
        ]
    return edges


def whole_choice(analysis: Analysis, problem: Problem, found: Solution) -> Choice:
    """The whole program's choice that a solution stands for."""
    frame = analysis.frame
    strategies: dict[int, Strategy] = {}
    storage = [Storage.USED] * len(frame.groups)
    remat = []
    for segment, pick in zip(analysis.segments, found.picks, strict=True):
        candidate = problem.options[segment.kind][pick].candidate
        for block, strategy in zip(segment.blocks, candidate.strategies, strict=True):
            strategies[block] = strategy
        for group in segment.groups:
            storage[group] = candidate.storage
        if candidate.remat:
            remat.append(segment.index)
    return Choice(
        tuple(strategies[block.index] for block in frame.blocks),
        tuple(storage),
        tuple(remat),
    )


def best_solutions(problem: Problem, count: int) -> list[Solution]:
    """The best solution, and others that differ from it where it matters.

    Each next one may not use what the one before chose for the kind of segment that
    takes most of the time.
    """
    found: list[Solution] = []
    banned: set[tuple[int, int]] = set()
    while len(found) < count:
        kept = [
            [i for i in range(len(options)) if (kind, i) not in banned]
            for kind, options in enumerate(problem.options)
        ]
        if not all(kept):
            break
        reduced = replace(
            problem,
            options=tuple(
                tuple(options[i] for i in rows)
                for options, rows in zip(problem.options, kept, strict=True)
            ),
            edge_ms={
                (a, b): [[matrix[i][j] for j in kept[b]] for i in kept[a]]
                for (a, b), matrix in problem.edge_ms.items()
            },
        )
        best = solve_ilp(reduced)
        if best is None:
            break
        picks = [
            kept[kind][pick]
            for kind, pick in zip(problem.kinds, best.picks, strict=True)
        ]
        found.append(solution(problem, picks))
        spent: dict[tuple[int, int], float] = {}
        for kind, pick in zip(problem.kinds, picks, strict=True):
            time_ms = problem.options[kind][pick].time_ms
            spent[kind, pick] = spent.get((kind, pick), 0.0) + time_ms
        if not spent:  # a program without segments leaves nothing to choose
            break
        banned.add(max(spent, key=lambda choice: spent[choice]))
    return found


def over_budget(analysis: Analysis, problem: Problem) -> MemoryBudgetError:
    """The error for a budget that nothing fits in."""
    smallest = smallest_budget(problem)
    frame = analysis.frame
    program = frame.program
    largest = sorted(
        (
            (program.arg_names[a], program.values[program.args[a]].size_bytes)
            for a in range(len(program.args))
        ),
        key=lambda item: -item[1],
    )[:5]
    names = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
    budget = format_bytes(problem.budget_bytes or 0)
    return MemoryBudgetError(
        f"No plan fits in {budget} of memory on each device. The "
        f"smallest budget that would do is about {format_bytes(smallest)}. The "
        f"largest arguments, unsharded: {names}. Raise the budget, use more devices, "
        "or make the batch smaller.",
        smallest_feasible_bytes=smallest,
        contributors=largest,
    )
