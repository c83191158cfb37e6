"""Attention as a kind of `cfp.kernels.kinds`: its matches, and kernels for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

import jax.numpy as jnp

from cfp.analysis.flow import Flow
from cfp.analysis.strategies import FactorAxes
from cfp.errors import CfpError
from cfp.kernels import chunked
from cfp.kernels.call import refusal
from cfp.kernels.core import Core, Steps
from cfp.kernels.functions import (
    NAME,
    AttentionFunctions,
    Letters,
    Meaning,
    PassShapes,
    Shaped,
    Way,
    common,
)
from cfp.kernels.problem import AttentionProblem, AttentionStrategy, AxisSizes
from cfp.kernels.proof import Proved, Reader, prove
from cfp.kernels.region import Region, has_dropout, scores_of, values_of
from cfp.kernels.registry import KERNELS, ScoreMemory
from cfp.program.graph import Op, Program, numpy_dtype, searched_once
from cfp.program.part import NotConstant
from cfp.program.replace import (
    Different,
    LeftAlone,
    Replacement,
    Sites,
    Stage,
    is_in_order,
)

_ROUNDS = frozenset({"ring", "zigzag"})  # Roles of axes along which keys rotate.
_QUERIES = _ROUNDS | {"all_gather"}  # Roles of axes that shard queries.
_FLOAT = 4  # Bytes of a number in float32.
# Share of an attention's products that a kernel computes under a causal mask. Rates of
# kernels count only these products.
_CAUSAL_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Match:
    """A proved attention in a program, which a kernel may compute.

    Attributes:
        op: id of the contraction that makes the scores.
        source: file and line of the first product that needs the problem's dtype.
        letters: names of the scores' dims, see `core.ORDER`.
        sizes: {letter: size}.
        between: ids of scores, weights and their gradients, which kernels do not make.
        ops: ids of all ops of the attention.
        passes: proved forward passes, if any; then the backward pass, if any.
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


@dataclass(frozen=True, slots=True)
class Span:
    """Range of op ids, first to last, around the ops of a pass; others may be inside.

    Attributes:
        working_bytes: bytes per device for the pass, without the original operands.
        counted: ids of the pass's results that `working_bytes` includes.
    """

    first: int
    last: int
    working_bytes: int
    counted: tuple[int, ...]


def usual(platform: str, for_memory: bool) -> tuple[str, ...]:
    """Default kernels, best first; `for_memory` adds kernels that only save memory."""
    # decisions.md, "Kernels that compute the same are taken without being asked for".
    fast = ("cudnn",) if platform in ("gpu", "cuda", "rocm") else ()
    return (*fast, "chunked") if for_memory else fast


def variants(allowed: Sequence[str]) -> list[list[str]]:
    """Lists [[NAME...], ["NAME ring"...]] of allowed kernels, if they are attention's.

    NAME gathers keys if queries are sharded. "NAME ring" needs that, and rotates keys.
    """
    known = [name for name in allowed if name in KERNELS]
    return [known, [f"{name} ring" for name in known]]


