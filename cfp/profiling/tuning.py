"""Has the compiler try out its kernels before many programs are built side by side.

A compiler for GPUs times several kernels for each matrix product that it meets, and
keeps the outcome. Programs that are built at once and share products all do that work,
on one device and at the same time: on 4 H200, 32 segments of a transformer took 62 s,
and 10 s after three programs, built one by one in 19 s, had met nearly all products.
Kernels are tried out on the first device of a mesh, so that as many programs as there
are devices can be built at once, each for the mesh in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from queue import SimpleQueue

import numpy as np
from jax.sharding import Mesh

from cfp.profiling.builder import BuildEnvironment, Job, build
from cfp.profiling.deaths import record_deaths
from cfp.profiling.marks import Limits, Marks
from cfp.profiling.private import make_private_folder
from cfp.profiling.processes import Agreement
from cfp.profiling.record import is_to_retry
from cfp.profiling.store import ProfileStore
from cfp.profiling.threads import builders, default_threads, with_settings
from cfp.program.graph import Program


def tune_kernels(
    program: Program,
    mesh: Mesh,
    jobs: Sequence[Job],
    store: ProfileStore,
    *,
    retry_failures: bool | datetime = False,
    progress: Callable[[str], None] | None = None,
    limits: Limits | None = None,
) -> int:
    """Builds jobs, one on each device, for what the compiler learns from them.

    Nothing runs, and nothing is kept in the store unless a process died of a build;
    that job is then left out. So is what was built for this before: a file beside what
    the compiler has learnt says so.

    Args:
      program: the program that the jobs are parts of.
      mesh: the devices.
      jobs: what to build.
      store: beside it lies what the compiler has learnt.
      retry_failures: build again what a process died of, or died of before a moment.
      progress: called with what is being built.
      limits: what counts as hung.

    Returns:
      How many were built; none where the compiler has nothing to try out, or more
      to learn.
    """
    environment = BuildEnvironment.beside(store.build_path)
    platform = mesh.devices.flat[0].platform
    if not environment.options(platform):
        return 0
    record_deaths(store, about={job.key.digest for job in jobs})
    known = store.get_many({job.key.digest for job in jobs})
    fatal = {
        k for k, record in known.items() if not is_to_retry(record, retry_failures)
    }
    learnt = environment.learnt_dir
    make_private_folder(learnt.parent)
    make_private_folder(learnt)
    done = {file.name for file in learnt.iterdir()}
    wanted = {job.key.digest: job for job in jobs}
    todo = [job for key, job in wanted.items() if key not in fatal | done]
    marks = Marks(store.path, limits, program.name)
    with environment.compilation_cache(platform), marks:
        orders = SimpleQueue[Mesh]()
        most = min(mesh.devices.size, default_threads(platform))
        most = marks.at_once(wanted, most) if Agreement.of(mesh).alone else 1
        for count in range(most):
            orders.put(_rolled(mesh, count))

        def learn(job: Job) -> None:
            order = orders.get()
            try:
                with marks.doing(job.key, job.label, "build"):
                    # What cannot be built is found out, and recorded, where it is
                    # needed.
                    build(program, order, job, environment)
            finally:
                orders.put(order)
            (learnt / job.key.digest).touch()

        with builders(most) as pool:
            builds = pool.map(with_settings(learn), todo)
            for number, job in enumerate(todo, 1):
                if progress is not None:
                    progress(f"tuning kernels for {job.label}, {number} of {len(todo)}")
                next(builds)
    return len(todo)


def _rolled(mesh: Mesh, count: int) -> Mesh:
    """The same mesh with another device first."""
    devices = np.roll(mesh.devices.flatten(), -count).reshape(mesh.devices.shape)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
