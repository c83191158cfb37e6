"""Functions of the host that a step calls, and what becomes of their exceptions.

XLA runs a function of the host for one device, or for each. If it raises, that device
stops, and the others wait for it in their next collective: on virtual CPU devices the
process aborts after 40 seconds, and the exception is lost. So a planned step calls such
functions through a guard: the exception is kept, the devices go on with zeros, and the
exception is raised once they are done.
"""

# pyright: reportPrivateImportUsage=false
# (of jax 0.12, which exports ClosedJaxpr in a way that pyright takes for private)

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from cfp.program.graph import Program
from cfp.program.jaxprs import closed_with, with_equations, with_inner

_NAME, _RESULTS = "callback", "result_avals"


def host_calls(program: Program) -> tuple[str, ...]:
    """Returns a program's calls of host functions: kind and ``file:line``."""
    found = []
    for op in program.ops:
        if op.kind == "custom_call" and _NAME in op.attributes:
            how = op.scope.rpartition("/")[2].rstrip(":") or op.kind
            found.append(f"{how} at {op.source}" if op.source else how)
    return tuple(dict.fromkeys(found))


class Alarm:
    """The first exception that functions of the host have raised since it was taken.

    They run in threads of the runtime's.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._error: Exception | None = None

    def take(self) -> Exception | None:
        """The exception, if there was one; it is forgotten here."""
        with self._lock:
            error, self._error = self._error, None
        return error

    def guard(
        self, function: Callable[..., Any], results: Sequence[Any]
    ) -> Callable[..., Any]:
        """A function that calls another one, and returns zeros where that raises.

        Args:
            function: of flat arrays, as JAX keeps it.
            results: shapes and types of the arrays that it returns.
        """

        def guarded(*args: Any) -> Any:
            try:
                return function(*args)
            except Exception as error:  # whatever it is, it is raised again later
                with self._lock:
                    self._error = self._error or error
                return tuple(np.zeros(one.shape, one.dtype) for one in results)

        return guarded


def guarded(closed: ClosedJaxpr, alarm: Alarm) -> ClosedJaxpr:
    """A traced step whose functions of the host raise nothing into the devices."""

    def guard(jaxpr: Jaxpr) -> Jaxpr:
        return with_equations(jaxpr, guard_equation)

    def guard_equation(eqn: JaxprEqn) -> JaxprEqn:
        eqn = with_inner(eqn, guard)
        called = eqn.params.get(_NAME)
        if not (eqn.primitive.name.endswith(_NAME) and callable(called)):
            return eqn
        calls = alarm.guard(called, eqn.params.get(_RESULTS, ()))
        return eqn.replace(params={**eqn.params, _NAME: calls})

    return closed_with(closed, guard)
