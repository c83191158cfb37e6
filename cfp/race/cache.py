"""How a race ended that was asked for before: the same question has the same answer.

Only times of one race compare, so that a race is run again if its programs are known
from several. What each race measured is therefore kept once more, under its set of
programs and its budget. And what takes part under a budget depends on what was compiled
for others meanwhile: what took part when the same was asked for is kept, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cfp.profiling.builder import Job
from cfp.profiling.key import Parts, ProfileKey
from cfp.profiling.record import ProfileRecord
from cfp.profiling.store import ProfileStore
from cfp.settings import RACE_NOISE


@dataclass(frozen=True, slots=True)
class Answer:
    """How a race ended that was asked for before.

    Attributes:
        known: choices that took part because they were known to fit, in order, as
            records have them.
        time_ms: of the winner; infinite if nothing ran.
        ended: when that was, as in records.
    """

    known: tuple[str, ...]
    time_ms: float
    ended: str

    def is_old(self, records: Iterable[ProfileRecord]) -> bool:
        """Whether the fastest that ran since did not take part, and beats the winner.

        What was known then and did not is no news, however the clocks have drifted.
        Where nothing ran anything else will do.

        Args:
            records: of choices that fit.
        """
        if self.time_ms == float("inf"):
            return any(record.choice not in self.known for record in records)
        since = [record for record in records if record.created > self.ended]
        best = min(since, key=lambda record: record.time_ms, default=None)
        if best is None or best.choice in self.known:
            return False
        return best.time_ms < (1.0 - RACE_NOISE) * self.time_ms


def question(
    jobs: Iterable[Job],
    options: Iterable[Mapping[str, str]],
    budget_bytes: int,
    environment: Parts,
) -> ProfileKey:
    """What the answer to a race is kept under.

    Args:
        jobs: programs that take part in any case.
        options: of the compiler that leaders are raced with.
        budget_bytes: memory of each device.
        environment: what measurements depend on.
    """
    return ProfileKey(
        (
            ("what", "who took part in a race"),
            ("programs", _digest(job.key.digest for job in jobs)),
            ("options", repr([sorted(one.items()) for one in options])),
            ("budget", str(budget_bytes)),
            *environment,
        )
    )


def answer_to(asked: ProfileKey, store: ProfileStore) -> Answer | None:
    """How a race ended before; None if it was not asked for."""
    record = store.get(asked.digest)
    if record is None:
        return None
    try:
        known = json.loads(record.choice)
    except (ValueError, RecursionError):
        return None
    if not isinstance(known, list) or not all(isinstance(one, str) for one in known):
        return None  # Records may come from elsewhere.
    return Answer(tuple(known), record.time_ms, record.created)


def keep_answer(
    asked: ProfileKey,
    store: ProfileStore,
    known: Sequence[str],
    samples_ms: Sequence[float],
) -> None:
    """Keeps what took part because it was known, and samples of the winner."""
    record = ProfileRecord(
        key=asked.digest,
        parts=asked.parts,
        status="ok" if samples_ms else "out_of_memory",
        reason="" if samples_ms else "nothing ran",
        samples_ms=tuple(samples_ms),
        choice=json.dumps(known),
    )
    store.put(record, replace=True)


def of_one_race(
    jobs: Mapping[str, Job], budget_bytes: int | None, store: ProfileStore
) -> dict[str, ProfileRecord]:
    """What a race of just these programs measured: records by digest.

    Args:
        jobs: the programs by digest.
        budget_bytes: memory of each device, or None.
        store: what knows them.
    """
    keys = _keys_among(jobs, budget_bytes)
    found = store.common(key.digest for key in keys.values())
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
    """Keeps what a race of just these programs measured of those that ran.

    Why others did not is for their own records to say, and so is what was chosen.
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