@searched_once
def find(program: Program) -> Sites[Match]:
    """Finds a program's attentions, by the id of the op that makes scores.

    Scores that the backward pass recomputes are a separate attention. Attentions that
    are not proved are listed with a reason.
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
                reason = f"a constant cannot be evaluated: {error}"
            elif has_dropout(region):
                reason = "dropout: random numbers enter the scores or weights"
            left.append(LeftAlone(dot.id, dot.source, reason))
    return Sites(found, tuple(left))


def _match(region: Region) -> Match:
    """Proves that a region is an attention; else raises Different or NotConstant."""
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
    problem, held = _problem(program, passes, sizes), _held(passes)
    is_second = problem.rounds_output or problem.dtype != common([held["q"], held["k"]])
    product = program.ops[cores[0].reads["v"].use[0]] if is_second else dot
    found = Match(
        op=dot.id,
        source=product.source,
        letters=cores[0].steps[cores[0].scores].letters,
        sizes=sizes,
        between=frozenset(w for v in own - results for w in region.values.standing(v)),
        ops=frozenset({*region.inside, *region.sinks, *(op.id for op in made)}),
        passes=tuple(passes),
        problem=problem,
    )
    made = AttentionProposal(found, Way("xla")).replacements(program)
    if not all(is_in_order(program, stage) for one in made for stage in one.stages):
        raise Different("the kernel would run before one of its operands exists")
    return found


def _problem(
    program: Program, passes: Sequence[Proved], sizes: Mapping[str, int]
) -> AttentionProblem:
    first, every = passes[0], [one.meaning for one in passes]
    meaning, dtype = first.meaning, common(_held(passes).values())
    batch = [x for x in sizes if x[0] == "b" and x != meaning.heads]
    groups = [x for x in sizes if x[0] == "q" and x != meaning.tokens]
    kv_heads = sizes.get(meaning.heads, 1)
    wide = [_is_output_wide(program, x.core, jnp.dtype(dtype)) for x in passes]
    by_key = any(one.sides and one.by_key for one in every)
    return AttentionProblem(
        batch=prod(sizes[x] for x in batch),
        queries=sizes.get(meaning.tokens, 1),
        keys=sizes["k"],
        heads=kv_heads * prod(sizes[x] for x in groups),
        kv_heads=kv_heads,
        head_dim=max(sizes.get("d", 1), sizes.get("e", 1)),
        dtype=dtype,
        causal=all(one.causal for one in every),
        left=meaning.left,
        segments=by_key,
        hides_keys=by_key,
        bias=any(one.sides and not one.by_key for one in every),
        rounds_output=any(wide),
        scale=meaning.scale,
    )


def _held(passes: Sequence[Proved]) -> dict[str, str]:
    """Names of dtypes that hold the operands of all passes' products, by name."""
    every = [one.core.dtypes for one in passes]
    return {name: common([one[name] for one in every]) for name in every[0]}


def _is_output_wide(program: Program, core: Core, dtype: Any) -> bool:
    """True if a pass's output or its gradient is used in a wider dtype."""
    if core.is_backward:
        held = jnp.dtype(core.narrowest(core.reads["dout"].use))
        return held.itemsize > dtype.itemsize
    v, views = core.makes["out"].value, ("convert", "transpose", "reshape")

    def is_wide(v: int) -> bool:
        return numpy_dtype(program.values[v].dtype).itemsize > dtype.itemsize

    def is_view(op: Op) -> bool:
        return op.kind in views and is_wide(op.results[0])

    made = {*Flow(program).made_of([v], is_view)}
    users = (program.ops[op] for w in made for op, _ in program.users[w])
    is_used = any(op.kind not in views for op in users)
    return is_wide(v) and (is_used or not made.isdisjoint(program.outputs))


def propose(
    program: Program, match: Match, kernel: str, axes: Mapping[int, FactorAxes]
) -> AttentionProposal | str:
    """Proposes a kernel for an attention; or returns why a layout does not allow it.

    Args:
        kernel: a name out of `variants`.
        axes: {op id: mesh axes of each factor of its sharding rule}.
    """
    if match.op not in axes:
        return "the layout has no sharding for it"
    implementation, _, ring = kernel.partition(" ")
    rule, spread = program.ops[match.op].known_rule, ring or "all_gather"
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
                return f"axis {axis} shards neither batch, key heads nor queries"
    if ring and spread not in [role for _, role in roles]:
        return f"no axis shards queries for a {spread}"
    return AttentionProposal(match, Way(implementation, tuple(roles)))


def read(match: Match, how: Sequence[str]) -> AttentionProposal:
    """Reads words of `Way.how`; raises PlanMismatch for an unknown kernel or role."""
    return AttentionProposal(match, Way.read(how))


