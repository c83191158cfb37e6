"""Profiling that search asks for, and the problem that the profiles make up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice, Layout, Storage
from cfp.analysis.strategies import Strategy
from cfp.errors import DeviceError, MemoryBudgetError
from cfp.profiling.builder import Job
from cfp.profiling.collectives import Rates
from cfp.profiling.key import Parts
from cfp.profiling.record import ProfileRecord
from cfp.search.candidates import choose_candidates
from cfp.search.estimate import Estimator
from cfp.search.measure import (
    pair_job,
    segment_bytes,
    segment_job,
    segment_layout,
)
from cfp.search.problem import Candidate, Option, Problem, Solution


@dataclass(frozen=True, slots=True)
class Wanted:
    """A candidate of a kind of segment, and the jobs that tell what it costs.

    A segment alone is not what it costs inside a model: its first and last
    collectives have nothing to hide behind. So it is also measured together with a
    neighbour, its *carrier*, and what the neighbour takes alone is subtracted.

    Attributes:
        kind, candidate: the choice.
        job: the segment alone.
        carrier_job: the neighbour alone, or None where there is no neighbour.
        pair_job: both.
        handover_ms: estimated resharding between the two, which the search adds by
            itself.
    """

    kind: int
    candidate: Candidate
    job: Job
    carrier_job: Job | None = None
    pair_job: Job | None = None
    handover_ms: float = 0.0

    @property
    def jobs(self) -> list[Job]:
        """All its jobs."""
        found = (self.job, self.carrier_job, self.pair_job)
        return [job for job in found if job is not None]

    def time_ms(self, records: Mapping[str, ProfileRecord]) -> float:
        """What the segment adds to a step."""
        alone = records[self.job.key.digest].time_ms
        if self.carrier_job is None or self.pair_job is None:
            return alone
        carrier = records.get(self.carrier_job.key.digest)
        pair = records.get(self.pair_job.key.digest)
        if carrier is None or pair is None or not (carrier.ok and pair.ok):
            return alone
        # What is within the noise of two large numbers is not negative.
        return max(pair.time_ms - carrier.time_ms - self.handover_ms, 0.0)


def wanted_profiles(
    analysis: Analysis,
    classics: Mapping[str, Choice],
    rates: Rates,
    environment: Parts,
    per_kind: int,
    in_context: bool = True,
) -> list[Wanted]:
    """What to measure: for each kind of segment the classics and the best by estimate.

    Args:
        analysis: the program's analysis.
        classics: choices whose part in every segment must be among the candidates.
        rates: the devices' rates, for the estimates.
        environment: what else a profile depends on.
        per_kind: how many candidates to measure for each kind.
        in_context: whether segments are measured with a neighbour, too.
    """
    frame, segments = analysis.frame, analysis.segments
    estimator = Estimator(frame, rates)
    chosen: list[list[Candidate]] = []
    for kind, index in enumerate(analysis.representatives):
        segment = segments[index]
        behind = segments[index + 1] if index + 1 < len(segments) else None
        twin = behind if behind is not None and behind.kind == kind else None
        estimate = estimator.segment(segment, twin)
        required = {
            (c := segment_candidate(analysis, index, choice)).key: c
            for choice in classics.values()
        }
        chosen.append(choose_candidates(estimate, list(required.values()), per_kind))
    found = []
    for kind, index in enumerate(analysis.representatives):
        for number, candidate in enumerate(chosen[kind]):
            label = f"segment {kind}: {number + 1} of {len(chosen[kind])}"
            job = segment_job(frame, segments, index, candidate, environment, label)
            near = _neighbour(analysis, index) if in_context else None
            if near is None:
                found.append(Wanted(kind, candidate, job))
                continue
            carrier, handover_ms = _carrier(
                analysis, estimator, index, candidate, near, chosen
            )
            carrier_index = analysis.representatives[segments[near].kind]
            found.append(
                Wanted(
                    kind,
                    candidate,
                    job,
                    segment_job(
                        frame, segments, carrier_index, carrier, environment, label
                    ),
                    pair_job(
                        frame,
                        segments,
                        {index: candidate, near: carrier},
                        environment,
                        f"{label}, in context",
                    ),
                    handover_ms,
                )
            )
    return found


def _neighbour(analysis: Analysis, index: int) -> int | None:
    """The segment that a segment is measured together with: a twin, or any."""
    segments = analysis.segments
    near = [i for i in (index + 1, index - 1) if 0 <= i < len(segments)]
    twins = [i for i in near if segments[i].kind == segments[index].kind]
    return (twins or near or [None])[0]


def _carrier(
    analysis: Analysis,
    estimator: Estimator,
    index: int,
    candidate: Candidate,
    near: int,
    chosen: list[list[Candidate]],
) -> tuple[Candidate, float]:
    """The neighbour's choice that goes best with a candidate, and the handover."""
    same_kind = analysis.segments[near].kind == analysis.segments[index].kind
    options = [candidate] if same_kind else chosen[analysis.segments[near].kind]
    mine = _layout_of(analysis, index, candidate)
    out = _between(analysis, index, near)
    back = _between(analysis, near, index)
    costs = []
    for option in options:
        other = _layout_of(analysis, near, option)
        cost = _handover(estimator, mine, other, out)
        costs.append(cost + _handover(estimator, other, mine, back))
    best = min(range(len(options)), key=lambda i: (costs[i], i))
    return options[best], costs[best]


