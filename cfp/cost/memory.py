"""Memory of a program: what stays throughout, or for the backward pass; temporaries.

A compiler keeps less than a backward pass reads: elementwise work runs again inside the
fusion that reads it. Results and operands of heavy ops must be in memory, and so must
arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import ceil, prod

import jax.numpy as jnp

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Frame, Layout, SegmentKernels, lay_out
from cfp.analysis.segments import Segment
from cfp.analysis.storage import spec_ways
from cfp.analysis.strategies import Spec
from cfp.attention import chunked
from cfp.attention.matching.functions import Way
from cfp.attention.matching.matches import (
    GATHERED,
    ROUNDS,
    Match,
    attentions,
    keeps_scores,
    way_of,
)
from cfp.attention.problem import AttentionProblem
from cfp.cost.fusion import FUSED, is_in_memory, uses_through
from cfp.presets.presets import data_parallel
from cfp.program.graph import Op, Program, searched_once
from cfp.program.rematerialize import CHEAP, makeable, rematerializable

# Of these the reader reads the tensor itself.
_MOVING = frozenset({"convert", "reshape", "transpose"})


@searched_once
def turning_point(frame: Frame) -> int:
    """Returns the id of the backward pass's first op, or the number of ops."""
    derived = [m.op for b in frame.blocks for m in b.members if m.derived]
    return min(derived, default=len(frame.program.ops))


def can_rematerialize(frame: Frame, segment: Segment) -> bool:
    """Returns True if a segment keeps anything that it might rematerialize instead."""
    return (
        rematerializable(frame.program, segment.ops, turning_point(frame)) is not None
    )


# --------------------------------------------------------------------- residuals


def residuals_under(
    layout: Layout, segment: Segment, remat: bool, kernels: SegmentKernels
) -> Set[int]:
    """Values that a segment keeps for the backward pass under a choice."""
    return residuals(layout.frame, segment.ops, remat) - values_eliminated_by_kernel(
        layout, segment.ops, kernels
    )


@searched_once
def residuals(frame: Frame, ops: tuple[int, ...], remat: bool = False) -> Set[int]:
    """Values that some ops keep from the forward to the backward pass.

    Args:
        remat: whether they are rematerialized: then they keep only what others read.
    """
    program, turn = frame.program, turning_point(frame)
    mine = {op for op in ops if op < turn and op not in program.leaf_ops}
    made = [v for op in sorted(mine) for v in program.ops[op].results]
    if remat:
        inside = set(ops)
        read = {
            v for v in made if any(user not in inside for user, _ in program.users[v])
        }
        return read - makeable(program, read).keys()
    read_late = [v for v in made if any(user >= turn for user, _ in program.users[v])]
    found = {v for v in read_late if _feeds_heavy(program, v, turn)}
    # The rest is made again of tensors that are in memory.
    stack = [v for v in read_late if v not in found]
    seen = {*program.args, *program.opened_entries}
    while stack:
        v = stack.pop()
        producer = program.values[v].producer
        if v in seen or producer in program.leaf_ops:
            continue
        seen.add(v)
        op = program.ops[producer] if producer in mine else None
        if op is None or op.kind not in CHEAP or _feeds_heavy(program, v, 0):
            found.add(v)
        else:
            stack += op.operands
    return found


def _feeds_heavy(program: Program, v: int, first: int) -> bool:
    """Returns True if a heavy op reads a value, at or behind some op."""
    uses = uses_through(program, v, lambda op, _: op.kind in _MOVING)
    return any(
        op.id >= first and op.kind not in CHEAP and op.kind != "reduce"
        for op, _ in uses
    )


def kernel_sites(
    layout: Layout, ops: Sequence[int], kernels: SegmentKernels
) -> list[tuple[Match, Way]]:
    """Returns the attentions that kernels compute, each with its way."""
    program = layout.frame.program
    matches = attentions(program).among(program, ops) if kernels.attention else []
    ways = [(one, way_of(program, one, kernels, layout.axes)) for one in matches]
    return [(one, way) for one, way in ways if isinstance(way, Way)]


def values_eliminated_by_kernel(
    layout: Layout, ops: Sequence[int], kernels: SegmentKernels
) -> set[int]:
    """Values that are not in memory any more where kernels compute some ops."""
    sites = kernel_sites(layout, ops, kernels)
    less = (match for match, way in sites if not keeps_scores(way))
    return set().union(*(match.between for match in less))


# ------------------------------------------------------------------------- bytes


