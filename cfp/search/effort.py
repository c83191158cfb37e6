"""When search-guided profiling ends, and what it leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cfp.profiling.record import ProfileRecord
from cfp.search.problem import Option
from cfp.search.wanted import Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """When to stop.

    Attributes:
        per_kind: how many candidates of each kind of segment to measure.
        tolerance: the gap that is small enough.
        patience: how many rounds in a row may make no plan faster by the tolerance;
            where memory keeps out a faster one, one more. While none fits, a round
            counts that needs less memory.
        batch: how many candidates to measure in a round.
        at_first: how many of each kind to measure at once with the classics, of the
            best by estimate.
    """

    per_kind: int
    tolerance: float = 0.01
    patience: float = float("inf")
    batch: int = 8
    at_first: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """What was measured, and what that leaves open.

    Attributes:
        wanted: what was asked for, in order.
        records: what is known of it, by key.
        required: how many of ``wanted`` were asked for before any search.
        rounds: how many searches asked for more.
        gap: the share of the best plan's predicted time that an unmeasured choice
            could save at most; 1 if no measured plan fits in memory.
        tight: whether memory decides, so that forward passes may be computed again.
        estimated: for each kind of segment its options by estimates, where nothing is
            to be measured.
    """

    wanted: list[Wanted]
    records: Mapping[str, ProfileRecord]
    required: int
    rounds: int
    gap: float
    tight: bool
    estimated: tuple[tuple[Option, ...], ...] = ()
