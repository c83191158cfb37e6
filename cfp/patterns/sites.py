"""All cross-entropies of a program, proved, and what computes them under a layout."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod

from cfp.analysis.layout import Layout
from cfp.patterns.build import PREFIX, build, is_chunked, spread_of
from cfp.patterns.cross_entropy import CrossEntropy, LeftAlone, find_cross_entropies
from cfp.patterns.proof import objection
from cfp.program.graph import Program
from cfp.program.replace import Replacement

_KEY = "cross-entropy"
_TOO_LATE = "something is made too late to be read"


@dataclass(frozen=True, kw_only=True)
class CrossEntropies:
    """All that a program has.

    Attributes:
        found: by the op that makes the logits.
        left_alone: what looks like one, and why it stays.
    """

    found: Mapping[int, CrossEntropy]
    left_alone: tuple[LeftAlone, ...] = ()


def cross_entropies(program: Program) -> CrossEntropies:
    """Finds and proves all cross-entropies of a program; once for each program."""
    known = program.looked_for
    if _KEY not in known:
        known[_KEY] = _find(program)
    return known[_KEY]


def _find(program: Program) -> CrossEntropies:
    found: dict[int, CrossEntropy] = {}
    alone: list[LeftAlone] = []
    for one in find_cross_entropies(program):
        if isinstance(one, LeftAlone):
            alone.append(one)
            continue
        plain = build(program, one, 2)
        reason = objection(program, one, plain) if plain else _TOO_LATE
        if reason is None:
            found[one.contraction] = one
        else:
            alone.append(LeftAlone(one.contraction, reason))
    return CrossEntropies(found=found, left_alone=tuple(alone))


def among(program: Program, ops: Collection[int]) -> list[CrossEntropy]:
    """The cross-entropies whose logits some top-level ops make."""
    inside = set(ops)
    return [
        one
        for op, one in cross_entropies(program).found.items()
        if program.top_level(op) in inside
    ]


def in_parts(
    layout: Layout, ops: Collection[int], kernel: str
) -> tuple[Replacement, ...]:
    """Returns the replacements of some ops' cross-entropies.

    Args:
        layout: how they are spread.
        ops: top-level ops.
        kernel: what `name_of` calls a number of parts; anything else replaces none.
    """
    if not is_chunked(kernel):
        return ()
    chunks, program = int(kernel.removeprefix(PREFIX)), layout.frame.program
    made = []
    for one in among(program, ops):
        spread = spread_of(layout, one)
        if spread is not None:
            made.append(build(program, one, chunks, spread, dict(layout.frame.mesh)))
    return tuple(one for one in made if one is not None)


def no_longer_made(program: Program, replaced: Iterable[Replacement]) -> set[int]:
    """Returns values as large as the logits that replacements no longer make.

    Everything that reads the logits is known, or they are left alone: see
    `cfp.patterns.cross_entropy`. Contractions with them are made in parts.
    """
    found: set[int] = set()
    for one in replaced:
        stack = [*program.ops[one.op].results]
        size = prod(program.values[stack[0]].shape)
        while stack:
            found.add(value := stack.pop())
            for user, _ in program.users[value]:
                op = program.ops[user]
                if op.kind != "dot_general":
                    stack += [
                        v
                        for v in op.results
                        if v not in found and prod(program.values[v].shape) == size
                    ]
    return found
