"""Compiles whole programs, in threads, and says which of them fit in memory."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime

from jax.sharding import Mesh

from cfp.profiling.builder import BuildEnvironment, Built, Job, build
from cfp.profiling.deaths import bury
from cfp.profiling.marks import Marks
from cfp.profiling.options import MeasureOptions
from cfp.profiling.place import place_for
from cfp.profiling.processes import Agreement
from cfp.profiling.record import ProfileRecord, is_to_retry
from cfp.profiling.store import ProfileStore
from cfp.profiling.threads import default_threads, with_settings
from cfp.program.graph import Program
from cfp.race.programs import RaceProgram, RaceResult


@dataclass(frozen=True, slots=True)
class Compiled:
    """What became of a program.

    Attributes:
        peak_bytes: what it needs on each device; 0 if it could not be compiled.
        refused: why it cannot race, as a result; None if it fits.
        cached: whether it was answered from the store.
    """

    peak_bytes: int
    refused: RaceResult | None
    cached: bool

    @property
    def fits(self) -> bool:
        """Whether it was compiled, and fits."""
        return self.refused is None


def compile_programs(
    program: Program,
    mesh: Mesh,
    programs: Sequence[RaceProgram],
    store: ProfileStore,
    *,
    budget_bytes: int | None,
    options: MeasureOptions | None = None,
    built: dict[str, Built] | None = None,
    end: float = math.inf,
) -> list[Compiled]:
    """Says which programs fit; none runs.

    What was compiled for a race before is known from the store. What is too large, or
    fails, is kept there.

    Args:
        program: the program.
        mesh: the devices.
        programs: what to compile.
        store: where records are kept.
        budget_bytes: memory of one device, or None.
        options: how to build.
        built: compiled programs by name: used, and added to.
        end: from this moment on (`time.monotonic`) nothing else is compiled, once one
            program is.

    Returns:
        What became of each, in their order.
    """
    options = options or MeasureOptions()
    built = {} if built is None else built
    jobs = {one.job.key.digest: one.job for one in programs}
    bury(store, about=jobs)
    known = still_good(store.common(jobs), options.retry_failures, budget_bytes)
    new = [one for one in programs if one.job.key.digest not in known]
    fresh: dict[str, ProfileRecord | Built] = {}
    with Marks(store.path, options.limits, program.name) as marks:
        builds = _Builds((program, mesh), new, marks, built)
        for digest, outcome in builds.run(store, options, end):
            fresh[digest] = _within(outcome, budget_bytes)
    fresh = {
        digest: replace(one, choice=jobs[digest].choice)
        if isinstance(one, ProfileRecord)
        else one
        for digest, one in fresh.items()
    }
    keep([one for one in fresh.values() if isinstance(one, ProfileRecord)], store)
    found = []
    for one in programs:
        digest = one.job.key.digest
        outcome = known.get(digest) or fresh.get(digest) or too_late(one.job)
        found.append(_compiled(one, outcome, budget_bytes, digest in known))
    return found


def build_each(
    program: Program,
    mesh: Mesh,
    programs: Sequence[RaceProgram],
    store: ProfileStore,
    marks: Marks,
    options: MeasureOptions,
    *,
    budget_bytes: int | None,
    built: dict[str, Built],
    end: float,
) -> dict[str, Built | ProfileRecord]:
    """Programs that fit, and records of why others do not, by key; see above."""
    builds = _Builds((program, mesh), programs, marks, built)
    done = builds.run(store, options, end)
    return {digest: _within(outcome, budget_bytes) for digest, outcome in done}


def still_good(
    found: Mapping[str, ProfileRecord],
    retry_failures: bool | datetime,
    budget_bytes: int | None,
) -> dict[str, ProfileRecord]:
    """Records that need not be made again."""
    return {
        digest: record
        for digest, record in found.items()
        if not is_to_retry(record, retry_failures)
        # Something was refused for its size alone, and the budget has grown.
        and not (_was_refused(record) and fits(record, budget_bytes))
    }


def fits(record: ProfileRecord, budget_bytes: int | None) -> bool:
    """Whether a program needs no more than there is."""
    return budget_bytes is None or record.peak_bytes <= budget_bytes


def keep(records: Sequence[ProfileRecord], store: ProfileStore) -> None:
    """Keeps what became of programs together, since half a race is none.

    What another process measured meanwhile, with a larger budget, says more than that
    it is too large for this one.
    """
    known = store.get_many(record.key for record in records if _was_refused(record))
    measured = {digest for digest, record in known.items() if record.ok}
    news = [record for record in records if record.key not in measured]
    store.put_all(news, replace=True)


def too_late(job: Job) -> ProfileRecord:
    """What a race says of a program for which there was no time; it is not stored."""
    reason = "not compiled, since the time for planning was over"
    key = job.key
    return ProfileRecord(
        key=key.digest, parts=key.parts, status="timeout", reason=reason
    )


def _compiled(
    one: RaceProgram,
    outcome: Built | ProfileRecord,
    budget_bytes: int | None,
    cached: bool,
) -> Compiled:
    if isinstance(outcome, Built):
        return Compiled(outcome.peak_bytes, None, False)
    refused = None
    if not (outcome.ok and fits(outcome, budget_bytes)):
        refused = RaceResult(
            name=one.name,
            predicted_ms=one.predicted_ms,
            record=outcome,
            peak_bytes=outcome.peak_bytes,
            fits=fits(outcome, budget_bytes),
            cached=cached,
        )
    return Compiled(outcome.peak_bytes, refused, cached)


def _was_refused(record: ProfileRecord) -> bool:
    compiled = record.peak_bytes > 0 and not record.run_seconds
    return record.status == "out_of_memory" and compiled


def _within(
    outcome: Built | ProfileRecord, budget_bytes: int | None
) -> Built | ProfileRecord:
    if isinstance(outcome, ProfileRecord) or budget_bytes is None:
        return outcome
    if outcome.peak_bytes <= budget_bytes:
        return outcome
    reason = f"needs {outcome.peak_bytes} bytes of {budget_bytes}"
    return outcome.record("out_of_memory", reason=reason)


def _everywhere(
    agreement: Agreement, outcome: Built | ProfileRecord
) -> Built | ProfileRecord:
    """A build's outcome, where it was built in all processes; else why not."""
    [ready] = agreement.everywhere([isinstance(outcome, Built)], "whether it is built")
    if ready or isinstance(outcome, ProfileRecord):
        return outcome
    reason = "another process could not build it"
    return outcome.record("compile_error", reason=reason)


