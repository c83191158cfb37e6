"""Leaves of modules that are no arrays: part of the program, not of its arguments.

A module of some libraries holds its settings and functions among its arrays, as leaves
of its pytree. ``jax.jit`` takes no function as an argument; here such a leaf becomes a
part of the pytree's structure, for the time that the step is traced and called.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import all_leaves, register_static, tree_leaves, tree_map

# Containers of plain Python. What stands in them is what jax.jit says it is.
_PLAIN = (dict, list, tuple, type(None))
_NUMBERS = (bool, int, float, complex)


@register_static
class Fixed(NamedTuple):
    """A value that is part of a pytree's structure.

    No dataclass: these need a module that is in `sys.modules`, and the text of this one
    is part of modules that plans are exported as.

    Attributes:
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
    if not any(map(_may_be_fixed, tree_leaves(tree))):
        return tree
    return tree_map(_with_fixed, tree, is_leaf=is_module)


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


def has_fixed(tree: Any) -> bool:
    """True if any part of a pytree is a :class:`Fixed`."""
    found = tree_leaves(tree, is_leaf=lambda node: isinstance(node, Fixed))
    return any(isinstance(leaf, Fixed) for leaf in found)


def is_module(node: Any) -> bool:
    """True for a node of a pytree that is no container of plain Python."""
    is_plain = isinstance(node, (*_PLAIN, *_NUMBERS, str))
    return not is_plain and not all_leaves([node])


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic)


def _may_be_fixed(leaf: Any) -> bool:
    return isinstance(leaf, bool) or not (_is_array(leaf) or isinstance(leaf, _NUMBERS))


def _with_fixed(node: Any) -> Any:
    if not is_module(node):
        return node
    leaves = tree_leaves(node)
    has_bool = any(isinstance(leaf, bool) for leaf in leaves)
    are_numbers = all(_is_array(leaf) or isinstance(leaf, _NUMBERS) for leaf in leaves)
    if not are_numbers or (has_bool and not any(map(_is_array, leaves))):
        return tree_map(_fix, node)
    if not has_bool:
        return node
    return tree_map(
        _with_fixed, node, is_leaf=lambda part: part is not node and is_module(part)
    )


def _fix(leaf: Any) -> Any:
    if _is_array(leaf) or not isinstance(leaf, Hashable):
        return leaf
    return Fixed(leaf, type(leaf))
