"""All attentions of a program, and what computes them under a layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax.numpy as jnp

from cfp.analysis.layout import SegmentKernels
from cfp.analysis.strategies import FactorAxes
from cfp.attention.call import refusal
from cfp.attention.kernels import KERNELS, ScoreMemory
from cfp.attention.matching.core import Steps
from cfp.attention.matching.functions import (
    NAME,
    AttentionFunctions,
    Letters,
    Meaning,
    PassShapes,
    Shaped,
    Way,
)
from cfp.attention.matching.meaning import Proved, Reader
from cfp.attention.matching.proof import prove
from cfp.attention.matching.region import (
    FLOATS,
    Region,
    has_dropout,
    scores_of,
    values_of,
)
from cfp.attention.problem import AttentionProblem, AttentionStrategy
from cfp.errors import CfpError
from cfp.program.graph import Program, numpy_dtype, searched_once
from cfp.program.part import NotConstant
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


@dataclass(frozen=True, kw_only=True)
class Match:
    """An attention of a program that a kernel may compute.

    Attributes:
        op: the contraction that makes the scores.
        source: source line.
        letters: of the dims of the scores.
        sizes: of each letter.
        between: ids of the values between contractions, scores, weights and their
            gradients, which kernels do not make.
        ops: all ops that belong to it.
        passes: each proved pass; a backward pass has all three gradients.
    """

    op: int
    source: str
    letters: Letters
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
    """All of a program, by the ops that make scores; proved.

    Scores that the backward pass recomputes are another attention.
    """
    values, left = values_of(program), list[LeftAlone]()
    found: dict[int, Match] = {}
    exponentials = (op for op in program.ops if op.kind == "exponential" and op.rule)
    dots = (scores_of(values, op) for op in exponentials)
    for dot in {dot.id: dot for dot in dots if dot is not None}.values():
        region = Region(values, dot)
        try:
            found[dot.id] = _match(region)
        except (Different, NotConstant) as error:
            reason = str(error)
            if isinstance(error, NotConstant):
                reason = f"a constant of it is not evaluated: {error}"
            elif has_dropout(region):
                reason = "dropout: random numbers enter its scores or weights"
            left.append(LeftAlone(dot.id, dot.source, reason))
    return Sites(found, tuple(left))


def _match(region: Region) -> Match:
    """Proves an attention."""
    program, dot = region.program, region.scores
    region.grow()
    steps = Steps(region)
    cores = steps.passes()
    sizes: dict[str, int] = {}
    for one in cores:
        for t in (*one.reads.values(), *one.makes.values()):
            shape = program.shape(t.value)
            sizes.update((x, n) for x, n in zip(t.letters, shape, strict=True) if x)
    passes = [Reader(core, prove(core), sizes).proved() for core in cores]
    made = [step.op for step in steps.found.values()]
    results = {t.value for core in cores for t in core.makes.values()}
    own = {v for op in made for v in op.results} | region.members | region.stacks
    found = Match(
        op=dot.id,
        source=dot.source,
        letters=cores[0].steps[cores[0].scores].letters,
        sizes=sizes,
        between=frozenset(w for v in own - results for w in region.values.standing(v)),
        ops=frozenset({*region.inside, *region.sinks, *(op.id for op in made)}),
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
    first, every = passes[0], [one.meaning for one in passes]
    meaning, reads = first.meaning, first.core.reads
    batch = [x for x in sizes if x[0] == "b" and x != meaning.heads]
    groups = [x for x in sizes if x[0] == "q" and x != meaning.tokens]
    kv_heads = sizes.get(meaning.heads, 1)
    dtypes = [program.values[reads[name].value].dtype for name in ("q", "k", "v")]
    dtype = jnp.result_type(*map(numpy_dtype, dtypes))
    outputs = [x.core.makes["out"].value for x in passes if not x.core.is_backward]
    by_key = any(one.sides and one.by_key for one in every)
    return AttentionProblem(
        batch=prod(sizes[x] for x in batch),
        queries=sizes.get(meaning.tokens, 1),
        keys=sizes["k"],
        heads=kv_heads * prod(sizes[x] for x in groups),
        kv_heads=kv_heads,
        head_dim=max(sizes.get("d", 1), sizes.get("e", 1)),
        dtype=str(dtype),
        causal=all(one.causal for one in every),
        left=meaning.left,
        segments=by_key,
        hides_keys=by_key,
        bias=any(one.sides and not one.by_key for one in every),
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
    dims = zip(rule.results[0], match.letters, strict=True)
    letters = {rule.major(factors): letter for factors, letter in dims}
    heads, roles = match.meaning.heads, list[tuple[str, str]]()
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
    forward = [one for one in match.passes if not one.core.is_backward]
    backward = [one for one in match.passes if one.core.is_backward]
    own = [one for one in forward if [_is_of(one)] == [*map(_is_of, backward)]][-1:]
    groups = [[one, *(backward if one in own else [])] for one in forward]
    groups += [backward] if backward and not own else []
    return tuple(_replacement(program, match, way, own) for own in groups)


def _is_of(proved: Proved) -> tuple[Any, ...]:
    """Returns a key, equal for a forward pass and its backward pass in one body."""
    core, values = proved.core, proved.core.every.values
    sides = [values.number((t.value, ())) for t in proved.reads]
    roots = [core.roots[x] for x in ("q", "k", "v")]
    return core.parent, replace(proved.meaning, passes_hidden=False), sides, roots


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
        one = proved.core
        tensors = [*(one.reads[name] for name in ("q", "k", "v")), *proved.reads]
        tensors += [one.reads["dout"]] if one.is_backward else []
        first = min(program.values[t.value].producer for t in one.makes.values())
        uses = tuple(_early(program, t.use, first) for t in tensors)
        stages.append(Stage(uses, tuple(t.value for t in one.makes.values())))
        values = (program.ops[op].operands[index] for op, index in uses)
        read = zip(values, tensors, strict=True)
        reads = tuple(_shaped(program, v, t.letters) for v, t in read)
        makes = tuple(_shaped(program, t.value, t.letters) for t in one.makes.values())
        # A backward pass that follows no forward one computes it like its gradient.
        out = reads[-1] if one.is_backward else makes[0]
        out = passed[0].out if passed else out
        passed.append(PassShapes(one.is_backward, reads, makes, out))
    functions = AttentionFunctions(
        passes[-1].meaning,
        way,
        tuple(sorted(match.sizes.items())),
        tuple(passed),
        _precision(program, match),
    )
    return Replacement(NAME, match.op, tuple(stages), functions)


def _early(program: Program, use: Use, first: int) -> Use:
    """Returns the use of a value, or of its original if it is widened behind an op."""
    while True:
        value = program.values[program.ops[use[0]].operands[use[1]]]
        maker = program.maker(value.id)
        if maker is None or maker.id < first or maker.kind != "convert":
            return use
        narrow = program.values[maker.operands[0]]
        if narrow.dtype not in FLOATS or narrow.size_bytes >= value.size_bytes:
            return use
        use = maker.id, 0


def _shaped(program: Program, v: int, letters: Letters) -> Shaped:
    value = program.values[v]
    return value.shape, numpy_dtype(value.dtype).name, letters
