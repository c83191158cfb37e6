"""A call of a step function, as flat arrays and everything else."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import NoneType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_flatten, tree_flatten_with_path, tree_unflatten

from cfp.errors import PlanMismatch, StepNotTraceable

# Kinds of NumPy's dtypes that hold objects, text and dates.
_NO_NUMBERS = "OSUMm"
# What a step knows of itself once it is traced, whoever gives memory away.
_TRACED = ("flat_fn", "traced")


@dataclass(frozen=True)
class FlatStep:
    """A step function seen as a function of its flat array arguments.

    Attributes:
        fn: the user's function.
        avals: shape and dtype of each array leaf of the arguments.
        donated: whether the user gives each leaf's memory away.
        arg_names: a path for each leaf, such as ``state/params/dense/kernel``.
        in_tree: the structure of ``(dynamic args, kwargs)``.
        static: static arguments, by position or keyword.
    """

    fn: Callable[..., Any]
    avals: tuple[jax.ShapeDtypeStruct, ...]
    donated: tuple[bool, ...]
    arg_names: tuple[str, ...]
    in_tree: Any
    static: tuple[tuple[int | str, Any], ...]

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The array leaves of a call's arguments, which must fit the structure.

        Raises:
            PlanMismatch: a static argument has another value.
            StepNotTraceable: the arguments have another structure.
        """
        if kwargs:
            args, kwargs = _by_position(self._parameters, args, kwargs)
        passed = {**dict(enumerate(args)), **kwargs}
        for key, value in self.static:
            got = passed.get(key)
            if type(got) is not type(value) or got != value:
                raise PlanMismatch(
                    f"Static argument {key} was {value!r} when the step was "
                    f"planned, and is {got!r} now. Plan again for the new value."
                )
        leaves, tree = tree_flatten(_dynamic(args, kwargs, dict(self.static)))
        if tree != self.in_tree:
            raise StepNotTraceable(
                f"The arguments' structure changed: expected {self.in_tree}, "
                f"got {tree}."
            )
        return leaves

    def leaves_of(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any] | None:
        """Like :meth:`flatten`, sooner; None where the call does not fit.

        A leaf may be something else than an array, such as a dict; it is not None.
        """
        if kwargs:
            args, kwargs = _by_position(self._parameters, args, kwargs)
        if self.static:
            passed = {**dict(enumerate(args)), **kwargs}
            for key, value in self.static:
                got = passed.get(key)
                if type(got) is not type(value) or got != value:
                    return None
            args, kwargs = _dynamic(args, kwargs, dict(self.static))
        try:
            leaves = self.in_tree.flatten_up_to((tuple(args), kwargs))
        except (ValueError, TypeError):
            return None
        return None if NoneType in map(type, leaves) else leaves

    @cached_property
    def _parameters(self) -> tuple[inspect.Parameter, ...]:
        return _parameters(self.fn)

    def giving(self, donated: Sequence[bool]) -> FlatStep:
        """The same step, as it was traced, with other leaves' memory given away."""
        other = replace(self, donated=tuple(donated))
        kept = {name: vars(self)[name] for name in _TRACED if name in vars(self)}
        vars(other).update(kept)
        return other

    @cached_property
    def flat_fn(self) -> Callable[..., Any]:
        """``fn`` as a function of flat leaves, under its own name."""

        def flat(*leaves: Any) -> Any:
            dynamic, kwargs = tree_unflatten(self.in_tree, leaves)
            args = list(dynamic)
            for key, value in self.static:
                if isinstance(key, int):
                    args.insert(key, value)
                else:
                    kwargs[key] = value
            return self.fn(*args, **kwargs)

        flat.__name__ = flat.__qualname__ = getattr(self.fn, "__name__", "step")
        return flat

    @cached_property
    def traced(self) -> jax.stages.Traced:
        """``flat_fn`` as JAX traced it: the user's Python code runs this one time.

        Raises:
            StepNotTraceable: JAX cannot trace the function.
        """
        try:
            return jax.jit(self.flat_fn).trace(*self.avals)
        except Exception as error:
            # Whatever the user's code raises while it is traced is the user's to mend.
            raise StepNotTraceable(
                f"JAX could not trace {self.flat_fn.__name__!r}: "
                f"{type(error).__name__}: {error}\n"
                "The step must be a function that jax.jit accepts; arguments that are "
                "not arrays belong in static_argnums or static_argnames, also where "
                "the step is wrapped in jax.jit, which keeps its own to itself."
            ) from error

    @property
    def gives_unasked(self) -> bool:
        """Whether a jax.jit around the step gives memory away, and nobody else does.

        Inside of another program it cannot.
        """
        wrapped = isinstance(self.fn, jax.stages.Wrapped)
        calls = self.traced.jaxpr.eqns if wrapped and not any(self.donated) else ()
        return any(any(call.params.get("donated_invars", ())) for call in calls)


