"""Functions that an exported module contains, beside its tables.

It imports nothing but JAX, and reads the tables that stand before it in the module. The
text of the one module of cfp that it names stands behind it.
"""

# pyright: reportPrivateImportUsage=false
# (of jax 0.12, which exports ClosedJaxpr in a way that pyright takes for private)

from __future__ import annotations

import base64
import hashlib
import inspect
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.extend.mlir import ir
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)
from jax.tree_util import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

from cfp.program.fixed import fixed, released

# The tables. In the module that is written they are filled.
MESH: Mapping[str, int] = {}
ARGUMENTS: Sequence[tuple[str, str, PartitionSpec, bool]] = ()
RESULTS: Sequence[PartitionSpec] = ()
IN_HOST: Sequence[tuple[int, int]] = ()
STATIC: Sequence[int | str] = ()
COMPILER_OPTIONS: Mapping[str, str] = {}
EQUATIONS: tuple[int, str] = (0, "")
SITES: Sequence[tuple[str, str, str, str, PartitionSpec]] = ()
PROGRAM: Mapping[str, str] = {}

# ------------------------------------------------------------------------------ runtime


def make_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of the plan, over given devices or the first that there are."""
    kinds = (jax.sharding.AxisType.Auto,) * len(MESH)
    shape, names = tuple(MESH.values()), tuple(MESH)
    return jax.make_mesh(shape, names, axis_types=kinds, devices=devices)


def shard(
    step: Callable[..., Any], *args: Any, mesh: Mesh | None = None, **kwargs: Any
) -> Callable[..., Any]:
    """Compiles the step, sharded, and returns it as a function like the step.

    Args:
        step: the step that was planned.
        args, kwargs: its arguments, as arrays or ``jax.ShapeDtypeStruct`` s.
        mesh: the devices; :func:`make_mesh`, if not given.

    Raises:
        ValueError: the arguments or the step are not those that were planned.
    """
    mesh = _own_mesh(make_mesh() if mesh is None else mesh)
    static, leaves, tree = _flatten(step, args, kwargs)
    if not _are_planned(leaves):
        raise _misfit(step, static, leaves, tree)
    made: list[Any] = []

    def flat(*leaves: Any) -> Any:
        here = in_space(leaves, [i for i, _ in IN_HOST], jax.memory.Space.Device)
        dynamic, named = released(tree_unflatten(tree, here))
        given = list(dynamic)
        for key, value in sorted(static.items(), key=str):
            if isinstance(key, int):
                given.insert(key, value)
            else:
                named[key] = value
        results, structure = tree_flatten(fixed(step(*given, **named)))
        made.append(structure)
        return in_space(results, [j for _, j in IN_HOST], jax.memory.Space.Host)

    flat.__name__ = flat.__qualname__ = getattr(step, "__name__", "step")
    avals = [jax.typeof(x) if not hasattr(x, "shape") else x for x in leaves]
    kinds = [host_memory(x) for x in leaves]
    for i, _ in IN_HOST:
        kinds[i] = HOST
    first = SingleDeviceSharding(mesh.devices.flat[0])
    traced = jax.jit(flat).trace(*placed(avals, [first] * len(avals), kinds))
    run = jaxpr_as_fun(constrained(traced.jaxpr, mesh))
    if PROGRAM:
        check_program(traced.jaxpr, mesh)
    ins = tuple(
        in_memory(NamedSharding(mesh, row[2]), kind)
        for row, kind in zip(ARGUMENTS, kinds, strict=True)
    )
    outs = [NamedSharding(mesh, spec) for spec in RESULTS]
    if len(outs) != len(traced.out_info):
        raise ValueError(
            f"Planned for {len(outs)} results, the step has {len(traced.out_info)}."
            f"{_TRY} the step that was planned; or plan again, and export that plan"
        )

    jaxpr = traced.jaxpr.jaxpr
    kinds_of = {id(v): kind for v, kind in zip(jaxpr.invars, kinds, strict=True)}
    for i, var in enumerate(jaxpr.outvars):
        is_host = getattr(var.aval, "memory_space", None) == jax.memory.Space.Host
        outs[i] = in_memory(outs[i], HOST if is_host else kinds_of.get(id(var), ""))

    def replay(*leaves: Any) -> Any:
        return run(*leaves)

    replay.__name__ = replay.__qualname__ = flat.__name__
    lowered = jax.jit(
        replay,
        in_shardings=ins,
        out_shardings=outs,
        donate_argnums=tuple(i for i, row in enumerate(ARGUMENTS) if row[3]),
        keep_unused=True,
    ).lower(*placed(avals, ins, kinds))
    if PROGRAM:
        put_program(lowered)
    compiled = lowered.compile(compiler_options=dict(COMPILER_OPTIONS) or None)
    return Sharded(step, compiled, ins, static, tree, made[-1])


HOST = "pinned_host"  # The memory that JAX means by `jax.memory.Space.Host`.


def host_memory(leaf: Any) -> str:
    """The memory of the host that an array is in, or is to be; "" for the device's."""
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    return kind if kind in (HOST, "unpinned_host") else ""


