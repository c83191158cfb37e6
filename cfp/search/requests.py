"""Requests to measure segments: their jobs, and costs derived from the jobs' records.

A segment (a run of blocks, such as a layer) is measured alone, and together with a
neighbour. Segments that take a small share of the step are measured alone only: noise
would exceed the difference. Whole programs are measured by jobs, too.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from statistics import median
from types import MappingProxyType
from typing import Any

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import (
    Choice,
    Frame,
    Layout,
    SegmentKernels,
    constraints,
    lay_out,
)
from cfp.analysis.presets import activations
from cfp.analysis.storage import even_spec
from cfp.analysis.strategies import Spec
from cfp.cost.costs import (
    Costs,
    SegmentChoice,
    SegmentEstimate,
    layout_of,
    segment_candidate,
)
from cfp.cost.memory import turning_point
from cfp.errors import CfpError
from cfp.kernels.kinds import proposals
from cfp.printable import mesh_text
from cfp.profiling.builder import Job
from cfp.profiling.record import Parts, ProfileKey, ProfileRecord
from cfp.program.constrain import VERSION, Constraints, rematerializable
from cfp.program.part import Part, cut_part, numbered, whole
from cfp.search.choices import (
    first_candidates,
    kernel_variants,
    preset_parts,
    ranked_candidates,
)
from cfp.search.solver import Option, Problem
from cfp.settings import LEAST_ADDED_SHARE, SMALL_SHARE, ConstraintLevel, Replacing


def constraints_of(
    analysis: Analysis, choice: Choice, level: ConstraintLevel
) -> Constraints:
    """Makes the sharding constraints, remat and kernels of a whole program's choice."""
    layout, part = lay_out(analysis.frame, choice), whole(analysis.frame.program)
    return _constrain(analysis, layout, part, choice.remat, choice.kernels, level)


def _constrain(
    analysis: Analysis,
    layout: Layout,
    part: Part,
    remat: Iterable[int],
    kernels: Iterable[tuple[int, SegmentKernels]],
    level: ConstraintLevel = ConstraintLevel.EVERYTHING,
) -> Constraints:
    """Makes the constraints of a part of a program, reduced to a level.

    `remat` and `kernels` name segments by index. One device has no sharding constraint.
    Nor has a kernel's read, at any level: keys of ring attention stay sharded.
    """
    frame, program = layout.frame, layout.frame.program
    segments = analysis.segments
    replaced = [
        replacement
        for index, own in kernels
        for one in proposals(layout, segments[index].ops, own)
        for replacement in one.replacements(program)
    ]
    turn, within = turning_point(frame), program.with_bodies(part.ops)
    again = (
        rematerializable(program, within & {*segments[index].ops}, turn, within)
        for index in remat
    )
    constrained = constraints(layout, within)
    own = {use for one in replaced for stage in one.stages for use in stage.reads}
    values, uses = constrained.values, dict[tuple[int, int], Spec]()
    if not frame.mesh:
        # On one device they change no sharding, and a step took 3 % longer with them:
        # docs/decisions.md, "Presets race with and without constraints inside".
        values = {}
    elif level is not ConstraintLevel.EVERYTHING:
        shared = () if level is ConstraintLevel.ARGUMENTS else activations(frame)
        # The compiler propagates from these values. If one is uneven, ops may read its
        # padding as numbers (a scatter's indices), so even shardings replace it.
        values = {
            v: even_spec(spec, program.values[v].shape, frame.mesh)
            for v, spec in values.items()
            if v in shared
        }
        _hold(layout, part, values, uses)
    else:
        # Constraints of values do not cover values that enter a loop's body.
        _hold(layout, part, {}, uses, products=False)
        reads = {use: program.ops[use[0]].operands[use[1]] for use in uses}
        uses = {use: spec for use, spec in uses.items() if reads[use] not in values}
        uses |= constrained.uses
    uses = {use: spec for use, spec in uses.items() if use not in own}
    return Constraints(values, uses, tuple(filter(None, again)), tuple(replaced))


