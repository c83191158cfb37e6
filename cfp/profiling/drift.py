"""Sees whether devices have become slower, or faster, between two measurements.

Clocks drop as devices grow warm, and rise again: of two programs the later one may look
slower than it is. So one small program, the *reference*, runs again and again between
the others. Each record keeps what it took before and after, beside its own raw samples;
only who compares records takes the drift out of them (`at_one_clock`), by what is usual
among these records: not by the first, when devices are still cool as in no training.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial

from jax.sharding import Mesh

from cfp.profiling.builder import Built
from cfp.profiling.key import ProfileKey, environment_parts
from cfp.profiling.probe_build import build_probe
from cfp.profiling.probes import reference
from cfp.profiling.record import ProfileRecord
from cfp.profiling.tasks import Task
from cfp.program.trace import planning_mesh


def reference_task(mesh: Mesh, execute: Callable[..., ProfileRecord]) -> Task:
    """The reference on the devices of a mesh.

    Args:
      mesh: the devices.
      execute: times what was built, as `cfp.profiling.runner.execute` does.
    """
    mesh = planning_mesh(mesh)
    probe = reference(mesh)
    where = environment_parts(list(mesh.devices.flat))
    key = ProfileKey((*probe.parts, ("mesh", str(tuple(mesh.shape.items()))), *where))

    def run(built: Built) -> ProfileRecord:
        return execute(built, probe.inputs, mesh, feedback=probe.feedback)

    return Task(key=key, label=probe.label, build=partial(_build, mesh, key), run=run)


def _build(mesh: Mesh, key: ProfileKey) -> Built | ProfileRecord:
    outcome = _build_once(mesh, key)
    if not isinstance(outcome, Built):
        _build_once.cache_clear()  # A failure is kept in the store, and may be retried.
    return outcome


@lru_cache(maxsize=8)
def _build_once(mesh: Mesh, key: ProfileKey) -> Built | ProfileRecord:
    # Once for a process: a search measures in many rounds.
    return build_probe(key, reference(mesh), mesh)


def drift(record: ProfileRecord, usual_ms: float) -> float:
    """By how much devices were slower than usual; 0.02 is 2 %, faster is below zero.

    As much as the reference before and the one after agree on: if only one of them was
    slow, nobody knows whether what ran between them was.
    """
    if not record.reference_ms:
        return 0.0
    least = min(record.reference_ms) / usual_ms - 1
    most = max(record.reference_ms) / usual_ms - 1
    return max(least, 0.0) or min(most, 0.0)


def at_one_clock(records: Mapping[str, ProfileRecord]) -> dict[str, ProfileRecord]:
    """The records as if the devices had been equally fast all the time.

    Corrected are those whose devices drifted by more than the spread of the samples.
    What is returned is to be compared, never to be kept.
    """
    known = [ms for record in records.values() for ms in record.reference_ms]
    if not known:
        return dict(records)
    usual_ms = statistics.median(known)

    def corrected(record: ProfileRecord) -> ProfileRecord:
        slower = drift(record, usual_ms)
        if not record.ok or abs(slower) * record.time_ms <= record.spread_ms:
            return record
        samples = tuple(ms / (1 + slower) for ms in record.samples_ms)
        return replace(record, samples_ms=samples)

    return {digest: corrected(record) for digest, record in records.items()}
