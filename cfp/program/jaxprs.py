"""Programs as JAX traces them, and the programs inside of their equations."""

# pyright: reportPrivateImportUsage=false
# (of jax 0.12, which exports ClosedJaxpr in a way that pyright takes for private)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

ChangeProgram = Callable[[Jaxpr], Jaxpr]


def inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs among an equation's parameters, by the parameters' names."""
    found = []
    for name in sorted(eqn.params):
        value = eqn.params[name]
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, ClosedJaxpr):
                found.append(one.jaxpr)
            elif isinstance(one, Jaxpr):
                found.append(one)
    return found


def with_equations(jaxpr: Jaxpr, change: Callable[[JaxprEqn], JaxprEqn]) -> Jaxpr:
    """A program with its equations changed; itself if none is."""
    eqns = [change(eqn) for eqn in jaxpr.eqns]
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return jaxpr.replace(eqns=eqns)


def with_inner(eqn: JaxprEqn, change: ChangeProgram) -> JaxprEqn:
    """An equation with the programs inside of it changed; itself if none is."""
    params = {name: _changed(eqn.params[name], change) for name in sorted(eqn.params)}
    if all(params[name] is eqn.params[name] for name in params):
        return eqn
    return eqn.replace(params=params)


def closed_with(closed: ClosedJaxpr, change: ChangeProgram) -> ClosedJaxpr:
    """A closed program with another one in it; itself if that is the same."""
    found = change(closed.jaxpr)
    return closed if found is closed.jaxpr else closed.replace(jaxpr=found)


def _changed(value: Any, change: ChangeProgram) -> Any:
    if isinstance(value, ClosedJaxpr):
        return closed_with(value, change)
    if isinstance(value, Jaxpr):
        return change(value)
    if type(value) in (tuple, list):
        new = [_changed(one, change) for one in value]
        if any(a is not b for a, b in zip(new, value, strict=True)):
            return type(value)(new)
    return value
