"""Step times on devices of which one is here, or none.

Programs are compiled for all of the devices. On one that plays them a program's
computation is timed, and collectives do nothing: its time is kept under the text of
what is computed, so that no computation is timed twice, be it of two plans, or of one
plan for 64 devices and for 1,024 whose shards are of the same shapes. What a whole step
takes follows from that, from the program's schedule and from the links' curves.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from jax.sharding import Mesh

from cfp.cost.schedule import Schedule, schedule_of
from cfp.cost.step_time import Constants, step_time
from cfp.profiling.builder import Built, Job
from cfp.profiling.hlo_text import modules_in
from cfp.profiling.key import Parts, ProfileKey
from cfp.profiling.rates import Rates
from cfp.profiling.record import ProfileRecord
from cfp.profiling.runner import TimingOptions, run
from cfp.profiling.store import ProfileStore
from cfp.program.graph import Program

# Trying out kernels takes a device.
UNTUNED: Mapping[str, str] = MappingProxyType(
    {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": "False"}
)
# As long as in the runs that `Constants` are fitted on, less what repeats.
_TIMING = TimingOptions(
    warmup_seconds=0.3, min_samples=3, max_samples=6, budget_seconds=0.8
)
# What says how many devices there are, or where one stands among them, or where a line
# of the source is. No time of a computation depends on it.
_APART = frozenset(
    "backend_config channel_id control-predecessors frontend_attributes metadata"
    " replica_groups sharding source_target_pairs use_global_device_ids".split()
)
_NAME = re.compile(r"%([\w.-]+)")
# Of a measurement's place: how many devices are played, and which they are.
_PLAYED = frozenset({"devices", "order", "processes", "mocked"})


def computation_of(hlo_text: str) -> str:
    """A digest of what one device computes, however many others there are.

    Args:
        hlo_text: of the compiled program.
    """
    numbers: dict[str, int] = {}

    def number(name: str) -> int:
        return numbers.setdefault(name, len(numbers))

    found = hashlib.sha256()
    for module in modules_in(hlo_text):
        for name, lines in module.computations.items():
            found.update(f"{number(name)} {name == module.entry}\n".encode())
            for one in lines:
                attributes = [
                    _NAME.sub(lambda m: str(number(m[1])), text)
                    for text in parts_of(one.attributes)
                    if text.partition("=")[0] not in _APART
                ]
                # Tables with a place for each device, and other numbers.
                shape = "" if one.opcode == "constant" else one.shape
                config = one.config if one.opcode == "custom-call" else ""
                ids = [number(name) for name in (one.name, *one.operands)]
                line = (shape, one.opcode, ids, attributes, one.root, one.trips, config)
                found.update(repr(line).encode())
    return found.hexdigest()


def parts_of(attributes: str) -> list[str]:
    """The attributes of an instruction, ``name=value``, one by one."""
    attributes = attributes.removeprefix(")")
    found, depth, start = [], 0, 0
    for place, letter in enumerate(attributes):
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and depth == 0:
            found.append(attributes[start:place])
            start = place + 1
    return [text.strip() for text in (*found, attributes[start:])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A program's whole step, as it was predicted.

    Attributes:
        label: what progress calls the program.
        record: its samples are predictions.
        alone_ms: what its computation took by itself; empty if it did not run.
        schedule: what it computes and sends, in order.
    """

    label: str
    record: ProfileRecord
    alone_ms: tuple[float, ...] = ()
    schedule: Schedule | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """Times programs for devices that are not all here; a `MeasureOptions.run`.

    Attributes:
        rates: of the described devices.
        store: where the computation's times are kept.
        place: what these depend on; None where nothing runs, and the computation's
            time follows from the rates, too.
        compiler_options: that programs for such devices need.
        constants: of the device kind.
        known: what was found, by key.
        timed: computations that were timed just now.
    """

    rates: Rates
    store: ProfileStore
    place: Parts | None
    compiler_options: Mapping[str, str] = field(default_factory=dict)
    constants: Constants = field(default_factory=Constants)
    known: dict[str, Predicted] = field(default_factory=dict, repr=False)
    timed: list[str] = field(default_factory=list, repr=False)

    def __call__(
        self, built: Built, job: Job, program: Program, mesh: Mesh, **options: object
    ) -> ProfileRecord:
        """The record of a whole step, whose samples are predictions."""
        if built.key.digest not in self.known:
            self.known[built.key.digest] = self._predicted(built, job, program, mesh)
        return self.known[built.key.digest].record

    def _predicted(
        self, built: Built, job: Job, program: Program, mesh: Mesh
    ) -> Predicted:
        text = built.compiled.as_text() or ""
        alone: Sequence[float | None] = [None]
        timed_ms, seconds = (), 0.0
        if self.place is not None:
            found = self._alone(built, job, program, mesh, text)
            if not found.ok:
                failed = built.record(found.status, reason=found.reason)
                return Predicted(label=job.label, record=failed)
            alone = timed_ms = found.samples_ms
            seconds = found.run_seconds
        schedule = schedule_of(text).merged()
        samples_ms = [
            step_time(
                schedule, self.rates, computation_ms=ms, constants=self.constants
            ).total_ms
            for ms in alone
        ]
        record = built.record("ok", samples_ms=samples_ms, run_seconds=seconds)
        return Predicted(
            label=job.label, record=record, alone_ms=timed_ms, schedule=schedule
        )

    def _alone(
        self, built: Built, job: Job, program: Program, mesh: Mesh, text: str
    ) -> ProfileRecord:
        """Measures the time of a program's computation by itself, once."""
        assert self.place is not None
        parts = (
            ("what", "computation alone"),
            ("computation", computation_of(text)),
            ("donated", repr(job.donated)),
            *(part for part in self.place if part[0] not in _PLAYED),
        )
        key = ProfileKey(parts)
        kept = self.store.get(key.digest)
        if kept is not None and kept.ok:
            return kept
        self.timed.append(key.digest)
        record = run(replace(built, key=key), job, program, mesh, timing=_TIMING)
        self.store.put(record, replace=True)
        return record
