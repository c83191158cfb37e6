"""A plan as rules from logical names of dims to axes of the mesh.

Libraries of models let each dim of a parameter have a name, and shard by rules such as
``("mlp", "x")``: for each tensor they go through the rules in order, and give the axes
of a rule to the dim of its name, unless another dim of the tensor has one of them.
A plan can be written so if every tensor wants the same axes for the same name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from cfp.errors import PlanMismatch, compose

if TYPE_CHECKING:
    from cfp.plan.plan import Plan

Names = tuple[str | None, ...]
Axes = tuple[str, ...]
Rules = tuple[tuple[str, Axes], ...]

_TRY = "cfp export --python, which names every argument by itself"


def names_by_path(plan: Plan, names: Sequence[Any]) -> dict[str, Names]:
    """Names of dims for a plan's arguments, by the arguments' paths.

    Args:
        plan: the plan.
        names: for each argument of the step that is not static a pytree like it, with
            a ``PartitionSpec`` of names in place of each array; None for an argument,
            or a part of one, without names.
    """
    roots = dict.fromkeys(path.partition("/")[0] for path in plan.arg_names)
    found: dict[str, Names] = {}
    for root, tree in zip(roots, names, strict=False):
        leaves = tree_flatten_with_path(
            tree, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
        )[0]
        for path, leaf in leaves:
            rest = keystr(path, simple=True, separator="/")
            if len(leaf):
                found[f"{root}/{rest}" if rest else root] = tuple(leaf)
    return found


def logical_rules(plan: Plan, names: Mapping[str, Sequence[str | None]]) -> Rules:
    """Rules that shard all tensors that have names as a plan does.

    Args:
        plan: the plan.
        names: for arguments, by path as in ``plan.arg_names``, a name for each dim, or
            None for a dim without.

    Returns:
        (name, axes) in order of precedence; names that stay whole have no axes.

    Raises:
        PlanMismatch: there are no names, or no such rules.
    """
    specs = dict(zip(plan.arg_names, plan.arg_specs, strict=True))
    known = {path: tuple(dims) for path, dims in names.items() if path in specs}
    if not any(any(dims) for dims in known.values()):
        what = f"{len(names)} names for other paths" if names else "none"
        raise PlanMismatch(
            compose(
                "The plan's arguments have no logical names.",
                expected=f"names for arguments such as {next(iter(specs), 'none')}",
                got=what,
                attempt=_TRY,
            )
        )
    axes: dict[str, tuple[Axes, str]] = {}
    for path, dims in known.items():
        spec = specs[path]
        if len(dims) != len(spec):
            _refuse(path, f"{len(spec)} names of dims", f"{dims}")
        for name, wanted in zip(dims, spec, strict=True):
            if not wanted:
                continue
            if name is None:
                _refuse(path, "a name for each dim that is sharded", f"{dims}, {spec}")
            elif name in axes and axes[name][0] != wanted:
                other, where = axes[name]
                _refuse(
                    path,
                    f"one sharding for the name {name!r}: {_text(other)} as in {where}",
                    _text(wanted),
                )
            else:
                axes[name] = wanted, path
    every = dict.fromkeys(name for dims in known.values() for name in dims if name)
    chosen = {name: axes[name][0] if name in axes else () for name in every}
    rules = tuple(
        (name, chosen[name]) for name in _ordered(chosen, known, specs) if name
    )
    for path, dims in known.items():
        if (made := applied(rules, dims)) != specs[path]:
            _refuse(path, f"{specs[path]}", f"{made} by the rules {dict(rules)}")
    return rules


def applied(rules: Rules, names: Sequence[str | None]) -> tuple[Axes, ...]:
    """Derives the sharding that rules give a tensor with dims of these names."""
    spec: list[Axes] = [() for _ in names]
    used: set[str] = set()
    for name, axes in rules:
        if name in names and used.isdisjoint(axes):
            spec[[*names].index(name)] = axes
            used.update(axes)
    return tuple(spec)


def _ordered(
    chosen: Mapping[str, Axes],
    known: Mapping[str, Names],
    specs: Mapping[str, Sequence[Axes]],
) -> list[str]:
    """The names, each behind those that come before it in some tensor."""
    before: dict[str, set[str]] = {name: set() for name in chosen}
    for path, dims in known.items():
        spec = specs[path]
        for name, have in zip(dims, spec, strict=True):
            if name is None or have or not chosen[name]:
                continue
            holders = [
                other
                for other, axes in zip(dims, spec, strict=True)
                if other and other != name and set(axes) & set(chosen[name])
            ]
            if not holders:
                _refuse(
                    path,
                    f"{name!r} sharded over {_text(chosen[name])}, as elsewhere",
                    "a dim of that name that stays whole",
                )
            before[name].update(holders[:1])
    try:
        return [*TopologicalSorter(before).static_order()]
    except CycleError as error:
        names = ", ".join(map(repr, dict.fromkeys(error.args[1])))
        raise PlanMismatch(
            compose(
                "No order of the logical names fits all tensors.",
                expected="one of two names to go first wherever they share an axis",
                got=f"tensors that want it otherwise: {names}",
                attempt=_TRY,
            )
        ) from error


def _text(axes: Axes) -> str:
    return ",".join(axes) or "whole"


def _refuse(path: str, expected: str, got: str) -> None:
    raise PlanMismatch(
        compose(
            f"Rules for logical names cannot say how {path} is sharded.",
            expected=expected,
            got=got,
            attempt=_TRY,
        )
    )
