"""All attentions of a program, and what computes them under a layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from cfp.analysis.layout import SegmentKernels
from cfp.analysis.strategies import FactorAxes
from cfp.attention.kernels import KERNELS, ScoreMemory
from cfp.attention.matching.core import Core
from cfp.attention.matching.found import Found, Tensor
from cfp.attention.matching.functions import Meaning, Way
from cfp.attention.matching.meaning import Proved, proved_pass
from cfp.attention.matching.proof import prove
from cfp.attention.matching.region import Region, has_dropout, scores_of
from cfp.attention.matching.values import Values, values_of
from cfp.attention.matching.ways import (
    make_replacements,
    out_of_order,
    problem_of_passes,
    refusal_of,
    roles_of,
)
from cfp.attention.problem import AttentionProblem
from cfp.program.constants import NotConstant
from cfp.program.graph import Op, Program, searched_once
from cfp.program.replace import Different, LeftAlone, Replacement, Sites

ROUNDS = frozenset({"ring", "zigzag"})  # Keys come in parts.
GATHERED = frozenset({"all_gather"})
_QUERIES = ROUNDS | GATHERED  # Roles of axes that shard queries.
_DROPOUT = "dropout: random numbers enter its scores or weights"


@dataclass(frozen=True, kw_only=True)
class Match:
    """An attention of a program that may be computed by something else.

    Attributes:
        found, problem: what is computed, and where.
        passes: each pass as it is proved.
    """

    found: Found
    problem: AttentionProblem
    passes: tuple[Proved, ...]

    @property
    def meaning(self) -> Meaning:
        """The attention that its first pass computes."""
        return self.passes[0].meaning

    @property
    def ops(self) -> set[int]:
        """All ops that belong to it."""
        return {self.found.op, *self.found.ops}


def was_searched(program: Program) -> bool:
    """True if the program was searched for attentions, as kernels require."""
    return (attentions,) in program.looked_for


@searched_once
def attentions(program: Program) -> Sites[Match]:
    """All of a program, by the ops that make scores; proved."""
    found = [*_written_out(program)]
    matches = {one.found.op: one for one in found if isinstance(one, Match)}
    return Sites(matches, tuple(one for one in found if isinstance(one, LeftAlone)))


def _written_out(program: Program) -> Iterator[Match | LeftAlone]:
    """Yields each attention, with the scores that its gradients compute again."""
    values = values_of(program)
    dots: dict[int, Op] = {}
    for op in program.ops:
        if op.kind == "exponential" and op.rule is not None:
            dot = scores_of(values, op)
            if dot is not None:
                dots.setdefault(dot.id, dot)
    numbers = {i: values.number((dot.results[0], ())) for i, dot in dots.items()}
    groups: dict[int, list[Op]] = {}
    first_of: dict[int, int] = {}
    for i, dot in sorted(dots.items()):
        first = first_of.get(numbers[i], i)
        groups.setdefault(first, []).append(dot)
        for number in values.equal_elsewhere(dot.results[0]):
            first_of.setdefault(number, first)
    for first, own in groups.items():
        regions: list[Region] = []
        try:
            yield _match(program, values, own, regions)
        except Different as error:
            is_random = any(map(has_dropout, regions))
            reason = _DROPOUT if is_random else str(error)
            yield LeftAlone(first, dots[first].source, reason)
        except NotConstant as error:
            reason = f"a constant of it is not evaluated: {error}"
            yield LeftAlone(first, dots[first].source, reason)


def _match(
    program: Program, values: Values, dots: Sequence[Op], regions: list[Region]
) -> Match:
    """Proves an attention; what is read on the way is added to the regions."""
    passes: list[Proved] = []
    sizes: dict[str, int] = {}
    between: set[int] = set()
    ops: set[int] = set()
    scores: Tensor | None = None
    for dot in dots:
        region = Region(values, dot)
        regions.append(region)
        region.grow()
        if scores is None:
            scores = Tensor(dot.results[0], None, region.letters(dot.results[0]))
        own = region.passes()
        for t in (t for one in own for t in (*one.reads.values(), *one.makes.values())):
            shape = program.shape(t.value)
            sizes.update((x, n) for x, n in zip(t.letters, shape, strict=True) if x)
        for one in own:
            core = Core(region, one)
            table, passes_hidden = prove(core)
            passes.append(proved_pass(core, table, sizes, passes_hidden))
        between |= region.members | region.stacks
        ops |= {dot.id, *region.inside, *region.sinks}
        if region.weights_gradient is not None:
            ops.add(region.weights_gradient.id)
    forward = [one.one for one in passes if not one.one.is_backward]
    backward = [one.one for one in passes if one.one.is_backward]
    if not forward or len(backward) > 1:
        raise Different("its gradients are computed more than once")
    assert scores is not None, "there is a contraction"
    found = Found(
        op=dots[0].id,
        source=dots[0].source,
        scores=scores,
        sizes=sizes,
        between=frozenset(between),
        forward=tuple(forward),
        backward=backward[0] if backward else None,
        ops=frozenset(ops),
    )
    if out_of_order(program, found, passes):
        raise Different("what it reads is made after what it makes")
    problem = problem_of_passes(program, found, passes)
    return Match(found=found, passes=tuple(passes), problem=problem)


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
    where = (program, match.found, match.passes[0], own)
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
    return refusal_of(match.problem, way, mesh, platform)


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
    return make_replacements(program, match.found, match.passes, way)
