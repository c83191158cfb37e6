"""Steps by hand under sets of compiler options, in turn, and when they send.

    python -m cfp_test.bench.schedules --out FILE.json --steps llama=fsdp bert=largest
        [--sets overlap2 large+overlap2] [--profiled 0 1200] [--turns 8]
        [--seconds 200] [--tiny]

A step is a model of :mod:`cfp_test.bench.side_by_side` and a way to shard it by hand; a
set is some of :data:`cfp_test.bench.recorded.OPTIONS` joined by ``+``. All of a step's
programs share one state, and take turns. ``--profiled`` compiles with the times of a
trace, and so many microseconds more for each collective than it took.

Traced, a program says how long computation waits, and whether each collective begins
while a kernel of 0.2 ms or more is running: one that fills the device leaves no room
for it until it ends.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from cfp import platform
from cfp.program.trace import planning_mesh
from cfp_test.bench.case import Flat, Ready, session_of
from cfp_test.bench.kernels import Span, covered, device_events
from cfp_test.bench.recorded import OPTIONS
from cfp_test.bench.side_by_side import AXES, Maker, Piece
from cfp_test.scripts.rows import Rows

# The profiler does not tell kernels of a command buffer apart.
_NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
_DEFINED = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ", re.MULTILINE)
_SENDS = re.compile(
    _DEFINED.pattern + r".*? (?:all-gather|all-reduce|reduce-scatter|all-to-all"
    r"|collective-permute)(?:-start)?\(",
    re.MULTILINE,
)
_WARM_SECONDS = 3.0
_STEPS, _TRACED = 4, 3  # In a sample, after one; in a trace.
_LONG_NS = 2e5
_EDGE = 0.05  # Of a long kernel: what begins before began with it.
_END_NS = 6e4

Events = Sequence[tuple[str, str, Span]]  # device, kernel and op, span


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """Waiting and sending of one device in one step, from a trace.

    Attributes:
        waiting_ms: while nothing computes, from the first kernel to the last.
        sending_ms: while any collective runs.
        between, with_long, inside, at_end: collectives that begin while no long kernel
            runs, in its first twentieth, later, and in its last 0.06 ms.
    """

    waiting_ms: float
    sending_ms: float
    between: float
    with_long: float
    inside: float
    at_end: float


def sending(events: Events, steps: int) -> Sending | None:
    """Reads a trace of some steps; None if it has no kernel of a GPU."""
    device = min((one for one, _, _ in events), default="")
    mine = sorted((span, name) for one, name, span in events if one == device)
    sends = [span for span, name in mine if "nccl" in name.lower()]
    computes = [span for span, name in mine if "nccl" not in name.lower()]
    if not sends or not computes:
        return None
    long = [span for span in computes if span[1] - span[0] > _LONG_NS]
    begins = [start for start, _ in long]
    found = Counter[str]()
    for start, _ in sends:
        at = bisect(begins, start) - 1
        began, ended = long[at] if at >= 0 else (0.0, 0.0)
        if start >= ended:
            found["between"] += 1
        elif ended - start < _END_NS:
            found["at_end"] += 1
        elif start - began < _EDGE * (ended - began):
            found["with_long"] += 1
        else:
            found["inside"] += 1
    whole = max(end for _, end in computes) - computes[0][0]
    kinds = ("between", "with_long", "inside", "at_end")
    return Sending(
        waiting_ms=(whole - covered(computes)) / 1e6 / steps,
        sending_ms=covered(sends) / 1e6 / steps,
        **{kind: found[kind] / steps for kind in kinds},
    )


def profile_text(text: str, events: Events, steps: int, more_us: float) -> bytes:
    """The times of a trace, as the compiler takes them by `fdo_profile`.

    Collectives run in the order of the schedule, under other names than it has.

    Args:
        text: the scheduled module without command buffers.
        events: a trace of it.
        more_us: what each collective is said to take besides its shortest run.

    Raises:
        ValueError: other collectives ran than the module has.
    """
    scheduled = _scheduled_names(text)
    device = min(one for one, _, _ in events)
    spent, shortest = defaultdict[str, float](float), dict[str, float]()
    order: dict[str, float] = {}
    for one, name, (start, end) in events:
        op, us = name.split(" ")[-1], (end - start) / 1e3
        if "nccl" in name.lower():
            shortest[op] = min(us, shortest.get(op, us))
            if one == device:
                order[op] = min(start, order.get(op, start))
        elif one == device:
            spent[scheduled.get(op, op)] += us / steps
    entry = text[text.index("\nENTRY") :]
    starts = [match[1] for match in _SENDS.finditer(entry)]
    if len(starts) != len(order):
        raise ValueError(f"{len(order)} collectives ran, the module has {len(starts)}")
    for op, start in zip(sorted(order, key=order.__getitem__), starts, strict=True):
        spent[scheduled[start]] = shortest[op] + more_us
    lines = (f'costs {{ name: "{op}" cost_us: {us:.3f} }}' for op, us in spent.items())
    return "\n".join(lines).encode()


def _scheduled_names(text: str) -> dict[str, str]:
    """The name that each op had when the module was scheduled."""
    names = {}
    for line in text.splitlines():
        if defined := _DEFINED.match(line):
            before = re.search(r'scheduling_name="([^"]*)"', line)
            names[defined[1]] = before[1] if before else defined[1]
    return names


class Step:
    """One step's programs, and the state that they share."""

    def __init__(self, name: str, work: Path, tiny: bool) -> None:
        model, _, way = name.partition("=")
        piece = Piece.of(model)
        mesh = planning_mesh(platform.make_mesh(AXES))
        session = session_of(piece.zoo_model, piece.options(tiny), mesh)
        maker = Maker(piece, session, work, tiny)
        made = maker.by_hand(way, kernel=True)
        self._sharded = maker.sharded(way, kernel=True)
        self._ready: Ready = made.step
        self._tiny = tiny
        self.options = maker.options
        self.programs: dict[str, Any] = {"": made.step.built.compiled}
        self._args = list(made.start())

    def compile(self, options: Mapping[str, Any]) -> Flat:
        """Compiles the step once more; on CPUs without options."""
        more = {} if self._tiny else options
        compiled = self._sharded.lowered.compile({**self.options, **more})
        return Flat(compiled, jax.tree.structure(self._sharded.args))

    def run(self, program: Any, steps: int) -> float:
        """Runs steps in a row; milliseconds for each."""
        begun = time.perf_counter()
        for _ in range(steps):
            results = program(*self._args)
            for put, got in self._ready.feedback:
                self._args[put] = results[got]
        jax.block_until_ready(self._args)
        return (time.perf_counter() - begun) * 1e3 / steps

    def trace(self, program: Any) -> Events:
        """Kernels of some steps in a row."""
        self.run(program, 2)
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                self.run(program, _TRACED)
            files = sorted(Path(folder).rglob("*.xplane.pb"))
            return [event for file in files for event in device_events(file)]


