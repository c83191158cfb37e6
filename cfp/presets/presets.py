"""The presets: classic strategies, as choices for any program.

None of them knows a model: each mesh axis plays a role (:mod:`cfp.presets.roles`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from cfp.analysis.blocks import Block
from cfp.analysis.layout import Choice, Frame, Storage, lay_out
from cfp.analysis.strategies import NONE, AxisChoice, Strategy
from cfp.presets.roles import ROLES, axis_walk

# The presets that need no axis of their own: what every axis does, and the storage.
PRESETS = {
    "data_parallel": ("data", Storage.USED),
    "zero1": ("data", Storage.OPTIMIZER),
    "fully_sharded": ("data", Storage.SHARDED),
    "tensor_parallel": ("tensor", Storage.USED),
    "tensor_sequence_parallel": ("sequence", Storage.USED),
    "expert_parallel": ("expert", Storage.USED),
}

# Whose strategies the others fall back to; REPLICATED where it shards nothing.
DATA_PARALLEL, REPLICATED = "data_parallel", "replicated"

# What others call them.
ALIASES = {
    "ddp": "data_parallel",
    "dp": "data_parallel",
    "data": "data_parallel",
    "replicated": "data_parallel",
    "zero_1": "zero1",
    "zero2": "zero1",
    "zero_2": "zero1",
    "fsdp": "fully_sharded",
    "fsdp2": "fully_sharded",
    "zero3": "fully_sharded",
    "zero_3": "fully_sharded",
    "hsdp": "fully_sharded",
    "tp": "tensor_parallel",
    "megatron": "tensor_parallel",
    "model_parallel": "tensor_parallel",
    "sp": "tensor_sequence_parallel",
    "sequence_parallel": "tensor_sequence_parallel",
    "ep": "expert_parallel",
}


def presets(frame: Frame) -> dict[str, Choice]:
    """Every preset that makes sense for a program on its mesh, by name.

    Presets that come out equal to an earlier one (experts in a program without
    any) are left out. Where data parallelism finds no batch to shard, it is called
    what it is then: replicated; on one device that is all there is.
    """
    if not frame.mesh:
        return {REPLICATED: preset(frame, (), Storage.USED)}
    found: dict[str, Choice] = {}
    for name, (role, storage) in PRESETS.items():
        roles = (role,) * len(frame.mesh)
        choice = preset(frame, roles, storage)
        if name == DATA_PARALLEL and _is_replicated(frame, choice):
            name = REPLICATED
        _add(found, name, choice)
    if len(frame.mesh) > 1:
        for roles in product(ROLES, repeat=len(frame.mesh)):
            if len(set(roles)) == 1:
                continue
            for storage, suffix in ((Storage.USED, ""), (Storage.SHARDED, "+sharded")):
                pairs = zip(frame.mesh, roles, strict=True)
                name = ",".join(f"{axis}={role}" for (axis, _), role in pairs)
                _add(found, name + suffix, preset(frame, roles, storage))
    return found


def plainest(named: Mapping[str, Choice]) -> Choice:
    """Picks data parallelism of some presets, or what it is where it shards nothing."""
    return named[DATA_PARALLEL if DATA_PARALLEL in named else REPLICATED]


def _is_replicated(frame: Frame, choice: Choice) -> bool:
    """Returns True if a choice shards no block of a program, and no argument."""
    plain = AxisChoice()
    if any(one != plain for strategy in choice.blocks for one in strategy):
        return False
    layout = lay_out(frame, choice)
    return not any(any(layout.arg_spec(i)) for i in range(len(frame.program.args)))


def _add(found: dict[str, Choice], name: str, choice: Choice) -> None:
    if choice not in found.values():
        found[name] = choice


def preset(frame: Frame, roles: Sequence[str], storage: Storage) -> Choice:
    """The choice in which each mesh axis plays one role.

    Args:
        frame: the program on its mesh.
        roles: one of :data:`cfp.presets.roles.ROLES` for each mesh axis.
        storage: how every storage group is kept.
    """
    axes = zip(frame.mesh, roles, strict=True)
    columns = [axis_walk(frame, role, size) for (_, size), role in axes]
    strategies = tuple(
        compatible(frame, block, tuple(column[block.index] for column in columns))
        for block in frame.blocks
    )
    return Choice(strategies, (storage,) * len(frame.groups))


def compatible(frame: Frame, block: Block, strategy: Strategy) -> Strategy:
    """A strategy without the later of two axes that do not split a factor together."""
    rule = frame.program.ops[block.anchor].rule
    assert rule is not None
    split: dict[int, int] = {}
    kept = []
    for (_, size), choice in zip(frame.mesh, strategy, strict=True):
        factors = {f for f in (choice.inner, choice.exit) if f != NONE}
        if not all(rule.splits(f, split.get(f, 1) * size) for f in factors):
            kept.append(AxisChoice())
            continue
        for f in factors:
            split[f] = split.get(f, 1) * size
        kept.append(choice)
    return tuple(kept)
