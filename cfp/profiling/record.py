"""Outcome of one measurement: the unit that the store keeps.

A failure is a record like any other, so that a search never repeats a compile
that is known to run out of memory.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from cfp.fields import Count, Time, first_error

Status = Literal["ok", "out_of_memory", "compile_error", "timeout", "crashed"]
STATUSES: tuple[str, ...] = get_args(Status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Collectives of one kind, size and group that a compiled program contains.

    Attributes:
      kind: as in HLO: "all-reduce", "all-gather", "reduce-scatter", ...
      bytes: size on one device of the operand or the result, whichever is larger.
      group_size: how many devices are in a group.
      count: how often it is executed in one run.
    """

    kind: str
    bytes: Count
    group_size: Count
    count: Count


def utc_now() -> str:
    """This moment as an ISO 8601 string in UTC; as text such strings sort by time."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _in_utc(text: str) -> str:
    if datetime.fromisoformat(text).utcoffset() != timedelta(0):
        raise ValueError("ISO 8601 in UTC")
    return text


Moment = Annotated[str, AfterValidator(_in_utc)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledBytes:
    """Memory that a program needs on one device: compiled, or by prediction.

    Attributes:
      alias_bytes: of results that live in a donated argument's memory.
      temp_bytes: the largest need for temporaries.
      code_bytes: of the generated code.
    """

    argument_bytes: Count = 0
    output_bytes: Count = 0
    alias_bytes: Count = 0
    temp_bytes: Count = 0
    code_bytes: Count = 0

    @property
    def size(self) -> CompiledBytes:
        """The memory alone, of a class that adds to it."""
        names = (one.name for one in dataclasses.fields(CompiledBytes))
        return CompiledBytes(**{name: getattr(self, name) for name in names})

    @property
    def peak_bytes(self) -> int:
        """Everything together: arguments, results, temporaries, code."""
        return (
            self.argument_bytes
            + self.output_bytes
            - self.alias_bytes
            + self.temp_bytes
            + self.code_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRecord(CompiledBytes):
    """One thing that was built and run, or the reason why it could not be.

    Attributes:
      key: digest of `parts`, see `cfp.profiling.key.ProfileKey`.
      parts: the named parts of the key, in order.
      status: "ok" means built, run and timed.
      reason: for a failure, what the compiler or the runtime said.
      samples_ms: milliseconds per execution, every sample in the order taken. None is
        altered later; docs/planning-rules.md lists all places that correct them.
      drift: how many times as long steps took at the end of the race that the samples
        are of; see `cfp.race.turns`.
      build_seconds: tracing, lowering and compiling.
      run_seconds: all of running, warm-up included.
      collectives: what the compiled program sends.
      choice: of a whole program what was chosen for it; see `cfp.race.remembered`.
      created: ISO 8601, UTC.

    Raises:
      ValueError: it is "ok", and has no samples.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    key: str
    parts: tuple[tuple[str, str], ...]
    status: Status
    reason: str = ""
    samples_ms: tuple[Time, ...] = ()
    drift: Time = 1.0
    build_seconds: Time = 0.0
    run_seconds: Time = 0.0
    collectives: tuple[Collective, ...] = ()
    choice: str = ""
    created: Moment = field(default_factory=utc_now)

    def __post_init__(self):
        if self.ok and not self.samples_ms:
            raise ValueError("samples_ms: expected at least one where status is 'ok'")

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def time_ms(self) -> float:
        """The median sample, times `drift`; infinite for a failure: none is picked."""
        return self.drift * statistics.median(self.samples_ms) if self.ok else math.inf

    def to_json(self) -> str:
        """The record on one line; equal records give equal strings."""
        found = dataclasses.asdict(self)
        return json.dumps(found, allow_nan=False, sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> ProfileRecord:
        """Reads what `to_json` wrote; all else is a ValueError."""
        try:
            return _reader().validate_json(text)
        except ValidationError as error:
            where, expected, got = first_error(error)
            raise ValueError(
                f"{where or 'record'}: expected {expected}, got {got}"
            ) from error


@cache
def _reader() -> TypeAdapter[ProfileRecord]:
    return TypeAdapter(ProfileRecord)
