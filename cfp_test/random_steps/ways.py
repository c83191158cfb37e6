"""Ways to shard a step: presets, the planner's own, and choices drawn at random."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice, Storage
from cfp.analysis.presets import presets
from cfp.analysis.strategies import Strategy, block_strategies
from cfp.cost.costs import segment_candidate
from cfp.search.choices import kernel_variants
from cfp.settings import ConstraintLevel, Replacing

# Where a choice is from.
PRESET, PLANNED, BUDGET = "preset", "planned", "planned within a budget"
RANDOM, ALIKE, MIXED = "random", "random, kinds alike", "preset, some blocks random"
# Kernels of attention that CPU devices have.
NAMES = ("xla", "chunked")
DRAWN = (PRESET, RANDOM, RANDOM, RANDOM, ALIKE, MIXED)


@dataclass(frozen=True)
class Way:
    """A way to shard a step.

    Attributes:
        source: where the choice is from.
        seed: of what is drawn.
    """

    source: str
    seed: int


@dataclass(frozen=True)
class Sharding:
    """A choice, and how much of it the compiler is constrained to."""

    choice: Choice
    level: ConstraintLevel


def draw_ways(seed: int, count: int) -> list[Way]:
    """Draws ways to shard a program; the planner's own are not among them."""
    rng = random.Random(f"ways {seed}")
    return [Way(rng.choice(DRAWN), rng.randrange(10**6)) for _ in range(count)]


def sharding_of(analysis: Analysis, way: Way) -> Sharding:
    """The choice that a way makes for a program."""
    frame, rng = analysis.frame, random.Random(way.seed)
    strategies, known = _possible(analysis)
    drawn = tuple(rng.choice(strategies[block.index]) for block in frame.blocks)
    storage = tuple(rng.choice(list(Storage)) for _ in frame.groups)
    name = rng.choice(list(known))
    if way.source == ALIKE:
        first: dict[int, list] = {}
        blocks = list(drawn)
        for segment in analysis.segments:
            own = first.setdefault(segment.kind, [blocks[b] for b in segment.blocks])
            for b, strategy in zip(segment.blocks, own, strict=True):
                if strategy in strategies[b]:
                    blocks[b] = strategy
        drawn = tuple(blocks)
    elif way.source == MIXED:
        base = known[name].blocks
        drawn = tuple(
            rng.choice((own, kept)) for own, kept in zip(drawn, base, strict=True)
        )
    choice = Choice(drawn, storage)
    if way.source == PRESET:
        choice = known[name]
    choice = _with_kernels(analysis, choice, rng)
    if rng.random() < 0.3:
        again = [s.index for s in analysis.segments if rng.random() < 0.5]
        choice = replace(choice, remat=tuple(again))
    level = rng.choice((*[ConstraintLevel.EVERYTHING] * 4, *ConstraintLevel))
    return Sharding(choice, level)


def _with_kernels(analysis: Analysis, choice: Choice, rng: random.Random) -> Choice:
    """A choice with kernels for its attentions."""
    kernels = Replacing(kernels=(rng.choice(NAMES),))
    found = []
    for segment in analysis.segments:
        if analysis.representatives[segment.kind] != segment.index:
            continue
        own = segment_candidate(analysis, segment.index, choice)
        known = kernel_variants(analysis, segment.kind, own, kernels)
        if known and rng.random() < 0.7:
            found.append((segment.index, rng.choice(known).kernels))
    return replace(choice, kernels=tuple(found))


# Of the program before, which has several ways.
_KNOWN: list[tuple[Analysis, Any]] = []


def _possible(
    analysis: Analysis,
) -> tuple[dict[int, list[Strategy]], dict[str, Choice]]:
    """The strategies of each block, and the presets."""
    if not _KNOWN or _KNOWN[0][0] is not analysis:
        frame = analysis.frame
        strategies = {
            block.index: block_strategies(frame.program, block, frame.mesh)
            for block in frame.blocks
        }
        _KNOWN[:] = [(analysis, (strategies, presets(frame)))]
    return _KNOWN[0][1]