def _hold(
    layout: Layout,
    part: Part,
    values: dict[int, Spec],
    uses: dict[tuple[int, int], Spec],
    products: bool = True,
) -> None:
    """Adds constraints of ops whose shardings the compiler must not choose.

    Changes `values` and `uses`. Products need them on meshes of several axes only, and
    for their operands only: the compiler may shard the result's sum. `products=False`
    leaves products out.
    """
    program = layout.frame.program
    several = sum(size > 1 for _, size in layout.frame.mesh) > 1
    for op_id in program.with_bodies(part.ops):
        op = program.ops[op_id]
        if op.rule is None or not op.rule.held or op_id not in layout.axes:
            continue
        is_product = op.kind == "dot_general"
        if is_product and not (several and products):
            continue
        for index, v in enumerate(op.operands):
            wanted = layout.use_spec(op_id, index)
            if wanted is not None and program.values[v].shape:
                uses[op_id, index] = wanted
        if not is_product:
            values.update(
                (v, layout.value_spec[v]) for v in op.results if v in layout.value_spec
            )


def part_job(
    analysis: Analysis,
    candidates: Mapping[int, SegmentChoice],
    environment: Parts,
    label: str,
) -> Job:
    """Makes the job that measures one segment, or adjacent ones together.

    Args:
        candidates: ``{segment index: its choice}``.
    """
    layout = layout_of(analysis, candidates)
    ops = sorted(op for index in candidates for op in analysis.segments[index].ops)
    part = cut_part(analysis.frame.program, ops)
    again = [index for index, candidate in candidates.items() if candidate.remat]
    kernels = [(index, candidate.kernels) for index, candidate in candidates.items()]
    constrained = _constrain(analysis, layout, part, again, kernels)
    job = _job(layout, part, constrained, environment, label)
    return replace(job, expected_ms=sum(c.estimate_ms for c in candidates.values()))


def whole_job(
    analysis: Analysis,
    choice: Choice,
    environment: Parts,
    label: str,
    level: ConstraintLevel = ConstraintLevel.EVERYTHING,
    options: Mapping[str, str] = MappingProxyType({}),
) -> Job:
    """Makes the job that measures a whole program under a choice and XLA options."""
    frame = analysis.frame
    # Donation and pins change the memory that a choice needs.
    given = repr((frame.program.alias, sorted(frame.pins.items())))
    digest = hashlib.sha256(given.encode()).hexdigest()
    environment = (
        *environment,
        ("what", "whole program, raced when warm"),
        ("arguments", digest),
    )
    how = {"level": level, "options": dict(options)}
    chosen = json.dumps({"choice": asdict(choice), **how})
    layout, part = lay_out(frame, choice), whole(frame.program)
    constrained = constraints_of(analysis, choice, level)
    job = _job(layout, part, constrained, environment, label)
    return replace(_under(job, options), choice=chosen)


def _under(job: Job, options: Mapping[str, str]) -> Job:
    """Adds XLA options to a job and its key; without options, the job is unchanged."""
    chosen = tuple(sorted(options.items()))
    key = ProfileKey((*job.key.parts, ("options", repr([*chosen]))))
    return replace(job, key=key, options=chosen) if chosen else job


def _returned(frame: Frame, part: Part) -> Iterator[tuple[int, int, int]]:
    """Yields (part's input, output with its new value, program's argument) indices."""
    program = frame.program
    position = {v: i for i, v in enumerate(program.args)}
    places = {v: i for i, v in enumerate(part.outputs)}
    is_whole = part.is_whole(program)
    seen: set[int] = set()
    for place, v in enumerate(part.inputs):
        argument = position.get(v)
        output = frame.paired[argument] if argument is not None else None
        if argument is None or output is None:
            continue
        made = output if is_whole else places.get(program.outputs[output])
        # If one output renews two arguments, it is fed back to the first.
        if made is not None and made not in seen:
            seen.add(made)
            yield place, made, argument