def flatten_step(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
) -> FlatStep:
    """Separates a call into its array leaves and everything else.

    Like ``jax.jit``, it knows an argument by position and by name, whichever way it is
    named here and passed in the call, and a static one that is left out has its
    default.

    Args:
        fn: the step function.
        args: arrays, ``jax.ShapeDtypeStruct`` s, or pytrees of them.
        kwargs: the same, by keyword.
        static_argnums, static_argnames: arguments whose values are part of the program.
        donate_argnums, donate_argnames: arguments whose arrays the step may overwrite.

    Raises:
        StepNotTraceable: an argument leaf is neither an array nor a shape, a static
            argument cannot be hashed, or there is no argument of a name.
    """
    args, kwargs = _by_position(_parameters(fn), args, kwargs or {})
    parameters = _parameter_names(fn)
    passed = {**dict(enumerate(args)), **kwargs}
    _check_names(fn, "static_argnames", static_argnames)
    _check_names(fn, "donate_argnames", donate_argnames)
    chosen = _chosen(parameters, len(args), static_argnums, static_argnames)
    static = {key: value for key, value in passed.items() if key in chosen}
    for key, value in static.items():
        _check_hashable(key, value)
    donate = _chosen(parameters, len(args), donate_argnums, donate_argnames)
    # What has a default may be left out, if it is static.
    known = passed.keys() | set(range(len(parameters)))
    for option, numbers, there in (
        ("static_argnums", static_argnums, known),
        ("donate_argnums", donate_argnums, passed.keys()),
    ):
        absent = [
            number
            for number in _sequence(numbers, int)
            if not _chosen(parameters, len(args), number, ()) & there
        ]
        if absent:
            raise StepNotTraceable(
                f"{option} names positions {absent}, but the call has {len(args)} "
                "positional arguments."
            )
    positions = [i for i in range(len(args)) if i not in static]
    flat, in_tree = tree_flatten_with_path(_dynamic(args, kwargs, static))
    avals, arg_names, donated = [], [], []
    for path, leaf in flat:
        if path[0].idx == 0:
            key = positions[path[1].idx]
            root = parameters[key] if key < len(parameters) else f"arg{key}"
        else:
            root = key = str(path[1].key)
        rest = jax.tree_util.keystr(path[2:], simple=True, separator="/")
        arg_names.append(f"{root}/{rest}" if rest else root)
        donated.append(key in donate)
        avals.append(abstract(leaf, arg_names[-1]))
        _check_width(avals[-1].dtype, arg_names[-1])
    return FlatStep(
        fn,
        tuple(avals),
        tuple(donated),
        tuple(arg_names),
        in_tree,
        tuple(static.items()),
    )


