"""The presets: classic strategies, as choices for any program.

A choice is a strategy for each block, and a storage for each group of state. No preset
knows a model: each mesh axis plays a role (:mod:`cfp.analysis.roles`).

Two more presets imitate sharding by hand: most matrices are sharded along their largest
dim, the batch along its own, and Shardy propagates that. Propagation mixes strategies:
the weights of a wide MLP are larger than its activations and stay in place, while
attention's are gathered. Its sharding at each block's anchor is the block's strategy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from cfp.analysis.blocks import Block
from cfp.analysis.layout import Choice, Frame, Layout, Storage, lay_out
from cfp.analysis.roles import ROLES, axis_walk
from cfp.analysis.strategies import (
    NONE,
    AxisChoice,
    Spec,
    Strategy,
    axis_choices,
    splits_together,
)
from cfp.errors import OptionError, known_names
from cfp.program.constrain import propagate
from cfp.program.graph import searched_once
from cfp.program.rules import Dims, Rule

# The fallback of other presets; its name is REPLICATED if it shards nothing.
DATA_PARALLEL, REPLICATED = "data_parallel", "replicated"

# Equal to data parallelism in a step without an update.
ZERO1 = "zero1"

# Presets in which all axes play one role: (role, storage).
PRESETS = {
    DATA_PARALLEL: ("data", Storage.USED),
    ZERO1: ("data", Storage.OPTIMIZER),
    "fully_sharded": ("data", Storage.SHARDED),
    "hsdp": ("data", Storage.INNER),
    "tensor_parallel": ("tensor", Storage.USED),
    "tensor_sequence_parallel": ("sequence", Storage.USED),
    "expert_parallel": ("expert", Storage.USED),
}

# Names of the presets elsewhere.
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
    """Returns {name: choice} of a program's distinct presets, without `PROPAGATED`.

    All axes have one role, or each its own: ``x=data,y=tensor+sharded`` (all state is
    stored sharded). A preset equal to an earlier one is left out, such as experts if
    there are none. Data parallelism that shards nothing is called ``replicated``; one
    device has no other preset.
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
    """Returns the preset ``data_parallel``, or ``replicated`` if that is its name."""
    return named[DATA_PARALLEL if DATA_PARALLEL in named else REPLICATED]


def _is_replicated(frame: Frame, choice: Choice) -> bool:
    if any(one != AxisChoice() for strategy in choice.blocks for one in strategy):
        return False
    layout = lay_out(frame, choice)
    return not any(any(layout.arg_spec(i)) for i in range(len(frame.program.args)))


def preset(frame: Frame, roles: Sequence[str], storage: Storage) -> Choice:
    """Returns the choice for one role per mesh axis, and one storage for all state.

    `Frame.effective` may replace the storage. An axis that cannot split a block by its
    role replicates there.
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
    """Replicates along axes that cannot split a factor together with earlier axes."""
    rule = frame.program.ops[block.anchor].known_rule
    kept: list[AxisChoice] = []
    for choice in strategy:
        kept.append(choice)
        if not splits_together(rule, frame.mesh[: len(kept)], kept):
            kept[-1] = AxisChoice()
    return tuple(kept)


# Imitations of sharding by hand: with constraints on activations, and without.
PROPAGATED = BY_HAND, FROM_ARGUMENTS = "propagated", "propagated_from_arguments"


def named_choices(frame: Frame) -> dict[str, Choice]:
    """Returns `presets`, and those of `propagated` that differ: {name: choice}."""
    known = presets(frame)
    others = propagated(frame).items()
    return known | {n: c for n, c in others if c not in known.values()}


def check_preset(name: str | None) -> None:
    """Raises OptionError if a name is no preset's, nor AXIS=ROLE,...; None passes."""
    known = (*PRESETS, *PROPAGATED, REPLICATED)
    parts = str(name).removesuffix("+sharded").split(",")
    roles = {part.partition("=")[2] for part in parts}
    if name not in (None, *known) and not roles <= {*ROLES}:
        text = known_names(str(name), known, ALIASES)
        raise OptionError(f"There is no preset {name!r}. {text}")


@searched_once
def activations(frame: Frame) -> Mapping[int, Spec]:
    """Returns data parallelism's sharding {value id: spec} of values blocks share.

    Such a value is computed, and several blocks read it: a residual stream, forward and
    backward. Values that are not sharded are left out.
    """
    program = frame.program
    layout = lay_out(frame, data_parallel(frame))
    shared = {}
    for value in program.values:
        readers = {frame.block_of[op] for op, _ in program.users[value.id]} - {NONE}
        is_shared = value.producer >= 0 and len(readers) > 1
        if is_shared and any(spec := layout.spec(value.id) or ()):
            shared[value.id] = spec
    return shared


def data_parallel(frame: Frame) -> Choice:
    """Returns the choice that shards the batch, if any, over the axes that can."""
    return preset(frame, ("data",) * len(frame.mesh), Storage.USED)


@searched_once
def propagated(frame: Frame) -> Mapping[str, Choice]:
    """Returns {name: choice} of `PROPAGATED`, equal choices once; {} without state."""
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
    """Returns the choice with the first storage mode that shards as `LARGEST` does."""
    layout = Layout(frame, dict(enumerate(strategies)), {})

    def stored(mode: Storage) -> list[dict[int, Spec]]:
        return [layout.stored_specs(group, mode)[1] for group in frame.groups]

    largest = stored(Storage.LARGEST)
    mode = next(mode for mode in Storage if stored(mode) == largest)
    return Choice(strategies, (mode,) * len(frame.groups))


def _read_back(frame: Frame, block: Block, specs: Mapping[int, Spec]) -> Strategy:
    """Derives a block's strategy from the shardings {value id: spec} of its anchor."""
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
    """Returns the major factors of the dims that an axis shards under a spec."""
    majors = (
        rule.major(factors)
        for factors, names in zip(dims, spec, strict=False)
        if axis in names
    )
    return [factor for factor in majors if factor is not None]


def _axis_choice(
    rule: Rule, size: int, operands: list[list[int]], result: list[int]
) -> AxisChoice:
    """Derives an axis's choice in an op from the factors that it shards.

    First choice: a factor sharded in an operand and the result. Second: a summed one,
    its sums scattered along a sharded factor of the result, or else all-reduced. Third:
    any sharded factor. Choices not in `axis_choices` are skipped. Last: no split.
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
