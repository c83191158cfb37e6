"""Programs as JAX traces them, and the programs inside of their equations.

JAX's configuration, and what else it keeps for a process without public names.

A function of the same arguments is another program inside ``jax.enable_x64(True)`` or
``jax.default_matmul_precision("highest")``. ``jax.jit`` traces again there, and
`cfp.parallelize` does the same. ``jax.jit`` compares a tuple that JAX keeps for each
thread. No public function returns that tuple, and reading each setting by its public
name takes a thousand times as long (0.17 ms, against 0.0001).

cuDNN's attention is traced on machines without cuDNN, too:
`jax.nn.dot_product_attention(implementation="cudnn")` reads the version of cuDNN and
the GPU while it is traced. A plan for described GPUs needs neither.

`jax.distributed` has keys and values that all processes of a program see, beside their
devices. Every wait has a deadline here; a collective waits for its devices for ever.
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

from cfp.errors import CfpError

# What JAX leaves out of that tuple although it changes what runs: the kind of random
# keys, and how the compiler works, with what JAX 0.10.2 to 0.12 has by default. Other
# settings change what is traced, which fingerprints are of, or only what is reported.
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


def trace_context_key() -> Hashable:
    """Returns the key of this thread's JAX configuration at this moment."""
    return trace_context(), _others(jax.config)


def compiler_settings() -> tuple[tuple[str, str], ...]:
    """Returns settings that compiled programs depend on beside their modules.

    Only values other than JAX's defaults, by name.
    """
    # Some are no attributes of the configuration.
    values = jax.config.values
    found = {
        name: str(getattr(jax.config, name, values.get(name, usual)))
        for name, usual in _ALSO.items()
    }
    return tuple((name, text) for name, text in found.items() if text != _ALSO[name])


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Turns JAX's checks for NaN and infinity off, in this thread.

    Under these checks JAX donates no memory and reads all results, so that measuring on
    random numbers would take other time and memory, or fail.
    """
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


def checks_numbers() -> bool:
    """True if JAX is to look for NaN or infinity in what programs return."""
    config: Any = jax.config
    return config.jax_debug_nans or config.jax_debug_infs


def check_numbers(results: Sequence[tuple[str, jax.Array]]) -> None:
    """Looks for NaN and infinity as far as `jax_debug_nans` and `jax_debug_infs` say.

    Args:
        results: by path.

    Raises:
        FloatingPointError: it names the first that has one.
    """
    settings = (("NaN", "nans", jnp.isnan), ("infinity", "infs", jnp.isinf))
    for name, short, test in settings:
        if not getattr(jax.config, f"jax_debug_{short}"):
            continue
        for path, result in results:
            inexact = jnp.issubdtype(result.dtype, jnp.inexact)
            if inexact and bool(test(result).any()):
                raise FloatingPointError(
                    f"Result {path} of the step has {name} (jax_debug_{short} is on). "
                    "To see the operation that makes it, call the step by itself, "
                    "in jax.jit, with the same arguments."
                )


def check_settings() -> None:
    """Refuses a configuration of JAX under which nothing can be planned or compiled.

    Raises:
        CfpError: it names the setting.
    """
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):
        raise CfpError(
            "jax_use_shardy_partitioner is off (JAX_USE_SHARDY_PARTITIONER=0, or "
            "jax.config.update), and cfp shards programs by Shardy. Unset the "
            'variable, or call jax.config.update("jax_use_shardy_partitioner", True).'
        )
    if getattr(jax.config, "jax_disable_jit", False):
        raise CfpError(
            "jax_disable_jit is on (jax.disable_jit(), or JAX_DISABLE_JIT=1), and cfp "
            "shards compiled programs. Leave jax.disable_jit() to plan a step, or to "
            "run it under a plan; to debug the step call it by itself."
        )


# ------------------------------------------------------- cuDNN that is not here

# That JAX's newest release asks for, and the oldest GPUs that have all layouts.
_VERSION = 91300
_CAPABILITY = (9, 0)
_ANSWERS = {
    "check_cudnn_version": lambda: _VERSION,
    "check_compute_capability": lambda least: _numbers(least) <= _CAPABILITY,
    "is_cuda_compute_capability_equal": lambda one: _numbers(one) == _CAPABILITY,
}


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))


@contextlib.contextmanager
def cudnn_expected() -> Iterator[None]:
    """Makes JAX trace its attention as for Hopper GPUs, if there is no GPU.

    Lowering for CPU devices then fails for want of such an op.
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

_LATE = "DEADLINE_EXCEEDED"


@dataclass(frozen=True, slots=True)
class Channel:
    """Key-value messages between the processes of a program.

    Attributes:
        coordinator: HOST:PORT of process 0, or "" if it is not known.
    """

    process: int
    count: int
    coordinator: str
    _client: Any

    def put(self, key: str, text: str) -> None:
        """Stores a value; an earlier value of the key is replaced."""
        self._client.key_value_set(key, text, allow_overwrite=True)

    def get(self, key: str, seconds: float) -> str | None:
        """Waits for the value of a key; None if that takes longer.

        Raises:
            jax.errors.JaxRuntimeError: the coordinator cannot be reached.
        """
        try:
            return self._client.blocking_key_value_get(key, int(seconds * 1000))
        except jax.errors.JaxRuntimeError as error:
            if _LATE not in str(error):
                raise
            return None

    def below(self, folder: str) -> Mapping[str, str]:
        """Returns all values so far under keys in a folder."""
        found = self._client.key_value_dir_get(f"{folder}/")
        return {key.removeprefix(f"{folder}/"): text for key, text in found}

    def forget(self, folder: str) -> None:
        """Removes all keys that begin with a folder's name."""
        self._client.key_value_delete(f"{folder}/")


def open_channel() -> Channel | None:
    """The channel of this program; None where it has one process."""
    state = distributed.global_state
    if state.client is None or state.num_processes < 2:
        return None
    address = state.coordinator_address or ""
    return Channel(state.process_id, state.num_processes, address, state.client)


# pyright: reportPrivateImportUsage=false
# (of jax 0.12, which exports ClosedJaxpr in a way that pyright takes for private)


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