def results_beside(frame: Frame) -> list[tuple[int, int | None]]:
    """Results that take no donated argument's place: they are there beside them.

    A compiler gives them memory for the whole of an execution. Copies are among them:
    arguments unchanged, and results again.

    Returns:
        For each its place among the results, and the argument that it is or renews.
    """
    program = frame.program
    positions = {v: position for position, v in enumerate(program.args)}
    renewed: dict[int, int] = {}
    for output, position in frame.renewed.items():
        # One value that renews two takes the first one's place.
        renewed.setdefault(program.outputs[output], position)
    in_host, seen = host_results(program), set[int]()
    found: list[tuple[int, int | None]] = []
    for place, v in enumerate(program.outputs):
        position = positions.get(v, renewed.get(v))
        donated = None if position is None else program.alias[position]
        is_new = v in seen or (donated is None and v not in in_host)
        if (donated != place) if v in positions else is_new:
            found.append((place, position))
        seen.add(v)
    return found


def host_results(program: Program) -> set[int]:
    """Values that a program returns in the memory of the host."""
    kinds = program.output_memory or ("",) * len(program.outputs)
    return {v for v, kind in zip(program.outputs, kinds, strict=True) if kind}


def host_bytes(layout: Layout, positions: Iterable[int]) -> tuple[int, int]:
    """Computes bytes of arguments in host memory, for each device.

    Args:
        positions: arguments; those in device memory do not count.

    Returns:
        Bytes in host memory between steps, and bytes that a step moves there and back.
    """
    program = layout.frame.program
    returned = host_results(program)
    kept = moved = 0
    for position in positions:
        if not any(program.arg_memory[position : position + 1]):
            continue
        value = program.args[position]
        size = value_bytes(layout, value, layout.arg_spec(position))
        output = layout.frame.paired[position]
        is_back = output is not None and program.outputs[output] in returned
        kept += size
        moved += size * (2 if is_back else 1)
    return kept, moved


def fixed_bytes(analysis: Analysis) -> tuple[int, int]:
    """Computes the bytes of arguments that are no state, and of such results.

    On each device; of results those beside the arguments count.
    """
    frame, state = analysis.frame, analysis.frame.group_of_arg
    layout = lay_out(frame, data_parallel(frame))
    given = (p for p in range(len(frame.program.args)) if p not in state)
    beside = (place for place, p in results_beside(frame) if p not in state)
    return sum(argument_bytes(layout, p) for p in given), result_bytes(layout, beside)


def result_bytes(layout: Layout, places: Iterable[int] | None = None) -> int:
    """Computes the bytes of some results, or of all that are beside arguments."""
    outputs = layout.frame.program.outputs
    places = dict(results_beside(layout.frame)) if places is None else places
    return sum(value_bytes(layout, outputs[p], layout.output_spec(p)) for p in places)


def argument_bytes(layout: Layout, position: int) -> int:
    """Computes the bytes of an argument on each device; none if the host has it."""
    program = layout.frame.program
    if any(program.arg_memory[position : position + 1]):
        return 0
    value = program.args[position]
    return value_bytes(layout, value, layout.arg_spec(position))


def accumulated_bytes(layout: Layout, segment: Segment) -> int:
    """Computes the bytes of a segment's sums over the iterations of an opened loop."""
    program, inside = layout.frame.program, set(segment.ops)
    return sum(
        value_bytes(layout, result, layout.spec(result))
        for loop in sorted(program.opened)
        for made, result in zip(
            program.ops[loop].yields, program.ops[loop].results, strict=True
        )
        if program.values[made].producer in inside and program.values[made].shape
    )


def value_bytes(layout: Layout, v: int, spec: Spec | None = None) -> int:
    """Computes the bytes of a value on each device.

    Args:
        spec: its sharding; None for its reader's, as a value that the forward pass
            gathers stays gathered.
    """
    spec = spec or layout.read_spec(v) or layout.spec(v) or ()
    size = layout.frame.program.values[v].size_bytes
    return ceil(size / spec_ways(spec, layout.frame.mesh))


# ------------------------------------------------------------------------- temporaries

# Ops are gone through in program order. A tensor is in memory from the op that makes it
# to the last one that reads it: what has memory of its own, and what is kept for the
# backward pass. A loop needs what it returns, such as the stacked gradients of its
# layers, and what one iteration does, which may have a forward pass in it that is
# rematerialized.

# Of one op: the tensors that it makes, and those that are not read after it.
Step = tuple[Sequence[int], Sequence[int]]


def peak_bytes(steps: Iterable[Step], size_of: Callable[[int], int]) -> int:
    """Computes the largest memory in use at once over some steps.

    Args:
        size_of: bytes of a tensor on a device; 0 if it is not made.
    """
    live = most = 0
    for made, freed in steps:
        live += sum(map(size_of, made))
        most = max(most, live)
        live -= sum(map(size_of, freed))
    return most


