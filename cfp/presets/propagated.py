"""The compiler's own propagation as choices: what it makes of sharded arguments.

A person who shards by hand gives each parameter its largest dim, and the batch to the
tokens and to the activations; the rest is propagation's. What comes of that mixes
strategies: of a wide MLP the weights are larger than the activations, so that they stay
where they are, and attention's are gathered. Shardy is asked, and what it says of each
block's anchor is read back as the block's strategy, so that its parts are measured and
mixed like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cfp.analysis.blocks import Block
from cfp.analysis.layout import Choice, Frame, Storage, lay_out
from cfp.analysis.specs import stored_spec
from cfp.analysis.storage import USUAL_STORAGE
from cfp.analysis.strategies import NONE, AxisChoice, Spec, Strategy, axis_choices
from cfp.presets.presets import PRESETS, compatible, preset, presets
from cfp.presets.roles import ROLES
from cfp.program.constrain import propagate
from cfp.program.rules import Dims, Rule

# The batch is constrained on activations, or on arguments alone.
BY_HAND, FROM_ARGUMENTS = "propagated", "propagated_from_arguments"
PROPAGATED = (BY_HAND, FROM_ARGUMENTS)


def propagated(frame: Frame) -> Mapping[str, Choice]:
    """Finds propagation's choices for sharded matrices, by name.

    Nothing where there is no state to shard, and no two alike.
    """
    known: dict[Any, Mapping[str, Choice]] = frame.program.looked_for.setdefault(
        "propagated", {}
    )
    key = frame.mesh, tuple(sorted(frame.pins.items()))
    if key not in known:
        known[key] = _propagated(frame)
    return known[key]


def named_choices(frame: Frame) -> dict[str, Choice]:
    """The presets, and what propagation makes that is none of them, by name."""
    known = presets(frame)
    others = propagated(frame).items()
    return known | {n: c for n, c in others if c not in known.values()}


def is_known(name: str) -> bool:
    """True if a preset has this name on some mesh, such as ``x=data,y=tensor``."""
    roles = [
        part.partition("=")[2] for part in name.removesuffix("+sharded").split(",")
    ]
    return name in PRESETS or name in PROPAGATED or {*roles} <= {*ROLES}


def activations(frame: Frame) -> Mapping[int, Spec]:
    """The values that blocks share and data parallelism shards, and how it does.

    A residual stream, forward and backward: what several blocks read.
    """
    known = frame.program.looked_for.setdefault("activations", {})
    if frame.mesh not in known:
        program = frame.program
        layout = lay_out(frame, _data_parallel(frame))
        shared = {}
        for value in program.values:
            readers = {frame.block_of[op] for op, _ in program.users[value.id]} - {NONE}
            if value.producer >= 0 and len(readers) > 1:
                spec = layout.spec(value.id)
                if spec is not None and any(spec):
                    shared[value.id] = spec
        known[frame.mesh] = shared
    return known[frame.mesh]


def _data_parallel(frame: Frame) -> Choice:
    return preset(frame, ("data",) * len(frame.mesh), Storage.USED)


def _propagated(frame: Frame) -> Mapping[str, Choice]:
    if not frame.groups:
        return {}
    program = frame.program
    layout = lay_out(frame, _data_parallel(frame))
    arguments = [layout.arg_spec(position) for position in range(len(program.args))]
    for group in frame.groups:
        used = arguments[group.args[0]]
        wide = stored_spec(
            group, Storage.LARGEST, used, frame.mesh, group.args[0] in frame.pins
        )
        for position in group.args:
            arguments[position] = frame.pins.get(position, wide)
    outputs: list[Spec | None] = [None] * len(program.outputs)
    for position, output in enumerate(frame.paired):
        if output is not None:
            outputs[output] = arguments[position]
    found: dict[str, Choice] = {}
    for name in PROPAGATED:
        values = activations(frame) if name == BY_HAND else {}
        specs = propagate(program, frame.mesh, arguments, outputs, values)
        strategies = tuple(
            compatible(frame, block, _read_back(frame, block, specs))
            for block in frame.blocks
        )
        choice = _stored_usually(frame, strategies)
        if choice not in found.values():
            found[name] = choice
    return found


def _stored_usually(frame: Frame, strategies: tuple[Strategy, ...]) -> Choice:
    """A choice with matrices along their largest dims, in a usual way if it is one."""
    modes = (Storage.LARGEST, *USUAL_STORAGE)
    ways = [Choice(strategies, (mode,) * len(frame.groups)) for mode in modes]
    layouts = [lay_out(frame, way) for way in ways]
    positions = range(len(frame.program.args))
    largest, *usual = [[*map(layout.arg_spec, positions)] for layout in layouts]
    pairs = zip(ways[1:], usual, strict=True)
    alike = [way for way, specs in pairs if specs == largest]
    return [*alike, ways[0]][0]


def _read_back(frame: Frame, block: Block, specs: Mapping[int, Spec]) -> Strategy:
    """Derives each axis's strategy in a block from the sharding of its anchor."""
    op = frame.program.ops[block.anchor]
    rule = op.rule
    assert rule is not None
    result = rule.results[0], specs.get(op.results[0], ())
    operands = [
        (dims, specs.get(value, ()))
        for value, dims in zip(op.operands, rule.operands, strict=False)
    ]
    return tuple(
        _axis_choice(
            rule,
            size,
            [_factors(rule, *operand, axis) for operand in operands],
            _factors(rule, *result, axis),
        )
        for axis, size in frame.mesh
    )


def _factors(rule: Rule, dims: Dims, spec: Spec, axis: str) -> list[int]:
    """The factors of a tensor's dims that an axis shards."""
    majors = (
        rule.major(factors)
        for factors, names in zip(dims, spec, strict=False)
        if axis in names
    )
    return [factor for factor in majors if factor is not None]


def _axis_choice(
    rule: Rule, size: int, operands: list[list[int]], result: list[int]
) -> AxisChoice:
    """Derives an axis's effect on an op from the factors that it shards.

    It splits a factor of the result that comes sharded so, or else one that is summed
    over, scattered as the result is sharded; or whatever is sharded of the operands.
    """
    arriving = [factor for factors in operands for factor in factors]
    summed = sorted({f for f in arriving if f in rule.reduction}, key=arriving.count)
    wishes = [AxisChoice(factor) for factor in result if factor in arriving]
    for factor in reversed(summed):
        wishes += [*(AxisChoice(factor, scattered) for scattered in result)]
        wishes.append(AxisChoice(factor))
    wishes += [AxisChoice(factor) for factor in (*result, *arriving)]
    allowed = axis_choices(rule, size)
    return next((wish for wish in wishes if wish in allowed), AxisChoice())