def _job(
    layout: Layout, part: Part, constrained: Constraints, environment: Parts, label: str
) -> Job:
    """Makes the job that measures a part of a program under a layout.

    The key numbers ops and values from the part's start, so that equal layers of
    different models, or at different depths, share a record.
    """
    frame, program = layout.frame, layout.frame.program

    def even(v: int, spec: Spec | None) -> Spec:
        """Makes a spec even, as jit's arguments need, or replicated if it is None."""
        shape = program.values[v].shape
        return even_spec(spec or ((),) * len(shape), shape, frame.mesh)

    made_before = {v for v in part.inputs if program.values[v].producer >= 0}
    in_specs = tuple(
        even(v, layout.read_spec(v) if v in made_before else layout.spec(v))
        for v in part.inputs
    )
    specs = [even(v, layout.spec(v)) for v in part.outputs]
    feedback: list[tuple[int, int]] = []
    for place, made, argument in _returned(frame, part):
        specs[made] = in_specs[place]
        if program.alias[argument] is not None:
            feedback.append((place, made))
    out_specs = tuple(specs)
    numbers = numbered(program, part)
    inside = numbers.translated(constrained)
    again = inside.rematerialized
    what = (sorted(inside.values.items()), sorted(inside.uses.items()))
    what += (in_specs, out_specs, feedback, again and VERSION, again, inside.replaced)
    given = dict(zip(program.args, program.given, strict=False))
    decided = [
        (numbers.values[v], given[v].hex())
        for v in part.inputs
        if given.get(v) and program.decides(v)
    ]
    key = (
        ("ops", numbers.digest),
        ("shardings", hashlib.sha256(repr(what).encode()).hexdigest()),
        *([("given", repr(sorted(decided)))] if decided else []),
        ("mesh", mesh_text(frame.mesh)),
        *environment,
    )
    return Job(
        key=ProfileKey(key),
        label=label,
        part=part,
        constraints=constrained,
        in_specs=in_specs,
        out_specs=out_specs,
        feedback=tuple(feedback),
    )


# Key of a plan's counts: number of strategies that the deadline left unmeasured.
UNMEASURED_STRATEGIES = "strategies_unmeasured"


@dataclass(frozen=True, slots=True)
class MeasurementRequest:
    """Request to measure a segment's candidate: its jobs, and its cost from records.

    A segment alone takes longer than inside a model: no other computation hides its
    first and last collectives. So it is also measured together with a neighbour, and
    the neighbour's time alone is subtracted. There are four cases:

    ======================  ========================  =============================
    candidate               jobs, `own_job` with a *  time
    ======================  ========================  =============================
    without a neighbour     alone*                    alone
    beside a neighbour      alone*, neighbour, pair   pair - neighbour - resharding
    rematerialized          alone*                    base + (alone - base alone)
    rematerialized, beside  base alone, neighbour,    base + (pair - base's pair)
    a neighbour             pair*
    ======================  ========================  =============================

    The second time is at least 0.4 of alone; if the neighbour or the pair failed, it is
    alone. The difference that is added to a base is at least 0; if the base failed, the
    time is alone. In the last two cases, "alone" and "pair" are rematerialized.

    Attributes:
        kind: the segment's kind, a number.
        jobs: the jobs of the table, in its order.
        neighbour: (segment index, choice) of the neighbour; None without one.
        reshard_ms: estimated resharding between the two, which the search adds again.
        base: a rematerialized candidate's request without rematerialization; or None.
    """

    kind: int
    candidate: SegmentChoice
    jobs: tuple[Job, ...]
    neighbour: tuple[int, SegmentChoice] | None = None
    reshard_ms: float = 0.0
    base: MeasurementRequest | None = None

    @property
    def own_job(self) -> Job:
        """The job of this candidate: the last if there is a base, else the first."""
        return self.jobs[-1 if self.base else 0]

    def has_failed(self, records: Mapping[str, ProfileRecord]) -> bool:
        """True if any job has the record of a failure."""
        known = (records.get(job.key.digest) for job in self.jobs)
        return any(record is not None and not record.ok for record in known)

    def outcome(self, records: Mapping[str, ProfileRecord]) -> ProfileRecord | None:
        """Returns the first job's record; None while any is missing, also of the base.

        Returns a failed record if the cost cannot be derived: the first job failed, or
        any job of a rematerialized candidate.
        """
        found = [records.get(job.key.digest) for job in self.jobs]
        known = [record for record in found if record is not None]
        if len(known) < len(found):
            return None
        if self.base is not None and self.base.outcome(records) is None:
            return None
        failed = [record for record in known if not record.ok]
        return failed[0] if failed and (self.base or not known[0].ok) else known[0]

    def is_measured(self, records: Mapping[str, ProfileRecord]) -> bool:
        """True if the candidate's cost can be derived from the records."""
        found = self.outcome(records)
        return found is not None and found.ok

    def time_ms(self, records: Mapping[str, ProfileRecord]) -> float:
        """Computes the time that one run of the segment adds to a step, ms."""
        if self.base is not None and self.base.is_measured(records):
            return self.base.time_ms(records) + self._more_ms(records)
        alone_ms, pair = self._alone(records).time_ms, self._pair(records)
        if pair is None:
            return alone_ms
        neighbour, both = pair
        added_ms = both.time_ms - neighbour.time_ms - self.reshard_ms
        # Noise of two large times could make a small segment look free.
        return max(added_ms, LEAST_ADDED_SHARE * alone_ms)

    def alone_ms(self, records: Mapping[str, ProfileRecord]) -> float:
        """Computes the segment's time without a neighbour, ms."""
        alone_ms = self._alone(records).time_ms
        return alone_ms + self._more_ms(records) if self._pair(records) else alone_ms

    def pair_ms(self, records: Mapping[str, ProfileRecord]) -> float | None:
        """Returns the pair's time, ms; None unless pair and neighbour are measured."""
        pair = self._pair(records)
        return pair[1].time_ms if pair else None

    def residual_bytes(self, records: Mapping[str, ProfileRecord], least: int) -> int:
        """Returns the bytes kept from the forward to the backward pass.

        The backward pass reads `least`, by the program. A pair gives that or more. A
        segment alone gives that, or all its temporaries if these are less.
        """
        alone_bytes = self._alone(records).temp_bytes
        if (pair := self._pair(records)) is None:
            return min(least, alone_bytes)
        neighbour, both = pair
        # Bytes beyond the segment's own temporaries belong to the neighbour.
        return max(least, min(alone_bytes, both.temp_bytes - neighbour.temp_bytes))

    def _alone(self, records: Mapping[str, ProfileRecord]) -> ProfileRecord:
        return records[self.jobs[0].key.digest]

    def _pair(
        self, records: Mapping[str, ProfileRecord]
    ) -> tuple[ProfileRecord, ProfileRecord] | None:
        """Records of the neighbour alone and with the segment; None unless both ok."""
        if self.neighbour is None:
            return None
        neighbour, both = (records[job.key.digest] for job in self.jobs[1:])
        return (neighbour, both) if neighbour.ok and both.ok else None

    def _more_ms(self, records: Mapping[str, ProfileRecord]) -> float:
        """Computes the time that rematerializing adds; 0 without a measured base."""
        base = self.base
        if base is None or not base.is_measured(records):
            return 0.0
        pair = self._pair(records)
        if pair is None:
            return max(0.0, self._alone(records).time_ms - base.alone_ms(records))
        neighbour, both = pair
        if (without := base._pair(records)) is not None:
            return max(0.0, both.time_ms - without[1].time_ms)
        beside_ms = neighbour.time_ms + base.alone_ms(records)
        return max(0.0, both.time_ms - (beside_ms + self.reshard_ms))