@dataclass(frozen=True, slots=True)
class AttentionProposal:
    """A kernel to replace an attention; implements `cfp.kernels.kinds.Proposal`."""

    site: Match
    way: Way

    @property
    def _scores(self) -> ScoreMemory:
        return KERNELS[self.way.implementation].scores

    @property
    def keeps_between(self) -> bool:
        """True if the kernel keeps scores for the backward pass.

        With sharded queries the gradients use the rows' log-sum-exp, and no scores.
        """
        return self._scores is ScoreMemory.ALL and not self._axes(_QUERIES)

    def share_at_once(self, sizes: AxisSizes) -> float:
        """Share of a device's scores in memory at once; 0 for tiles and chunks."""
        if self._scores is not ScoreMemory.ALL:
            return 0.0  # Chunks are counted by `spans`.
        return 1 / prod(sizes[axis] for axis in self._axes(_ROUNDS))

    def kernel_ms(self, matmul_ms: float, memory_ms: float) -> float:
        """Estimates ms by `matmul_ms` of the original products; ignores `memory_ms`."""
        share = _CAUSAL_SHARE if self.site.problem.causal else 1.0
        return matmul_ms * share / KERNELS[self.way.implementation].matmul_share

    def refusal(self, sizes: AxisSizes, platform: str) -> str | None:
        """Reason why devices of a platform cannot compute the proposal, or None."""
        reason = refusal_of(self.site.problem, self.way, sizes, platform)
        if reason is None or self.site.problem.dtype != "float32":
            return reason
        held = _held(self.site.passes)
        is_first = common([held["q"], held["k"]]) == "float32"
        wide = "q, k and v" if is_first else "v and the attention weights"
        least = next((x for x in held.values() if x != "float32"), "bfloat16")
        narrow = replace(self.site.problem, dtype=least)
        can = refusal_of(narrow, self.way, sizes, platform) is None
        return reason + f"; to use it, cast {wide} to {least}" * can

    def replacements(self, program: Program) -> tuple[Replacement, ...]:
        """Replacements that compute all passes.

        A backward pass uses residuals of the last forward pass in its body that is the
        same attention of the same operands. Without one it repeats the forward pass.
        """
        passes = self.site.passes
        forward = [one for one in passes if not one.core.is_backward]
        backward = [one for one in passes if one.core.is_backward]
        own = [one for one in forward if [_is_of(one)] == [*map(_is_of, backward)]][-1:]
        groups = [[one, *(backward if one in own else [])] for one in forward]
        groups += [backward] if backward and not own else []
        return tuple(_replacement(program, self, group) for group in groups)

    def spans(self, program: Program, sizes: AxisSizes) -> list[Span]:
        """Lists each pass's span, with its memory; [] for kernels but "chunked"."""
        found = list[Span]()
        if self._scores is not ScoreMemory.CHUNKS:
            return found
        for one in (proved.core for proved in self.site.passes):
            made = tuple(t.value for t in one.makes.values())
            makers = [program.values[v].producer for v in made]
            first = min(makers + [t.use[0] for t in one.reads.values()])
            needed = self.working_bytes(sizes, one.is_backward)
            counted = made if one.is_backward else ()
            found.append(Span(first, max(makers), needed, counted))
        return found

    def working_bytes(self, sizes: AxisSizes, is_backward: bool) -> int:
        """Bytes per device for a chunked pass, without the original pass's operands.

        A backward pass also counts the forward output and float32 gradients.
        """
        problem = self.site.problem

        def ranks(roles: Iterable[str]) -> int:
            return prod(sizes[axis] for axis in self._axes(roles))

        own = jnp.dtype(problem.dtype).itemsize
        batch = problem.batch / ranks(("batch",))
        heads, kv_heads = (
            batch * ceil(n / ranks(("heads",)))
            for n in (problem.heads, problem.kv_heads)
        )
        queries = _whole_chunks(problem.queries / ranks(_QUERIES))
        keys = _whole_chunks(problem.keys / ranks(_ROUNDS))
        rows, columns = min(queries, chunked.CHUNK), min(keys, chunked.CHUNK)
        has_loops = max(queries, keys) > chunked.CHUNK
        scores = heads * rows * columns
        # Numbers in the rows of a query position and of a key position.
        query, key = heads * problem.head_dim, kv_heads * problem.head_dim
        # Products are in float32, and their inputs in the operands' type.
        if not is_backward:
            chunks = rows * query * (own + _FLOAT) + 2 * columns * key * own
            needed = scores * (_FLOAT + own) + queries * query * _FLOAT
            return round(needed + has_loops * chunks)
        chunks = rows * query * (3 * own + _FLOAT) + 2 * columns * key * (own + _FLOAT)
        needed = 2 * scores * (_FLOAT + own) + has_loops * chunks
        needed += queries * query * (own + _FLOAT) + 2 * keys * key * _FLOAT
        if ranks(_ROUNDS) > 1:
            # The next keys and values, and gradients: received and new ones.
            needed += 2 * keys * key * (own + 2 * _FLOAT)
        return round(needed)

    def _axes(self, roles: Iterable[str]) -> list[str]:
        return [axis for axis, role in self.way.roles if role in roles]


