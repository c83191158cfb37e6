"""Compiles whole programs, and remembers programs and races of earlier runs.

Predictions of memory are off by a few percent. So under a budget, one choice of an
earlier run may race again: the fastest that fits. A larger budget then gives no slower
plan. If none fits, the smallest lets an error name a sufficient budget.

The store answers a repeated race, without running. Times compare only within one race.
They are stored with a key of the race's programs and its budget, besides each program's
own record. An `Answer` stores the winner's time and the remembered choice that raced,
since a later run may remember another choice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from math import inf
from typing import Any

import pydantic
from jax.sharding import Mesh
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.analysis.strategies import Strategy, block_strategies
from cfp.context import PlanContext
from cfp.kernels.kinds import known_kernels
from cfp.printable import waiting_text
from cfp.profiling.builder import BuildEnvironment, Built, Job, build, default_threads
from cfp.profiling.jobs import build_all
from cfp.profiling.record import MEMORY_SHARE, ProfileKey, ProfileRecord, refused_option
from cfp.profiling.store import ProfileStore
from cfp.profiling.tasks import InFlight, settle
from cfp.program.graph import Program
from cfp.race.admission import expected_ms
from cfp.race.programs import (
    RaceProgram,
    RaceResult,
    fits,
    is_compiled_too_large,
    level_name,
    programs_of,
)
from cfp.search.guided import Candidate, prediction_of
from cfp.search.solver import Problem
from cfp.settings import (
    NO_LATENCY_HIDING,
    STAY_AFTER_LOOK,
    WORTH_HAVING,
    ConstraintLevel,
    Dimension,
)


@dataclass(frozen=True, slots=True)
class Builder:
    """Compiles candidate programs for the devices of a context.

    After the context's deadline, each `build_each` compiles at most one program, and
    compiled programs are timed once.

    Attributes:
        program: the program, for candidates without `RaceProgram.stands_on`.
        built: ``{identity: Built}`` of compiled programs, even if over the budget.
    """

    context: PlanContext
    program: Program
    built: dict[str, Built] = field(default_factory=dict, repr=False)

    @property
    def platform(self) -> str:
        """JAX's name of the devices' platform."""
        return self.context.devices.devices.flat[0].platform

    def where(self, one: RaceProgram) -> tuple[Program, Mesh]:
        """Returns the program and the mesh of a candidate."""
        return one.stands_on or (self.program, self.context.devices)

    @property
    def in_flight(self) -> InFlight:
        """Context that notes builds and runs in the store while they are under way."""
        context = self.context
        return InFlight(context.store, context.measure.limits, self.program.name)


def compile_programs(
    builder: Builder, programs: Sequence[RaceProgram]
) -> list[RaceResult]:
    """Compiles programs without running them, and stores failures.

    Programs over the budget count as failures. Programs in the store are not compiled.

    Returns:
        A result for each program, in order; samples come from earlier races only.
    """
    context, keys = builder.context, [one.job.key.digest for one in programs]
    known = {**_builds(context.store, programs), **known_records(context, keys)}
    new = [one for one in programs if one.job.key.digest not in known]
    with builder.in_flight as in_flight:
        ready, failed = build_each(builder, new, in_flight)
    keep(failed.values(), context.store)
    outcomes = {**ready, **failed, **known}
    return results_of(programs, outcomes, context.budget_bytes, known)


def keep_built(store: ProfileStore, one: RaceProgram, built: Built) -> None:
    """Stores a compiled program's memory and choice, under a key apart from times."""
    made = replace(built, key=_key_of_build(one))
    record = made.record("ok", samples_ms=[1e3 * built.build_seconds])
    store.put(replace(record, choice=one.job.choice), replace=True)


def _builds(store: ProfileStore, programs: Sequence[RaceProgram]) -> dict[str, Built]:
    """Returns {program's key: `Built` without executable} by `keep_built`'s records."""
    keys = {one.job.key.digest: (one.job.key, _key_of_build(one)) for one in programs}
    found = store.get_many(mine.digest for _, mine in keys.values())
    return {
        digest: Built(
            key=key,
            compiled=None,
            collectives=one.collectives,
            build_seconds=one.build_seconds,
            **asdict(one.size),
        )
        for digest, (key, mine) in keys.items()
        if (one := found.get(mine.digest))
    }


def _key_of_build(one: RaceProgram) -> ProfileKey:
    return ProfileKey((*one.job.key.parts, _COMPILED))


