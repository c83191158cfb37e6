"""What to measure: candidates of each kind of segment, alone and with a neighbour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.cost.choice import SegmentChoice, segment_candidate
from cfp.cost.costs import Costs
from cfp.cost.estimate import SegmentEstimate
from cfp.errors import DeviceError
from cfp.profiling.builder import Job
from cfp.profiling.key import Parts
from cfp.profiling.record import ProfileRecord
from cfp.search.choices import choose_candidates, preset_parts
from cfp.search.jobs import part_job
from cfp.search.kernels import Kernels, with_kernels
from cfp.search.problem import Option
from cfp.settings import LEAST_ADDED_SHARE


@dataclass(frozen=True, slots=True)
class Wanted:
    """A candidate of a kind of segment, and the jobs that tell what it costs.

    A segment alone is not what it costs inside a model: its first and last
    collectives have nothing to hide behind. So it is also measured together with a
    neighbour, and what that takes alone is subtracted.

    Attributes:
        kind, candidate: the choice.
        job: the segment alone.
        neighbour_job: the neighbour alone, or None where there is no neighbour.
        pair_job: both.
        reshard_ms: what resharding between the two takes, which the search adds itself.
        neighbour: the neighbour's place and choice, or None.
        base: for a candidate that is computed again the same without that, whose
            time in context it shares but for what computing again adds; or None. It
            is measured beside the neighbour alone, if there is one: ``job`` is the
            base's then.
    """

    kind: int
    candidate: SegmentChoice
    job: Job
    neighbour_job: Job | None = None
    pair_job: Job | None = None
    reshard_ms: float = 0.0
    neighbour: tuple[int, SegmentChoice] | None = None
    base: Wanted | None = None

    @property
    def jobs(self) -> list[Job]:
        """All its jobs."""
        found = (self.job, self.neighbour_job, self.pair_job)
        return [job for job in found if job is not None]

    @property
    def shares_job(self) -> bool:
        """Whether it is the base that is measured alone."""
        return self.base is not None and self.job is self.base.job

    @property
    def own_job(self) -> Job:
        """The job that is its own: together with a neighbour, if alone is shared."""
        return self.pair_job if self.shares_job and self.pair_job else self.job

    def failure(self, records: Mapping[str, ProfileRecord]) -> ProfileRecord | None:
        """Why nothing is known of what it costs; None if that is known."""
        needed = [self.job]
        if self.shares_job:
            needed = self.jobs
        found = (records[job.key.digest] for job in needed)
        return next((record for record in found if not record.ok), None)

    def is_known(self, records: Mapping[str, ProfileRecord]) -> bool:
        """Whether there is a record, if of a failure, of all that tells its cost."""
        known = all(job.key.digest in records for job in self.jobs)
        return known and (self.base is None or self.base.is_known(records))

    def has_failed(self, records: Mapping[str, ProfileRecord]) -> bool:
        """Whether it did not run, be it alone or together with its neighbour."""
        known = (records.get(job.key.digest) for job in self.jobs)
        return any(record is not None and not record.ok for record in known)

    def alone_ms(self, records: Mapping[str, ProfileRecord]) -> float:
        """What the segment takes by itself."""
        return records[self.job.key.digest].time_ms + self._again_ms(records)

    def time_ms(self, records: Mapping[str, ProfileRecord]) -> float:
        """What the segment adds to a step."""
        alone = records[self.job.key.digest]
        if self.base is not None:
            less = records[self.base.job.key.digest]
            if not less.ok:
                return alone.time_ms  # Only computed again does it run at all.
            more_ms = max(alone.time_ms - less.time_ms, self._again_ms(records))
            return self.base.time_ms(records) + max(0.0, more_ms)
        context = self._context(records)
        if context is None:
            return alone.time_ms
        neighbour, pair = context
        added = pair.time_ms - neighbour.time_ms - self.reshard_ms
        # The noise of two large numbers can make a small segment look free.
        return max(added, LEAST_ADDED_SHARE * alone.time_ms)

    def kept_bytes(self, records: Mapping[str, ProfileRecord], least: int) -> int:
        """What the segment keeps from the forward to the backward pass.

        Args:
            records: what was measured.
            least: what it must keep by its program.
        """
        alone = records[self.job.key.digest].temp_bytes
        context = self._context(records)
        if context is None:
            return min(least, alone)
        neighbour, pair = context
        # More than it needs alone would be the neighbour's.
        return max(least, min(alone, pair.temp_bytes - neighbour.temp_bytes))

    def _again_ms(self, records: Mapping[str, ProfileRecord]) -> float:
        """What computing again adds beside the neighbour; 0 where that is unknown."""
        context = self._context(records)
        if self.base is None or context is None:
            return 0.0
        neighbour, pair = context
        plain = self.base._context(records)
        if plain is not None:
            return max(0.0, pair.time_ms - plain[1].time_ms)
        alone_ms = records[self.base.job.key.digest].time_ms
        beside_ms = neighbour.time_ms + alone_ms + self.reshard_ms
        return max(0.0, pair.time_ms - beside_ms)

    def _context(
        self, records: Mapping[str, ProfileRecord]
    ) -> tuple[ProfileRecord, ProfileRecord] | None:
        """The neighbour alone and with the segment, if both could be measured."""
        if self.neighbour_job is None or self.pair_job is None:
            return None
        neighbour = records.get(self.neighbour_job.key.digest)
        pair = records.get(self.pair_job.key.digest)
        if neighbour is None or pair is None or not (neighbour.ok and pair.ok):
            return None
        return neighbour, pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """What was measured, or estimated.

    Attributes:
        wanted: what was asked for, in order.
        records: what is known of it, by key.
        required: how many of ``wanted`` were asked for before any search.
        rounds: how many searches asked for more.
        tight: whether memory decides, so that forward passes may be computed again.
        estimated: for each kind of segment its options by estimates, where nothing is
            to be measured.
    """

    wanted: Sequence[Wanted] = ()
    records: Mapping[str, ProfileRecord]
    required: int = 0
    rounds: int = 0
    tight: bool
    estimated: tuple[tuple[Option, ...], ...] = ()


class WantedMaker:
    """Makes candidates of segments into things to measure.

    Args:
        costs: of the program's segments.
        classics: choices whose parts are measured in any case.
        estimates: of every kind of segment.
        environment: what else a profile depends on.
        in_context: whether segments are measured with a neighbour, too.
        kernels: what may compute attentions.
    """

    def __init__(
        self,
        costs: Costs,
        classics: Mapping[str, Choice],
        estimates: Sequence[SegmentEstimate],
        environment: Parts,
        in_context: bool = True,
        kernels: Kernels | None = None,
    ) -> None:
        analysis = self._analysis = costs.analysis
        self.costs, self.estimates = costs, estimates
        self._classics = classics
        self._environment = environment
        self._in_context = in_context
        self.kernels = kernels
        self._family: dict[tuple[int, SegmentChoice], str] = {}
        self._made: Counter[int] = Counter()
        self._jobs: dict[tuple, Job] = {}
        self._required = preset_parts(analysis, classics.values())
        for name, choice in classics.items():
            for kind, parts in enumerate(preset_parts(analysis, [choice])):
                for part in parts:
                    self._family.setdefault((kind, part), name)

    def first(self, per_kind: int, others: int) -> list[Wanted]:
        """For each kind the parts of the classics, and the best others by estimate.

        Args:
            per_kind: how many in all, unless the classics have more parts.
            others: how many besides those of the classics, at most.
        """
        found = []
        for kind, estimate in enumerate(self.estimates):
            required = self._required[kind]
            count = min(per_kind, len(required) + others)
            chosen = choose_candidates(estimate, required, count)
            for candidate in with_kernels(self.kernels, kind, chosen):
                found.append(self.make(kind, candidate))
        return found

    def make(self, kind: int, candidate: SegmentChoice) -> Wanted:
        """What tells the cost of a candidate that computes nothing again."""
        analysis = self._analysis
        index = analysis.representatives[kind]
        label = self._label(kind)
        job = self._alone(index, candidate, label)
        near = _neighbour(analysis, index) if self._in_context else None
        if near is None:
            return Wanted(kind, candidate, job)
        neighbour, between_ms = self._neighbour_choice(index, candidate, near)
        neighbour_index = analysis.representatives[analysis.segments[near].kind]
        alone = self._alone(neighbour_index, neighbour, label)
        together = part_job(
            analysis,
            {index: candidate, near: neighbour},
            self._environment,
            f"{label}, in context",
        )
        together = replace(
            together, after=frozenset((job.key.digest, alone.key.digest))
        )
        return Wanted(
            kind, candidate, job, alone, together, between_ms, (near, neighbour)
        )

    def again(self, base: Wanted, alone: bool = False) -> Wanted:
        """The same candidate, with its forward pass computed again.

        Args:
            base: the candidate.
            alone: whether the base failed, by itself or beside its neighbour.
        """
        label = f"{self._label(base.kind)}, computed again"
        return computed_again(self._analysis, self._environment, base, label, alone)

    def _label(self, kind: int) -> str:
        self._made[kind] += 1
        return f"segment {kind}: {self._made[kind]}"

    def _alone(self, index: int, candidate: SegmentChoice, label: str) -> Job:
        key = (index, candidate)
        if key not in self._jobs:
            picks = {index: candidate}
            self._jobs[key] = part_job(self._analysis, picks, self._environment, label)
        return self._jobs[key]

    def _neighbour_choice(
        self, index: int, candidate: SegmentChoice, near: int
    ) -> tuple[SegmentChoice, float]:
        """The neighbour's choice that goes best with a candidate, and the resharding.

        A twin chooses alike. The neighbour of a classic's part is the same classic's,
        and any other's the part of the classic that goes best with it.
        """
        analysis = self._analysis
        kind, other = analysis.segments[index].kind, analysis.segments[near].kind
        relative = self._family.get((kind, candidate))
        options = self._required[other]
        if other == kind:
            options = [candidate]
        elif relative is not None:
            options = [segment_candidate(analysis, near, self._classics[relative])]
        ways = [
            (option, self.costs.reshard_ms(index, near, candidate, option))
            for option in options
        ]
        return min(ways, key=lambda way: way[1])


def computed_again(
    analysis: Analysis,
    environment: Parts,
    base: Wanted,
    label: str,
    alone: bool = False,
) -> Wanted:
    """A candidate with its forward pass computed again, and what tells its cost.

    The neighbour's tells what it keeps then, which may be more than it has to: the
    compiler need not see a way to let go of the rest. While it runs it needs about what
    the base does: 0.89 to 1.14 times as much, of eleven segments on 2 H200. Without a
    neighbour, or where the base failed with or without it, it is measured alone.
    """
    index = analysis.representatives[base.kind]
    candidate = replace(base.candidate, remat=True)
    if base.neighbour is None or alone:
        job = part_job(analysis, {index: candidate}, environment, label)
        return Wanted(base.kind, candidate, job, base=base)
    near, neighbour = base.neighbour
    picks = {index: candidate, near: neighbour}
    together = part_job(analysis, picks, environment, f"{label}, in context")
    # They share most kernels, which are then tried out once.
    together = replace(together, after=frozenset((base.job.key.digest,)))
    return replace(base, candidate=candidate, pair_job=together, base=base)


def _neighbour(analysis: Analysis, index: int) -> int | None:
    """The segment that a segment is measured together with: a twin, or any."""
    segments = analysis.segments
    near = [i for i in (index + 1, index - 1) if 0 <= i < len(segments)]
    twins = [i for i in near if segments[i].kind == segments[index].kind]
    return (twins or near or [None])[0]


def measured_options(
    costs: Costs,
    wanted: Iterable[Wanted],
    records: Mapping[str, ProfileRecord],
    alone: bool = False,
) -> list[list[Option]]:
    """For each kind of segment the candidates that were measured.

    Args:
        costs: of the program's segments.
        wanted: what was to be measured.
        records: what was measured.
        alone: take what segments take alone for what they cost.

    Raises:
        DeviceError: no candidate of some segment could be measured.
    """
    options: list[list[Option]] = [[] for _ in costs.analysis.representatives]
    reasons: dict[int, str] = {}
    for item in wanted:
        if not item.is_known(records):
            continue
        failed = item.failure(records)
        if failed is not None:
            reasons[item.kind] = f"{failed.status}: {failed.reason}"
            continue
        least = costs.least_bytes(item.kind, item.candidate)
        residual = item.kept_bytes(records, least.residual_bytes)
        options[item.kind].append(
            Option(
                candidate=item.candidate,
                time_ms=item.alone_ms(records) if alone else item.time_ms(records),
                state_bytes=least.state_bytes,
                residual_bytes=residual,
                temp_bytes=max(0, records[item.job.key.digest].temp_bytes - residual),
            )
        )
    for kind, found in enumerate(options):
        if not found:
            raise DeviceError(
                f"No strategy of segment kind {kind} could be measured "
                f"({reasons.get(kind, 'nothing was profiled')}). Run the profile pass, "
                "use more devices, or a smaller batch."
            )
    return options
