"""All attentions of a program, and what computes them under a layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax.numpy as jnp

from cfp.analysis.layout import SegmentKernels
from cfp.analysis.strategies import FactorAxes
from cfp.attention.call import refusal
from cfp.attention.kernels import KERNELS, ScoreMemory
from cfp.attention.matching.core import Core
from cfp.attention.matching.found import Letters, Tensor
from cfp.attention.matching.functions import (
    KEYS,
    LENGTHS,
    NAME,
    AttentionFunctions,
    Meaning,
    PassShapes,
    Shaped,
    Way,
    product,
)
from cfp.attention.matching.meaning import Proved, Reader, heads_of
from cfp.attention.matching.proof import prove
from cfp.attention.matching.region import Region, has_dropout, scores_of
from cfp.attention.matching.values import FLOATS, Values, values_of
from cfp.attention.problem import AttentionProblem
from cfp.attention.strategy import AttentionStrategy
from cfp.errors import CfpError
from cfp.program.constants import NotConstant
from cfp.program.graph import Op, Program, numpy_dtype, searched_once
from cfp.program.replace import (
    Different,
    LeftAlone,
    Replacement,
    Sites,
    Stage,
    Use,
    is_in_order,
)

ROUNDS = frozenset({"ring", "zigzag"})  # Keys come in parts.
GATHERED = frozenset({"all_gather"})
_QUERIES = ROUNDS | GATHERED  # Roles of axes that shard queries.
_DROPOUT = "dropout: random numbers enter its scores or weights"


@dataclass(frozen=True, kw_only=True)
class Match:
    """An attention of a program that a kernel may compute.

    Attributes:
        op: the contraction that makes the scores.
        source: source line.
        scores: the value of the scores.
        sizes: of each letter.
        between: ids of the values between contractions, scores, weights and their
            gradients, which kernels do not make.
        ops: all ops that belong to it.
        passes: each proved pass; a backward pass has all three gradients.
    """

    op: int
    source: str
    scores: Tensor
    sizes: Mapping[str, int]
    between: frozenset[int]
    ops: frozenset[int]
    passes: tuple[Proved, ...]
    problem: AttentionProblem

    @property
    def meaning(self) -> Meaning:
        """The attention that its first pass computes."""
        return self.passes[0].meaning


def was_searched(program: Program) -> bool:
    """True if the program was searched for attentions, as kernels require."""
    return (attentions,) in program.looked_for


@searched_once
def attentions(program: Program) -> Sites[Match]:
    """All of a program, by the ops that make scores; proved."""
    found = [*_written_out(program)]
    matches = {one.op: one for one in found if isinstance(one, Match)}
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
        except (Different, NotConstant) as error:
            is_random = any(map(has_dropout, regions))
            reason = _DROPOUT if is_random else str(error)
            if isinstance(error, NotConstant):
                reason = f"a constant of it is not evaluated: {error}"
            yield LeftAlone(first, dots[first].source, reason)


def _match(
    program: Program, values: Values, dots: Sequence[Op], regions: list[Region]
) -> Match:
    """Proves an attention; adds the ops on the way to its regions."""
    passes: list[Proved] = []
    sizes: dict[str, int] = {}
    ops: set[int] = set()
    for dot in dots:
        regions.append(region := Region(values, dot))
        region.grow()
        own = region.passes()
        for t in (t for one in own for t in (*one.reads.values(), *one.makes.values())):
            shape = program.shape(t.value)
            sizes.update((x, n) for x, n in zip(t.letters, shape, strict=True) if x)
        for one in own:
            core = Core(region, one)
            table, passes_hidden = prove(core)
            passes.append(Reader(core, table, sizes).proved(passes_hidden))
        ops |= {dot.id, *region.inside, *region.sinks}
        if region.weights_gradient is not None:
            ops.add(region.weights_gradient.id)
    backward = [one for one in passes if one.one.is_backward]
    if len(passes) == len(backward) or len(backward) > 1:
        raise Different("its gradients are computed more than once")
    [scores] = dots[0].results
    found = Match(
        op=dots[0].id,
        source=dots[0].source,
        scores=Tensor(scores, None, regions[0].letters(scores)),
        sizes=sizes,
        between=frozenset().union(*(region.between for region in regions)),
        ops=frozenset(ops),
        passes=tuple(passes),
        problem=_problem(program, passes, sizes),
    )
    stages = (s for one in replacements(program, found, Way("xla")) for s in one.stages)
    if not all(is_in_order(program, stage) for stage in stages):
        raise Different("what it reads is made after what it makes")
    return found


def _problem(
    program: Program, passes: Sequence[Proved], sizes: Mapping[str, int]
) -> AttentionProblem:
    """An attention as a problem for kernels."""
    first = passes[0]
    meaning, heads = first.meaning, heads_of(first.one)
    every = [one.meaning for one in passes]
    batch = [x for x in sizes if x[0] == "b" and x != heads]
    groups = [x for x in sizes if x[0] == "q" and x != meaning.tokens]
    kv_heads = sizes.get(heads, 1)
    values = [program.values[first.one.reads[name].value] for name in ("q", "k", "v")]
    dtype = jnp.result_type(*(numpy_dtype(value.dtype) for value in values))
    outputs = [x.one.makes["out"].value for x in passes if not x.one.is_backward]
    return AttentionProblem(
        batch=product(sizes, batch),
        queries=sizes.get(meaning.tokens, 1),
        keys=sizes["k"],
        heads=kv_heads * product(sizes, groups),
        kv_heads=kv_heads,
        head_dim=max(sizes.get("d", 1), sizes.get("e", 1)),
        dtype=str(dtype),
        causal=all(one.causal for one in every),
        left=meaning.left,
        segments=(by_key := any(one.has(KEYS) or one.has(LENGTHS) for one in every)),
        hides_keys=by_key,
        bias=any(one.is_dense for one in every),
        rounds_output=any(_is_kept_wide(program, v, dtype) for v in outputs),
        scale=meaning.scale,
    )


def _is_kept_wide(program: Program, v: int, dtype: Any) -> bool:
    """True if a value, or what views of it become, is used in a wider dtype."""
    views = ("convert", "transpose", "reshape")

    def is_wide(v: int) -> bool:
        return numpy_dtype(program.values[v].dtype).itemsize > dtype.itemsize

    made = program.made_of([v], lambda op: op.kind in views and is_wide(op.results[0]))
    users = (program.ops[op] for w in made for op, _ in program.users[w])
    is_used = any(op.kind not in views for op in users)
    return is_wide(v) and (is_used or not made.isdisjoint(program.outputs))


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
    if kernels.attention not in KERNELS:
        return "it is no kernel of attention"
    if match.op not in axes:
        return "nothing says how it is sharded"
    rule, spread = program.ops[match.op].known_rule, kernels.spread or "all_gather"
    dims = zip(rule.results[0], match.scores.letters, strict=True)
    letters = {rule.major(factors): letter for factors, letter in dims}
    heads, roles = heads_of(match.passes[0].one), list[tuple[str, str]]()
    for factor, names in enumerate(axes[match.op]):
        letter = letters.get(factor, "")
        for axis in names:
            if letter == match.meaning.tokens:
                roles.append((axis, spread))
            elif letter and letter == heads:
                roles.append((axis, "heads"))
            elif letter.startswith("b"):
                roles.append((axis, "batch"))
            else:
                return f"axis {axis} shards neither sequences, nor heads, nor queries"
    if kernels.spread and spread not in [role for _, role in roles]:
        return f"no axis shards queries for a {spread}"
    return Way(kernels.attention, tuple(roles))


def refusal_of(
    problem: AttentionProblem, way: Way, sizes: Mapping[str, int], platform: str
) -> str | None:
    """Returns the reason why a problem cannot be computed in a way, or None."""
    if problem.dtype == "float64":
        return "kernels compute in float32 at most, and it is in float64"
    try:
        strategy = AttentionStrategy.of(dict(way.roles) or None, dict(sizes))
    except CfpError as error:
        return str(error)
    return refusal(problem, strategy, KERNELS[way.implementation], platform)


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
    """Returns the replacements that compute all passes of an attention in a way.

    A backward pass goes on from the last forward pass in its body, if both are the
    same attention of the same operands; otherwise it computes that again.
    """
    forward = [one for one in match.passes if not one.one.is_backward]
    backward = [one for one in match.passes if one.one.is_backward]
    partner = next(
        (p for p in reversed(forward) if any(_are_one(p, b) for b in backward)), None
    )
    groups = [[one, *backward] if one is partner else [one] for one in forward]
    groups += [backward] if backward and partner is None else []
    return tuple(_replacement(program, match, way, own) for own in groups)


def _are_one(forward: Proved, backward: Proved) -> bool:
    """True if a backward pass is that of a forward pass in the same body."""
    cores = forward.core, backward.core
    plain = [replace(p.meaning, passes_hidden=False) for p in (forward, backward)]
    sides = [[t.value for t in one.reads] for one in (forward, backward)]
    numbers = [[cores[0].values.number((v, ())) for v in own] for own in sides]
    return (
        cores[0].parent == cores[1].parent
        and plain[0] == plain[1]
        and numbers[0] == numbers[1]
        and all(cores[0].roots[x] == cores[1].roots[x] for x in ("q", "k", "v"))
    )


def _precision(program: Program, match: Match) -> str:
    """Returns the highest precision of the products of an attention."""
    ops = [program.ops[op] for op in match.ops]
    texts = [op.attributes for op in ops if op.kind == "dot_general"]
    for name in ("HIGHEST", "HIGH"):
        if any(f"precision {name}>" in text for text in texts):
            return name.lower()
    return "default"


def _replacement(
    program: Program, match: Match, way: Way, passes: Sequence[Proved]
) -> Replacement:
    stages: list[Stage] = []
    passed: list[PassShapes] = []
    for proved in passes:
        one = proved.one
        tensors = [*(one.reads[name] for name in ("q", "k", "v")), *proved.reads]
        is_backward = one.is_backward
        if is_backward:
            tensors.append(one.reads["dout"])
        first = min(program.values[t.value].producer for t in one.makes.values())
        uses = tuple(_early(program, t.use, first) for t in tensors if t.use)
        assert len(uses) == len(tensors), "all that is read is read by an op"
        stages.append(Stage(uses, tuple(t.value for t in one.makes.values())))
        values = [program.ops[op].operands[index] for op, index in uses]
        reads = tuple(
            _shaped(program, v, t.letters) for v, t in zip(values, tensors, strict=True)
        )
        makes = tuple(_shaped(program, t.value, t.letters) for t in one.makes.values())
        # A backward pass that follows no forward one computes it like its gradient.
        out = reads[-1] if is_backward else makes[0]
        passed.append(
            PassShapes(is_backward, reads, makes, passed[0].out if passed else out)
        )
    functions = AttentionFunctions(
        passes[-1].meaning,
        way,
        heads_of(passes[0].one),
        tuple(sorted(match.sizes.items())),
        tuple(passed),
        _precision(program, match),
    )
    return Replacement(NAME, match.op, tuple(stages), functions)


def _early(program: Program, use: Use, first: int) -> Use:
    """Returns the use of a value, or of its original if it is widened behind an op."""
    op, index = use
    value = program.values[program.ops[op].operands[index]]
    if value.producer < first or program.ops[value.producer].kind != "convert":
        return use
    narrow = program.values[program.ops[value.producer].operands[0]]
    sizes = [numpy_dtype(one.dtype).itemsize for one in (narrow, value)]
    if narrow.dtype not in FLOATS or sizes[0] >= sizes[1]:
        return use
    return _early(program, (value.producer, 0), first)


def _shaped(program: Program, v: int, letters: Letters) -> Shaped:
    value = program.values[v]
    return value.shape, numpy_dtype(value.dtype).name, letters
