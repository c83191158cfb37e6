"""Records of earlier whole programs and outcomes of earlier races.

A prediction of memory is off by a few percent; the memory of a compiled program is
known. Such a program races under another budget, too, if it fits. So a larger budget
gives no slower plan, and an error names the least need of all compiled programs.

The same question has the same answer, and runs nothing. Only times of one race compare:
they are stored under the set of its programs and its budget, besides a record of each
program. The earlier choices in a race depend on programs compiled meanwhile, and are
stored with the answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.analysis.strategies import Strategy, block_strategies
from cfp.attention.kernels import KERNELS
from cfp.context import PlanContext
from cfp.profiling.builder import Job
from cfp.profiling.compiler_options import refused_option
from cfp.profiling.key import ProfileKey
from cfp.profiling.record import ProfileRecord
from cfp.profiling.store import ProfileStore
from cfp.race.programs import RaceProgram, is_compiled_too_large, programs_of
from cfp.search.problem import Problem
from cfp.settings import STAY_AFTER_LOOK, WORTH_HAVING, ConstraintLevel
from cfp.solution import Candidate, prediction_of

EARLIER_RUN = "from an earlier run"


class _Kept(BaseModel):
    """A choice for a whole program, as its record has it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    choice: Choice
    level: ConstraintLevel
    options: dict[str, str]


class _Raced(BaseModel):
    """A choice that raced because it was known, and digests of all that ran."""

    model_config = ConfigDict(extra="forbid")

    known: str
    raced: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Outcome of an earlier race.

    Attributes:
        known: the choice that raced because it was known to fit, as records have it.
        time_ms: of the winner.
        ended: when that was, as in records.
        raced: digests of all choices that ran.
    """

    known: str
    time_ms: float
    ended: str
    raced: tuple[str, ...] = ()

    def is_old(self, records: Iterable[ProfileRecord]) -> bool:
        """True if a record made since may change the answer.

        True if the fastest record made since is of a choice that did not race, and
        clearly faster than the winner.

        Args:
            records: of choices that fit.
        """
        since = [record for record in records if record.created > self.ended]
        best = min(since, key=_turn_ms, default=None)
        if best is None or best.choice == self.known:
            return False
        if _digest([best.choice]) in self.raced:
            return False
        return _turn_ms(best) < (1.0 - WORTH_HAVING) * self.time_ms


def question(context: PlanContext, programs: Iterable[RaceProgram]) -> ProfileKey:
    """Returns the key of a race's answer: its programs that race in any case."""
    options = context.rules.compiler_options.values()
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
    """Returns how the race ended before; None if it was not run."""
    record = store.get(asked.digest)
    if record is None:
        return None
    try:
        kept = _Raced.model_validate_json(record.choice)
    except ValidationError:
        return None  # Records may come from elsewhere.
    return Answer(kept.known, record.time_ms, record.created, kept.raced)


def keep_answer(
    asked: ProfileKey,
    store: ProfileStore,
    known: str,
    samples_ms: Sequence[float],
    raced: Iterable[str],
) -> None:
    """Keeps what raced because it was known, all that ran, and the winner's samples."""
    digests = tuple(_digest([choice]) for choice in raced)
    record = ProfileRecord(
        key=asked.digest,
        parts=asked.parts,
        status="ok",
        samples_ms=tuple(samples_ms),
        choice=_Raced(known=known, raced=digests).model_dump_json(),
    )
    store.put(record, replace=True)


def compiled_before(
    context: PlanContext, programs: Sequence[RaceProgram]
) -> dict[Any, ProfileRecord]:
    """Returns records of programs that were compiled, by their candidates' keys."""
    found = context.store.get_many(one.job.key.digest for one in programs)
    return {
        one.candidate.key: record
        for one in programs
        if (record := found.get(one.job.key.digest)) is not None
        and (record.ok or is_compiled_too_large(record))
    }


# What was compiled whole, and what it needs on each device and, if it was timed, takes.
Remembered = tuple[Candidate, ProfileRecord]


def _turn_ms(record: ProfileRecord) -> float:
    """Step time in a turn, which is longer than a look: by up to 4 %, as is counted."""
    longer = STAY_AFTER_LOOK if len(record.samples_ms) < 2 else 1.0
    return longer * record.time_ms


