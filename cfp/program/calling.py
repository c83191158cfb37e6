"""A call's arguments: matched as jax.jit does, and watched for changes in place.

A step is traced once, on copies of its arguments' Python objects. In-place changes of
these objects that the step does not return would be lost: it would run, and update
nothing.

Modules of some libraries have functions and settings among their pytree's leaves, which
``jax.jit`` refuses. Here such leaves become part of the pytree's structure while the
step is traced and called. So do later places of an object that may change in place: it
stays one object in the step and in the results, as in Python and under ``nnx.jit``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterator,
    Mapping,
    MappingView,
    MutableMapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import is_dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Var
from jax.tree_util import (
    SequenceKey,
    all_leaves,
    keystr,
    register_static,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
    treedef_is_leaf,
)

from cfp.errors import OptionError, StepNotTraceable, known_names
from cfp.printable import counted
from cfp.program.jaxprs import equations, inner_jaxprs


def check_keywords(
    fn: Callable[..., Any],
    kwargs: Mapping[str, Any],
    options: Sequence[str],
    function: str = "cfp.plan",
) -> None:
    """Raises OptionError if the step `fn` cannot take a keyword of `kwargs`.

    Args:
        options: keywords of `function` itself, which the message may suggest.
    """
    parameters = _parameters(fn)
    if parameters is None or _takes_any(parameters):
        return
    for name in kwargs.keys() - parameters.keys():
        raise OptionError(
            f"Neither the step nor {function} has an argument {name!r}. "
            f"{known_names(name, [*parameters, *options])}"
        )


def check_hashable(key: int | str, value: Any) -> None:
    try:
        hash(value)
    except TypeError as error:
        raise StepNotTraceable(
            f"Static argument {key!r} is a {type(value).__name__}, which cannot be "
            "hashed, so cfp could not tell calls with different values apart. Pass "
            "a tuple or a frozen dataclass."
        ) from error


_Kind = TypeVar("_Kind", int, str)
# Operations whose results have values of operands, up to dtype, shape and place.
_MOVES = (
    "broadcast_in_dim clamp concatenate convert_element_type copy device_put max min "
    "name optimization_barrier random_unwrap reshape select_n sharding_constraint "
    "squeeze stack stop_gradient transpose"
).split()


def sequence(one_or_many: _Kind | Sequence[_Kind], kind: type[_Kind]) -> list[_Kind]:
    return [one_or_many] if isinstance(one_or_many, kind) else list(one_or_many)


def chosen(
    fn: Callable[..., Any],
    passed: Mapping[int | str, Any],
    option: str,
    numbers: int | Sequence[int],
    names: str | Sequence[str],
) -> set[int | str]:
    """Returns `numbers` and `names` of arguments; parameters as position and as name.

    `passed` is a call's {position or keyword: argument}. Negative numbers count from
    the end of its positions. `option` is "static" or "donate".

    Raises:
        OptionError: `fn` takes no argument of a name; or the call has none at a
            position, unless it is static and `fn` takes one.
    """
    every, known, words = _parameters(fn), {*passed}, {*sequence(names, str)}
    unknown = sorted(map(str, words - {*(every or ())}))
    if unknown and every is not None and not _takes_any(every):
        raise OptionError(
            f"{option}_argnames names {unknown}, which the step lacks. "
            f"{known_names(unknown[0], every)}"
        )
    parameters: dict[Any, str] = dict(enumerate(parameter_names(fn)))
    if option == "static":  # Arguments with defaults may be left out.
        known.update(parameters)
    count = sum(isinstance(key, int) for key in passed)
    given: list[Any] = [numbers] if isinstance(numbers, str) else sequence(numbers, int)
    place = {i: i if isinstance(i, str) or i >= 0 else i + count for i in given}
    absent = [
        i
        for i, at in place.items()
        if isinstance(i, str) or known.isdisjoint({at, parameters.get(at)})
    ]
    if absent:
        raise OptionError(
            f"{option}_argnums names positions {absent}, but the call has "
            f"{counted(count, 'positional argument', 'positional arguments')}. Name "
            f"positions from 0, or arguments by {option}_argnames."
        )
    both = {i for i, name in parameters.items() if name in words}.union(place.values())
    return both | words | {parameters[i] for i in both if i in parameters}


def dynamic_part(
    args: Sequence[Any], kwargs: Mapping[str, Any], static: Collection[int | str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns (args, kwargs) without arguments whose position or name is `static`."""
    return (
        tuple(a for i, a in enumerate(args) if i not in static),
        {name: a for name, a in kwargs.items() if name not in static},
    )


