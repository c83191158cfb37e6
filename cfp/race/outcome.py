"""What comes of a race: a winner, and how all others did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from cfp.profiling.builder import Built
from cfp.race.programs import RaceResult
from cfp.settings import ConstraintLevel
from cfp.solution import Candidate

TOO_FAR = "predicted too far behind to be raced"
UNMEASURED = "estimated too far behind to be measured"
TOO_LARGE = "predicted not to fit in memory"
_NOT_RUN = "estimated; nothing was compiled or run"


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceRow:
    """One finalist of the race.

    Attributes:
        name: the plan's or the classic's.
        predicted_ms: from the profiles.
        samples_ms: measured step times, all of them.
        time_ms: their median, or None where it did not run.
        peak_bytes: memory that the compiled program needs on each device. Where the
            program ran without some of its repeats, this and the times are scaled by
            the prediction to the whole of it.
        note: why it did not run, or "".
    """

    name: str
    predicted_ms: float | None
    samples_ms: tuple[float, ...]
    time_ms: float | None
    peak_bytes: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class RaceOutcome:
    """What comes of a race.

    Attributes:
        winner: what is to be run.
        result: how it did, if it was timed.
        peak_bytes: what it needs on each device, if it was compiled.
        built: its whole program, if it was compiled just now.
        rows: what took part, and how it did.
        counts: counts and seconds of all passes.
    """

    winner: Candidate
    result: RaceResult | None = None
    peak_bytes: int | None = None
    built: Built | None = field(default=None, repr=False)
    rows: tuple[RaceRow, ...] = ()
    counts: Mapping[str, float] = field(default_factory=dict)


def race_row(result: RaceResult) -> RaceRow:
    """How a program did, as a plan keeps it."""
    record = result.record
    note = "" if record.ok else f"{record.status}: {record.reason}"
    if record.ok and not result.fits:
        note = "over the memory budget"
    return RaceRow(
        name=result.name,
        predicted_ms=result.predicted_ms,
        samples_ms=result.samples_ms,
        time_ms=median(result.samples_ms) if record.ok else None,
        peak_bytes=result.peak_bytes,
        note=note,
    )


def left_out(name: str, predicted_ms: float | None, why: str) -> RaceRow:
    """A candidate that was not raced, as a plan keeps it."""
    return RaceRow(
        name=name,
        predicted_ms=predicted_ms,
        samples_ms=(),
        time_ms=None,
        peak_bytes=0,
        note=why,
    )


def not_run(candidates: Sequence[Candidate]) -> list[RaceRow]:
    """Candidates for devices that are not there, as a plan keeps them."""
    every = [c for c in candidates if c.level is ConstraintLevel.EVERYTHING]
    return [left_out(c.name, c.predicted_ms, _NOT_RUN) for c in every]