def build_each(
    builder: Builder, programs: Sequence[RaceProgram], in_flight: InFlight
) -> tuple[dict[str, Built], dict[str, ProfileRecord]]:
    """Compiles programs that `builder.built` lacks; after the deadline one in all.

    Returns:
        ``{key: compiled program}`` of programs that fit, and ``{key: record}`` of
        programs that failed or do not fit. Programs that were not begun are absent.
    """
    context, wanted = builder.context, {one.job.key.digest: one for one in programs}
    most_bytes, kept = context.budget_bytes, BuildEnvironment.beside(context.store.path)
    found: dict[str, Built | ProfileRecord] = {
        digest: replace(built, key=one.job.key)
        for digest, one in wanted.items()
        if (built := builder.built.get(one.identity)) is not None
    }
    jobs = [one.job for digest, one in wanted.items() if digest not in found]
    begun = count(len(found))

    def build_one(job: Job) -> Built | ProfileRecord:
        one = wanted[job.key.digest]
        outcome = build(*builder.where(one), job, kept)
        if isinstance(outcome, Built):
            builder.built[one.identity] = outcome
        return outcome

    def tell(job: Job, number: int, left: int, seconds: float) -> None:
        if not seconds:
            which = f", {number} of {len(jobs)}" if len(jobs) > 1 else ""
            context.measure.tell(f"compiling {job.label!r}{which}")
        elif left == 1:
            context.measure.tell(waiting_text(job.label, seconds))

    found |= build_all(
        jobs,
        build_one,
        in_flight,
        threads=default_threads(builder.platform),
        tell=tell,
        is_late=lambda: next(begun) > 0 and context.is_over,
    )
    ready, failed = dict[str, Built](), dict[str, ProfileRecord]()
    for digest, one in wanted.items():
        outcome = found.get(digest)
        if isinstance(outcome, Built) and not fits(outcome, most_bytes):
            reason = f"needs {outcome.peak_bytes} bytes, more than {most_bytes}"
            outcome = outcome.record("out_of_memory", reason=reason)
        if isinstance(outcome, Built):
            ready[digest] = outcome
        elif outcome is not None:
            failed[digest] = one.own(outcome)
    return ready, failed


def results_of(
    programs: Sequence[RaceProgram],
    outcomes: Mapping[str, ProfileRecord | Built],
    budget_bytes: int | None,
    cached: Collection[str],
) -> list[RaceResult]:
    """Returns results, in order; programs without an outcome were `TOO_LATE`."""
    pairs = [(one, one.job.key.digest) for one in programs]
    return [
        RaceResult.of(one, outcomes.get(key), budget_bytes, key in cached)
        for one, key in pairs
    ]


def known_records(
    context: PlanContext, digests: Collection[str]
) -> dict[str, ProfileRecord]:
    """Returns the store's records by key, without records to make again.

    Left out: failures to retry, and programs too large for an earlier budget only.
    """
    settle(context.store)
    return {
        digest: record
        for digest, record in context.measure.known(context.store, digests).items()
        # Unless it was refused for its size under a smaller budget.
        if not (is_compiled_too_large(record) and fits(record, context.budget_bytes))
    }


def keep(records: Collection[ProfileRecord], store: ProfileStore) -> None:
    """Stores records of a race in one transaction: part of a race would be useless.

    A compiled program that is too large does not replace a measurement, which another
    process may have made meanwhile with a larger budget.
    """
    known = store.get_many(one.key for one in filter(is_compiled_too_large, records))
    measured = {digest for digest, record in known.items() if record.ok}
    news = [record for record in records if record.key not in measured]
    store.put_all(news, replace=True)


EARLIER_RUN = "from an earlier run"
_COMPILED = ("outcome", "compiled")


class _Kept(BaseModel):
    """JSON of a candidate's choice, constraint level and options, in its record."""

    model_config = ConfigDict(extra="forbid", strict=True)

    choice: Choice
    level: ConstraintLevel
    options: dict[str, str]


