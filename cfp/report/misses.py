"""Measurements that the store lacks, each with what the nearest one differs in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cfp.analysis.analyze import Analysis
from cfp.context import PlanContext
from cfp.passes.profile import profile_segments
from cfp.profiling.collectives import measure_rates, rate_keys
from cfp.profiling.key import ProfileKey
from cfp.profiling.rates import Rates

_MOST_LABELS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """Something that the store has no record of.

    Attributes:
        key: what it would be kept under.
        nearest: the stored key that differs in the fewest parts; None if there is
            none at all.
    """

    label: str
    key: ProfileKey
    nearest: ProfileKey | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Misses:
    """Measurements that the profile pass would make.

    Attributes:
        misses: in the order in which it would.
        known: how many things are in the store.
        rates_known: whether the devices' rates are. If not, estimates follow from
            defaults, and some other strategies may be measured than are listed.
        complete: whether that is all. If not, more strategies may be measured: what
            follows from the times of those that are listed.
    """

    misses: tuple[Miss, ...]
    known: int
    rates_known: bool
    complete: bool


def find_misses(context: PlanContext, analysis: Analysis) -> Misses:
    """Looks everything up that the profile pass would, and measures nothing."""
    mesh, store = context.devices, context.store
    probes = rate_keys(mesh)
    answered = store.get_many([key.digest for key in probes.values()])
    rates_known = len(answered) == len(probes)
    rates = measure_rates(mesh, store) if rates_known else Rates.default(mesh)
    asked = {key.digest: (label, key) for label, key in probes.items()}
    found, _ = profile_segments(context, analysis, rates, measure=False)
    for item in found.requests:
        for job in item.jobs:
            asked.setdefault(job.key.digest, (job.label, job.key))
    answered = store.get_many(asked)
    complete = all(
        job.key.digest in answered for item in found.requests for job in item.jobs
    )
    stored = store.keys()
    return Misses(
        misses=tuple(
            Miss(label=label, key=key, nearest=key.nearest(stored))
            for digest, (label, key) in asked.items()
            if digest not in answered
        ),
        known=len(answered),
        rates_known=rates_known,
        complete=complete,
    )


def why_lines(found: Misses) -> Iterator[str]:
    """The misses as text, those of one cause together."""
    yield f"{found.known} answered by the store, {len(found.misses)} not."
    causes: dict[str, list[str]] = {}
    for miss in found.misses:
        stored: Sequence[ProfileKey] = [] if miss.nearest is None else [miss.nearest]
        causes.setdefault(miss.key.explain(stored), []).append(miss.label)
    for cause, labels in causes.items():
        yield ""
        yield from labels[:_MOST_LABELS]
        if len(labels) > _MOST_LABELS:
            yield f"and {len(labels) - _MOST_LABELS} more"
        yield from (f"  {line}" for line in cause.splitlines())
    if not found.rates_known:
        yield ""
        yield (
            "Which strategies are worth measuring follows from the devices' rates, "
            "which are not known yet: some may be others than these."
        )
    if not found.complete:
        yield ""
        yield (
            "Which other strategies are worth measuring follows from what these take."
        )


def why_data(found: Misses) -> dict[str, Any]:
    """The misses as plain data; `differing` has what was and what is, by part."""
    return {
        "known": found.known,
        "rates_known": found.rates_known,
        "complete": found.complete,
        "misses": [
            {
                "label": miss.label,
                "key": miss.key.digest,
                "differing": _differing(miss),
            }
            for miss in found.misses
        ],
    }


def _differing(miss: Miss) -> dict[str, list[str | None]] | None:
    if miss.nearest is None:
        return None
    was, now = dict(miss.nearest.parts), dict(miss.key.parts)
    return {
        name: [was.get(name), now.get(name)]
        for name in miss.key.differing(miss.nearest)
    }
