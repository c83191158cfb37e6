"""Answers what jobs take: from the store, or by measuring."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from jax.sharding import Mesh

from cfp.profiling.builder import Job
from cfp.profiling.options import MeasureOptions
from cfp.profiling.processes import Agreement
from cfp.profiling.record import ProfileRecord, is_to_retry
from cfp.profiling.runner import profile
from cfp.profiling.store import ProfileStore
from cfp.profiling.tuning import tune_kernels
from cfp.program.graph import Program


class Looker:
    """Looks jobs up, and measures those that the store does not know.

    Args:
        program: the program that the jobs are parts of.
        mesh: the devices.
        store: where records are kept.
        tuning: gives jobs that are built first for their kernels.
        measure: whether devices may be used.
        options: how to measure.
        end: from this moment on (`time.monotonic`) nothing else is begun. Several
            processes measure the same, however long it takes.

    Attributes:
        alone: whether no other process measures the same.
        known: keys of what the store answered; not of failures that are tried again.
        interrupted: whether the user has ended the measuring.
    """

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        store: ProfileStore,
        tuning: Callable[[], list[Job]],
        measure: bool,
        options: MeasureOptions,
        end: float = math.inf,
    ) -> None:
        self._program = program
        self._mesh = mesh
        self._store = store
        self._tuning: Callable[[], list[Job]] | None = tuning
        self._measure = measure
        self._options = options
        self.alone = Agreement.of(mesh).alone
        self._end = end if self.alone else math.inf
        self._asked = 0
        self._measured: set[str] = set()
        self.known: set[str] = set()
        self.interrupted = False

    @property
    def has_end(self) -> bool:
        """True if time may be over before all is measured."""
        return math.isfinite(self._end)

    @property
    def is_over(self) -> bool:
        """True if time is over, or the user has ended the measuring."""
        return self.interrupted or self._is_late()

    def _is_late(self) -> bool:
        return time.monotonic() > self._end

    def __call__(
        self, jobs: Sequence[Job], anyway: bool = False
    ) -> Mapping[str, ProfileRecord]:
        """Records by key; what may not be measured and is not known has none.

        Args:
            jobs: what to look up.
            anyway: whether it is measured however late it is.

        Raises:
            KeyboardInterrupt: the user interrupts before anything can be chosen from.
        """
        digests = {job.key.digest for job in jobs}
        known = self._store.common(digests)
        where, how = (self._program, self._mesh), self._options
        again = how.retry_failures if self._measure else False
        answered = {d for d, one in known.items() if not is_to_retry(one, again)}
        self.known |= answered - self._measured
        self._asked += 1
        if not self._measure:
            return known
        self._measured |= digests - answered
        try:
            if self._tuning is not None and not answered >= digests:
                tune_kernels(
                    *where,
                    self._tuning(),
                    self._store,
                    retry_failures=how.retry_failures,
                    progress=how.progress,
                    limits=how.limits,
                )
                self._tuning = None
            return profile(
                *where,
                jobs,
                self._store,
                retry_failures=how.retry_failures,
                progress=how.progress,
                limits=how.limits,
                place=how.place,
                is_late=None if anyway else self._is_late,
            ).records
        except KeyboardInterrupt:
            # Of several processes the others would go on.
            if self._asked == 1 or not self.alone:
                raise
            self.interrupted = True
            return self._store.common(digests)