@pydantic.dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Outcome of an earlier race.

    Attributes:
        known: the remembered choice that raced (of `to_race_again`), as JSON, or "".
        time_ms: step time of the winner.
        ended: time of the end, in the format of `ProfileRecord.created`.
        raced: digests of all choices that ran and fit.
    """

    known: str
    time_ms: float
    ended: str
    raced: tuple[str, ...] = ()

    def is_old(self, records: Iterable[ProfileRecord]) -> bool:
        """True if the fastest later record did not race, and beats the winner by 2 %.

        Args:
            records: records of choices that fit.
        """
        since = [record for record in records if record.created > self.ended]
        best = min(since, key=_turn_ms, default=None)
        if best is None or best.choice == self.known:
            return False
        is_new = choice_digest(best.choice) not in self.raced
        return is_new and _turn_ms(best) < (1.0 - WORTH_HAVING) * self.time_ms


_ANSWERS = TypeAdapter(Answer)


def choice_digest(choice: str) -> str:
    return _digest([choice])


def question(context: PlanContext, programs: Iterable[RaceProgram]) -> ProfileKey:
    """Returns the key of a race's answer, by programs, options and budget."""
    options = context.defaults.compiler_options.values()
    return ProfileKey(
        (
            ("what", "the programs of a race"),
            ("programs", _digest(one.job.key.digest for one in programs)),
            ("options", repr([sorted(one.items()) for one in options])),
            ("budget", str(context.budget_bytes)),
            *context.environment,
        )
    )


def answer_to(asked: ProfileKey, store: ProfileStore) -> Answer | None:
    """Returns the stored answer of a race; None if there is none, or it is invalid."""
    record = store.get(asked.digest)
    try:
        return record and _ANSWERS.validate_json(record.choice)
    except ValidationError:
        return None  # Records may come from other machines or versions.


def keep_answer(asked: ProfileKey, store: ProfileStore, answer: Answer) -> None:
    record = ProfileRecord(
        key=asked.digest,
        parts=asked.parts,
        status="ok",
        samples_ms=(answer.time_ms,),
        choice=_ANSWERS.dump_json(answer).decode(),
    )
    store.put(record, replace=True)


def compiled_before(
    context: PlanContext, programs: Sequence[RaceProgram]
) -> dict[Any, ProfileRecord]:
    """Returns {candidate's key: stored record} of programs timed, or only compiled."""
    keys = [(one, key) for one in programs for key in (_key_of_build(one), one.job.key)]
    found = context.store.get_many(key.digest for _, key in keys)
    return {
        one.candidate.key: record
        for one, key in keys
        if (record := found.get(key.digest)) is not None
        and (record.ok or is_compiled_too_large(record))
    }


# A candidate that an earlier run compiled, and its memory and perhaps times.
Remembered = tuple[Candidate, ProfileRecord]


def _turn_ms(record: ProfileRecord) -> float:
    """Step time, ms; 4 % more for a single sample (a look), infinity without a run."""
    if _COMPILED in record.parts:
        return inf  # Its sample is the time of compiling.
    longer = STAY_AFTER_LOOK if len(record.samples_ms) < 2 else 1.0
    return longer * record.time_ms


def remembered(analysis: Analysis, store: ProfileStore, job: Job) -> list[Remembered]:
    """Returns this program's candidates and records in the store, the fastest first.

    Programs that were compiled but not timed are last. Other failures are left out.
    Program, mesh and environment must be equal; choices, levels and options may differ.

    Args:
        job: job of the whole program under any choice and compiler options.
    """
    like = _apart_from_choice(job.key.parts)
    program, mesh = analysis.frame.program, analysis.frame.mesh
    options = [block_strategies(program, b, mesh) for b in analysis.frame.blocks]
    found = [
        (made, record)
        for record in store.records()
        if record.choice
        and _apart_from_choice(record.parts) == like
        and (record.ok or is_compiled_too_large(record))
        and (made := _read(analysis, options, record)) is not None
    ]
    return sorted(found, key=lambda pair: _turn_ms(pair[1]))


