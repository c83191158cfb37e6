"""A block that is compiled alone sends what its ops' factors say, and nothing else.

*The block* is all of its ops: the anchor, the ops behind it, the contractions that
differentiation derived from it, and the ops before those in the backward pass. They are
cut out of the step and compiled as a program of their own. What enters comes as the
block's first reader of it wants it, and what leaves does so as the block makes it, so
that nothing is resharded at the boundary. Outside stand the updates of parameters,
which follow their storage, and all that is between this block and others.

Expected inside are, from the rules alone:

- A reduction for each op that sums over a factor which the strategy splits. Of a
  strategy that splits no contracted factor of the anchor those are not the anchor, but
  what sums over the same index elsewhere: the gradient of a weight whose batch is
  split, of a bias, the statistics of a norm. One block's reductions stay apart: the
  pass that packs several into one is switched off.
- Gathering of a tensor that the block makes split in a dim which an op inside it needs
  whole. There are two reasons, and a test below holds that there are no others: the
  anchor's sum is scattered (the derived contractions then need the cotangent whole), or
  an op's own rule does not let the dim pass (a cumulative sum along it, a reshape that
  puts it behind another).
- An exchange of a lookup's columns for rows, and back for its gradient, where the
  strategy says so.

XLA's CPU backend turns a reduce-scatter into an all-reduce and a slice, so both count
as reductions here; of their bytes the operand's count.
"""

from collections import Counter
from functools import cache
from math import prod

import pytest

from cfp.analysis.analyze import build_frame
from cfp.analysis.layout import Layout, constraints
from cfp.analysis.segments import block_fingerprint
from cfp.analysis.storage import spec_ways
from cfp.analysis.strategies import NONE, block_strategies, describe
from cfp.models import build
from cfp.profiling.hlo import collectives_in
from cfp.program.part import cut_part, lower_part
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.support.checking import make_mesh
from cfp_test.support.covering import at_night, cover_values

MODELS = ("gpt", "moe", "bert", "llama")
MESHES = {"x4": (("x", 4),), "x2y2": (("x", 2), ("y", 2))}
SMALL = {
    "layers": 2,
    "batch": 8,
    "seq": 8,
    "hidden": 16,
    "heads": 4,
    "vocab": 32,
    "dtype": "float32",
}
MORE = {"moe": {"experts": 4, "expert_group_size": 16}}
APART = {
    "xla_disable_hlo_passes": "all-reduce-combiner,cpu-all-reduce-combiner",
    "xla_backend_optimization_level": 0,
}


@cache
def frame_of(model, sizes):
    fn, args = build(model, **SMALL, **MORE.get(model, {}))
    step = flatten_step(fn, args, donate_argnums=(0,))
    return build_frame(trace(step, make_mesh(sizes))[0], sizes)


def kind_of(frame, block):
    """Returns a key that blocks share whose ops are the same."""
    ops = Counter(
        (frame.program.ops[i].name, frame.program.ops[i].rule) for i in block.ops
    )
    return block_fingerprint(frame.program, block), frozenset(ops.items())


def distinct(frame, known=()):
    """One block of each kind; none of those kinds that other programs have, too."""
    seen = {kind_of(other, block) for other in known for block in other.blocks}
    found = {}
    for block in frame.blocks:
        kind = kind_of(frame, block)
        if kind not in seen:
            found.setdefault(kind, block)
    return list(found.values())


def local_bytes(layout, value, spec):
    size = layout.frame.program.values[value].size_bytes
    return size // spec_ways(spec, layout.frame.mesh)


def ways(frame, axes):
    return prod(dict(frame.mesh)[name] for name in axes)


def reductions(layout, block):
    """(kind, bytes of the larger side, group size) for each sum to be completed.

    XLA has no collective that reduces pairs (the largest number and its index): it
    gathers what each device has found, and reduces that on all of them.
    """
    program = layout.frame.program
    for op_id in block.ops:
        op = program.ops[op_id]
        group = ways(layout.frame, layout.unreduced(op))
        for index, result in enumerate(op.results if group > 1 else ()):
            size = local_bytes(layout, result, layout.natural_spec(op, index))
            if len(op.results) == 1:
                yield "reduction", size, group
            else:
                yield "all-gather", size * group, group


def moves(layout, block):
    """(value, how it is made, how it is read, reader) where the two differ, inside."""
    program = layout.frame.program
    made = {r for i in block.ops for r in program.ops[i].results}
    for op_id in block.ops:
        op = program.ops[op_id]
        for index, value in enumerate(op.operands):
            have, wanted = layout.spec(value), layout.use_spec(op_id, index)
            if value in made and None not in (have, wanted) and have != wanted:
                yield value, have, wanted, (op, index)


