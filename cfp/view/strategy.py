"""Strategies of segments in words, and in what two of them differ."""

from __future__ import annotations

from cfp.plan.figures import StrategyFigures
from cfp.plan.parts import roles_text
from cfp.view.words import REMATERIALIZED, STORAGE_WORDS, elided, few, kernels_text


def strategy_text(
    strategy: StrategyFigures, base: StrategyFigures | None = None
) -> str:
    """Describes a strategy: what it shards, and how parameters are kept.

    Args:
        strategy: of a kind of segment.
        base: say only in what it differs from this one of the same kind; "" where it
            differs in nothing.
    """
    before = {
        name: roles_text(alike.strategy)
        for alike in (base.blocks if base else ())
        for name in alike.names
    }
    parts = []
    for alike in strategy.blocks:
        text = roles_text(alike.strategy)
        names = [name for name in alike.names if before.get(name) != text]
        if names:
            shown = few([*map(elided, names)]) if base else ", ".join(names)
            parts.append(f"{shown} {text}")
    stored = strategy.storage
    if stored is not None and (base is None or base.storage != stored):
        parts.append(f"parameters {STORAGE_WORDS[stored]}")
    if strategy.kernels and (base is None or base.kernels != strategy.kernels):
        parts.append(kernels_text(strategy.kernels))
    elif base is not None and base.kernels and not strategy.kernels:
        parts.append("computed as it is written")
    if strategy.rematerialized and not (base and base.rematerialized):
        parts.append(REMATERIALIZED)
    elif base is not None and base.rematerialized and not strategy.rematerialized:
        parts.append(f"not {REMATERIALIZED}")
    return "; ".join(parts)
