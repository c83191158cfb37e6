"""Jaxprs and the jaxprs inside of them; JAX's configuration, and messages.

Configuration: a function is another program inside ``jax.enable_x64(True)`` or
``jax.default_matmul_precision("highest")``. ``jax.jit`` compares a tuple that JAX keeps
for each thread, and traces again if it differs; `cfp.parallelize` compares it, too. The
tuple is private. Reading each public setting instead takes 0.17 ms, not 0.0001.

cuDNN: `jax.nn.dot_product_attention(implementation="cudnn")` reads the version of
cuDNN and the GPU while it is traced. A plan for described GPUs needs neither.

Messages: processes of `jax.distributed` share keys and values. A wait for a key has a
deadline, while a collective waits for its devices for ever.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import distributed
from jax._src.config import trace_context
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive
from jax.interpreters import mlir
from jax.sharding import Mesh

from cfp.errors import CfpError

# Settings outside of that tuple that change what runs, with the defaults of JAX 0.10.2
# to 0.12. Further settings change the trace, which fingerprints cover, or only reports.
_ALSO = {
    "jax_compiler_enable_remat_pass": "True",
    "jax_cpu_enable_async_dispatch": "True",
    "jax_default_prng_impl": "threefry2x32",
    "jax_disable_most_optimizations": "False",
    "jax_enable_pgle": "False",
    "jax_exec_time_optimization_effort": "0.0",
    "jax_memory_fitting_effort": "0.0",
    "jax_memory_fitting_level": "O2",
    "jax_no_execution": "False",
    "jax_optimization_level": "UNKNOWN",
    "jax_pgle_profiling_runs": "3",
    "jax_xla_profile_version": "0",
}
_others = attrgetter(*(name for name in _ALSO if hasattr(jax.config, name)))


def trace_context_key(mesh: Any) -> Hashable:
    """Key of this thread's JAX settings that may change a trace or its execution.

    If `mesh` is None, the key has the mesh of ``jax.set_mesh``.
    """
    asks = mesh is None and not jax.sharding.get_abstract_mesh().empty  # It is fast.
    return trace_context(), _others(jax.config), mesh_around() if asks else None


def mesh_around() -> Mesh | None:
    """Returns the mesh of ``jax.set_mesh``; None without it, or while JAX traces."""
    # JAX refuses to name devices while it traces.
    with contextlib.suppress(ValueError):
        return None if (found := jax.sharding.get_mesh()).empty else found
    return None


def compiler_settings() -> tuple[tuple[str, str], ...]:
    """Returns (name, value) of settings in `_ALSO` that differ from JAX's defaults."""
    # `jax.config` has no attributes for some settings.
    values = jax.config.values
    found = {
        name: str(getattr(jax.config, name, values.get(name, usual)))
        for name, usual in _ALSO.items()
    }
    return tuple((name, text) for name, text in found.items() if text != _ALSO[name])


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Turns off `jax_debug_nans` and `jax_debug_infs` in this thread, in a ``with``.

    Each makes JAX read all results, and may raise for those of random numbers. Under
    `jax_debug_nans` JAX donates no memory.
    """
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


def checks_numbers() -> bool:
    """True if `jax_debug_nans` or `jax_debug_infs` is on."""
    config: Any = jax.config
    return config.jax_debug_nans or config.jax_debug_infs


def check_numbers(results: Sequence[tuple[str, jax.Array]]) -> None:
    """Checks (path, array) pairs as `jax_debug_nans` and `jax_debug_infs` require.

    Raises:
        FloatingPointError: an array has a number that an active setting refuses.
    """
    settings = (("NaN", "nans", jnp.isnan), ("infinity", "infs", jnp.isinf))
    for name, short, test in settings:
        if not getattr(jax.config, f"jax_debug_{short}"):
            continue
        for path, result in results:
            inexact = jnp.issubdtype(result.dtype, jnp.inexact)
            if inexact and bool(test(result).any()):
                raise FloatingPointError(
                    f"Result{path} of the step has {name} (jax_debug_{short} is on). "
                    "To find the operation, call the step in jax.jit, without cfp, on "
                    "these arguments; make donated ones anew, as they are deleted."
                )


def check_settings() -> None:
    """Raises CfpError if Shardy or jit is turned off; the message names the setting."""
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):
        raise CfpError(
            "jax_use_shardy_partitioner is off (JAX_USE_SHARDY_PARTITIONER=0, or "
            "jax.config.update), but cfp needs Shardy. Unset the variable, or call "
            'jax.config.update("jax_use_shardy_partitioner", True).'
        )
    if getattr(jax.config, "jax_disable_jit", False):
        raise CfpError(
            "jax_disable_jit is on (jax.disable_jit(), or JAX_DISABLE_JIT=1), but cfp "
            "needs jit. Turn it off; to debug the step, call it without cfp."
        )


# ------------------------------------------------------ cuDNN on machines without it

# cuDNN's version with all that JAX may require, and the oldest GPUs with all layouts.
_CAPABILITY = (9, 0)
_ANSWERS = {
    "check_cudnn_version": lambda: 91300,
    "check_compute_capability": lambda least: _numbers(least) <= _CAPABILITY,
    "is_cuda_compute_capability_equal": lambda one: _numbers(one) == _CAPABILITY,
}


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))


@contextlib.contextmanager
def cudnn_expected() -> Iterator[None]:
    """Makes JAX trace its cuDNN attention as for Hopper GPUs, in a ``with``.

    Changes nothing if JAX's default backend is "gpu". Lowering for CPUs still fails.
    """
    is_here = jax.default_backend() == "gpu"
    own = {name: getattr(fused, name) for name in _ANSWERS}
    try:
        for name, answer in ({} if is_here else _ANSWERS).items():
            setattr(fused, name, answer)
        yield
    finally:
        for name, function in own.items():
            setattr(fused, name, function)


# ------------------------------------------------- messages between processes


@dataclass(frozen=True, slots=True)
class Channel:
    """Key-value messages between the processes of `jax.distributed`.

    Attributes:
        process: this process's index.
        count: number of processes.
        coordinator: HOST:PORT of process 0, or "" if it is not known.
    """

    process: int
    count: int
    coordinator: str
    _client: Any

    def put(self, key: str, text: str) -> None:
        """Stores a value under a key, in place of an earlier one."""
        self._client.key_value_set(key, text, allow_overwrite=True)

    def get(self, key: str, seconds: float) -> str | None:
        """Waits for the value of a key; None if it is not set in time.

        Raises:
            jax.errors.JaxRuntimeError: another failure, unless JAX ends the process.
        """
        try:
            return self._client.blocking_key_value_get(key, int(seconds * 1000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None

    def below(self, folder: str) -> Mapping[str, str]:
        """Returns {key without ``folder/``: value} of keys that now begin with it."""
        found = self._client.key_value_dir_get(f"{folder}/")
        return {key.removeprefix(f"{folder}/"): text for key, text in found}

    def forget(self, folder: str) -> None:
        """Removes the key ``folder``, and all keys that begin with ``folder/``."""
        self._client.key_value_delete(f"{folder}/")


def open_channel() -> Channel | None:
    """Returns this process's channel to the others; None if there are no others."""
    state = distributed.global_state
    if state.client is None or state.num_processes < 2:
        return None
    address = state.coordinator_address or ""
    return Channel(state.process_id, state.num_processes, address, state.client)


