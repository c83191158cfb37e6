"""Options of all builds and timings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime

from cfp.profiling.in_flight import Limits
from cfp.profiling.tasks import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """Options of builds and timings.

    Attributes:
        retry_failures: whether what failed before is tried again, or what failed before
            a moment.
        progress: called with what is being done.
    """

    retry_failures: bool | datetime = False
    limits: Limits = field(default_factory=Limits)
    progress: Callable[[Progress | str], None] | None = None

    def tell(self, event: Progress | str) -> None:
        """Passes an event on."""
        if self.progress is not None:
            self.progress(event)

    def tell_of_rates(self, event: Progress) -> None:
        """Passes an event of timing devices on, without a best of different probes."""
        label = f"rates of the devices: {event.label}" if event.label else ""
        self.tell(replace(event, label=label, best_ms=math.inf))