def to_race_again(
    context: PlanContext,
    analysis: Analysis,
    problem: Problem | None,
    candidates: Sequence[Candidate],
    answer: Answer | None,
) -> list[Candidate]:
    """Returns at most one remembered candidate: the fastest that fits, or the smallest.

    So more memory gives no slower plan. Without a race, predicted times decide. The
    smallest, if none fits, lets errors name a sufficient budget (docs/decisions.md,
    "Compiled programs are remembered"). Those in `candidates` are left out.

    Args:
        answer: last answer of the race. Unless it is old (`Answer.is_old`), no choice
            but its own is returned, so that the stored race is the same.
    """
    assert context.memory is not None, "remembered choices race under a budget only"
    budget_bytes = context.memory.budget_bytes
    allowed = known_kernels(context.defaults.replacing_for_memory.kernels)
    defaults, passed = context.defaults, {MEMORY_SHARE, *NO_LATENCY_HIDING}
    passed.update(defaults.shared_options, *defaults.compiler_options.values())
    [first] = programs_of(analysis, candidates[:1], context.environment)
    known = [
        (one, record)
        for one, record in remembered(analysis, context.store, first.job)
        # Choices with kernels, compiler options and rematerialization allowed now.
        if one.choice.all_kernels <= allowed and one.options.keys() <= passed
        if not one.choice.remat or Dimension.REMAT in context.settings.dimensions
    ]
    present = {one.key for one in candidates}
    new = dict[Any, Remembered]()
    for one, record in known:  # Of equal candidates the fastest stays.
        if one.key not in present:
            time_ms = prediction_of(analysis, problem, one.choice).time_ms
            new.setdefault(one.key, (replace(one, predicted_ms=time_ms), record))
    ranked = sorted(new.values(), key=lambda pair: expected_ms(pair[0]))
    if context.races:
        ranked.sort(key=lambda pair: _turn_ms(pair[1]))
    fitting = [pair for pair in ranked if pair[1].peak_bytes <= budget_bytes]
    if answer is not None and not answer.is_old(record for _, record in fitting):
        chosen = [pair for pair in ranked if pair[1].choice == answer.known]
    else:
        chosen = fitting[:1] or sorted(ranked, key=lambda pair: pair[1].peak_bytes)[:1]
    return [one for one, _ in chosen]


def _apart_from_choice(parts: tuple[tuple[str, str], ...]) -> dict[str, str]:
    chosen = ("shardings", "options", "race", "outcome")
    return {name: value for name, value in parts if name not in chosen}


def _read(
    analysis: Analysis, options: Sequence[Sequence[Strategy]], record: ProfileRecord
) -> Candidate | None:
    """Reads a record's candidate; None if it does not suit this program or version."""
    try:
        kept = _Kept.model_validate_json(record.choice)
    except ValidationError:
        return None
    choice, segments = kept.choice, range(len(analysis.segments))
    # Records may come from other machines or versions.
    if (
        len(choice.blocks) == len(options)
        and len(choice.storage) == len(analysis.frame.groups)
        and all(one in those for one, those in zip(choice.blocks, options, strict=True))
        and all(index in segments for index in choice.remat)
        and all(index in segments and one for index, one in choice.kernels)
        and choice.all_kernels <= known_kernels()
        and refused_option(kept.options) is None
    ):
        name = level_name(EARLIER_RUN, kept.level)
        return Candidate(name, choice, level=kept.level, options=kept.options)
    return None


@dataclass(frozen=True, slots=True)
class EarlierRace:
    """Store of a race's times, apart from the programs' own records.

    Attributes:
        programs: ``{key: program}`` of the race.
        rounds: limit of a race's turns.
    """

    context: PlanContext
    programs: Mapping[str, RaceProgram]
    rounds: int

    def records(self) -> dict[str, ProfileRecord]:
        """Returns {key: record} of a race of the same programs, budget and `rounds`.

        Failures are absent. Empty without such a race, or with records of several.
        """
        keys = self._keys
        found = self.context.store.get_many(key.digest for key in keys.values())
        if len({one.created for one in found.values()}) > 1:
            return {}
        return {
            digest: self.programs[digest].own(found[key.digest])
            for digest, key in keys.items()
            if key.digest in found
        }

    def keep(self, records: Mapping[str, ProfileRecord]) -> None:
        """Stores the times of a race, without failures."""
        keys = self._keys
        kept = [
            replace(one, key=keys[digest].digest, parts=keys[digest].parts, choice="")
            for digest, one in records.items()
            if one.ok
        ]
        self.context.store.put_all(kept, replace=True)

    @property
    def _keys(self) -> dict[str, ProfileKey]:
        race = (
            ("among", _digest(self.programs)),
            ("budget", str(self.context.budget_bytes)),
            ("turns", str(self.rounds)),
        )
        parts = {d: one.job.key.parts for d, one in self.programs.items()}
        return {d: ProfileKey((*own, *race)) for d, own in parts.items()}


def _digest(digests: Iterable[str]) -> str:
    return hashlib.sha256(json.dumps(sorted(set(digests))).encode()).hexdigest()