def by_position(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static: Collection[int | str] = (),
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a call's (args, kwargs) with keywords made positional if possible.

    Static arguments that are left out get their defaults, if these can be hashed.
    """
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError):  # No signature, or one that does not fit.
        return tuple(args), dict(kwargs)
    for i, (name, one) in enumerate(bound.signature.parameters.items()):
        if (i in static or name in static) and one.default is not one.empty:
            with suppress(TypeError):  # Parts of a frozen dataclass may be lists.
                hash(one.default)
                if one.kind is not one.POSITIONAL_ONLY:
                    bound.arguments.setdefault(name, one.default)
    return bound.args, bound.kwargs


def parameter_names(fn: Callable[..., Any]) -> list[str]:
    """Returns names of parameters that may be positional; [] without a signature."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in (_parameters(fn) or {}).values() if p.kind in kinds]


def written_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function inside of wrappers, or ``__call__`` of an object's class."""
    fn = inspect.unwrap(fn)
    while isinstance(fn, partial):
        fn = inspect.unwrap(fn.func)
    return fn if hasattr(fn, "__code__") else type(fn).__call__


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def _parameters(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """Returns a function's parameters by name; None without a signature."""
    try:
        return inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return None


def changed(
    before: Mapping[str, Any], passed: Mapping[str, Any], result: Any
) -> dict[str, tuple[Any, jax.Array]]:
    """Returns {path: (given, new)} of modules' arrays set in place and not returned.

    `before` has `leaves_of_modules` before the call, `passed` is {name: argument}. A
    result returns an array if their paths share a name: a bare metric does not.
    """
    returned = {(id(leaf), key) for leaf, keys in _named(result) for key in keys}
    return {
        path: (before[path], new)
        for path, new in leaves_of_modules(passed)
        if isinstance(new, jax.Array)
        and before.get(path, new) is not new
        and returned.isdisjoint((id(new), key) for key in path.split("/"))
    }


def _named(tree: Any) -> list[tuple[Any, set[str]]]:
    """Returns (leaf, keys of its path) pairs; no positions in tuples and lists."""
    return [
        (leaf, {keystr((k,), simple=True) for k in at if type(k) is not SequenceKey})
        for at, leaf in tree_flatten_with_path(tree)[0]
    ]


def leaves_of_modules(passed: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (path, leaf) of mutable modules in `passed`, which is {name: argument}."""
    for name, arg in passed.items():
        nodes, _ = tree_flatten_with_path(arg, is_leaf=is_mutable)
        for start, node in nodes:
            if is_mutable(node):
                for path, leaf in tree_flatten_with_path(node)[0]:
                    rest = keystr((*start, *path), simple=True, separator="/")
                    yield f"{name}/{rest}", leaf


def lost_changes(
    run: Callable[..., tuple[Any, Mapping[str, tuple[Any, Any]]]], avals: Sequence[Any]
) -> list[str]:
    """Returns paths of values that a step sets in place, changed, and does not return.

    `run` maps flat leaves to (results, {path: (given, new value)}).
    """

    def flat(*leaves: Any) -> dict[str, Any]:
        result, changed = run(*leaves)
        named = _named(result)
        return {
            path: (
                given if isinstance(given, jax.Array) else 0,
                new,
                [leaf for leaf, keys in named if not keys.isdisjoint(path.split("/"))],
            )
            for path, (given, new) in changed.items()
        }

    closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*avals)
    makers = {out: eqn for eqn in equations(closed.jaxpr) for out in eqn.outvars}
    found = tree_unflatten(tree_structure(shapes), closed.jaxpr.outvars)
    return [
        path
        for path, (given, new, ends) in found.items()
        if id(new) not in _reached(ends, makers, _MOVES)
        and id(given) not in _reached([new], makers, ())
    ]


def _reached(ends: Sequence[Any], makers: Mapping[Any, Any], moves: Any) -> set[int]:
    """Returns ids of `ends`, and of variables that calls and `moves` copy to them."""
    found, todo = set[int](), [*ends]
    while todo:
        var = todo.pop()
        if not isinstance(var, Var) or id(var) in found:
            continue
        found.add(id(var))
        if (eqn := makers.get(var)) is None:
            continue
        ins, outs, place = eqn.invars, eqn.outvars, eqn.outvars.index(var)
        inner = next(iter(inner_jaxprs(eqn)), None)
        if eqn.primitive.name in moves:
            todo += ins if len(outs) == 1 else [ins[place]]
        elif inner and len(inner.invars) == len(ins):
            within = _reached(inner.outvars[place : place + 1], makers, moves)
            pairs = zip(inner.invars + inner.outvars, ins + outs, strict=False)
            todo += [outer for one, outer in pairs if id(one) in within]
    return found


_ADDRESS = re.compile(" at 0x[0-9a-f]+")


def static_differences(before: Any, now: Any) -> Iterator[tuple[Any, str]]:
    """Yields (path, ``[/FIELD]`` and `_difference`) of static data seen to differ."""
    pairs = zip(_nodes(before), _nodes(now), strict=False)
    for (path, one, kind, children), (_, other, its_kind, _) in pairs:
        if kind == its_kind:
            continue
        if type(one) is not type(other):
            yield path, f" = {type(other).__name__}, was {type(one).__name__}"
        if isinstance(one, Fixed) and isinstance(other, Fixed):
            yield path, _difference(other.value, one.value)
        old, new = (getattr(node, "__dict__", {}) for node in (one, other))
        for field in [field for field in old if field in new]:
            # Values such as arrays have no single truth value; children are dynamic.
            is_same = repr(old[field]) == repr(new[field])
            if not (is_same or id(old[field]) in children):
                yield path, f"/{field}{_difference(new[field], old[field])}"


def _difference(new: Any, old: Any) -> str:
    """Returns `` = new, was old``; one text if only addresses in memory differ."""
    texts = [_ADDRESS.sub("", ascii(value)) for value in (new, old)]
    short = [text[:57] + "..." * (len(text) > 57) for text in texts]
    if texts[0] == texts[1]:
        return f" is another {short[0]}: make it once, outside"
    if short[0] == short[1]:
        short = ["..." + text[-57:] for text in texts]
    return f" = {short[0]}, was {short[1]}"


def _nodes(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Yields (path, node, its own structure, ids of children), outer nodes first."""
    parts, kind = tree_flatten_with_path(tree, is_leaf=lambda part: part is not tree)
    yield path, tree, kind, {id(part) for _, part in parts}
    for key, part in parts:
        if key:  # A leaf's own part has none.
            yield from _nodes(part, (*path, *key))


def arrays_around(fn: Callable[..., Any], traced: bool) -> list[str]:
    """Returns paths of JAX arrays, or of tracers if `traced`, in variables around `fn`.

    These are its closure, arguments that `functools.partial` holds, the globals that it
    reads, and a method's object.
    """
    found: list[str] = []
    around: dict[str, Any] = {}
    while isinstance(fn, partial):
        around |= zip(parameter_names(fn.func), fn.args, strict=False)
        around |= fn.keywords
        fn = fn.func
    owner = getattr(fn, "__self__", None)
    fn = inspect.unwrap(getattr(fn, "__func__", fn))
    if inspect.isfunction(fn):
        variables = inspect.getclosurevars(fn)
        around |= {**variables.globals, **variables.nonlocals}
    if owner is not None and hasattr(owner, "__dict__"):
        around |= {f"self.{name}": value for name, value in vars(owner).items()}
    for name, value in around.items():
        if inspect.ismodule(value) or isinstance(value, type):
            continue
        try:
            # Iterators would be used up, and JAX refuses views.
            leaves, _ = tree_flatten_with_path(
                value, is_leaf=lambda node: isinstance(node, Iterator | MappingView)
            )
        except (TypeError, ValueError):
            # Not a pytree, such as a dict whose keys do not compare.
            continue
        for path, leaf in leaves:
            if isinstance(leaf, jax.Array) and isinstance(leaf, Tracer) == traced:
                rest = keystr(path, simple=True, separator="/")
                found.append(f"{name}/{rest}" if rest else name)
    return found


# Most elements of a mask that measurements use: it is a constant of their program.
MOST_ELEMENTS = 1 << 16


def may_be_given(leaf: Any) -> bool:
    """True for a concrete number or small bool array: measurements use its value."""
    if isinstance(leaf, jax.ShapeDtypeStruct | Tracer):
        return False
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, bool | int | float | complex)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    shape = tuple(np.shape(leaf))
    return not shape or (bool(dtype == np.bool_) and prod(shape) <= MOST_ELEMENTS)


def given_bytes(leaf: Any, dtype: Any) -> bytes:
    """Returns an argument's value in `dtype` as bytes; b"" if deleted, remote, None."""
    if leaf is None:
        return b""
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted() or not leaf.is_fully_addressable:
            return b""
        leaf = jax.device_get(leaf)
    return np.asarray(leaf, dtype).tobytes()


# Containers of plain Python, whose leaves are treated as by jax.jit.
_PLAIN = (dict, list, tuple, type(None))
_NUMBERS = (int, float, complex)
_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)


@register_static
class Fixed(NamedTuple):
    """A leaf made part of its pytree's structure; `kind`, a type, tells True from 1."""

    value: Any
    kind: type


def fixed(tree: Any) -> Any:
    """Returns the pytree with modules' leaves other than arrays made :class:`Fixed`.

    Modules: see `is_module`. Numbers, bools too, stay leaves if an outermost module has
    only arrays and numbers, except in modules with a bool and no array. Unhashable
    leaves stay.
    """
    stay = (*_ARRAYS, *_NUMBERS)
    if all(isinstance(x, stay) and not isinstance(x, bool) for x in tree_leaves(tree)):
        return tree
    return tree_map(_with_fixed, tree, is_leaf=is_module)


@register_static
class Same(NamedTuple):
    """A later place of the object that began `back` objects before; see `is_object`."""

    back: int


def is_object(node: Any) -> bool:
    """True if `is_mutable`, but neither mapping nor dataclass, which are values."""
    return is_mutable(node) and not (isinstance(node, Mapping) or is_dataclass(node))


def is_mutable(node: Any) -> bool:
    """True for a custom node of a pytree that may change in place."""
    is_fixed = isinstance(node, Mapping) and not isinstance(node, MutableMapping)
    parameters = getattr(type(node), "__dataclass_params__", None)
    is_frozen = getattr(parameters, "frozen", False) or isinstance(node, partial)
    return not (is_fixed or is_frozen) and is_module(node)


def together(tree: Any, shares: bool = True) -> Any:
    """Returns the pytree; if `shares`, with :class:`Same` at objects' later places."""
    places, backs = dict[int, int](), list[int]()
    kept = list[Any]()  # An object that is kept shares its id with no other.

    def is_known(node: Any) -> bool:
        if not (shares and is_object(node)):
            return False
        if id(node) in places and tree_leaves(node):
            backs.append(len(kept) - places[id(node)])
            return True
        places[id(node)] = len(kept)
        kept.append(node)
        return False

    leaves, kind = tree_flatten(tree, is_leaf=is_known)
    each = iter(backs)
    leaves = [Same(next(each)) if is_object(leaf) else leaf for leaf in leaves]
    return kind.unflatten(leaves) if backs else tree


def shared_places(tree: Any) -> list[tuple[Any, Any]]:
    """Returns (path of the object's first place, own path) of each :class:`Same`."""
    first, pairs = list[Any](), []
    for path, node, _, _ in _nodes(tree):
        if is_object(node):
            first.append(path)
        elif isinstance(node, Same):
            pairs.append((first[-node.back], path))
    return pairs


def released(tree: Any, instead: Callable[[Any], Any] = lambda value: value) -> Any:
    """Undoes :func:`fixed` and :func:`together`; `instead` maps each fixed value."""
    made = list[Any]()

    def rebuilt(node: Any) -> Any:
        if isinstance(node, Fixed):
            return instead(node.value)
        if isinstance(node, Same):
            return made[-node.back]
        place, found = len(made), is_object(node)
        made.extend([node] * found)
        parts, kind = tree_flatten(node, is_leaf=lambda part: part is not node)
        if not treedef_is_leaf(kind):
            node = kind.unflatten(map(rebuilt, parts))
            made[place : place + found] = [node] * found
        return node

    return rebuilt(tree) if has_fixed(tree) else tree


def has_fixed(tree: Any) -> bool:
    """True if a pytree has a :class:`Fixed` or a :class:`Same`."""
    found = tree_leaves(tree, is_leaf=lambda node: isinstance(node, Fixed | Same))
    return any(isinstance(leaf, Fixed | Same) for leaf in found)


def is_module(node: Any) -> bool:
    """True for a custom node of a pytree: no leaf, dict, list, tuple or None."""
    return not (isinstance(node, (*_PLAIN, *_NUMBERS, str)) or all_leaves([node]))


def _with_fixed(node: Any) -> Any:
    if not is_module(node):
        return node
    leaves = tree_leaves(node)
    has_bool = any(isinstance(leaf, bool) for leaf in leaves)
    has_array = any(isinstance(leaf, _ARRAYS) for leaf in leaves)
    are_numbers = all(isinstance(leaf, (*_ARRAYS, *_NUMBERS)) for leaf in leaves)
    if not are_numbers or (has_bool and not has_array):
        return tree_map(_fix, node)
    if not has_bool:
        return node
    return tree_map(
        _with_fixed, node, is_leaf=lambda part: part is not node and is_module(part)
    )


def _fix(leaf: Any) -> Any:
    if isinstance(leaf, _ARRAYS) or not isinstance(leaf, Hashable):
        return leaf
    return Fixed(leaf, type(leaf))