def steps_of(
    program: Program,
    ops: Iterable[int],
    held: Set[int],
    spans: Sequence[tuple[int, int]] = (),
) -> list[Step]:
    """Lists the ops of a segment, or of a loop's body, one after another.

    A loop's results are in memory before its body runs.

    Args:
        held: tensors that are kept for the backward pass.
        spans: ranges of op ids that run at once, whose operands stay until the last.
            Extra memory of the first span is tensor -1, of the second -2.
    """
    inside = set(ops)
    own = [span for span in spans if inside.issuperset(span)]
    made: dict[int, list[int]] = {op: [] for op in sorted(inside)}
    freed: dict[int, list[int]] = {op: [] for op in inside}
    for op in made.keys() - program.leaf_ops:
        for v in program.ops[op].results:
            if v in held or is_in_memory(program, v):
                made[op].append(v)
                read = max(op, _last_reader(program, v, inside))
                ends = (last for first, last in own if first <= read <= last)
                freed[max(ends, default=read)].append(v)
    for number, (first, last) in enumerate(spans, 1):
        if (first, last) in own:
            made[first].append(-number)
            freed[last].append(-number)
    steps: list[Step] = []
    for op, new in made.items():
        body = program.ops[op].body
        inner = [other for other in body if program.ops[other].parent == op]
        steps += [(new, ()), *steps_of(program, inner, held, spans), ((), freed[op])]
    return [step for step in steps if any(step)]


def _last_reader(program: Program, v: int, inside: Set[int]) -> int:
    """Finds the last op that reads a tensor, also through views."""

    def own(op_id: int) -> int:
        while op_id >= 0 and op_id not in inside:
            op_id = program.ops[op_id].parent
        return op_id

    def is_made_where_it_is_read(op: Op, w: int) -> bool:
        fuses = op.kind in FUSED and own(op.id) >= 0
        return fuses and not is_in_memory(program, w)

    uses = uses_through(program, v, is_made_where_it_is_read)
    return max((own(op.id) for op, _ in uses), default=-1)


# ----------------------------------------------------------------- attention in chunks

_FLOAT = 4  # Bytes of a number in float32.


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Ops in whose place an attention is computed: from the first to the last.

    Attributes:
        match: the op by which the attention is known.
    """

    match: int
    first: int
    last: int
    is_backward: bool


def spans_of(program: Program, match: Match) -> list[Span]:
    """Finds the passes in which a program computes an attention."""
    spans = []
    for one in (proved.core for proved in match.passes):
        readers = [t.use[0] for t in one.reads.values()]
        makers = [program.values[t.value].producer for t in one.makes.values()]
        first, last = min(readers + makers), max(makers)
        span = Span(match=match.op, first=first, last=last, is_backward=one.is_backward)
        spans.append(span)
    return spans


def working_bytes(
    problem: AttentionProblem, way: Way, sizes: Mapping[str, int], is_backward: bool
) -> int:
    """Computes a device's memory beside the values that a pass reads.

    For the backward pass that is the output, too; gradients, in float32, are counted.
    """

    def ranks(roles: Iterable[str]) -> int:
        return prod(sizes[axis] for axis, role in way.roles if role in roles)

    own = jnp.dtype(problem.dtype).itemsize
    batch = problem.batch / ranks(("batch",))
    heads, kv_heads = (
        batch * ceil(n / ranks(("heads",))) for n in (problem.heads, problem.kv_heads)
    )
    queries = _whole_chunks(problem.queries / ranks(ROUNDS | GATHERED))
    keys = _whole_chunks(problem.keys / ranks(ROUNDS))
    rows, columns = min(queries, chunked.CHUNK), min(keys, chunked.CHUNK)
    has_loops = max(queries, keys) > chunked.CHUNK
    scores = heads * rows * columns
    # Numbers for each query, and for each key.
    query, key = heads * problem.head_dim, kv_heads * problem.head_dim
    # Products are in float32, and what products read is in the type of the operands.
    if not is_backward:
        chunks = rows * query * (own + _FLOAT) + 2 * columns * key * own
        needed = scores * (_FLOAT + own) + queries * query * _FLOAT
        return round(needed + has_loops * chunks)
    chunks = rows * query * (3 * own + _FLOAT) + 2 * columns * key * (own + _FLOAT)
    needed = 2 * scores * (_FLOAT + own) + has_loops * chunks
    needed += queries * query * (own + _FLOAT) + 2 * keys * key * _FLOAT
    if ranks(ROUNDS) > 1:
        # The keys and values that follow, and of gradients what arrives and is new.
        needed += 2 * keys * key * (own + 2 * _FLOAT)
    return round(needed)


def _whole_chunks(tokens: float) -> int:
    """Rounds a number of tokens up to whole chunks."""
    whole, chunk = ceil(tokens), chunked.CHUNK
    return whole if whole <= chunk else ceil(whole / chunk) * chunk
