"""What unmeasured candidates will probably cost, by how measured ones turned out.

A lower bound rules out, and tells what is left open. As a guess it is a poor one: by it
nearly everything unmeasured is a little faster than all that was measured, needs
no temporaries, and computes its forward pass again for nothing. Where memory decides,
what bounds ask for therefore mostly turns out slower and larger; so there the next
candidates are those that are likely to be part of the best plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from cfp.search.costs import Costs
from cfp.search.estimate import SegmentEstimate
from cfp.search.problem import Candidate, Option
from cfp.settings import RECOMPUTE_TIME_EXPECTED


class Outlook:
    """What to expect of one kind of segment.

    Args:
        costs: of the program's segments.
        kind: which kind.
        measured: its options that were measured, at least one without recomputation.
        weighed: a lower bound of their times.
    """

    def __init__(
        self,
        costs: Costs,
        kind: int,
        measured: Sequence[Option],
        weighed: SegmentEstimate,
    ) -> None:
        self._costs, self._kind, self._weighed = costs, kind, weighed
        self._plain = {o.candidate.key: o for o in measured if not o.candidate.remat}
        plain = self._plain.values()
        again = [o for o in measured if o.candidate.remat]
        bounds = [
            (o.time_ms, weighed.total_ms(o.candidate))
            for o in plain
            if not o.candidate.kernel
        ]
        self._slower = _middle((ms / low for ms, low in bounds if low > 0.0), 1.0)
        self._kept = _middle(map(self._beyond, plain), 0)
        self._temp = _middle((o.temp_bytes for o in plain), 0)
        self._kept_again = _middle(map(self._beyond, again), 0)
        bases = [(o, self._plain.get(_without(o.candidate).key)) for o in again]
        known = [(o, p) for o, p in bases if p is not None]
        times = (o.time_ms / p.time_ms for o, p in known if p.time_ms > 0.0)
        self._again = _middle(times, RECOMPUTE_TIME_EXPECTED)
        sizes = ((_needed(o), _needed(p)) for o, p in known)
        # The backward pass needs as much, if not from the forward pass on.
        self._needed = _middle((size / whole for size, whole in sizes if whole), 1.0)

    def expect(self, candidate: Candidate) -> Option:
        """What a candidate will probably cost."""
        option = self._plain.get(_without(candidate).key) or self._unmeasured(candidate)
        if not candidate.remat:
            return option
        needed = round(self._needed * _needed(option))
        least = self._costs.least_bytes(self._kind, candidate).residual_bytes
        kept = min(needed, max(0, round(least + self._kept_again)))
        return replace(
            option,
            candidate=candidate,
            time_ms=self._again * option.time_ms,
            residual_bytes=kept,
            temp_bytes=needed - kept,
        )

    def _unmeasured(self, candidate: Candidate) -> Option:
        plain = _without(candidate)
        least = self._costs.least_bytes(self._kind, plain)
        saved_ms = self._slower * self._costs.saved_by_kernel_ms(self._kind, plain)
        return Option(
            candidate=plain,
            time_ms=max(0.0, self._slower * self._weighed.total_ms(plain) - saved_ms),
            state_bytes=least.state_bytes,
            residual_bytes=max(0, round(least.residual_bytes + self._kept)),
            temp_bytes=round(self._temp),
        )

    def _beyond(self, option: Option) -> int:
        """What an option keeps beyond the least that it must."""
        least = self._costs.least_bytes(self._kind, option.candidate)
        return option.residual_bytes - least.residual_bytes


def _needed(option: Option) -> int:
    return option.residual_bytes + option.temp_bytes


def _without(candidate: Candidate) -> Candidate:
    return replace(candidate, remat=False)


def _middle(values: Iterable[float], otherwise: float) -> float:
    found = [*values]
    return median(found) if found else otherwise
