"""Matches a call's arguments, by position and by name, as jax.jit does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from cfp.errors import OptionError, StepNotTraceable, nearest


def check_names(
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
    unknown = [name for name in sequence(names, str) if name not in parameters]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if unknown and not takes_any:
        raise StepNotTraceable(
            f"{option} names {unknown}, but the step's arguments are "
            f"{list(parameters)}."
        )


def check_keywords(
    fn: Callable[..., Any],
    kwargs: Mapping[str, Any],
    options: Sequence[str],
    function: str = "cfp.plan",
) -> None:
    """Refuses keywords that neither the step has nor a function of cfp.

    Args:
        fn: the step.
        kwargs: of the call, without the options.
        options: of the function.
        function: its name.

    Raises:
        OptionError: there is one.
    """
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    for name in kwargs.keys() - parameters.keys():
        raise OptionError(
            f"Neither the step nor {function} has an argument {name!r}; "
            f"{nearest(name, [*options, *parameters])}The step's are "
            f"{', '.join(parameters)}; those of {function} {', '.join(options)}."
        )


def check_hashable(key: int | str, value: Any) -> None:
    try:
        hash(value)
    except TypeError as error:
        raise StepNotTraceable(
            f"Static argument {key!r} is a {type(value).__name__}, which cannot be "
            "hashed, so that calls with different values look alike. Pass a "
            "tuple or a frozen dataclass."
        ) from error


_Kind = TypeVar("_Kind", int, str)


def sequence(one_or_many: _Kind | Sequence[_Kind], kind: type[_Kind]) -> list[_Kind]:
    return [one_or_many] if isinstance(one_or_many, kind) else list(one_or_many)


def chosen(
    parameters: Sequence[str],
    count: int,
    numbers: int | Sequence[int],
    names: str | Sequence[str],
) -> set[int | str]:
    """Arguments by position and by name; negative positions count from the end."""
    positions = {i + count if i < 0 else i for i in sequence(numbers, int)}
    words = set(sequence(names, str))
    positions |= {i for i, name in enumerate(parameters) if name in words}
    words |= {parameters[i] for i in positions if 0 <= i < len(parameters)}
    return positions | words


def dynamic_part(
    args: Sequence[Any], kwargs: Mapping[str, Any], static: Collection[int | str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments without the static ones."""
    return (
        tuple(a for i, a in enumerate(args) if i not in static),
        {name: a for name, a in kwargs.items() if name not in static},
    )


def by_position(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call in which all stands at its position that can.

    So that it makes no difference whether arguments are passed by keyword.
    """
    placed, named = list(args), dict(kwargs)
    try:
        parameters = [*inspect.signature(fn).parameters.values()]
    except (TypeError, ValueError):
        parameters = []
    for one in parameters[len(placed) :]:
        if one.kind is not one.POSITIONAL_OR_KEYWORD or one.name not in named:
            break
        placed.append(named.pop(one.name))
    return tuple(placed), named


def parameter_names(fn: Callable[..., Any]) -> list[str]:
    """The names of a function's positional parameters, as far as it tells them."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds]