@dataclass(frozen=True, kw_only=True)
class Profiles:
    """Result of the profile pass: measurements or estimates of segments.

    Attributes:
        presets: choices by name of presets that are worth measuring.
        costs: estimated costs of segments, such as resharding between them.
        has_all_presets: True if these are all presets that may fit; otherwise presets
            far behind by estimate are left out.
        memory_bound: True if the fastest choice may not fit in memory.
        rounds: ``[round]`` requests; the first round precedes any search.
        records: ``{digest of a job's key: record}``.
        problem: the search problem if estimates alone decide; otherwise None.
        replacing: kernels that candidates may have.
        counts: numbers of strategies and seconds of the pass, for the plan's counts.
    """

    presets: Mapping[str, Choice] = field(repr=False)
    costs: Costs = field(repr=False)
    memory_bound: bool
    rounds: Sequence[Sequence[MeasurementRequest]] = field(default=((),), repr=False)
    records: Mapping[str, ProfileRecord] = field(default_factory=dict, repr=False)
    problem: Problem | None = field(default=None, repr=False)
    replacing: Replacing = field(default_factory=Replacing)
    counts: Mapping[str, float] = field(default_factory=dict)
    has_all_presets: bool = True

    @property
    def requests(self) -> list[MeasurementRequest]:
        """Requests of all rounds, in order."""
        return [item for asked in self.rounds for item in asked]

    @property
    def failed_kernels(self) -> dict[SegmentKernels, str]:
        """Kernels that always failed: ``{kernels: "failed: STATUS: first REASON"}``."""
        failed: dict[SegmentKernels, str] = {}
        ran: set[SegmentKernels] = set()
        for item in self.requests:
            record = self.records.get(item.own_job.key.digest)
            kernels = item.candidate.kernels
            if not kernels or record is None:
                continue
            if record.ok:
                ran.add(kernels)
            else:
                failed.setdefault(kernels, f"failed: {record.status}: {record.reason}")
        return {one: why for one, why in failed.items() if one not in ran}