def _check_width(dtype: Any, name: str) -> None:
    """Refuses what this version of JAX passes to no program that is compiled ahead.

    Raises:
        StepNotTraceable: the type has less than eight bits, and JAX is older than 0.11.
    """
    key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    narrow = not key and jax.dtypes.itemsize_bits(dtype) < 8
    if narrow and jax.__version_info__ < (0, 11):
        raise StepNotTraceable(
            f"Argument {name!r} is {dtype}, which JAX {jax.__version__} cannot pass to "
            "a sharded program that is compiled ahead. Use JAX 0.11 or newer, or pass "
            f"a wider type, and convert it to {dtype} inside the step."
        )


def _check_names(
    fn: Callable[..., Any], option: str, names: str | Sequence[str]
) -> None:
    """Refuses names that the step has no argument of, as far as it tells.

    Raises:
        StepNotTraceable: there is one.
    """
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return
    unknown = [name for name in _sequence(names, str) if name not in parameters]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if unknown and not takes_any:
        raise StepNotTraceable(
            f"{option} names {unknown}, but the step's arguments are "
            f"{list(parameters)}."
        )


def _check_hashable(key: int | str, value: Any) -> None:
    try:
        hash(value)
    except TypeError as error:
        raise StepNotTraceable(
            f"Static argument {key!r} is a {type(value).__name__}, which cannot be "
            "hashed, so that calls with different values are not told apart. Pass a "
            "tuple or a frozen dataclass."
        ) from error


_Kind = TypeVar("_Kind", int, str)


def _sequence(one_or_many: _Kind | Sequence[_Kind], kind: type[_Kind]) -> list[_Kind]:
    return [one_or_many] if isinstance(one_or_many, kind) else list(one_or_many)


def _chosen(
    parameters: Sequence[str],
    count: int,
    numbers: int | Sequence[int],
    names: str | Sequence[str],
) -> set[int | str]:
    """Arguments by position and by name; negative positions count from the end."""
    positions = {i + count if i < 0 else i for i in _sequence(numbers, int)}
    words = set(_sequence(names, str))
    positions |= {i for i, name in enumerate(parameters) if name in words}
    words |= {parameters[i] for i in positions if 0 <= i < len(parameters)}
    return positions | words


def _dynamic(
    args: Sequence[Any], kwargs: Mapping[str, Any], static: Collection[int | str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments without the static ones."""
    return (
        tuple(a for i, a in enumerate(args) if i not in static),
        {name: a for name, a in kwargs.items() if name not in static},
    )


def _by_position(
    parameters: Sequence[inspect.Parameter],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call in which all stands at its position that can.

    So that it makes no difference whether arguments are passed by keyword.
    """
    placed, named = list(args), dict(kwargs)
    for one in parameters[len(placed) :]:
        if one.kind is not one.POSITIONAL_OR_KEYWORD or one.name not in named:
            break
        placed.append(named.pop(one.name))
    return tuple(placed), named


def _parameters(fn: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """A function's parameters, as far as it tells them."""
    try:
        return tuple(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return ()


def _parameter_names(fn: Callable[..., Any]) -> list[str]:
    """The names of a function's positional parameters, as far as it tells them."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in _parameters(fn) if p.kind in kinds]


def abstract(leaf: Any, name: str) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an argument's leaf as JAX takes it.

    Raises:
        StepNotTraceable: it is no array.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
    if isinstance(leaf, jax.Array):
        weak = getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in _NO_NUMBERS:
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, dtype)
    if isinstance(leaf, bool | int | float | complex):
        dtype = jax.dtypes.canonicalize_dtype(jax.dtypes.result_type(leaf))
        return jax.ShapeDtypeStruct((), dtype, weak_type=True)
    kind = getattr(leaf, "dtype", type(leaf).__name__)
    way_out = "Pass an array or a jax.ShapeDtypeStruct, or name the argument in "
    way_out += "static_argnums or static_argnames."
    if "/" in name:
        root = name.partition("/")[0]
        way_out = f"Pass only the arrays in {root!r}, and add the rest inside the step."
    raise StepNotTraceable(
        f"Argument {name!r} is a {kind}, which is not an array that JAX takes. "
        + way_out
    )
