"""Options of all builds and timings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from cfp.profiling.builder import Job
from cfp.profiling.marks import Limits
from cfp.profiling.place import Place
from cfp.profiling.record import ProfileRecord
from cfp.profiling.tasks import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """Options of builds and timings.

    Attributes:
        retry_failures: whether what failed before is tried again, or what failed before
            a moment.
        limits: what counts as hung.
        progress: called with what is being done.
        place: where programs are compiled, if not here.
        compiler_options: of every program.
        run: times a program in place of `cfp.profiling.runner.run`, where not all of
            its devices are here.
        wants_local: see `cfp.profiling.builder.BuildEnvironment`.
    """

    retry_failures: bool | datetime = False
    limits: Limits = field(default_factory=Limits)
    progress: Callable[[Progress | str], None] | None = None
    place: Place | None = None
    compiler_options: Mapping[str, str] = field(default_factory=dict)
    run: Callable[..., ProfileRecord] | None = None
    wants_local: Callable[[Job, str], bool] | None = None

    def tell(self, event: Progress | str) -> None:
        """Passes an event on."""
        if self.progress is not None:
            self.progress(event)
