"""The purposes of a step's arguments: a batch, parameters, state, random keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from cfp.analysis.contractions import DimClasses, is_contraction
from cfp.analysis.layout import Frame
from cfp.analysis.storage import is_gradient
from cfp.program.graph import Value, op_flops, searched_once

# Of these a batch has some (labels, tokens, masks, edges), and weights have none.
_COUNTED = ("i32", "i64", "i1")

# JAX's random keys are so many numbers of 32 bits, in their last dim.
_KEY_SIZES = ((2,), (4,))

# Ops that give a number the shape and dtype of what it is combined with.
_SHAPING = ("broadcast_in_dim", "reshape", "convert")


@searched_once
def data_arguments(frame: Frame) -> dict[int, int]:
    """Positions of the arguments that hold a batch, as far as structure tells.

    State is no data, nor is anything that is passed along with it in one argument.
    Of the other arguments of the step those are data whose leaves agree in their
    first dim, as the leaves of a batch do and those of a set of weights do not, or
    of which some leaves are integers (nodes and edges of a graph, tokens and
    their positions). Where nothing is state, the argument with the most leaves holds
    the weights. Where weights are no state and nothing else is data, state is of which
    all leaves agree in their first dim, as the beams of a search do. What a step hands
    back as it is may be either: data if all leaves agree in their first dim, and with
    that of other data. Where all of this finds nothing, state is data that is not
    trained and has the dim of the batch first, as environments that a policy acts in
    (:func:`_rows_of_state`).

    Returns:
        For each position the rank of its first dim: 0 for the size that most leaves of
        an argument agree in, or the first of several, and 1 for the others.
    """
    program = frame.program
    root_of = [name.partition("/")[0] for name in program.arg_names]
    roots: dict[str, list[int]] = {}
    for position, root in enumerate(root_of):
        roots.setdefault(root, []).append(position)
    held = {root_of[p] for p in frame.group_of_arg.keys() - _handed_back(frame)}
    unsure = {root_of[p] for p in frame.group_of_arg} - held
    if not held and len(roots) > 1:
        largest = max(roots, key=lambda root: len(roots[root]))
        held = {largest} if len(roots[largest]) > 1 else set()
    found, carried, same, sizes, others = {}, {}, {}, set[int](), False
    for root, positions in roots.items():
        values = {p: program.values[program.args[p]] for p in positions}
        values = {p: v for p, v in values.items() if v.shape and not is_key(v)}
        leading = {p: v.shape[0] for p, v in values.items()}
        counted = any(v.dtype in _COUNTED for v in values.values())
        alike = len({*leading.values()}) == 1
        if root in held:
            carried |= dict.fromkeys(leading if alike else (), 0)
            continue
        others = others or bool(leading)
        if root in unsure:
            same |= leading if alike else {}
            continue
        if not leading or not (alike or counted):
            continue
        ((usual, _),) = Counter(leading.values()).most_common(1)
        found |= {p: int(size != usual) for p, size in leading.items()}
        sizes.add(usual)
    found |= {p: 0 for p, size in same.items() if not sizes or size in sizes}
    return found or (carried if others else {}) or _rows_of_state(frame)


def _rows_of_state(frame: Frame) -> dict[int, int]:
    """Positions of state that has rows: what is no parameter, nor kept for one.

    Parameters and an optimizer's moments are made new of gradients. Of the other state
    those leaves are rows whose first dim is a dim of the program's products, the most
    of them, and none of a parameter's dims: the number of environments, say, and not
    that of features of which means are kept.
    """
    program, outputs = frame.program, {*frame.program.outputs}
    trained = {
        position
        for group in frame.groups
        if any(is_gradient(program, v, outputs) for v in group.gradients)
        for position in group.args
    }
    classes = DimClasses(
        program, range(len(program.ops)), (), frame.canonical, axis_size=2
    )
    constant = _handed_back(frame)
    first: dict[Hashable, list[int]] = {}
    others: set[Hashable] = set()
    for position, value in enumerate(program.args):
        record = program.values[value]
        if is_key(record):
            continue
        is_row = position in frame.group_of_arg and position not in constant
        for dim in range(len(record.shape)):
            found = classes.of_dim(value, dim)
            if not is_row or position in trained:
                others.add(found)
            elif not dim:
                first.setdefault(found, []).append(position)
    flops = Counter[Hashable]()
    for op in filter(is_contraction, program.ops):
        factors = range(len(op.rule.sizes)) if op.rule is not None else ()
        for one in {classes.of_factor(op.id, factor) for factor in factors}:
            flops[one] += op_flops(program, op)
    rows = [one for one in first if one not in others and flops[one]]
    best = max(rows, key=lambda one: flops[one], default=None)
    return dict.fromkeys(first[best], 0) if best is not None else {}


def _handed_back(frame: Frame) -> set[int]:
    """Positions of arguments that are results, too, and nothing is made of them."""
    program = frame.program

    def is_result(position: int) -> bool:
        output = frame.paired[position]
        return output is not None and program.outputs[output] == program.args[position]

    groups = (group.args for group in frame.groups)
    return {p for args in groups if all(map(is_result, args)) for p in args}


def is_key(value: Value) -> bool:
    """Returns True if a value is a random key, or several, as numbers."""
    return value.dtype == "ui32" and value.shape[-1:] in _KEY_SIZES


@searched_once
def made_of_parameters(frame: Frame) -> list[bool]:
    """Finds for each value whether it is made of parameters and single numbers alone.

    A number that is unknown before the step runs, such as a scale of quantized weights,
    of a loss, or of an iteration, keeps a weight a weight.
    """
    program = frame.program
    is_number = [not value.shape for value in program.values]
    state = [False] * len(program.values)
    data = data_arguments(frame)
    for position, value in enumerate(program.args):
        state[value] = position not in data and not is_key(program.values[value])
    for op in program.ops:
        for v in (*op.operands, *op.entries):
            for outside, inside in program.entered(v):
                state[inside] = state[outside]
        numbers = all(is_number[v] for v in op.operands)
        if op.kind in _SHAPING and numbers:
            is_number[op.results[0]] = True
        reads = [v for v in op.operands if not is_number[v] and not program.is_leaf(v)]
        only = bool(reads) and all(state[v] for v in reads) and not op.has_regions
        for result in op.results:
            state[result] = only
    return state