def in_memory(sharding: Any, kind: str) -> Any:
    """A sharding in a kind of memory."""
    return sharding.with_memory_kind(kind) if kind else sharding


def in_space(leaves: Sequence[Any], which: Sequence[int], space: Any) -> list[Any]:
    """Some of these leaves in the memory of the host, or of the devices."""
    return [jax.device_put(x, space) if i in which else x for i, x in enumerate(leaves)]


def placed(
    avals: Sequence[Any], shardings: Sequence[Any], kinds: Sequence[str]
) -> list[Any]:
    """Types, with shardings where they are in the memory of the host."""
    return [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=in_memory(sharding, kind))
        if kind
        else aval
        for aval, sharding, kind in zip(avals, shardings, kinds, strict=True)
    ]


def program_digest(closed: ClosedJaxpr) -> str:
    """Returns the digest of a program, constants included."""
    run = jaxpr_as_fun(closed)

    def program(*leaves: Any) -> Any:
        return run(*leaves)

    inputs: list[Any] = [*closed.in_avals]
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in inputs]
    text = jax.jit(program, keep_unused=True).lower(*avals).as_text()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_program(closed: ClosedJaxpr, mesh: Mesh) -> None:
    """Refuses to use the plan's program for a step that it does not compute.

    Raises:
        ValueError: the step, the version of JAX or the platform is another.
    """
    found = {
        "jax": jax.__version__,
        "platform": mesh.devices.flat[0].platform,
        "digest": program_digest(closed),
    }
    for name, value in found.items():
        if value != PROGRAM[name]:
            raise ValueError(
                f"The plan's program was written for {name} {PROGRAM[name]}, here it "
                f"is {value}. (The digest is of the step, its constants included.) "
                "Export the plan again."
            )


def put_program(lowered: jax.stages.Lowered) -> None:
    """Puts the plan's program in the place of the lowered step's."""
    module = lowered.compiler_ir("stablehlo")
    assert module is not None, "JAX lowers to StableHLO"
    bytecode = zlib.decompress(base64.b85decode(PROGRAM["bytecode"]))
    with module.context, ir.Location.unknown():
        source = ir.Module.parse(bytecode)
        for op in [*module.body.operations]:
            op.operation.erase()
        with ir.InsertionPoint(module.body):
            for op in source.body.operations:
                op.operation.clone()


