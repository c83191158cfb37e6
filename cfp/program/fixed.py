"""Leaves of modules that are no arrays: part of the program, not of its arguments.

A module of some libraries holds its settings and functions among its arrays, as leaves
of its pytree. ``jax.jit`` takes no function as an argument; here such a leaf becomes a
part of the pytree's structure, for the time that the step is traced and called.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import register_static, tree_flatten, tree_leaves, tree_map

# Containers of plain Python. What stands in them is what jax.jit says it is.
_PLAIN = (dict, list, tuple, type(None))
_NUMBERS = (bool, int, float, complex)


@register_static
@dataclass(frozen=True, slots=True)
class Fixed:
    """A value that is part of a pytree's structure.

    Attributes:
        value: the leaf.
        kind: its type, so that True and 1 differ.
    """

    value: Any
    kind: type


def fixed(tree: Any) -> Any:
    """A pytree in which the modules' leaves that are no arrays are part of structure.

    A module, here, is a node of the pytree that is no container of plain Python. Its
    numbers are arguments, like for ``jax.jit``, unless functions, texts and other
    things that no array can be made of stand among its leaves, or it is a module
    inside of it that has no arrays at all and a bool, which holds settings. What
    cannot be hashed stays, to be refused.
    """
    leaves, _ = tree_flatten(tree)
    if not any(_may_be_fixed(leaf) for leaf in leaves):
        return tree
    return _each_module(_with_fixed, tree)


def giving_arrays(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns :func:`fixed` of what another returns."""

    def arrays(*args: Any, **kwargs: Any) -> Any:
        return fixed(fn(*args, **kwargs))

    return arrays


def released(tree: Any, instead: Callable[[Any], Any] | None = None) -> Any:
    """The pytree as it was before :func:`fixed`.

    Args:
        instead: what to put in place of such a leaf; the leaf, if not given.
    """
    if not has_fixed(tree):
        return tree
    change = instead or (lambda value: value)
    return tree_map(
        lambda leaf: change(leaf.value) if isinstance(leaf, Fixed) else leaf,
        tree,
        is_leaf=lambda node: isinstance(node, Fixed),
    )


def without_fixed(tree: Any) -> Any:
    """The pytree with None in place of what :func:`fixed` made part of it."""
    return released(tree, lambda _: None)


def has_fixed(tree: Any) -> bool:
    """True if any part of a pytree is a :class:`Fixed`."""
    found = tree_leaves(tree, is_leaf=lambda node: isinstance(node, Fixed))
    return any(isinstance(leaf, Fixed) for leaf in found)


def is_module(node: Any) -> bool:
    """True for a node of a pytree that is no container of plain Python."""
    is_plain = isinstance(node, (*_PLAIN, *_NUMBERS, str))
    return not is_plain and not jax.tree_util.all_leaves([node])


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic)


def _may_be_fixed(leaf: Any) -> bool:
    return isinstance(leaf, bool) or not (_is_array(leaf) or isinstance(leaf, _NUMBERS))


def _each_module(change: Callable[[Any], Any], tree: Any) -> Any:
    """Applies something to the outermost modules of a pytree."""
    return tree_map(
        lambda node: change(node) if is_module(node) else node, tree, is_leaf=is_module
    )


def _with_fixed(module: Any) -> Any:
    leaves = tree_leaves(module)
    if any(not _is_array(leaf) and not isinstance(leaf, _NUMBERS) for leaf in leaves):
        return tree_map(_fix, module)
    return _settings_fixed(module)


def _settings_fixed(module: Any) -> Any:
    """Fixes modules, at any depth, that have a bool and no arrays."""
    leaves = tree_leaves(module)
    if not any(isinstance(leaf, bool) for leaf in leaves):
        return module
    if not any(_is_array(leaf) for leaf in leaves):
        return tree_map(_fix, module)
    inside = lambda node: node is not module and is_module(node)  # noqa: E731
    return tree_map(
        lambda node: _settings_fixed(node) if inside(node) else node,
        module,
        is_leaf=inside,
    )


def _fix(leaf: Any) -> Any:
    if _is_array(leaf) or not isinstance(leaf, Hashable):
        return leaf
    return Fixed(leaf, type(leaf))