@dataclass(frozen=True)
class RequestBuilder:
    """Makes requests to measure candidates of segments.

    Attributes:
        presets: ``{name: choice}``; `first` requests all their parts.
        environment: parts of the records' keys that name devices and software.
        in_context: True to measure segments together with a neighbour, too.
        options: XLA options of all segments.
    """

    costs: Costs
    presets: Mapping[str, Choice]
    estimates: Sequence[SegmentEstimate]
    environment: Parts
    in_context: bool = True
    replacing: Replacing = field(default_factory=Replacing)
    options: Mapping[str, str] = field(default_factory=dict)

    def first(self, per_kind: int, others: int) -> list[MeasurementRequest]:
        """Makes requests for `first_candidates` of all kinds, largest share first."""
        chosen = first_candidates(
            self.costs.analysis,
            self.estimates,
            self._parts,
            self.replacing,
            others=others,
            per_kind=per_kind,
        )
        shares = self._shares
        return [
            self.make(kind, candidate, number)
            for kind in sorted(range(len(shares)), key=lambda kind: -shares[kind])
            for number, candidate in enumerate(chosen[kind], 1)
        ]

    def make(
        self, kind: int, candidate: SegmentChoice, number: int
    ) -> MeasurementRequest:
        """Makes the request for a candidate that is not rematerialized.

        Args:
            number: position of the candidate in its kind, for the progress display.
        """
        label = f"segment {kind}: {number}"
        analysis = self.costs.analysis
        index = analysis.representatives[kind]
        job = replace(self._alone(index, candidate), label=label)
        segments = analysis.segments
        beside = [i for i in (index + 1, index - 1) if 0 <= i < len(segments)]
        if not beside or not self.in_context or self._shares[kind] < SMALL_SHARE:
            return MeasurementRequest(kind, candidate, (job,))
        # Of layers A B A B, one program measures each kind beside the other.
        shares = [self._shares[segment.kind] for segment in segments]
        near = min(beside, key=lambda i: (segments[i].kind != kind, -shares[i], i))
        other = segments[near].kind
        # A neighbour of the same kind has the same choice. Beside a preset's part, it
        # has that preset's part; otherwise the preset part with the least resharding.
        options, preset = [*self._parts[other]], self._parts[kind].get(candidate)
        if other == kind:
            options = [candidate]
        elif preset is not None:
            options = [segment_candidate(analysis, near, preset)]
        # The neighbour has the kernels that a plan most likely gives it.
        options = [
            [*kernel_variants(analysis, other, one, self.replacing), one][0]
            for one in options
        ]
        [moves] = self.costs.reshardings_ms(index, near, [candidate], options)
        ways = zip(moves, options, strict=True)
        reshard_ms, neighbour = min(ways, key=lambda way: way[0])
        reshard_ms /= segments[index].repeat  # The pair runs once.
        alone = self._alone(analysis.representatives[other], neighbour)
        alone = replace(alone, label=label)
        picks = {index: candidate, near: neighbour}
        pair = part_job(analysis, picks, self.environment, f"{label}, in context")
        kernels = job.kernels | alone.kernels
        pair = replace(_under(pair, self.options), kernels=kernels)
        return MeasurementRequest(
            kind, candidate, (job, alone, pair), (near, neighbour), reshard_ms
        )

    @cached_property
    def _parts(self) -> list[dict[SegmentChoice, Choice]]:
        return preset_parts(self.costs.analysis, self.presets.values())

    @cached_property
    def _shares(self) -> list[float]:
        """``[kind]`` share of all its segments in the step's estimated time, 0 to 1."""
        counts = Counter(segment.kind for segment in self.costs.analysis.segments)
        times_ms = [
            counts[kind] * min(c.estimate_ms for c in ranked_candidates(estimate, 1))
            for kind, estimate in enumerate(self.estimates)
        ]
        total_ms = sum(times_ms)
        return [time_ms / total_ms if total_ms else 1.0 for time_ms in times_ms]

    @cached_property
    def _alone(self) -> Callable[[int, SegmentChoice], Job]:
        """Cached maker of single segments' jobs; many requests share a neighbour."""
        analysis, environment = self.costs.analysis, self.environment

        def alone(index: int, candidate: SegmentChoice) -> Job:
            job = part_job(analysis, {index: candidate}, environment, "")
            # Products depend on a block's strategy, and hardly on storage modes.
            own = enumerate(candidate.strategies)
            kernels = {(index, place, one) for place, one in own}
            kernels |= {(index, one) for one in candidate.kernels}
            return replace(_under(job, self.options), kernels=frozenset(kernels))

        return cache(alone)


