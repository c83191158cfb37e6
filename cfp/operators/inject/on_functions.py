"""Injection into plain functions: jitted functions with a name are replaced inside.

The function is traced, and its program evaluated with other functions in the places of
calls that a policy matches. Loops, branches and rematerialised parts are gone through,
too; not what has a derivative of its own. Inject before differentiating: a call that
was differentiated has other arguments than the function.
"""

# pyright: reportPrivateImportUsage=false
# (of jax 0.12, which exports ClosedJaxpr in a way that pyright takes for private)

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core

from cfp.errors import compose
from cfp.operators.inject.policy import Policy, PolicyError, Refused, first_match
from cfp.operators.inject.report import Report

_JIT = ("jit", "pjit")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedJit:
    """A call of a jitted function, as policies see it.

    Attributes:
        function: its name.
        arguments: shapes and types of its arguments.
        results: of its results.
    """

    function: str
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]


class FunctionPolicy(Policy):
    """Replaces jitted functions of one name.

    Derive from it, set `function`, and give `replace`.

    Attributes:
        function: the name of the function that was jitted.
    """

    function = ""

    def match(self, part: Any) -> bool:
        """By the name."""
        return isinstance(part, NamedJit) and part.function == self.function

    def build(self, part: Any) -> Callable[..., Any]:
        """Calls `replace`; there are no parameters."""
        return lambda parameters, *args: self.replace(*args)

    def replace(self, *args: jax.Array) -> Any:
        """Returns the function that is called in its place, with the same arrays.

        Raises:
            Refused: not these arguments, with the reason.
        """
        raise NotImplementedError


def injected(
    function: Callable[..., Any], policies: Sequence[Policy], report: Report
) -> Callable[..., Any]:
    """The function with jitted functions replaced inside.

    Args:
        function: of arrays, or trees of them.
        policies: in the order in which they are asked.
        report: called with every named jit when the function is called.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args, **kwargs)
        leaves = jax.tree.leaves((args, kwargs))
        made = _Evaluation(policies, report).run(closed, leaves, ())
        report.check()
        return jax.tree.unflatten(jax.tree.structure(shape), made)

    return run


class _Evaluation:
    """Evaluates a program, equation by equation."""

    def __init__(self, policies: Sequence[Policy], report: Report):
        self._policies, self._report = policies, report
        self._counts: dict[str, int] = {}

    def run(self, closed: Any, args: Sequence[Any], path: tuple[str, ...]) -> list[Any]:
        """The results of a program."""
        values: dict[Any, Any] = {}
        jaxpr = closed.jaxpr
        values.update(zip(jaxpr.constvars, closed.consts, strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        for equation in jaxpr.eqns:
            inputs = [read(atom) for atom in equation.invars]
            results = self._equation(equation, inputs, path)
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(
        self, equation: Any, inputs: list[Any], path: tuple[str, ...]
    ) -> list[Any]:
        if equation.primitive.name in _JIT:
            return self._jit(equation, inputs, path)
        if changed := self._inside(equation, path):
            equation = equation.replace(params={**equation.params, **changed})
        return _evaluated(equation, inputs)

    def _inside(self, equation: Any, path: tuple[str, ...]) -> dict[str, Any]:
        """The programs inside an equation, with functions replaced in them."""
        name = equation.primitive.name
        if name.startswith(("custom_jvp", "custom_vjp")):
            return {}
        return {
            key: self._program(value, (*path, name))
            for key, value in equation.params.items()
            if _is_program(value)
        }

    def _program(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, tuple):
            return tuple(self._program(one, path) for one in value)
        closed = value
        if isinstance(value, core.Jaxpr):
            if value.constvars:
                return value
            closed = core.ClosedJaxpr(value, ())
        inputs = [_abstract(one) for one in closed.in_avals]
        made = jax.make_jaxpr(lambda *args: self.run(closed, args, path))(*inputs)
        if isinstance(value, core.Jaxpr):
            # What holds a program without constants cannot be given any.
            return made.jaxpr if not made.consts else value
        return made

    def _jit(
        self, equation: Any, inputs: list[Any], path: tuple[str, ...]
    ) -> list[Any]:
        closed, name = equation.params["jaxpr"], equation.params["name"]
        part = NamedJit(
            function=name,
            arguments=tuple(_abstract(one) for one in closed.in_avals),
            results=tuple(_abstract(one) for one in closed.out_avals),
        )
        where = self._place((*path, name))
        policy = first_match(self._policies, part)
        if policy is None:
            self._report.add_left(where, "function", None, "no policy matches")
            run = jax.jit(_named(lambda *a: self.run(closed, a, (*path, name)), name))
            return list(run(*inputs))
        try:
            made = policy.build(part)({}, *policy.adapt(part, tuple(inputs), {}))
        except Refused as error:
            self._report.add_left(where, "function", policy, str(error))
            return list(jax.jit(core.jaxpr_as_fun(closed))(*inputs))
        results = jax.tree.leaves(made)
        found = tuple(_abstract(jax.typeof(one)) for one in results)
        if found != part.results:
            raise PolicyError(
                compose(
                    f"{policy.name} makes something else than {name} does.",
                    expected=_text(part.results),
                    got=_text(found),
                    attempt="inject before differentiating, and give results of the "
                    "same shapes and types",
                )
            )
        self._report.add_replaced(where, "function", policy)
        return results

    def _place(self, path: tuple[str, ...]) -> str:
        """A name of its own for each call."""
        where = "/".join(path)
        count = self._counts[where] = self._counts.get(where, 0) + 1
        return where if count == 1 else f"{where} ({count})"


def _evaluated(equation: Any, inputs: Sequence[Any]) -> list[Any]:
    """The results of an equation, as those of a program of it alone.

    How a primitive is bound to its parameters differs between releases of JAX; how a
    program is evaluated does not.
    """
    given = {
        atom: value
        for atom, value in zip(equation.invars, inputs, strict=True)
        if not isinstance(atom, core.Literal)
    }
    wanted = [one for one in equation.outvars if not isinstance(one, core.DropVar)]
    names = core.DebugInfo(
        traced_for="injection",
        func_src_info=equation.primitive.name,
        arg_names=("",) * len(given),
        result_paths=("",) * len(wanted),
    )
    alone = core.Jaxpr((), list(given), wanted, [equation], equation.effects, names)
    made = core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*given.values())
    found = dict(zip(wanted, made, strict=True))
    return [found.get(one) for one in equation.outvars]


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    function.__name__ = name
    return function


def _is_program(value: Any) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(_is_program(one) for one in value)
    return isinstance(value, core.ClosedJaxpr | core.Jaxpr)


def _abstract(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _text(found: Sequence[jax.ShapeDtypeStruct]) -> str:
    return ", ".join(f"{x.dtype}{list(x.shape)}" for x in found)
