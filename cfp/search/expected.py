"""What candidates should cost that are not measured.

Estimates leave out what hides behind computing, temporaries, and what computing again
takes: each counts as it turned out for what was measured of the kind (medians). Where
nothing is to be measured, as for virtual devices, whose times say nothing about those
of GPUs, and wherever there is no device, estimates alone decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from cfp.analysis.layout import Choice
from cfp.cost.choice import SegmentChoice
from cfp.cost.costs import Costs
from cfp.cost.estimate import SegmentEstimate
from cfp.search.build import build_problem
from cfp.search.choices import choose_candidates, preset_parts
from cfp.search.dynamic import solve_dynamically
from cfp.search.kernels import Kernels, with_kernels
from cfp.search.problem import Option
from cfp.search.wanted import Explored
from cfp.settings import RECOMPUTE_TIME_EXPECTED, SAFE_ESTIMATED_MEMORY_SHARE


class Outlook:
    """What to expect of one kind of segment.

    Args:
        costs: of the program's segments.
        kind: which kind.
        measured: its options that were measured, at least one without recomputation.
        estimate: of the times of all.
    """

    def __init__(
        self,
        costs: Costs,
        kind: int,
        measured: Sequence[Option],
        estimate: SegmentEstimate,
    ) -> None:
        self._costs, self._kind, self._estimate = costs, kind, estimate
        self._plain = {o.candidate: o for o in measured if not o.candidate.remat}
        plain = self._plain.values()
        again = [o for o in measured if o.candidate.remat]
        pairs = [
            (o.time_ms, estimate.total_ms(o.candidate))
            for o in plain
            if not o.candidate.kernel
        ]
        self._slower = _middle((ms / own for ms, own in pairs if own > 0.0), 1.0)
        self._kept = _middle(map(self._beyond, plain), 0)
        temps = [o.temp_bytes for o in plain]
        self._temp = round(median(temps)) if temps else None
        self._kept_again = _middle(map(self._beyond, again), 0)
        bases = [(o, self._plain.get(o.candidate.plain)) for o in again]
        known = [(o, p) for o, p in bases if p is not None]
        times = (o.time_ms / p.time_ms for o, p in known if p.time_ms > 0.0)
        self._again = _middle(times, RECOMPUTE_TIME_EXPECTED)
        sizes = ((_needed(o), _needed(p)) for o, p in known)
        # The backward pass needs as much, if not from the forward pass on.
        self._needed = _middle((size / whole for size, whole in sizes if whole), 1.0)

    def expect(self, candidate: SegmentChoice) -> Option:
        """What a candidate will probably cost."""
        option = self._plain.get(candidate.plain) or self._unmeasured(candidate.plain)
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

    def _unmeasured(self, plain: SegmentChoice) -> Option:
        least = self._costs.least_bytes(self._kind, plain)
        total_ms = self._estimate.total_ms(plain)
        saved_ms = self._costs.saved_by_kernel_ms(self._kind, plain)
        return Option(
            candidate=plain,
            time_ms=max(0.0, self._slower * (total_ms - saved_ms)),
            state_bytes=least.state_bytes,
            residual_bytes=max(0, round(least.residual_bytes + self._kept)),
            temp_bytes=self._costs.temp_bytes(self._kind, plain)
            if self._temp is None
            else self._temp,
        )

    def _beyond(self, option: Option) -> int:
        """What an option keeps beyond the least that it must."""
        least = self._costs.least_bytes(self._kind, option.candidate)
        return option.residual_bytes - least.residual_bytes


def _needed(option: Option) -> int:
    return option.residual_bytes + option.temp_bytes


def _middle(values: Iterable[float], otherwise: float) -> float:
    found = [*values]
    return median(found) if found else otherwise


def estimate_options(
    estimates: Sequence[SegmentEstimate],
    presets: Mapping[str, Choice],
    costs: Costs,
    *,
    per_kind: int,
    budget_bytes: int | None,
    kernels: Kernels | None = None,
) -> Explored:
    """The parts of the presets and the best others, with estimated costs.

    Args:
        estimates: of every kind of segment.
        presets: choices for the whole program whose parts are options in any case.
        costs: of the program's segments.
        per_kind: how many others of each kind, at most.
        budget_bytes: memory of one device, or None.
        kernels: what may compute attentions.
    """
    required = preset_parts(costs.analysis, presets.values())
    outlooks = [
        Outlook(costs, kind, (), estimate.without_twin())
        for kind, estimate in enumerate(estimates)
    ]
    options = []
    for kind, estimate in enumerate(estimates):
        own = required[kind]
        candidates = choose_candidates(estimate, own, len(own) + per_kind)
        candidates = with_kernels(kernels, kind, candidates)
        options.append([*map(outlooks[kind].expect, candidates)])
    problem = build_problem(costs, options, None)
    fastest = solve_dynamically(problem)
    assert fastest is not None, "without a budget everything fits"
    tight = budget_bytes is not None and (
        fastest.memory_bytes > SAFE_ESTIMATED_MEMORY_SHARE * budget_bytes
    )
    if tight:
        for kind, found in enumerate(options):
            if costs.can_rematerialize(kind):
                again = [replace(o.candidate, remat=True) for o in found]
                found += map(outlooks[kind].expect, again)
    return Explored(records={}, tight=tight, estimated=tuple(map(tuple, options)))
