"""The work of a step, as the counts that its throughput is told by."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from math import prod

from cfp.analysis.blocks import Block
from cfp.analysis.contractions import is_contraction
from cfp.analysis.flow import Flow
from cfp.analysis.layout import Frame
from cfp.program.graph import Op, Program, call_flops, op_flops, product_dtype

_NARROW = ("bf16", "f16")
_INTEGERS = ("i8", "i16", "i32", "i64", "ui8", "ui16", "ui32", "ui64")
_LONG = ("cholesky", "custom_call", "fft", "sort", "triangular_solve")
# What a FLOP saves in FP8, and a quantized number takes, on an H200 (docs/fp8.md).
_SAVED_MS, _QUANTIZED_MS = 0.71e-12, 1.65e-9
# What leaves the rows of a table as they are, or takes some of them.
_ROWS_PASS = ("broadcast_in_dim", "convert", "dynamic_slice", "reshape", "slice")


def model_work(frame: Frame, batch: dict[int, int]) -> dict[str, float]:
    """Returns a step's FLOPs and batch as a plan's counts.

    Args:
        batch: positions of the arguments that hold a batch, with the ranks of their
            first dims; see `cfp.presets.arguments.data_arguments`.

    Returns:
        ``model_flops`` of a step, without rematerialization by the step itself;
        ``narrow_share``, the part in types of 16 bits; ``fp8_share``, the part in FP8;
        ``fp8_saves_ms``, what it saves each device by estimate;
        ``devices_by_hand``, the largest number of devices in a region that the user
        sharded by hand; ``batch_samples``, and ``batch_tokens`` if integers of the
        batch look up several rows of a table of parameters for each sample;
        ``uncounted_loops``, the number of loops with products and of unknown length, of
        which one iteration counts. Unknown counts are absent.
    """
    program = frame.program
    flops = program_flops(program) - rematerialized_flops(program, frame.blocks)
    if not flops:
        return {}
    found: dict[str, float] = {"model_flops": float(flops)}
    found["narrow_share"] = _share(program, (*_NARROW, "f8"))
    if program.rewritten.products:
        share = found["fp8_share"] = _share(program, ("f8",))
        casts = [op for op in program.ops if op.kind == "convert"]
        made = [(program.values[op.results[0]], op.repeat) for op in casts]
        numbers = sum(prod(v.shape) * times for v, times in made if "f8" in v.dtype)
        saved_ms = _SAVED_MS * share * flops - _QUANTIZED_MS * numbers
        found["fp8_saves_ms"] = saved_ms / prod(size for _, size in frame.mesh)
    regions = (op.manual for op in program.ops if op.manual and op.manual.flops)
    if (most := max((one.devices for one in regions), default=1)) > 1:
        found["devices_by_hand"] = float(most)
    if loops := uncounted_loops(program):
        found["uncounted_loops"] = float(len(loops))
    rows = [program.args[p] for p, rank in batch.items() if not rank]
    others = {program.shape(v) for p, v in enumerate(program.args) if p not in batch}
    if sizes := [_samples(program, v, others) for v in rows if program.shape(v)]:
        samples = max(set(sizes), key=sizes.count)
        found["batch_samples"] = float(samples)
        tables = [v for p, v in enumerate(program.args) if p not in batch]
        tokens = max(_looked_up(program, rows, tables), default=0)
        if tokens > samples:
            found["batch_tokens"] = float(tokens)
    return found


def _samples(program: Program, v: int, others: Set[tuple[int, ...]]) -> int:
    """Counts the samples of an argument: rows, or rows of all microbatches.

    A loop over microbatches carries no value with their rows; a loop over time steps
    does.

    Args:
        others: shapes of values that are no data, such as sums of gradients.
    """
    first, *rest = program.shape(v)
    readers = [*Flow(program).readers(v)]
    if not rest or not all(
        op.kind == "dynamic_slice"
        and op.parent >= 0
        and program.shape(op.results[0])[0] == 1 < first
        for op, _ in readers
    ):
        return first
    loops = (program.ops[op.parent] for op, _ in readers)
    carried = {program.shape(c) for loop in loops for c in loop.results}
    carried -= {*others, (first, *rest)}
    carries_rows = any(shape[:1] == (rest[0],) for shape in carried)
    return rest[0] * (1 if carries_rows else first)


def uncounted_loops(program: Program) -> list[Op]:
    """Lists loops with products whose number of iterations is unknown.

    Loops without products, such as for random numbers, take next to no time.
    """
    return [op for op in program.ops if op.uncounted and _is_long(program, op)]


def long_branches(program: Program) -> list[Op]:
    """Lists branches with products, or other long work such as a factorization."""
    return [
        op for op in program.ops if op.kind in ("case", "if") and _is_long(program, op)
    ]


def _is_long(program: Program, op: Op) -> bool:
    """True if there is more in an op's regions than elementwise work and sums."""
    return any(
        is_contraction(one) or call_flops(one) > 0 or one.kind in _LONG
        for one in map(program.ops.__getitem__, op.body)
    )


