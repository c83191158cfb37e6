"""Parts of a step's time, from a profiler's trace: kernels that send, kernels that
compute, when both ran, and when sending alone held everything up.

On GPUs the events are kernels on streams. On CPUs they are the ops that threads
execute, with the time that they wait for each other in them.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.profiler import ProfileData

_COLLECTIVE = re.compile(
    r"nccl|all[-_]?reduce|all[-_]?gather|reduce[-_]?scatter|all[-_]?to[-_]?all"
    r"|collective[-_]?(permute|broadcast)|memcpyp2p",
    re.IGNORECASE,
)
# Ops that last as long as the ops inside them, which have events of their own.
_CONTAINER = re.compile(r"(while|call|conditional|async)\b")

Span = tuple[float, float]  # nanoseconds: start, end


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One step on one device, on average over steps and devices.

    Attributes:
      communication_ms: while any kernel sends.
      compute_ms: while any other kernel runs.
      overlapped_ms: while both do.
      exposed_ms: while something sends and nothing else runs.
      busy_ms: while any kernel runs.
    """

    communication_ms: float
    compute_ms: float
    overlapped_ms: float
    exposed_ms: float
    busy_ms: float


def trace_split(run: Callable[[int], object], steps: int = 5) -> Split | None:
    """Traces some steps.

    Args:
      run: `run(n)` executes n steps and blocks until they are done; warmed up.
      steps: how many to trace.

    Returns:
      The split, or None if the trace shows no kernel.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run(steps)
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        events = [event for file in files for event in device_events(file)]
    return split(events, steps)


def device_events(file: Path) -> Iterator[tuple[str, str, Span]]:
    """Yields (device, kernel or op, span) of everything that ran on devices."""
    for plane in ProfileData.from_file(str(file)).planes:
        if plane.name.startswith("/device:"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    for event in line.events:
                        name = f"{event.name} {dict(event.stats).get('hlo_op', '')}"
                        yield plane.name, name, (event.start_ns, event.end_ns)
        elif plane.name == "/host:CPU":
            for line in plane.lines:
                for event in line.events:
                    stats = dict(event.stats)
                    op = str(stats.get("hlo_op", ""))
                    if op and not _CONTAINER.match(op):
                        device = str(stats.get("device_ordinal", line.name))
                        yield device, op, (event.start_ns, event.end_ns)


def split(events: Iterable[tuple[str, str, Span]], steps: int) -> Split | None:
    """Averages events over steps and devices; None if there are none."""
    sending: dict[str, list[Span]] = {}
    computing: dict[str, list[Span]] = {}
    for device, name, span in events:
        kind = sending if _COLLECTIVE.search(name) else computing
        kind.setdefault(device, []).append(span)
    devices = sending.keys() | computing.keys()
    if not devices:
        return None
    totals = [0.0, 0.0, 0.0]  # sending, computing, either
    for device in devices:
        sent, computed = sending.get(device, []), computing.get(device, [])
        for i, spans in enumerate((sent, computed, [*sent, *computed])):
            totals[i] += covered(spans)
    sent, computed, either = (ns / 1e6 / steps / len(devices) for ns in totals)
    return Split(
        communication_ms=sent,
        compute_ms=computed,
        overlapped_ms=max(0.0, sent + computed - either),
        exposed_ms=max(0.0, either - computed),
        busy_ms=either,
    )


def covered(spans: Iterable[Span]) -> float:
    """Sums the time that lies within any of some spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