def _whole_chunks(tokens: float) -> int:
    """Rounds a number of tokens up: to whole chunks, if beyond one chunk."""
    whole, chunk = ceil(tokens), chunked.CHUNK
    return whole if whole <= chunk else ceil(whole / chunk) * chunk


def refusal_of(
    problem: AttentionProblem, way: Way, sizes: AxisSizes, platform: str
) -> str | None:
    """Reason why a kernel with roles (`way`) cannot compute a problem, or None."""
    if problem.dtype == "float64":
        return "kernels compute in float32 at most, and the attention is in float64"
    if problem.rounds_output:
        return (
            f"it would round the output, which it makes in {problem.dtype}; to use it, "
            f"cast the output to {problem.dtype}"
        )
    try:
        strategy = AttentionStrategy.of(dict(way.roles) or None, dict(sizes))
    except CfpError as error:
        return str(error)
    return refusal(problem, strategy, KERNELS[way.implementation], platform)


def _is_of(proved: Proved) -> tuple[Any, ...]:
    """Key that is equal for a forward pass and its backward pass in one body."""
    core, values = proved.core, proved.core.every.values
    sides = [values.number((t.value, ())) for t in proved.reads]
    roots = [core.roots[x] for x in ("q", "k", "v")]
    meaning = replace(proved.meaning, passes_hidden=False)
    return core.parent, meaning, sides, roots, core.dtypes  # Roots are not rounded.


def _precision(program: Program, match: Match) -> str:
    """Highest precision of an attention's products, by JAX's name."""
    ops = [program.ops[op] for op in match.ops]
    texts = [op.attributes for op in ops if op.kind == "dot_general"]
    for name in ("HIGHEST", "HIGH"):
        if any(f"precision {name}>" in text for text in texts):
            return name.lower()
    return "default"


def _replacement(
    program: Program, proposal: AttentionProposal, passes: Sequence[Proved]
) -> Replacement:
    match = proposal.site
    stages: list[Stage] = []
    passed: list[PassShapes] = []
    for proved in passes:
        one = proved.core
        tensors = [*(one.reads[name] for name in ("q", "k", "v")), *proved.reads]
        tensors += [one.reads["dout"]] if one.is_backward else []
        first = min(program.values[t.value].producer for t in one.makes.values())
        uses = tuple(one.early(t.use, first) for t in tensors)
        stages.append(Stage(uses, tuple(t.value for t in one.makes.values())))
        values = (program.ops[op].operands[index] for op, index in uses)
        read = zip(values, tensors, strict=True)
        reads = tuple(_shaped(program, v, t.letters) for v, t in read)
        makes = tuple(_shaped(program, t.value, t.letters) for t in one.makes.values())
        # A backward pass without a forward pass has an output like its gradient.
        out = reads[-1] if one.is_backward else makes[0]
        out = passed[0].out if passed else out
        passed.append(PassShapes(one.is_backward, reads, makes, out))
    functions = AttentionFunctions(
        passes[-1].meaning,
        proposal.way,
        tuple(sorted(match.sizes.items())),
        tuple(passed),
        common(_held(passes).values()),
        _precision(program, match),
    )
    return Replacement(NAME, match.op, tuple(stages), functions)


def _shaped(program: Program, v: int, letters: Letters) -> Shaped:
    value = program.values[v]
    return value.shape, numpy_dtype(value.dtype).name, letters