class Sharded(NamedTuple):
    """The step, compiled, that is called like the function it came from.

    Attributes:
        compiled: the program over flat argument leaves.
        shardings: of these leaves.
        static: the arguments that are part of the program.
        tree: the structure of all others.
        results: the structure of what it returns.
    """

    step: Callable[..., Any]
    compiled: jax.stages.Compiled
    shardings: tuple[NamedSharding, ...]
    static: Mapping[Any, Any]
    tree: Any
    results: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; arguments go to their shardings where they are elsewhere."""
        static, leaves, tree = _flatten(self.step, args, kwargs)
        if static != self.static:
            raise ValueError(
                f"The step was compiled for other static arguments: {self.static}, got "
                f"{static}.{_TRY} shard(step, ...) with these"
            )
        if tree != self.tree:
            raise _misfit(self.step, static, leaves, tree)
        try:
            placed = [
                leaf
                if isinstance(leaf, jax.Array) and leaf.sharding == sharding
                else jax.device_put(leaf, sharding)
                for leaf, sharding in zip(leaves, self.shardings, strict=True)
            ]
            results = self.compiled(*placed)
        except (TypeError, ValueError) as error:
            if _are_planned(leaves):
                raise
            raise _misfit(self.step, static, leaves, tree) from error
        return released(tree_unflatten(self.results, results))


def constrained(closed: ClosedJaxpr, mesh: Mesh) -> ClosedJaxpr:
    """The step's jaxpr with the sharding constraints of the plan.

    Sharding constraints that the step has of its own are left out: the plan decides.

    Raises:
        ValueError: it is not the jaxpr that was planned.
    """
    keys = [equation_key(eqn) for eqn in equations(closed.jaxpr)]
    found = (len(keys), digest(keys))
    if found != EQUATIONS:
        raise ValueError(
            f"The step is not the one that was planned: it has {found[0]} equations "
            f"(digest {found[1]}), planned were {EQUATIONS[0]} ({EQUATIONS[1]}). The "
            "function, its arguments' shapes or JAX's version changed: plan again."
        )
    wanted: dict[tuple[str, str, int], list[tuple[str, PartitionSpec]]] = {}
    for primitive, kind, value, which, spec in SITES:
        for number in numbers(which):
            wanted.setdefault((primitive, kind, number), []).append((value, spec))
    return closed.replace(jaxpr=_Rewriter(wanted, mesh).rewrite(closed.jaxpr))


class _Rewriter:
    """Goes through equations in order, and puts constraints behind and before them."""

    def __init__(
        self,
        wanted: Mapping[tuple[str, str, int], list[tuple[str, PartitionSpec]]],
        mesh: Mesh,
    ) -> None:
        self.wanted = wanted
        self.mesh = mesh
        self.seen: Counter[tuple[str, str]] = Counter()

    def rewrite(
        self, jaxpr: Jaxpr, body: Sequence[tuple[str, PartitionSpec]] = ()
    ) -> Jaxpr:
        now: dict[Var, Any] = {}  # what stands for a variable from here on
        copies: dict[tuple[Var, PartitionSpec], Var] = {}
        eqns: list[JaxprEqn] = []
        for value, spec in body:
            place, _, index = value.partition(" ")
            if place == "entry":
                var = jaxpr.invars[int(index)]
                eqns.append(self._constraint(var, spec, jaxpr.eqns[0]))
                now[var] = eqns[-1].outvars[0]

        def read(var: Any) -> Any:
            return var if isinstance(var, Literal) else now.get(var, var)

        for eqn in jaxpr.eqns:
            key = equation_key(eqn)
            before = sum(equation_key(e) == key for e in inner_equations(eqn))
            sites = self.wanted.get((*key, self.seen[key] + before), ())
            params = dict(eqn.params)
            for name in sorted(params):
                params[name] = self._inside(params[name], sites)
            self.seen[key] += 1
            if eqn.primitive.name == "sharding_constraint":
                now[eqn.outvars[0]] = read(eqn.invars[0])
                continue
            invars = [read(var) for var in eqn.invars]
            for value, spec in sites:
                place, _, index = value.partition(" ")
                if place == "in":
                    var = invars[int(index)]
                    if (var, spec) not in copies:
                        eqns.append(self._constraint(var, spec, eqn))
                        copies[var, spec] = eqns[-1].outvars[0]
                    invars[int(index)] = copies[var, spec]
            eqns.append(eqn.replace(invars=invars, params=params))
            for value, spec in sites:
                place, _, index = value.partition(" ")
                if place == "out":
                    var = eqn.outvars[int(index)]
                    eqns.append(self._constraint(var, spec, eqn))
                    now[var] = eqns[-1].outvars[0]
        outvars = [read(var) for var in jaxpr.outvars]
        for value, spec in body:
            place, _, index = value.partition(" ")
            if place == "yield":
                var = outvars[int(index)]
                eqns.append(self._constraint(var, spec, jaxpr.eqns[-1]))
                outvars[int(index)] = eqns[-1].outvars[0]
        return jaxpr.replace(eqns=eqns, outvars=outvars)

    def _inside(self, value: Any, body: Sequence[tuple[str, PartitionSpec]]) -> Any:
        if isinstance(value, ClosedJaxpr):
            return value.replace(jaxpr=self.rewrite(value.jaxpr, body))
        if isinstance(value, Jaxpr):
            return self.rewrite(value, body)
        if isinstance(value, tuple | list):
            if any(isinstance(one, ClosedJaxpr | Jaxpr) for one in value):
                return type(value)(self._inside(one, body) for one in value)
        return value

    def _constraint(self, var: Any, spec: PartitionSpec, eqn: JaxprEqn) -> JaxprEqn:
        sharding = NamedSharding(self.mesh, spec)
        shape = jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
        made = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))(
            shape
        )
        [constraint] = made.eqns
        return constraint.replace(
            invars=[var], outvars=[Var(var.aval)], source_info=eqn.source_info
        )


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All equations, those inside of others before them, call by call."""
    for eqn in jaxpr.eqns:
        yield from inner_equations(eqn)
        yield eqn


def inner_equations(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """All equations inside of one."""
    for name in sorted(eqn.params):
        value = eqn.params[name]
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, ClosedJaxpr | Jaxpr):
                yield from equations(one.jaxpr if isinstance(one, ClosedJaxpr) else one)


def equation_key(eqn: JaxprEqn) -> tuple[str, str]:
    """The primitive of an equation, and the type of its first result."""
    return eqn.primitive.name, type_text(eqn.outvars[0].aval) if eqn.outvars else ""