def remembered(analysis: Analysis, store: ProfileStore, job: Job) -> list[Remembered]:
    """Returns the store's records of other choices, the fastest first.

    Failures are left out, except programs that were compiled and are too large.

    Args:
        job: the whole program under any choice, without compiler options.
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


def known_to_fit(
    context: PlanContext,
    analysis: Analysis,
    problem: Problem | None,
    candidates: Sequence[Candidate],
    answer: Answer | None,
) -> list[Candidate]:
    """Finds the fastest choice that was compiled before and fits, or the leanest.

    It races, so that more memory gives no slower plan, and an error names a budget
    that is enough (docs/decisions.md, "Compiled programs are remembered").

    Args:
        answer: the last answer of the race. Its choice races again without devices,
            unless another has been faster since.
    """
    assert context.memory is not None, "without a budget nothing remembered is raced"
    budget_bytes = context.memory.budget_bytes
    [first] = programs_of(analysis, candidates[:1], context.environment)
    known = [
        (one, record)
        for one, record in remembered(analysis, context.store, first.job)
        if _is_asked_for(context, one.choice)
    ]
    present = {one.key for one in candidates}
    new = dict[Any, Remembered]()
    for one, record in known:  # Of those that are the same the fastest stays.
        if one.key not in present:
            new.setdefault(one.key, (one, record))
    ranked = [*new.values()]
    fitting = [pair for pair in ranked if pair[1].peak_bytes <= budget_bytes]
    if answer is not None and not answer.is_old(record for _, record in fitting):
        chosen = [pair for pair in ranked if pair[1].choice == answer.known]
    else:
        smallest_first = sorted(ranked, key=lambda pair: pair[1].peak_bytes)
        chosen = (fitting or smallest_first)[:1]
    return [
        replace(one, predicted_ms=prediction_of(analysis, problem, one.choice).time_ms)
        for one, _ in chosen
    ]


def _apart_from_choice(parts: tuple[tuple[str, str], ...]) -> dict[str, str]:
    chosen = ("shardings", "options", "race")
    return {name: value for name, value in parts if name not in chosen}


def _read(
    analysis: Analysis, options: Sequence[Sequence[Strategy]], record: ProfileRecord
) -> Candidate | None:
    """The choice as it was compiled, unless another version of cfp has made it.

    Args:
        options: the strategies of each block.
    """
    try:
        kept = _Kept.model_validate_json(record.choice)
    except ValidationError:
        return None
    choice, segments = kept.choice, range(len(analysis.segments))
    # Records may come from elsewhere.
    if (
        len(choice.blocks) == len(options)
        and len(choice.storage) == len(analysis.frame.groups)
        and all(one in those for one, those in zip(choice.blocks, options, strict=True))
        and all(index in segments for index in choice.remat)
        and all(index in segments for index, _ in choice.kernels)
        and all(one and one.attention in ("", *KERNELS) for _, one in choice.kernels)
        and refused_option(kept.options) is None
    ):
        return Candidate(EARLIER_RUN, choice, level=kept.level, options=kept.options)
    return None


def _is_asked_for(context: PlanContext, choice: Choice) -> bool:
    """True if all that a choice replaces may be replaced now."""
    allowed = context.rules.replacing_for_memory
    return all(one.attention in ("", *allowed.attention) for _, one in choice.kernels)


# ------------------------------------------------------------ the same question, again


def of_one_race(
    jobs: Mapping[str, Job], budget_bytes: int | None, store: ProfileStore
) -> dict[str, ProfileRecord]:
    """Returns the records that a race of just these programs made, by digest."""
    keys = _keys_among(jobs, budget_bytes)
    found = store.get_many(key.digest for key in keys.values())
    return {
        digest: replace(
            found[key.digest],
            key=digest,
            parts=jobs[digest].key.parts,
            choice=jobs[digest].choice,
        )
        for digest, key in keys.items()
        if key.digest in found
    }


def keep_race(
    jobs: Mapping[str, Job],
    budget_bytes: int | None,
    records: Mapping[str, ProfileRecord],
    store: ProfileStore,
) -> None:
    """Stores the measured times of this race's candidates.

    Failures and the chosen plan have records of their own.
    """
    keys = _keys_among(jobs, budget_bytes)
    kept = [
        replace(record, key=keys[digest].digest, parts=keys[digest].parts, choice="")
        for digest, record in records.items()
        if record.ok
    ]
    store.put_all(kept, replace=True)


def _keys_among(
    jobs: Mapping[str, Job], budget_bytes: int | None
) -> dict[str, ProfileKey]:
    race = (("among", _digest(jobs)), ("budget", str(budget_bytes)))
    return {digest: ProfileKey((*job.key.parts, *race)) for digest, job in jobs.items()}


def _digest(digests: Iterable[str]) -> str:
    return hashlib.sha256(json.dumps(sorted(set(digests))).encode()).hexdigest()
