"""The presets: classic strategies, as choices for any program.

No preset knows a model: each mesh axis plays a role (:mod:`cfp.presets.roles`).

The compiler's propagation makes choices, too, from sharded arguments. A person who
shards by hand gives each parameter its largest dim, and the batch to tokens and
activations. Propagation then mixes strategies: the weights of a wide MLP are larger
than the activations and stay in place, while attention's are gathered. cfp reads
Shardy's result at each block's anchor as the block's strategy, and measures its parts
like others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from cfp.analysis.blocks import Block
from cfp.analysis.layout import Choice, Frame, Layout, Storage, lay_out
from cfp.analysis.strategies import (
    NONE,
    AxisChoice,
    Spec,
    Strategy,
    axis_choices,
    splits_together,
)
from cfp.presets.roles import ROLES, axis_walk
from cfp.program.constrain import propagate
from cfp.program.graph import searched_once
from cfp.program.rules import Dims, Rule

# Whose strategies the others fall back to; REPLICATED where it shards nothing.
DATA_PARALLEL, REPLICATED = "data_parallel", "replicated"

# In a step that updates nothing it is data parallelism.
ZERO1 = "zero1"

# The presets that need no axis of their own: what every axis does, and the storage.
PRESETS = {
    DATA_PARALLEL: ("data", Storage.USED),
    ZERO1: ("data", Storage.OPTIMIZER),
    "fully_sharded": ("data", Storage.SHARDED),
    "hsdp": ("data", Storage.INNER),
    "tensor_parallel": ("tensor", Storage.USED),
    "tensor_sequence_parallel": ("sequence", Storage.USED),
    "expert_parallel": ("expert", Storage.USED),
}

# What others call them.
_ALIASES = {
    DATA_PARALLEL: ("ddp", "dp", "data", "replicated"),
    ZERO1: ("zero_1", "zero2", "zero_2"),
    "fully_sharded": ("fsdp", "fsdp2", "zero3", "zero_3"),
    "tensor_parallel": ("tp", "megatron", "model_parallel"),
    "tensor_sequence_parallel": ("sp", "sequence_parallel"),
    "expert_parallel": ("ep",),
}
ALIASES = {alias: name for name, known in _ALIASES.items() for alias in known}


@searched_once
def presets(frame: Frame) -> dict[str, Choice]:
    """Every preset that makes sense for a program on its mesh, by name.

    Presets that come out equal to an earlier one (experts in a program without
    any) are left out. Where data parallelism finds no batch to shard, it is called
    what it is then: replicated; on one device that is all there is.
    """
    if not frame.mesh:
        return {REPLICATED: preset(frame, (), Storage.USED)}
    found: dict[Choice, str] = {}
    for name, (role, storage) in PRESETS.items():
        choice = preset(frame, (role,) * len(frame.mesh), storage)
        if name == DATA_PARALLEL and _is_replicated(frame, choice):
            name = REPLICATED
        found.setdefault(choice, name)
    for roles in product(ROLES, repeat=len(frame.mesh)):
        if len(set(roles)) == 1:
            continue
        for storage, suffix in ((Storage.USED, ""), (Storage.SHARDED, "+sharded")):
            pairs = zip(frame.mesh, roles, strict=True)
            name = ",".join(f"{axis}={role}" for (axis, _), role in pairs)
            found.setdefault(preset(frame, roles, storage), name + suffix)
    return {name: choice for choice, name in found.items()}


def plainest(named: Mapping[str, Choice]) -> Choice:
    """Picks data parallelism of some presets, or what it is where it shards nothing."""
    return named[DATA_PARALLEL if DATA_PARALLEL in named else REPLICATED]


def _is_replicated(frame: Frame, choice: Choice) -> bool:
    """Returns True if a choice shards no block of a program, and no argument."""
    if any(one != AxisChoice() for strategy in choice.blocks for one in strategy):
        return False
    layout = lay_out(frame, choice)
    return not any(any(layout.arg_spec(i)) for i in range(len(frame.program.args)))


def preset(frame: Frame, roles: Sequence[str], storage: Storage) -> Choice:
    """Makes the choice in which each mesh axis plays one role, with one storage.

    A step without an update has no state to shard: its parameters are stored as used.
    """
    storage = frame.effective(storage, frame.groups)
    axes = zip(frame.mesh, roles, strict=True)
    columns = [axis_walk(frame, role, size) for (_, size), role in axes]
    strategies = tuple(
        compatible(frame, block, tuple(column[block.index] for column in columns))
        for block in frame.blocks
    )
    return Choice(strategies, (storage,) * len(frame.groups))


def compatible(frame: Frame, block: Block, strategy: Strategy) -> Strategy:
    """A strategy without the later of two axes that do not split a factor together."""
    rule = frame.program.ops[block.anchor].known_rule
    kept: list[AxisChoice] = []
    for choice in strategy:
        kept.append(choice)
        if not splits_together(rule, frame.mesh[: len(kept)], kept):
            kept[-1] = AxisChoice()
    return tuple(kept)


# The batch is constrained on activations, or on arguments alone.
BY_HAND, FROM_ARGUMENTS = "propagated", "propagated_from_arguments"
PROPAGATED = (BY_HAND, FROM_ARGUMENTS)


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


@searched_once
def activations(frame: Frame) -> Mapping[int, Spec]:
    """The values that blocks share and data parallelism shards, and how it does.

    A residual stream, forward and backward: what several blocks read.
    """
    program = frame.program
    layout = lay_out(frame, data_parallel(frame))
    shared = {}
    for value in program.values:
        readers = {frame.block_of[op] for op, _ in program.users[value.id]} - {NONE}
        if value.producer >= 0 and len(readers) > 1:
            spec = layout.spec(value.id)
            if spec is not None and any(spec):
                shared[value.id] = spec
    return shared


def data_parallel(frame: Frame) -> Choice:
    """The choice in which every axis shards the batch, as far as there is one."""
    return preset(frame, ("data",) * len(frame.mesh), Storage.USED)


@searched_once
def propagated(frame: Frame) -> Mapping[str, Choice]:
    """Finds propagation's choices for sharded matrices, by name.

    Nothing where there is no state to shard, and no two alike.
    """
    if not frame.groups:
        return {}
    program = frame.program
    layout = lay_out(frame, data_parallel(frame))
    arguments = [layout.arg_spec(position) for position in range(len(program.args))]
    for group in frame.groups:
        used = arguments[group.args[0]]
        _, wide = frame.stored_specs(group, Storage.LARGEST, used)
        for position in group.args:
            arguments[position] = frame.pins.get(position, wide)
    outputs: list[Spec | None] = [None] * len(program.outputs)
    for output, position in frame.renewed.items():
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
    layout = Layout(frame, dict(enumerate(strategies)), {})

    def stored(mode: Storage) -> list[dict[int, Spec]]:
        return [layout.stored_specs(group, mode)[1] for group in frame.groups]

    largest = stored(Storage.LARGEST)
    mode = next(mode for mode in Storage if stored(mode) == largest)
    return Choice(strategies, (mode,) * len(frame.groups))


def _read_back(frame: Frame, block: Block, specs: Mapping[int, Spec]) -> Strategy:
    """Derives each axis's strategy in a block from the sharding of its anchor."""
    op = frame.program.ops[block.anchor]
    rule = op.known_rule
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
    """Derives an axis's role in an op from the factors that it shards.

    The axis splits a factor of the result that arrives sharded; otherwise a factor that
    is summed over, scattered as the result is sharded; otherwise any sharded factor of
    the operands.
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