def segment_candidate(analysis: Analysis, index: int, choice: Choice) -> Candidate:
    """The part of a whole program's choice that concerns one segment."""
    segment = analysis.segments[index]
    modes = [choice.storage[g] for g in segment.groups]
    storage = max(set(modes), key=modes.count) if modes else Storage.USED
    return Candidate(tuple(choice.blocks[b] for b in segment.blocks), storage)


def build_problem(
    analysis: Analysis,
    wanted: list[Wanted],
    records: Mapping[str, ProfileRecord],
    rates: Rates,
    budget_bytes: int | None,
) -> Problem:
    """The search problem over everything that was measured.

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
        kept = segment_bytes(frame, segments[index], layout)
        options[item.kind].append(
            Option(
                candidate=item.candidate,
                time_ms=item.time_ms(records),
                state_bytes=kept.state_bytes,
                residual_bytes=kept.residual_bytes,
                temp_bytes=max(0, record.temp_bytes - kept.residual_bytes),
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
        fixed_bytes=0,
        budget_bytes=budget_bytes,
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
        lefts = [_layout_of(analysis, left.index, o.candidate) for o in before]
        rights = [_layout_of(analysis, right.index, o.candidate) for o in after]
        ahead = _between(analysis, left.index, right.index)
        back = _between(analysis, right.index, left.index)
        edges[pair] = [
            [
                _handover(estimator, a, b, ahead) + _handover(estimator, b, a, back)
                for b in rights
            ]
            for a in lefts
        ]
    return edges


def _layout_of(analysis: Analysis, index: int, candidate: Candidate) -> Layout:
    return segment_layout(analysis.frame, analysis.segments, index, candidate)


def _between(analysis: Analysis, maker: int, reader: int) -> list[int]:
    """Values that one segment's ops make and another's read."""
    program = analysis.frame.program
    reads = set(analysis.segments[reader].ops)
    found = []
    for op_id in analysis.segments[maker].ops:
        if op_id in program.leaf_ops:
            continue
        for v in program.ops[op_id].results:
            if program.values[v].shape and any(
                user in reads for user, _ in program.users[v]
            ):
                found.append(v)
    return found


def _handover(
    estimator: Estimator, maker: Layout, reader: Layout, values: list[int]
) -> float:
    total = 0.0
    for v in values:
        have, want = maker.spec(v), reader.read_spec(v)
        if have is not None and want is not None:
            size = maker.frame.program.values[v].size_bytes
            total += estimator.moves.cost_ms(size, have, (), want)
    return total


def whole_choice(analysis: Analysis, problem: Problem, found: Solution) -> Choice:
    """The whole program's choice that a solution stands for."""
    frame = analysis.frame
    strategies: dict[int, Strategy] = {}
    storage = [Storage.USED] * len(frame.groups)
    for segment, pick in zip(analysis.segments, found.picks, strict=True):
        candidate = problem.options[segment.kind][pick].candidate
        for block, strategy in zip(segment.blocks, candidate.strategies, strict=True):
            strategies[block] = strategy
        for group in segment.groups:
            storage[group] = candidate.storage
    return Choice(
        tuple(strategies[block.index] for block in frame.blocks), tuple(storage)
    )


def smallest_bytes(problem: Problem) -> int:
    """The smallest budget in which some choice fits.

    For every bound on the temporaries, each kind takes its option with the least
    kept memory.
    """
    best = None
    bounds = sorted({o.temp_bytes for found in problem.options for o in found})
    for bound in bounds:
        kept = [
            min(
                (
                    o.state_bytes + o.residual_bytes
                    for o in found
                    if o.temp_bytes <= bound
                ),
                default=None,
            )
            for found in problem.options
        ]
        used = [kept[kind] for kind in problem.kinds]
        if all(k is not None for k in used):
            total = problem.fixed_bytes + bound + sum(k for k in used if k is not None)
            best = total if best is None else min(best, total)
    assert best is not None, "a problem has options for every kind"
    return best


def over_budget(analysis: Analysis, problem: Problem) -> MemoryBudgetError:
    """The error for a budget that nothing fits in."""
    smallest = smallest_bytes(problem)
    frame = analysis.frame
    program = frame.program
    largest = sorted(
        (
            (program.arg_names[a], program.values[program.args[a]].size_bytes)
            for a in range(len(program.args))
        ),
        key=lambda item: -item[1],
    )[:5]
    names = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in largest)
    budget = problem.budget_bytes or 0
    return MemoryBudgetError(
        f"No plan fits in {budget / 2**30:.3f} GiB of memory on each device. The "
        f"smallest budget that would do is about {smallest / 2**30:.3f} GiB. The "
        f"largest arguments, unsharded: {names}. Raise the budget, use more devices, "
        "or make the batch smaller.",
        smallest_feasible_bytes=smallest,
        contributors=largest,
    )
