"""Injection into modules of `flax.nnx`: parts are taken out, and others put in.

A replacement has the part's own variables where its policy leaves them as they are, so
tied weights stay tied; what a policy maps becomes new parameters.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from cfp.operators.inject.policy import (
    Parameters,
    Policy,
    PolicyError,
    Refused,
    Replacement,
    check_mapping,
    first_match,
)
from cfp.operators.inject.report import Report

Path = tuple[Any, ...]


class Injected(nnx.Module):
    """An operator in a part's place; its attributes are the parameters.

    Args:
        part: that it replaces.
        policy: makes of calls what the replacement takes.
        replacement: takes parameters and what was made of the call.
        variables: nested dicts of parameters.
        seen: is called after each call.
    """

    def __init__(
        self,
        part: nnx.Module,
        policy: Policy,
        replacement: Replacement,
        variables: Mapping[str, Any],
        seen: Callable[[], None],
    ):
        self._adapter = nnx.static(_Adapter(part, policy, replacement, seen))
        for name, value in variables.items():
            setattr(self, name, _contained(value))
        self._names = nnx.static(tuple(variables))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the part is called."""
        parameters = {name: _arrays(getattr(self, name)) for name in self._names}
        return self._adapter(parameters, args, kwargs)


class _Adapter:
    """Stand-in for a replaced part, without arrays of its own.

    Of the part only its plain attributes stay, such as its configuration.
    """

    def __init__(
        self,
        part: nnx.Module,
        policy: Policy,
        replacement: Replacement,
        seen: Callable[[], None],
    ):
        self._kind = type(part).__name__
        self._policy, self._replacement, self._seen = policy, replacement, seen
        self._part = _Plain(
            **{
                name: value
                for name, value in vars(part).items()
                if not name.startswith("_")
                and not isinstance(value, nnx.Pytree | nnx.Variable | jax.Array)
            }
        )

    def __call__(self, parameters: Parameters, args: tuple, kwargs: dict) -> Any:
        try:
            adapted = self._policy.adapt(self._part, args, kwargs)
            made = self._replacement(parameters, *adapted)
        except Refused as error:
            raise PolicyError(
                f"A {self._kind} that {self._policy.name} replaced {error}: the "
                "original was taken out of this model, so make the call without, or "
                "leave the policy out of `policies`."
            ) from error
        self._seen()
        return made


class _Plain:
    """Attributes, and nothing else."""

    def __init__(self, **attributes: Any):
        self.__dict__.update(attributes)


def surgery(
    model: nnx.Module, policies: Sequence[Policy], report: Report
) -> dict[Path, Policy]:
    """Replaces parts of a model in place.

    Args:
        model: whose parts are replaced; not it itself.
        policies: in the order in which they are asked.
        report: called with every part.

    Returns:
        The policies of what was replaced, by path.
    """
    owners = Counter(id(value) for _, value in _walk(model, ()))
    replaced: dict[Path, Policy] = {}
    for path, parent, name, part in list(_parts(model)):
        if any(path[: len(done)] == done for done in replaced):
            continue
        where, kind = "/".join(map(str, path)), type(part).__name__
        policy = first_match(policies, part)
        if policy is None:
            report.add_left(where, kind, None, "no policy matches")
            continue
        try:
            # A call says which implementations were taken.
            seen = functools.partial(report.add_replaced, where, kind, policy)
            new = _replacement(part, policy, where, owners, seen)
        except Refused as error:
            report.add_left(where, kind, policy, str(error))
            continue
        _put(parent, name, new)
        replaced[path] = policy
        report.add_replaced(where, kind, policy)
    return replaced


def _replacement(
    part: nnx.Module,
    policy: Policy,
    where: str,
    owners: Counter[int],
    seen: Callable[[], None],
) -> Injected:
    """The module that takes a part's place.

    Raises:
        Refused: by the policy, or as parameters would no longer be shared.
    """
    variables = parameters_of(part)
    values = jax.tree.map(
        lambda one: one[...], variables, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    replacement = policy.build(part)
    check_mapping(policy, values, where)
    mapped = policy.to_injected(values)
    own = {
        id(value): variable
        for value, variable in zip(
            jax.tree.leaves(values),
            jax.tree.leaves(variables, is_leaf=lambda x: isinstance(x, nnx.Variable)),
            strict=True,
        )
    }
    inside = Counter(id(value) for _, value in _walk(part, ()))
    stays = {id(own[id(x)]) for x in jax.tree.leaves(mapped) if id(x) in own}
    for variable in own.values():
        if id(variable) not in stays and owners[id(variable)] > inside[id(variable)]:
            raise Refused("shares a parameter that its policy would change")
    new = jax.tree.map(lambda x: own.get(id(x), None) or nnx.Param(x), mapped)
    return Injected(part, policy, replacement, new, seen)


def parameters_of(part: nnx.Module) -> dict[str, Any]:
    """A part's parameters as nested dicts of variables."""
    found: dict[str, Any] = {}
    for path, value in _walk(part, ()):
        if isinstance(value, nnx.Param):
            inner = found
            for name in path[:-1]:
                inner = inner.setdefault(str(name), {})
            inner[str(path[-1])] = value
    return found


def _children(node: nnx.Module) -> list[tuple[Any, Any]]:
    """Modules and variables that are attributes of a module, or members of a list."""
    is_list = isinstance(node, nnx.List)
    return [
        (int(name) if is_list else name, value)
        for name, value in vars(node).items()
        if isinstance(value, nnx.Module | nnx.Variable)
    ]


def _walk(node: nnx.Module, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yields all variables below a module with their paths, shared ones each time."""
    for name, value in _children(node):
        if isinstance(value, nnx.Module):
            yield from _walk(value, (*path, name))
        else:
            yield (*path, name), value


def _parts(
    node: nnx.Module, path: Path = ()
) -> Iterator[tuple[Path, nnx.Module, Any, nnx.Module]]:
    """Yields (path, parent, name, module) of all modules below, outer ones first."""
    for name, value in _children(node):
        if isinstance(value, nnx.Module):
            if not isinstance(value, nnx.List | nnx.Dict):
                yield (*path, name), node, name, value
            yield from _parts(value, (*path, name))


def _put(parent: Any, name: Any, new: nnx.Module) -> None:
    if isinstance(parent, nnx.List):
        parent[int(name)] = new
    else:
        setattr(parent, name, new)


def _contained(value: Any) -> Any:
    if isinstance(value, Mapping):
        return nnx.Dict({name: _contained(one) for name, one in value.items()})
    return value


def _arrays(value: Any) -> Any:
    if isinstance(value, nnx.Variable):
        return value[...]
    return {name: _arrays(one) for name, one in value.items()}


def mapped_state(
    state: Mapping[str, Any], replaced: Mapping[Path, Policy], *, back: bool
) -> dict[str, Any]:
    """A whole model's parameters with those of replaced parts mapped.

    Args:
        state: nested dicts, as of `flax.nnx.to_pure_dict`.
        replaced: policies by path.
        back: from the injected model's to the original's; else the other way.
    """

    def visit(node: Any, path: Path) -> Any:
        if not isinstance(node, Mapping):
            return node
        if path in replaced:
            policy = replaced[path]
            return (policy.to_original if back else policy.to_injected)(dict(node))
        return {name: visit(child, (*path, name)) for name, child in node.items()}

    return visit(state, ())