def compare(
    step: Step, sets: Iterable[str], more_us: Iterable[float], turns: int, end: float
) -> list[dict[str, Any]]:
    """Compiles a step with each set, and times all in turn: a row for each."""
    for name in sets:
        step.programs[name] = step.compile(_merged(name))
    for more in more_us:
        plain = step.compile(_NO_GRAPHS)
        text = profile_text(plain.as_text() or "", step.trace(plain), _TRACED, more)
        step.programs[f"profiled {more:g}"] = step.compile({"fdo_profile": text})
    programs = list(step.programs.items())
    for _, program in programs:
        step.run(program, 2)
    warm = time.monotonic() + _WARM_SECONDS
    while time.monotonic() < warm:
        step.run(step.programs[""], 5)
    samples = defaultdict[str, list[float]](list)
    for turn in range(turns):
        if time.monotonic() > end:
            break
        for name, program in programs[:: 1 if turn % 2 == 0 else -1]:
            step.run(program, 1)
            samples[name].append(step.run(program, _STEPS))
    rows = []
    for name, program in programs:
        sent = sending(step.trace(program), _TRACED)
        temporary = program.memory_analysis().temp_size_in_bytes
        row = {"options": name, "samples_ms": samples[name], "temporary": temporary}
        rows.append({**row, "sending": asdict(sent) if sent else None})
    return rows


def _merged(name: str) -> dict[str, str]:
    return {k: v for one in name.split("+") for k, v in OPTIONS[one].items()}


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", nargs="+", required=True)
    parser.add_argument("--sets", nargs="*", default=["overlap2", "large", "notriton"])
    parser.add_argument("--profiled", nargs="*", type=float, default=[])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(args)
    end = time.monotonic() + given.seconds
    platform.select("cpu" if given.tiny else None, AXES)
    rows = Rows(given.out, {"sets": given.sets, "profiled": given.profiled})
    with tempfile.TemporaryDirectory() as work:
        for name in given.steps:
            if rows.find(step=name) or time.monotonic() > end:
                continue
            step = Step(name, Path(work), given.tiny)
            for row in compare(step, given.sets, given.profiled, given.turns, end):
                rows.add({"step": name, **row})
                print(name, row, flush=True)


if __name__ == "__main__":
    main()