def rematerialize(
    analysis: Analysis,
    environment: Parts,
    base: MeasurementRequest,
    label: str,
    records: Mapping[str, ProfileRecord],
) -> MeasurementRequest:
    """Makes the request for `base`'s candidate with its forward pass rematerialized.

    Without a neighbour, or if a job of `base` failed, the candidate is measured alone.
    Otherwise it is measured beside the neighbour, for the bytes kept between the
    passes. Memory while running is then taken from `base`.
    """
    index = analysis.representatives[base.kind]
    candidate = replace(base.candidate, remat=True)
    if base.neighbour is None or base.has_failed(records):
        job = part_job(analysis, {index: candidate}, environment, label)
        job = _under(job, dict(base.jobs[0].options))
        return MeasurementRequest(base.kind, candidate, (job,), base=base)
    near, neighbour = base.neighbour
    picks = {index: candidate, near: neighbour}
    together = part_job(analysis, picks, environment, f"{label}, in context")
    together = _under(together, dict(base.jobs[0].options))
    jobs = (*base.jobs[:2], replace(together, kernels=base.jobs[2].kernels))
    return replace(base, candidate=candidate, jobs=jobs, base=base)


def measured_options(
    costs: Costs,
    wanted: Iterable[MeasurementRequest],
    records: Mapping[str, ProfileRecord],
    alone: bool = False,
) -> list[list[Option]]:
    """Returns ``[kind]`` options of the measured requests, with their costs.

    Candidates without kernels may be derived from measured kernel variants, by the
    median difference in other pairs of the kind.

    Args:
        alone: True for times of segments alone, not of pairs.

    Raises:
        CfpError: no candidate of some kind is measured.
    """
    options: list[list[Option]] = [[] for _ in costs.analysis.representatives]
    reasons: dict[int, str] = {}
    for item in wanted:
        found = item.outcome(records)
        if found is not None and not found.ok:
            reasons[item.kind] = f"{found.status}: {found.reason}"
        elif found is not None:
            least = costs.least_bytes(item.kind, item.candidate)
            residual = item.residual_bytes(records, least.residual_bytes)
            once_ms = (item.alone_ms if alone else item.time_ms)(records)
            options[item.kind].append(
                Option(
                    candidate=item.candidate,
                    # Measured with all state on the devices: host transfers are added.
                    time_ms=costs.step_ms(item.kind, item.candidate, once_ms)
                    + costs.host_ms(item.kind, item.candidate),
                    state_bytes=least.state_bytes,
                    residual_bytes=residual,
                    temp_bytes=max(0, found.temp_bytes - residual),
                )
            )
    for kind, found in enumerate(options):
        found += _as_written(costs, kind, found)
        if not found:
            raise CfpError(
                f"No strategy of segment kind {kind} could be measured "
                f"({reasons.get(kind, 'nothing was profiled')}). Measure with cfp "
                "profile, use more devices, or make the batch smaller."
            )
    return options


def _as_written(costs: Costs, kind: int, known: Sequence[Option]) -> list[Option]:
    """Derives missing options without kernels, if pairs with the kernels are known."""
    there = {one.candidate: one for one in known if not one.candidate.remat}
    with_kernels = [one for one in there.values() if one.candidate.kernels]
    pairs = [
        (there[one.candidate.as_written], one)
        for one in with_kernels
        if one.candidate.as_written in there
    ]
    derived: dict[SegmentChoice, Option] = {}
    for one in with_kernels:
        candidate = one.candidate.as_written
        gains = [
            (written, other)
            for written, other in pairs
            if other.candidate.kernels == one.candidate.kernels
        ]
        if candidate in there or candidate in derived or not gains:
            continue

        def more(size: Callable[[Option], float], gains: Any = gains) -> float:
            return median(size(written) - size(other) for written, other in gains)

        least = costs.least_bytes(kind, candidate)
        temp_bytes = one.temp_bytes + more(lambda option: option.temp_bytes)
        residual_bytes = one.residual_bytes + more(lambda o: o.residual_bytes)
        derived[candidate] = Option(
            candidate=candidate,
            # A kernel slower by enough is measured both ways: less than 0 is noise.
            time_ms=one.time_ms + max(0.0, more(lambda option: option.time_ms)),
            state_bytes=least.state_bytes,
            residual_bytes=max(least.residual_bytes, round(residual_bytes)),
            temp_bytes=max(0, round(temp_bytes)),
        )
    return [*derived.values()]