def _looked_up(
    program: Program, rows: Iterable[int], tables: Iterable[int]
) -> Iterator[int]:
    """Yields the number of table rows that each lookup takes in one step.

    Only tokens count: integers of two dims or more that look up rows of an argument.
    Other integers index edges' nodes, places of a sparse array, or labels.
    """
    values, flow = program.values, Flow(program)

    def is_index(v: int) -> bool:
        return values[v].dtype in _INTEGERS

    def indices(op: Op) -> bool:
        return all(map(is_index, op.results))

    def of_a_table(op: Op) -> bool:
        return op.kind in _ROWS_PASS

    start = [v for v in rows if is_index(v) and len(values[v].shape) >= 2]
    index = {*flow.made_of(start, indices)}
    table = {*flow.made_of(tables, of_a_table)}
    for op in program.ops:
        if op.kind != "gather" or op.operands[0] not in table:
            continue
        # Of each index the last dim has the row, and zeros of the other dims, if any.
        count = prod(values[op.operands[1]].shape[:-1])
        width = prod(values[op.operands[0]].shape[1:])
        is_row = width > 1 and prod(values[op.results[0]].shape) == count * width
        if is_row and op.operands[1] in index and not program.in_uncounted(op.id):
            yield count * op.repeat


def _share(program: Program, dtypes: Collection[str]) -> float:
    """Returns the share of FLOPs in contractions of these types."""
    total = meant = 0.0
    for op in program.ops:
        if op.manual is not None:
            share = _share(op.manual.program, dtypes)
        elif is_contraction(op):
            share = float(product_dtype(program, op) in dtypes)
        else:
            continue
        flops = model_flops(program, op)
        total += flops
        meant += share * flops
    return meant / total if total else 0.0


def program_flops(program: Program) -> int:
    """Counts floating-point operations of one step: two for each multiply-add.

    Contractions count, as often as their loops run; elementwise ops and reductions do
    not. An unsharded custom_partitioning op counts, too. Of ragged products those of
    each row's own group count.
    """
    every = (op for op in program.ops if is_contraction(op) or call_flops(op))
    return sum(model_flops(program, op) for op in every)


def rematerialized_flops(program: Program, blocks: Sequence[Block]) -> int:
    """Counts the part of `program_flops` that the step itself rematerializes.

    ``jax.checkpoint`` counts; rematerialization by a plan is no part of the program.
    """
    again = [
        program.ops[member.op]
        for block in blocks
        for member in block.members[1:]  # The first is the anchor.
        if not member.derived
    ]
    return sum(model_flops(program, op) for op in again if is_contraction(op))


# -------------------------------------------------------------------- ragged products

# :func:`jax.lax.ragged_dot` multiplies each row by the matrix of its group alone. XLA
# multiplies every row with every matrix: of each group it has a copy of the rows, with
# zeros in place of those of other groups. That takes the time of all these products,
# but the model asks for those of each row's own group only.

_SAME = ("convert", "optimization_barrier")


def model_flops(program: Program, op: Op) -> int:
    """Counts the floating-point operations of `op_flops` that the model needs.

    Products of rows with matrices of other groups, which are zeros, do not count.
    """
    if op.manual is not None:
        inner = op.manual.program
        saved = sum(
            op_flops(inner, one) - model_flops(inner, one)
            for one in inner.ops
            if one.manual is not None or is_contraction(one)
        )
        return (op.manual.flops - saved) * op.manual.devices * op.repeat
    flops = op_flops(program, op)
    if op.kind != "dot_general" or not is_contraction(op):
        return flops
    rule = op.known_rule
    groups = {
        rule.major(rule.operands[index][dim])
        for index, value in enumerate(op.operands)
        for dim in _group_dims(program, value)
    }
    return flops // prod(rule.sizes[factor] for factor in groups if factor is not None)


def _group_dims(program: Program, value: int) -> list[int]:
    """Lists the dims of a masked value along which there are copies, one of a group.

    The mask has from where to where the rows of a group are, by the number of a row.
    """
    op, transposes = _behind(program, value, _SAME)
    if op is None or op.kind != "select" or not program.is_leaf(op.operands[2]):
        return []
    mask, copies, _ = op.operands
    both = program.maker(mask)
    if both is None or both.kind != "and":
        return []
    bounds = [_bound_dims(program, one) for one in both.operands]
    fresh = _fresh_dims(program, copies)
    return _transposed([d for d in fresh if all(d in b for b in bounds)], transposes)


def _bound_dims(program: Program, value: int) -> list[int]:
    """Lists the dims that bounds are of, where a value compares them with numbers."""
    op = program.maker(value)
    if op is None or op.kind != "compare":
        return []
    leaves = [program.is_leaf(v) for v in op.operands]
    if sorted(leaves) != [False, True]:
        return []
    bound = op.operands[leaves.index(False)]
    fresh, rank = _fresh_dims(program, bound), len(program.shape(bound))
    return [dim for dim in range(rank) if dim not in fresh] if fresh else []


def _fresh_dims(program: Program, value: int) -> list[int]:
    """Lists the dims along which a value holds copies of another one."""
    op, transposes = _behind(program, value, ())
    if op is None or op.kind != "broadcast_in_dim":
        return []
    kept = op.integers("broadcast_dimensions")
    rank = len(program.shape(value))
    return _transposed([dim for dim in range(rank) if dim not in kept], transposes)


def _behind(
    program: Program, value: int, same: Collection[str]
) -> tuple[Op | None, list[Op]]:
    """The op that makes a value, before transposes, the last first, and ops `same`."""
    transposes = []
    while (op := program.maker(value)) and op.kind in ("transpose", *same):
        transposes += [op] if op.kind == "transpose" else []
        value = op.operands[op.results.index(value)]
    return op, transposes


def _transposed(dims: list[int], transposes: list[Op]) -> list[int]:
    """Returns the places of a value's dims behind transposes, the last one first."""
    for op in reversed(transposes):
        dims = [n for n, dim in enumerate(op.integers("permutation")) if dim in dims]
    return dims
