"""Outcome of one measurement: the unit that the store keeps.

A failure is a record like any other, so that a search never repeats a compile
that is known to run out of memory.
"""

import dataclasses
import json
import math
import statistics
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, get_args

Status = Literal["ok", "out_of_memory", "compile_error", "timeout", "crashed"]
STATUSES: tuple[str, ...] = get_args(Status)
# More bytes than anything has, and few enough for a float.
_MOST_COUNT = 2**100


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
    bytes: int
    group_size: int
    count: int


def utc_now() -> str:
    """This moment as an ISO 8601 string in UTC, to the microsecond.

    As text such strings sort by time, also among those to the second that earlier
    versions wrote: a sign sorts before a point, and so a second before its parts.
    """
    return datetime.now(UTC).isoformat(timespec="microseconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledBytes:
    """Memory that a compiled program needs on one device, as the compiler states it.

    Attributes:
      argument_bytes: of the arguments.
      output_bytes: of the results.
      alias_bytes: of results that live in a donated argument's memory.
      temp_bytes: the largest need for temporaries.
      code_bytes: of the generated code.
    """

    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temp_bytes: int = 0
    code_bytes: int = 0

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
      status: "ok" means built, run and timed; or, of devices that are described,
        built and predicted (`cfp.cost.stand_in`).
      reason: for a failure, what the compiler or the runtime said.
      samples_ms: milliseconds per execution, every sample in the order taken. None is
        altered later: what is derived from them is where it is used, of a segment in
        `cfp.search.wanted`, of a truncated program in `cfp.race.truncated`, of a mesh's
        links in `cfp.profiling.collectives`.
      build_seconds: tracing, lowering and compiling.
      run_seconds: all of running, warm-up included.
      collectives: what the compiled program sends.
      choice: of a whole program what was chosen for it; see `cfp.race.remembered`.
      created: ISO 8601, UTC.

    Raises:
      ValueError: if the fields contradict each other.
    """

    key: str
    parts: tuple[tuple[str, str], ...]
    status: Status
    reason: str = ""
    samples_ms: tuple[float, ...] = ()
    build_seconds: float = 0.0
    run_seconds: float = 0.0
    collectives: tuple[Collective, ...] = ()
    choice: str = ""
    created: str = field(default_factory=utc_now)

    def __post_init__(self):
        if self.status not in STATUSES:
            raise ValueError(f"status: expected one of {STATUSES}, got {self.status!r}")
        if self.ok and not self.samples_ms:
            raise ValueError("samples_ms: expected at least one where status is 'ok'")
        times = (
            *self.samples_ms,
            self.build_seconds,
            self.run_seconds,
        )
        if not all(math.isfinite(value) and value >= 0 for value in times):
            raise ValueError(f"expected finite times of 0 or more, got {times}")
        try:
            offset = datetime.fromisoformat(self.created).utcoffset()
        except ValueError:
            offset = None
        if offset != timedelta(0):
            raise ValueError(f"created: expected ISO 8601 in UTC, got {self.created!r}")

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def time_ms(self) -> float:
        """The median sample; infinite for a failure, which no search then picks."""
        return statistics.median(self.samples_ms) if self.ok else math.inf

    def to_json(self) -> str:
        """The record on one line; equal records give equal strings."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False, sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> "ProfileRecord":
        """Reads what `to_json` wrote, and nothing else.

        Raises:
          ValueError: on a missing or unknown field, or one of the wrong type.
        """
        try:
            data = json.loads(text)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if isinstance(data, dict):
            # Older records have more, or less.
            data.pop("reference_ms", None)
            data.setdefault("choice", "")
        data = _fields(cls, data, "record")
        return cls(
            key=_string(data, "key"),
            parts=tuple(_part(item) for item in _list(data, "parts")),
            # __post_init__ refuses what is not a Status.
            status=_string(data, "status"),  # pyright: ignore[reportArgumentType]
            reason=_string(data, "reason"),
            samples_ms=_numbers(data, "samples_ms"),
            argument_bytes=_count(data, "argument_bytes"),
            output_bytes=_count(data, "output_bytes"),
            alias_bytes=_count(data, "alias_bytes"),
            temp_bytes=_count(data, "temp_bytes"),
            code_bytes=_count(data, "code_bytes"),
            build_seconds=_number(data["build_seconds"], "build_seconds"),
            run_seconds=_number(data["run_seconds"], "run_seconds"),
            collectives=tuple(_collective(item) for item in _list(data, "collectives")),
            choice=_string(data, "choice"),
            created=_string(data, "created"),
        )


def is_to_retry(record: ProfileRecord, retry_failures: bool | datetime) -> bool:
    """Returns True if a stored record is to be measured again.

    Args:
      record: what is in the store.
      retry_failures: whether what failed is, or what failed before a moment.
    """
    if record.ok or not isinstance(retry_failures, datetime):
        return not record.ok and bool(retry_failures)
    return datetime.fromisoformat(record.created) < retry_failures


def _fields(cls: type, data: Any, what: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{what}: expected an object, got {type(data).__name__}")
    expected = {item.name for item in dataclasses.fields(cls)}
    missing, unknown = expected - data.keys(), data.keys() - expected
    if missing or unknown:
        raise ValueError(
            f"{what}: missing fields {sorted(missing)}, "
            f"unknown fields {sorted(unknown)}"
        )
    return data


def _string(data: dict[str, Any], name: str) -> str:
    value = data[name]
    if not isinstance(value, str):
        raise ValueError(f"{name}: expected a string, got {value!r}")
    return value


def _count(data: dict[str, Any], name: str) -> int:
    value = data[name]
    # bool is an int to isinstance, and no count to us.
    if type(value) is not int or not 0 <= value <= _MOST_COUNT:
        raise ValueError(f"{name}: expected an integer of 0 or more, got {value!r:.60}")
    return value


def _number(value: Any, name: str) -> float:
    if type(value) is not float and not (
        type(value) is int and abs(value) <= _MOST_COUNT
    ):
        raise ValueError(f"{name}: expected a number, got {value!r:.60}")
    return float(value)


def _numbers(data: dict[str, Any], name: str) -> tuple[float, ...]:
    return tuple(_number(value, name) for value in _list(data, name))


def _list(data: dict[str, Any], name: str) -> list[Any]:
    value = data[name]
    if not isinstance(value, list):
        raise ValueError(f"{name}: expected a list, got {value!r:.60}")
    return value


def _part(item: Any) -> tuple[str, str]:
    match item:
        case [str(name), str(value)]:
            return name, value
    raise ValueError(f"parts: expected pairs of strings, got {item!r}")


def _collective(item: Any) -> Collective:
    data = _fields(Collective, item, "collectives")
    return Collective(
        kind=_string(data, "kind"),
        bytes=_count(data, "bytes"),
        group_size=_count(data, "group_size"),
        count=_count(data, "count"),
    )
