"""The jobs of a process that follows: it builds and runs what the leader says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from cfp.errors import CfpError
from cfp.profiling.builder import (
    BuildEnvironment,
    Built,
    Job,
    Place,
    build_here,
)
from cfp.profiling.collectives import build_probe_here, probe_of
from cfp.profiling.compile_pool import CompilePool, default_threads
from cfp.profiling.coordination import Coordination, LeaderFailed
from cfp.profiling.inputs import InputKind
from cfp.profiling.key import ProfileKey
from cfp.profiling.record import ProfileRecord
from cfp.profiling.runner import compile_generators, execute_here, shortage
from cfp.profiling.timing import TimingOptions
from cfp.program.graph import Program

# Makes a program of the name of a variant, and of what of its state is in the host.
Trace = Callable[[str, Sequence[tuple[int, int]]], Program]


def follow(
    talk: Coordination, trace: Trace, environment: BuildEnvironment, platform: str
) -> Any:
    """Does the leader's jobs until the end, and returns the leader's outcome."""
    with CompilePool(default_threads(platform)) as pool:
        follower = _Follower(talk, trace, environment, pool)
        jobs = {
            "trace": follower.trace,
            "build": follower.build,
            "probe": follower.probe,
            "run": follower.run,
        }
        return talk.follow(jobs, lambda name: follower.built.pop(name, None))


@dataclass(slots=True)
class _Follower:
    """A follower, with the programs that it has traced, and what it has built."""

    talk: Coordination
    make: Trace
    environment: BuildEnvironment
    pool: CompilePool
    programs: dict[str, Program] = field(default_factory=dict)
    built: dict[str, Future[Built | ProfileRecord]] = field(default_factory=dict)

    def trace(self, number: int, name: str, in_host: Sequence[tuple[int, int]]) -> None:
        """Traces a variant; answers with the fingerprint of its program."""
        try:
            program = self.make(name, in_host)
        except CfpError as error:
            self.talk.answer(number, f"none: {error}")
            return
        self.programs[program.fingerprint] = program
        self.talk.answer(number, program.fingerprint)

    def build(
        self,
        number: int,
        fingerprint: str,
        place: Place,
        job: Job,
    ) -> None:
        """Builds a part of a program; answers with why there is none, or None."""
        program, mesh = self.programs[fingerprint], _mesh(place)

        def built() -> Built | ProfileRecord:
            made = build_here(program, mesh, job, self.environment)
            if isinstance(made, Built):
                compile_generators(program, mesh, job)
            return made

        self._start(number, job.label, mesh, built)

    def probe(self, number: int, place: Place, label: str) -> None:
        """Builds a probe of the devices; answers as `build` does."""
        mesh = _mesh(place)
        key = ProfileKey((("probe", label),))
        what = probe_of(mesh, label)
        self._start(number, label, mesh, partial(build_probe_here, key, what, mesh))

    def _start(
        self,
        number: int,
        label: str,
        mesh: Mesh,
        build: Callable[[], Built | ProfileRecord],
    ) -> None:
        def answered() -> Built | ProfileRecord:
            try:
                made = build()
                if isinstance(made, Built) and (reason := shortage(made, mesh)):
                    made = made.record("out_of_memory", reason=reason)
            except BaseException as error:
                self.talk.fail(error)
                raise
            is_built = isinstance(made, Built)
            self.talk.answer(number, None if is_built else (made.status, made.reason))
            return made

        name = self.talk.name(number)
        self.built[name] = self.pool.start(label, answered)

    def run(
        self,
        number: int,
        name: str,
        place: Place,
        kinds: Sequence[InputKind],
        feedback: Sequence[tuple[int, int]],
        timing: TimingOptions,
    ) -> None:
        """Runs what was built; answers with what it failed with, or ""."""
        built = self.built[name].result()
        assert isinstance(built, Built), "the leader runs what all have built"
        how = _mesh(place), feedback, timing, self.talk.pace(number)
        failure = ""
        with contextlib.suppress(LeaderFailed):
            record = execute_here(built, kinds, *how)
            failure = "" if record.ok else record.reason
        self.talk.settle(failure, number)


def _mesh(place: Place) -> Mesh:
    """The mesh of some devices of the program, by their ids."""
    axes, ids = place
    known = {device.id: device for device in jax.devices()}
    devices = np.array([known[one] for one in ids])
    names = tuple(name for name, _ in axes)
    return Mesh(devices.reshape([size for _, size in axes]), names)
