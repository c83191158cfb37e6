"""Programs as JAX traces them, and the programs inside of their equations."""

# pyright: reportPrivateImportUsage=false
# (of jax 0.12, which exports ClosedJaxpr in a way that pyright takes for private)

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive
from jax.interpreters import mlir

_OF_SHARDINGS = "inspect_sharding"

ChangeProgram = Callable[[Jaxpr], Jaxpr]
# What tells two traces of one program apart: weak types, and objects' addresses.
_OF_A_TRACE = re.compile(r"weak_type=\w+|\b0x[0-9a-f]+")


def inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs among an equation's parameters, by the parameters' names."""
    found: list[Jaxpr] = []

    def noted(jaxpr: Jaxpr) -> Jaxpr:
        found.append(jaxpr)
        return jaxpr

    with_inner(eqn, noted)
    return found


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All equations, those inside of others before them; by call, not by jaxpr."""
    for eqn in jaxpr.eqns:
        for inner in inner_jaxprs(eqn):
            yield from equations(inner)
        yield eqn


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


def with_equations(
    closed: ClosedJaxpr, change: Callable[[JaxprEqn], JaxprEqn]
) -> ClosedJaxpr:
    """A program with equations changed, or else those inside; itself if none is."""

    def changed(jaxpr: Jaxpr) -> Jaxpr:
        eqns = []
        for eqn in jaxpr.eqns:
            new = change(eqn)
            eqns.append(with_inner(eqn, changed) if new is eqn else new)
        if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
            return jaxpr
        return jaxpr.replace(eqns=eqns)

    return closed_with(closed, changed)


def do_the_same(one: Jaxpr, other: Jaxpr) -> bool:
    """True if two traces of one function are one program but for weak types.

    A weakly typed value is converted to its own dtype if ``jnp.clip`` or ``jnp.where``
    combine it with other values.
    """
    if _text(one) == _text(other):
        return True
    known: dict[str, Jaxpr] = {}

    # Programs inside that are alike become one: a text has each only once.
    @cache
    def without_weak_types(jaxpr: Jaxpr) -> Jaxpr:
        found = _without_conversions(jaxpr, without_weak_types)
        return known.setdefault(_text(found), found)

    return without_weak_types(one) is without_weak_types(other)


def _text(jaxpr: Jaxpr) -> str:
    return _OF_A_TRACE.sub("", str(jaxpr))


def _typed(literal: Any) -> Literal:
    """A literal with its number as the dtype has it: a weak one has more digits."""
    if not isinstance(literal.val, int | float | complex):
        return literal
    return Literal(literal.aval.dtype.type(literal.val), literal.aval)


def _without_conversions(jaxpr: Jaxpr, change: ChangeProgram) -> Jaxpr:
    """A program without conversions that keep the dtype, and those inside changed."""
    sources: dict[Any, Any] = {}

    def read(values: Sequence[Any]) -> list[Any]:
        return [
            _typed(v) if isinstance(v, Literal) else sources.get(v, v) for v in values
        ]

    eqns = []
    for eqn in jaxpr.eqns:
        invars = read(eqn.invars)
        if (
            eqn.primitive.name == "convert_element_type"
            and eqn.params["sharding"] is None
            and eqn.params["new_dtype"] == invars[0].aval.dtype
        ):
            [sources[eqn.outvars[0]]] = invars
        else:
            eqns.append(with_inner(eqn, change).replace(invars=invars))
    return jaxpr.replace(eqns=eqns, outvars=read(jaxpr.outvars))


def _changed(value: Any, change: ChangeProgram) -> Any:
    if isinstance(value, ClosedJaxpr):
        return closed_with(value, change)
    if isinstance(value, Jaxpr):
        return change(value)
    if isinstance(value, tuple | list):
        new = [_changed(one, change) for one in value]
        if any(a is not b for a, b in zip(new, value, strict=True)):
            return getattr(type(value), "_make", type(value))(new)
    return value


# --------------------------------------------- lowered for devices that are not here


def deferred(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program whose ops do not ask for devices while it is lowered.

    JAX refuses to lower custom_partitioning ops, what becomes one, and functions of the
    host for a mesh without devices. Here they are lowered without.
    """
    return with_equations(closed, _deferred)


def _deferred(eqn: JaxprEqn) -> JaxprEqn:
    is_plain = eqn.primitive not in prim_requires_devices_during_lowering
    if is_plain or eqn.primitive.name == _OF_SHARDINGS:
        return eqn
    return eqn.replace(primitive=_deferred_p, params={"op": _Op(eqn)})


@dataclass(frozen=True, eq=False)
class _Op:
    """An op of JAX's that is lowered later; it hides the op's parameters."""

    eqn: JaxprEqn

    def __call__(self, *operands: Any) -> Any:
        primitive = self.eqn.primitive
        made = primitive.bind(*operands, **self.eqn.params)
        return made if primitive.multiple_results else [made]


_deferred_p = Primitive("deferred")
_deferred_p.multiple_results = True
_deferred_p.def_abstract_eval(lambda *_, op: [v.aval for v in op.eqn.outvars])
mlir.register_lowering(
    _deferred_p,
    lambda context, *values, op: mlir.lower_fun(op, multiple_results=True)(
        context, *values
    ),
)
