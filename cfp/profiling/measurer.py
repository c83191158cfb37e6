"""Measures jobs, or looks them up in the store.

Before many programs are built side by side, the compiler tunes their kernels. A
compiler for GPUs times several kernels for each matrix product, and stores the outcome.
Programs that share products would repeat this work, on one device at the same time
(docs/decisions.md, "Kernels are tuned before segments are built side by side"). Kernels
are timed on the first device of a mesh. So as many programs as devices are built at
once, each for the mesh in another order. These are the first programs of each set of
kernels (`Job.kernels`), not those of presets alone: on 2 H200, 28 programs of an
encoder took 35 s after 15 s of tuning. Five programs with other kernels, such as
attention as written, took 9 to 18 s each, as one device tuned them.
"""

from __future__ import annotations

import math
import time
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
from jax.sharding import Mesh

from cfp.profiling.builder import BuildEnvironment, Built, Job, build
from cfp.profiling.compile_pool import default_threads
from cfp.profiling.coordination import is_shared
from cfp.profiling.in_flight import InFlight, settle
from cfp.profiling.jobs import build_all, run_jobs
from cfp.profiling.record import ProfileRecord
from cfp.profiling.runner import place_of_parts
from cfp.profiling.store import ProfileStore
from cfp.profiling.tasks import MeasureOptions
from cfp.program.graph import Program


def tune_kernels(
    program: Program,
    mesh: Mesh,
    jobs: Sequence[Job],
    store: ProfileStore,
    options: MeasureOptions | None = None,
    is_late: Callable[[], bool] = lambda: False,
) -> dict[str, Built]:
    """Builds jobs, one on each device, so that the compiler tunes their kernels.

    No job runs, and none is stored. Nothing is built if the compiler tunes no kernels.

    Returns:
      Programs built for the mesh itself, by key, for later use.
    """
    options = options or MeasureOptions()
    environment = BuildEnvironment.beside(store.path)
    platform = mesh.devices.flat[0].platform
    if not jobs or not environment.options(platform):
        return {}
    threads = min(mesh.devices.size, default_threads(platform))
    threads = 1 if is_shared(mesh) else threads
    orders, built = SimpleQueue[Mesh](), dict[str, Built]()
    for count in range(threads):
        orders.put(_rolled(mesh, count))

    def learn(job: Job) -> None:
        order = orders.get()
        try:
            # What cannot be built is found out, and recorded, where it is needed.
            outcome = build(program, order, job, environment)
        finally:
            orders.put(order)
        if order == mesh and isinstance(outcome, Built):
            built[job.key.digest] = outcome

    def tell(job: Job, number: int, left: int, seconds: float) -> None:
        if not seconds:
            which = f"{job.label}, {number} of {len(jobs)}"
            options.tell(f"tuning kernels for {which}")

    with InFlight(store, options.limits, program.name) as in_flight:
        build_all(jobs, learn, in_flight, threads=threads, tell=tell, is_late=is_late)
    return built


def first_of_kernels(
    jobs: Iterable[Job], tuned: Collection[Hashable] = ()
) -> list[Job]:
    """Returns the first of the jobs that share kernels, in the order to tune them in.

    The largest come first, so that devices end together, and of equal ones those that
    share most with others: attention as it is written adds to the kernels that the same
    has with a kernel for it. Those of `tuned` the compiler has tried out.
    """
    found: dict[Hashable, Job] = {}
    for job in jobs:
        if job.kernels is not None and job.kernels not in tuned:
            found.setdefault(job.kernels, job)

    def rank(job: Job) -> tuple[int, bool]:
        return -len(job.part.ops), not job.constraints.replaced

    return sorted(found.values(), key=rank)


def _rolled(mesh: Mesh, count: int) -> Mesh:
    """Returns the mesh with another device first."""
    devices = np.roll(mesh.devices.flatten(), -count).reshape(mesh.devices.shape)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


@dataclass(slots=True)
class Measurer:
    """Looks jobs up, and measures those that the store does not know.

    Attributes:
        measure: True if devices may be used.
        end: time (`time.monotonic`) after which no job begins.
        known: keys of records from the store, without failures to try again.
    """

    program: Program
    mesh: Mesh
    store: ProfileStore
    measure: bool
    options: MeasureOptions
    end: float = math.inf
    known: set[str] = field(default_factory=set)
    _measured: set[str] = field(default_factory=set)
    _tuned: set[Hashable] = field(default_factory=set)

    @property
    def has_end(self) -> bool:
        """True if time may be over before all is measured."""
        return math.isfinite(self.end)

    @property
    def is_over(self) -> bool:
        """True if time is over."""
        return time.monotonic() > self.end

    def look_up(self, jobs: Iterable[Job]) -> dict[str, ProfileRecord]:
        """Records of the store, by key, but for failures that are tried again."""
        known = self.store.get_many({job.key.digest for job in jobs})
        retries = self.options.retries if self.measure else lambda _: False
        found = {d: one for d, one in known.items() if not retries(one)}
        self.known |= found.keys() - self._measured
        return found

    def __call__(
        self, jobs: Sequence[Job], ignore_end: bool = False
    ) -> Mapping[str, ProfileRecord]:
        """Returns records by key; unknown jobs that may not be measured are absent."""
        # By how processes died before, something may be in the store by now.
        settle(self.store)
        known = self.look_up(jobs)
        if not self.measure:
            return known
        new = [job for job in jobs if job.key.digest not in known]
        self._measured |= {job.key.digest for job in new}

        def is_late() -> bool:
            return not ignore_end and self.is_over

        first = first_of_kernels(new, self._tuned)
        self._tuned |= {job.kernels for job in first}
        where, store, options = (self.program, self.mesh), self.store, self.options
        built = tune_kernels(*where, first, store, options, is_late)
        place = place_of_parts(*where, BuildEnvironment.beside(store.path), built=built)
        name = self.program.name
        return run_jobs(place, jobs, store, options, program=name, is_late=is_late)