def gathers(layout, block):
    """(kind, bytes of the result, group size) of each gathering inside."""
    found = {(v, have, wanted) for v, have, wanted, _ in moves(layout, block)}
    for value, have, wanted in found:
        split = [{a: d for d, dim in enumerate(s) for a in dim} for s in (have, wanted)]
        gone = split[0].keys() - split[1].keys()
        if gone:
            size = local_bytes(layout, value, wanted)
            yield "all-gather", size, ways(layout.frame, gone)
        moved = [
            a for a in split[0].keys() & split[1].keys() if split[0][a] != split[1][a]
        ]
        if moved:
            yield (
                "all-to-all",
                local_bytes(layout, value, have),
                ways(layout.frame, moved),
            )


def compiled_alone(layout, block):
    program, mesh = layout.frame.program, make_mesh(layout.frame.mesh)
    part = cut_part(program, block.ops)

    def whole(value):
        return ((),) * len(program.values[value].shape)

    lowered = lower_part(
        program,
        part,
        mesh,
        constraints(layout, set(part.ops)),
        [layout.read_spec(v) or whole(v) for v in part.inputs],
        [layout.spec(v) or whole(v) for v in part.outputs],
    )
    return collectives_in(lowered.compile(compiler_options=APART).as_text())


def differing(frame, blocks, wanted=lambda strategy: True):
    """Blocks and strategies that send something else than expected."""
    found, checked = {}, 0
    for block in blocks:
        anchor = frame.program.ops[block.anchor]
        for strategy in block_strategies(frame.program, block, frame.mesh):
            if not wanted(strategy):
                continue
            layout = Layout(frame, {block.index: strategy}, {})
            got = Counter()
            for c in compiled_alone(layout, block):
                kind = c.kind
                if kind in ("all-reduce", "reduce-scatter"):
                    kind = "reduction"
                add(got, kind, c.bytes, c.group_size, c.count)
            expected = Counter()
            for one in (*reductions(layout, block), *gathers(layout, block)):
                add(expected, *one)
            checked += 1
            if got != expected:
                name = f"{block.name}: {describe(anchor, frame.mesh, strategy)}"
                found[name] = (got - expected, expected - got)
    assert checked
    return found


def add(sent, kind, size, group, count=1):
    """Counts a collective; a sum over two axes as one over each, as XLA may do it."""
    if kind == "reduction":
        group, count = 2, count * (group.bit_length() - 1)
    sent[kind, size, group] += count


def is_inner(strategy):
    """Returns True if no sum is scattered."""
    return all(choice.exit == NONE for choice in strategy)


def splits_no_sum(frame, block, strategy):
    rule = frame.program.ops[block.anchor].rule
    return not any(choice.inner in rule.reduction for choice in strategy)


@pytest.mark.parametrize("model", ["gpt", *at_night(MODELS[1:])])
def test_each_kind_of_block(model):
    """On one axis, without scattered sums; the rest is for the night."""
    frame = frame_of(model, MESHES["x4"])
    before = [frame_of(m, MESHES["x4"]) for m in MODELS[: MODELS.index(model)]]
    assert differing(frame, distinct(frame, before), is_inner) == {}


@cover_values(model=MODELS, mesh=MESHES)
def test_members_reduce_what_their_factors_say(model, mesh):
    """A contraction's partial sums follow from the anchor's strategy by its factors."""
    frame = frame_of(model, MESHES[mesh])
    program = frame.program
    for block in distinct(frame):
        for strategy in block_strategies(program, block, frame.mesh):
            layout = Layout(frame, {block.index: strategy}, {})
            for member in block.members:
                op = program.ops[member.op]
                expected = {
                    name
                    for (name, _), choice in zip(frame.mesh, strategy, strict=True)
                    for factor in op.rule.reduction
                    if choice.inner != NONE and member.factors[factor] == choice.inner
                }
                assert set(layout.unreduced(op)) == expected, (block, strategy)


def needs_whole(frame, move):
    """Returns True if the op that reads a tensor cannot run split as the tensor is."""
    _, have, _, (op, index) = move
    for names, factors in zip(have, op.rule.operands[index], strict=True):
        major = op.rule.major(factors)
        if names and (major is None or major in op.rule.fixed):
            return True
        if names and not op.rule.splits_results(major):
            return True
        if names and op.rule.sizes[major] % ways(frame, names):
            return True
    return False


@cover_values(model=MODELS, mesh=MESHES)
def test_nothing_moves_inside_without_a_reason(model, mesh):
    """Without scattered sums a dim moves only for an op that needs it whole."""
    frame = frame_of(model, MESHES[mesh])
    quiet, blocks = 0, distinct(frame)
    for block in blocks:
        for strategy in filter(
            is_inner, block_strategies(frame.program, block, frame.mesh)
        ):
            layout = Layout(frame, {block.index: strategy}, {})
            found = list(moves(layout, block))
            stops = [m for m in found if needs_whole(frame, m)]
            assert bool(found) == bool(stops), (block, strategy, found)
            quiet += not found and splits_no_sum(frame, block, strategy)
    assert quiet > len(blocks)