class _Builds:
    """Programs that are built side by side, each once."""

    def __init__(
        self,
        place: tuple[Program, Mesh],
        programs: Sequence[RaceProgram],
        marks: Marks,
        built: dict[str, Built],
    ) -> None:
        self._mesh = place[1]
        self._marks = marks
        self._built = built
        self._jobs = {one.job.key.digest: one.job for one in programs}
        self._places = {one.job.key.digest: one.place or place for one in programs}
        self._names: dict[str, list[str]] = defaultdict(list)
        for one in programs:
            self._names[one.job.key.digest].append(one.name)

    def run(
        self, store: ProfileStore, options: MeasureOptions, end: float
    ) -> Iterator[tuple[str, Built | ProfileRecord]]:
        """What became of each, by key; what there was no time for is left out."""
        if not self._jobs:
            return
        agreement = Agreement.of(self._mesh)
        there = {d for d, names in self._names.items() if self._built.keys() & {*names}}
        environment = replace(
            BuildEnvironment.beside(store.build_path), always=options.compiler_options
        )
        platform = self._mesh.devices.flat[0].platform
        # Of several builds it is not known which one a process died of.
        suspects = self._marks.folder.suspects().keys() & self._jobs.keys()
        place = place_for(platform, options.place)
        environment = replace(environment, place=place)
        most = default_threads(platform) if place is None else place.at_once
        threads = 1 if suspects else most
        cache = environment.compilation_cache(platform)
        with cache, ThreadPoolExecutor(threads) as pool:
            works: list[str] = []

            def build_in_time(digest: str) -> Built | ProfileRecord | None:
                # Several processes have clocks of their own.
                if agreement.alone and works and time.monotonic() > end:
                    return None
                outcome = self._build(self._jobs[digest], environment)
                works.extend([digest] if isinstance(outcome, Built) else [])
                return outcome

            built = pool.map(with_settings(build_in_time), self._jobs)
            for digest, job in self._jobs.items():
                if digest not in there:
                    options.tell(f"compiling {job.label}")
                if (outcome := next(built)) is not None:
                    yield digest, _everywhere(agreement, outcome)

    def _build(self, job: Job, environment: BuildEnvironment) -> Built | ProfileRecord:
        names = self._names[job.key.digest]
        for name in self._built.keys() & set(names):
            return replace(self._built[name], key=job.key)
        with self._marks.doing(job.key, job.label, "build"):
            outcome = build(*self._places[job.key.digest], job, environment)
        if isinstance(outcome, Built):
            self._built.update(dict.fromkeys(names, outcome))
        return outcome
