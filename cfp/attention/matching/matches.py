"""All attentions of a program, and what computes them under a layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    replacement_of,
    way_of_called,
)
from cfp.attention.matching.everywhere import check_closed, check_everywhere
from cfp.attention.matching.find import candidates, dropout
from cfp.attention.matching.found import Found, View
from cfp.attention.matching.functions import Meaning, Way
from cfp.attention.matching.infer import proved
from cfp.attention.matching.ways import (
    make_replacements,
    out_of_order,
    problem_of_found,
    refusal_of,
    roles_of,
)
from cfp.attention.problem import AttentionProblem
from cfp.program.graph import Program, searched_once
from cfp.program.replace import Different, LeftAlone, Replacement, Sites

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


def was_searched(program: Program) -> bool:
    """True if the program was searched for attentions, as kernels require."""
    return (attentions,) in program.looked_for


@searched_once
def attentions(program: Program) -> Sites[Match]:
    """All of a program, by the ops that make scores; proved."""
    found = [*_written_out(program)]
    for op, one in called_attentions(program).items():
        if one.refusal:
            found.append(LeftAlone(op, program.ops[op].source, one.refusal))
            continue
        problem = one.problem
        meaning = Meaning("q0", problem.scale, causal=problem.causal)
        where = found_of(program, one)
        found.append(Match(found=where, meaning=meaning, problem=problem, called=one))
    matches = {one.found.op: one for one in found if isinstance(one, Match)}
    return Sites(matches, tuple(one for one in found if isinstance(one, LeftAlone)))


def _written_out(program: Program) -> Iterator[Match | LeftAlone]:
    if not any(op.kind == "exponential" for op in program.ops):
        return
    view = View(program)
    for one in candidates(view):
        if isinstance(one, LeftAlone):
            yield one
            continue
        try:
            check_closed(view, one)
            one, meaning = proved(view, one)
            check_everywhere(view, one, meaning)
            if out_of_order(program, one, meaning):
                raise Different("what it reads is made after what it makes")
            if one.sizes.get("d", 1) != one.sizes.get("e", 1):
                raise Different("heads of keys and of values have other sizes")
        except Different as error:
            reason = dropout(view, one.inside) or str(error)
            yield LeftAlone(one.op, one.source, reason)
            continue
        problem = problem_of_found(program, one, meaning)
        yield Match(found=one, meaning=meaning, problem=problem)


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
    """Returns the reason why an attention cannot be computed in a way, or None."""
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