# pyright: reportPrivateImportUsage=false
# (of jax 0.12, which exports ClosedJaxpr in a way that pyright takes for private)

ChangeProgram = Callable[[Jaxpr], Jaxpr]
# Text that may differ between traces of one program: weak types, and addresses.
_OF_A_TRACE = re.compile(r"weak_type=\w+|\b0x[0-9a-f]+")


def inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Lists the jaxprs in an equation's parameters, sorted by the parameters' names."""
    params = [eqn.params[name] for name in sorted(eqn.params)]
    found = (getattr(one, "jaxpr", one) for one in jax.tree.leaves(params))
    return [one for one in found if isinstance(one, Jaxpr)]


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yields all equations, inner ones first; a jaxpr that is called twice, twice."""
    for eqn in jaxpr.eqns:
        for inner in inner_jaxprs(eqn):
            yield from equations(inner)
        yield eqn


def with_inner(eqn: JaxprEqn, change: ChangeProgram) -> JaxprEqn:
    """Applies `change` to jaxprs in `eqn.params`; returns `eqn` if it changes none."""
    params = {name: _changed(eqn.params[name], change) for name in sorted(eqn.params)}
    if all(params[name] is eqn.params[name] for name in params):
        return eqn
    return eqn.replace(params=params)


def closed_with(closed: ClosedJaxpr, change: ChangeProgram) -> ClosedJaxpr:
    """Applies `change` to `closed.jaxpr`; returns `closed` if nothing changes."""
    found = change(closed.jaxpr)
    return closed if found is closed.jaxpr else closed.replace(jaxpr=found)