def type_text(aval: Any) -> str:
    """A type as text: ``float32[8,16]``."""
    shape = ",".join(map(str, getattr(aval, "shape", ())))
    return f"{getattr(aval, 'dtype', 'token')}[{shape}]"


def digest(keys: Sequence[tuple[str, str]]) -> str:
    """Returns a key by which lists of equations are compared."""
    text = "\n".join(f"{primitive} {kind}" for primitive, kind in keys)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def numbers(text: str) -> list[int]:
    """Numbers from ``0-3,8``."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def _own_mesh(mesh: Mesh) -> Mesh:
    """The mesh with axes whose shardings the compiler may choose inside of the step."""
    axes = {name: size for name, size in mesh.shape.items() if size > 1}
    if axes != dict(MESH):
        raise ValueError(
            f"Planned for a mesh {dict(MESH)}, got {axes}.{_TRY} make_mesh(devices), "
            "which has the plan's axes; or plan again, and export that plan"
        )
    kinds = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def _flatten(
    step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[Any, Any], list[Any], Any]:
    """Static arguments, and the array leaves of all others with their structure."""
    placed, named = list(args), dict(kwargs)
    for one in [*inspect.signature(step).parameters.values()][len(placed) :]:
        if one.kind is not one.POSITIONAL_OR_KEYWORD or one.name not in named:
            break
        placed.append(named.pop(one.name))
    static = {i: a for i, a in enumerate(placed) if i in STATIC}
    static |= {name: a for name, a in named.items() if name in STATIC}
    dynamic = tuple(a for i, a in enumerate(placed) if i not in STATIC)
    named = {name: a for name, a in named.items() if name not in STATIC}
    return static, *tree_flatten(fixed((dynamic, named)))


def _kind(leaf: Any) -> str:
    """The type of an argument's leaf as text, or of what has none its name."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return type_text(leaf)
    try:
        return type_text(jax.typeof(leaf))
    except TypeError:
        typed = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        return type_text(leaf) if typed else f"a {type(leaf).__name__}"


def _are_planned(leaves: Sequence[Any]) -> bool:
    """True if argument leaves have the types that were planned for."""
    return [*map(_kind, leaves)] == [kind for _, kind, _, _ in ARGUMENTS]


_TRY = "\n  try:"
_MOST_NAMED = 5


def _misfit(
    step: Callable[..., Any],
    static: Mapping[Any, Any],
    leaves: Sequence[Any],
    tree: Any,
) -> ValueError:
    """The error that says which arguments are not those that were planned for."""
    planned = {path: kind for path, kind, _, _ in ARGUMENTS}
    paths = _paths(step, static, tree_unflatten(tree, leaves))
    found = dict(zip(paths, map(_kind, leaves), strict=True))
    lines = [
        f"  {path}: planned for {planned.get(path, 'nothing')}, "
        f"got {found.get(path, 'nothing')}"
        for path in dict.fromkeys((*planned, *found))
        if planned.get(path) != found.get(path)
    ]
    more = len(lines) - _MOST_NAMED
    lines[_MOST_NAMED:] = [f"  and {more} more"] if more > 0 else []
    same = "  the arrays are the same; what else is in their containers differs, such "
    same += "as a function, a setting, or the class of a module"
    text = "\n".join(["The arguments are not those of the plan:", *(lines or [same])])
    advice = "the arguments that were planned for; or plan again, and export that plan"
    return ValueError(f"{text}{_TRY} {advice}")


def _paths(
    step: Callable[..., Any], static: Mapping[Any, Any], dynamic: Any
) -> list[str]:
    """The path of each array leaf, as ARGUMENTS has it.

    Arguments may have other names than those planned, if there are as many.
    """
    names = [
        one.name
        for one in inspect.signature(step).parameters.values()
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    total = len(dynamic[0]) + len(static)
    names += [f"arg{i}" for i in range(len(names), total)]
    names = [name for i, name in enumerate(names) if i not in static]
    found = []
    for (part, argument, *path), _ in tree_flatten_with_path(dynamic)[0]:
        root = str(argument.key) if part.idx else names[argument.idx]
        found.append((root, keystr(tuple(path), simple=True, separator="/")))
    roots = [*dict.fromkeys(root for root, _ in found)]
    planned = [*dict.fromkeys(path.partition("/")[0] for path, *_ in ARGUMENTS)]
    known = dict(zip(roots, planned, strict=True)) if len(roots) == len(planned) else {}
    return [f"{known.get(root, root)}/{rest}".rstrip("/") for root, rest in found]
