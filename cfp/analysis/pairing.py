"""Pairs a step's outputs with the arguments whose new values they are."""

from __future__ import annotations

from cfp.analysis.flow import Flow
from cfp.analysis.numbering import squeeze
from cfp.program.graph import Program


def pair_outputs(program: Program, flow: Flow | None = None) -> tuple[int | None, ...]:
    """For each argument the output that is its new value, or None.

    Equal types with equal paths below the root say so; for arguments and results that
    have no path below the root, that the one is computed from the other elementwise.
    Donation speaks for the rest: JAX matches donated arguments with results by type
    alone, so it comes second.
    """
    flow = flow or Flow(program)
    paired: list[int | None] = [None] * len(program.args)
    taken: set[int] = set()
    by_path: dict[tuple, list[int]] = {}
    for index, name in enumerate(program.output_names):
        value = program.values[program.outputs[index]]
        for tail in {name, name.partition("/")[2]}:
            by_path.setdefault((tail, value.shape, value.dtype), []).append(index)
    for index, name in enumerate(program.arg_names):
        value = program.values[program.args[index]]
        tail = name.partition("/")[2]
        for candidate in by_path.get((tail, value.shape, value.dtype), ()):
            bare = not tail and not program.output_names[candidate].partition("/")[2]
            if candidate not in taken and not (
                bare and not _renews(flow, program.args[index], candidate)
            ):
                paired[index] = candidate
                taken.add(candidate)
                break
    for index, output in enumerate(program.alias):
        if paired[index] is None and output is not None and output not in taken:
            paired[index] = output
            taken.add(output)
    return tuple(paired)


def _renews(flow: Flow, arg: int, output: int) -> bool:
    """True if an output is an argument, or one with something added elementwise."""
    program = flow.program
    if program.outputs[output] == arg:
        return True
    shape = squeeze(program.values[arg].shape)
    stack, seen = [program.outputs[output]], set()
    reached = entered = False
    while stack:
        v = stack.pop()
        if v in seen:
            continue
        seen.add(v)
        reached = reached or v == arg
        sources = flow.sources(v)
        stack.extend(sources)
        producer = program.values[v].producer
        if sources or producer < 0 or producer in program.leaf_ops:
            continue
        op = program.ops[producer]
        plain = op.rule is not None and not (op.rule.reduction or op.rule.fixed)
        if plain and squeeze(program.values[op.results[0]].shape) == shape:
            stack.extend(op.operands)
        elif program.values[v].shape:
            entered = True
    return reached and entered