def with_equations(
    closed: ClosedJaxpr, change: Callable[[JaxprEqn], JaxprEqn]
) -> ClosedJaxpr:
    """Applies `change` to equations, outer first; returns `closed` if none changes.

    Equations inside of a changed equation are left alone.
    """

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
    """True if two traces print the same equations, weak types and addresses aside.

    ``jnp.clip`` and ``jnp.where`` convert weakly typed values to their own dtype; such
    conversions do not count. Numbers in constant arrays are not compared.
    """
    if one is other or _text(one) == _text(other):
        return True
    known: dict[str, Jaxpr] = {}

    # Equal inner jaxprs become one object, since a text prints each object once.
    @cache
    def without_weak_types(jaxpr: Jaxpr) -> Jaxpr:
        found = _without_conversions(jaxpr, without_weak_types)
        return known.setdefault(_text(found), found)

    return without_weak_types(one) is without_weak_types(other)


def _text(jaxpr: Jaxpr) -> str:
    return _OF_A_TRACE.sub("", str(jaxpr))


def _without_conversions(jaxpr: Jaxpr, change: ChangeProgram) -> Jaxpr:
    """Removes conversions to the same dtype, rounds literals, changes inner jaxprs."""
    sources: dict[Any, Any] = {}

    def read(value: Any) -> Any:
        if not isinstance(value, Literal):
            return sources.get(value, value)
        if not isinstance(value.val, int | float | complex):
            return value
        aval: Any = value.aval  # Weak numbers have more digits.
        return Literal(aval.dtype.type(value.val), aval)

    eqns = []
    for eqn in jaxpr.eqns:
        invars = [*map(read, eqn.invars)]
        if (
            eqn.primitive.name == "convert_element_type"
            and eqn.params["sharding"] is None
            and eqn.params["new_dtype"] == invars[0].aval.dtype
        ):
            [sources[eqn.outvars[0]]] = invars
        else:
            eqns.append(with_inner(eqn, change).replace(invars=invars))
    return jaxpr.replace(eqns=eqns, outvars=[*map(read, jaxpr.outvars)])


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


# ------------------------------------------------- lowering for a mesh without devices


def deferred(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program that JAX lowers for a mesh without devices.

    JAX refuses some ops there, such as host callbacks. Each is wrapped in an op that
    JAX accepts. `jax.debug.inspect_array_sharding` is not, and still fails.
    """
    return with_equations(closed, _deferred)


def _deferred(eqn: JaxprEqn) -> JaxprEqn:
    is_plain = eqn.primitive not in prim_requires_devices_during_lowering
    if is_plain or eqn.primitive.name == "inspect_sharding":
        return eqn
    return eqn.replace(primitive=_deferred_p, params={"op": _Op(eqn)})


@dataclass(frozen=True, eq=False)
class _Op:
    """A callable that binds an equation's primitive; hides its parameters from JAX."""

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
