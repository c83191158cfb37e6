"""All attentions of a program, and what computes them under a layout."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

from cfp.analysis.layout import SegmentKernels
from cfp.analysis.strategies import FactorAxes
from cfp.attention.kernels import KERNELS, ScoreMemory
from cfp.attention.matching.called import (
    Called,
    called_attentions,
    found_of,
    indivisible,
    left_alone,
    replacement_of,
    way_of_called,
)
from cfp.attention.matching.find import candidates, dropout
from cfp.attention.matching.found import Different, Found, LeftAlone, View
from cfp.attention.matching.functions import Meaning, Way
from cfp.attention.matching.infer import Prover
from cfp.attention.matching.ways import (
    make_replacements,
    out_of_order,
    problem_of_found,
    refusal_of,
    roles_of,
)
from cfp.attention.problem import AttentionProblem
from cfp.program.graph import Program
from cfp.program.replace import Replacement

ROUNDS = frozenset({"ring", "zigzag"})  # Keys come in parts.
GATHERED = frozenset({"all_gather"})
_QUERIES = ROUNDS | GATHERED  # Roles of axes that shard queries.


@dataclass(frozen=True, kw_only=True)
class Match:
    """An attention of a program that may be computed by something else.

    Attributes:
        found, meaning, problem: what is computed, and where.
        called: the kernel of the step's own that computes it, or None: then it is
            written out. Of such a one each pass is a match of its own.
    """

    found: Found
    meaning: Meaning
    problem: AttentionProblem
    called: Called | None = None

    @property
    def ops(self) -> set[int]:
        """All ops that belong to it."""
        return {self.found.op, *self.found.inside, *self.found.dots.values()}


@dataclass(frozen=True, kw_only=True)
class Attentions:
    """All that a program has.

    Attributes:
        matches: by the op that makes the scores.
        left_alone: what looks like it, and why it is not replaced.
    """

    matches: Mapping[int, Match]
    left_alone: tuple[LeftAlone, ...] = ()


def attentions(program: Program) -> Attentions:
    """Finds and proves all attentions of a program; once for each program."""
    return program.found(_find)


def was_searched(program: Program) -> bool:
    """True if the program was searched for attentions, as kernels require."""
    return _find in program.looked_for


def _find(program: Program) -> Attentions:
    written, called = _written_out(program), _called(program)
    return Attentions(
        matches={**written.matches, **called},
        left_alone=(*written.left_alone, *left_alone(program)),
    )


def _called(program: Program) -> dict[int, Match]:
    """Attentions that kernels of the step's own compute, if others may, too."""
    able = [one for one in called_attentions(program).values() if not one.refusal]
    return {
        one.op: Match(
            found=found_of(program, one),
            meaning=Meaning("q0", one.problem.scale, causal=one.problem.causal),
            problem=one.problem,
            called=one,
        )
        for one in able
    }


def _written_out(program: Program) -> Attentions:
    if not any(op.kind == "exponential" for op in program.ops):
        return Attentions(matches={})
    view = View(program)
    prover: Prover | None = None
    matches, alone = {}, []
    for one in candidates(view):
        if isinstance(one, LeftAlone):
            alone.append(one)
            continue
        prover = prover or Prover(view)
        try:
            one, meaning = prover.seen(one)
            if out_of_order(program, one, meaning):
                raise Different("what it reads is made after what it makes")
            if one.sizes.get("d", 1) != one.sizes.get("e", 1):
                raise Different("heads of keys and of values have other sizes")
        except Different as error:
            reason = dropout(view, one.inside) or str(error)
            alone.append(LeftAlone(one.op, one.scope, one.source, reason))
            continue
        problem = problem_of_found(program, one, meaning)
        matches[one.op] = Match(found=one, meaning=meaning, problem=problem)
    return Attentions(matches=matches, left_alone=tuple(alone))


def among(program: Program, ops: Collection[int]) -> list[Match]:
    """The attentions whose scores some top-level ops make."""
    inside = set(ops)
    return [
        match
        for op, match in attentions(program).matches.items()
        if program.top_level(op) in inside
    ]


def way_of(
    program: Program,
    match: Match,
    kernels: SegmentKernels,
    axes: Mapping[int, FactorAxes],
) -> Way | str:
    """Returns the way a kernel computes an attention under a layout, or why it cannot.

    Args:
        kernels: of a segment: the kernel of its attentions, and how queries are spread.
        axes: for ops their factors' axes, of the layout.
    """
    implementation, spread = kernels.attention, kernels.spread
    if implementation not in KERNELS:
        return "it is no kernel of attention"
    own = axes.get(match.found.op)
    if own is None:
        return "nothing says how it is sharded"
    if match.called is not None:
        how = spread or "all_gather"
        return way_of_called(program, match.called, implementation, own, how)
    where = (program, match.found, match.meaning, own)
    roles = roles_of(*where, spread or "all_gather")
    if isinstance(roles, str):
        return roles
    if spread and spread not in [role for _, role in roles]:
        return f"no axis shards queries for a {spread}"
    return Way(implementation, roles)


def cannot(
    match: Match, way: Way, mesh: Mapping[str, int], platform: str
) -> str | None:
    """Returns the reason why an attention cannot be computed in a way, or None.

    Args:
        match, way: the attention, and the way.
        platform: of its devices, such as "cpu" or "gpu".
    """
    reason = refusal_of(match.problem, way, mesh, platform)
    if reason is None and match.called is not None:
        return indivisible(match.problem, way, mesh)
    return reason


def keeps_scores(way: Way) -> bool:
    """Decides if scores are kept for the backward pass, as XLA's own attention does.

    Where queries are sharded the gradients come from the log-sum-exp of whole rows.
    """
    scores = KERNELS[way.implementation].scores
    return scores is ScoreMemory.ALL and not _QUERIES & {r for _, r in way.roles}


def share_at_once(way: Way, sizes: Mapping[str, int]) -> float:
    """Returns the share of a device's scores that is in memory at once."""
    if KERNELS[way.implementation].scores is not ScoreMemory.ALL:
        return 0.0  # Of chunks see `cfp.cost`.
    return 1 / prod(sizes[axis] for axis, role in way.roles if role in ROUNDS)


def replacements(program: Program, match: Match, way: Way) -> tuple[Replacement, ...]:
    """Returns the replacements that compute an attention in a given way."""
    if match.called is not None:
        return (replacement_of(program, match.called, way),)
    return make_replacements(program, match.found, match.meaning, way)
