"""Writes a plan as a Python module: tables that people can read, and what uses them.

A plan can also be rules from logical names of dims to axes of the mesh. Libraries of
models let each dim of a parameter have a name, and shard by rules such as ``("mlp",
"x")``: for each tensor they go through the rules in order, and give the axes of a rule
to the dim of its name, unless another dim of the tensor has one of them. A plan can be
written so if every tensor wants the same axes for the same name.
"""

from __future__ import annotations

import base64
import inspect
import pprint
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import tree_flatten_with_path

from cfp.analysis.strategies import Spec
from cfp.errors import PlanMismatch
from cfp.export import runtime
from cfp.export.runtime import digest, equation_key, equations, numbers
from cfp.plan.parts import Site, Sites, path_text, shape_of, short_source
from cfp.printable import printable
from cfp.program import fixed
from cfp.program.constrain import Constraints
from cfp.program.equations import place
from cfp.program.step import FlatStep

if TYPE_CHECKING:
    from cfp.plan.plan import Plan


_HEAD = "# The tables. In the module that is written they are filled.\n"
_TAIL = "# ----"
_IMPORTS = "from __future__ import annotations\n"
_OF_CFP = "from cfp.program.fixed import fixed, released\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedProgram:
    """A step's program under a plan, where constraints are not all that it changes.

    Attributes:
        bytecode: of the program, as StableHLO.
        digest: of the step that it is of, with its constants.
    """

    bytecode: bytes
    digest: str
    platform: str


def python_module(
    plan: Plan,
    sites: Sites | None,
    program: ExportedProgram | None = None,
    title: str = "",
) -> str:
    """Writes the text of a module that runs the plan's step with plain JAX.

    Args:
        program: of the step under the plan, which a plan needs that rematerializes or
            replaces parts of it.
        title: the plan in a sentence, for the module's docstring.

    Raises:
        PlanMismatch: the plan says something that such a module cannot.
    """
    if sites is None and (described := plan.environment.get("described")):
        raise PlanMismatch(
            f"The plan was made for {described}, which is described and not here: "
            "the places of its constraints in the step are found on those devices. "
            "Load it there, and plan.bind(step, *args).export_python(FILE)."
        )
    if sites is None:
        raise PlanMismatch(
            "The plan does not say where in the step its constraints are: it was "
            "saved by an older version of cfp, or without its step. Plan again, or "
            "plan.bind(step, *args) and save it."
        )
    if plan.changes_ops and program is None:
        raise PlanMismatch(
            "The plan rematerializes parts of the step or computes them by other "
            "kernels. A module has the step's program with that in it, which is made "
            "from the step: cfp export plan.json TARGET --python FILE, or "
            "plan.bind(step, *args).export_python(FILE)."
        )
    text, leaves = (
        inspect.getsource(one).partition(_IMPORTS)[2] for one in (runtime, fixed)
    )
    imports, rest = text.replace(_OF_CFP, "").split(_HEAD)
    tables = "\n".join([*_tables(plan, sites), *_program(program)])
    head = f"{_docstring(plan, sites, title)}\n\n{_IMPORTS}{imports}P = PartitionSpec\n"
    return f"{head}\n{tables}\n\n{rest[rest.index(_TAIL) :]}{leaves}"


def _docstring(plan: Plan, sites: Sites, title: str) -> str:
    count = sum(len(numbers(site.which)) for site in sites.sites)
    lines = [
        "How to shard a training step, as cfp planned it.",
        "",
        *([f"{title}.", ""] if title else []),
        "Needs JAX, and nothing else. Use it like this:",
        "",
        "    step = shard(train_step, *arguments)   # compiles",
        "    results = step(*arguments)             # runs, sharded",
        "",
        f"{len(plan.arg_names)} argument leaves; {count} sharding constraints at "
        f"{len(sites.sites)} sites.",
    ]
    text = "\n".join(lines).replace("\\", "/").replace('"""', "'''")
    return f'"""{"".join(c if c == chr(10) else printable(c) for c in text)}\n"""'


def _tables(plan: Plan, sites: Sites) -> Iterator[str]:
    yield f"MESH = {dict(plan.mesh_axes)!r}"
    yield ""
    yield "# Path, type, sharding, and whether the step may overwrite it."
    yield "ARGUMENTS = ["
    for name, kind, spec, donated in zip(
        plan.arg_names, plan.arg_types, plan.arg_specs, plan.donated, strict=True
    ):
        yield f"    ({name!r}, {kind!r}, {spec_code(spec, kind)}, {donated}),"
    yield "]"
    yield ""
    yield "# The results, leaf by leaf."
    yield "RESULTS = ["
    for spec in plan.output_specs:
        yield f"    {spec_code(spec)},"
    yield "]"
    yield ""
    yield "# State in the memory of the host between steps: the argument, and the"
    yield "# result that is its new value."
    yield f"IN_HOST = {plan.in_host!r}"
    yield ""
    yield f"STATIC = {tuple(plan.static or ())!r}"
    yield ""
    yield f"COMPILER_OPTIONS = {pprint.pformat(dict(plan.options))}"
    yield ""
    yield "# How many equations the step has, and a digest of what they are."
    yield f"EQUATIONS = ({sites.equations!r}, {sites.digest!r})"
    yield ""
    yield "# Sharding constraints inside of the step: the primitive, the type of its"
    yield "# first result, which value, which of all such equations, and the sharding."
    yield "SITES = ["
    source = None
    for site in sites.sites:
        if site.source != source:
            source = site.source
            yield f"    # {printable(source) or 'no line of the step'}"
        yield (
            f"    ({site.primitive!r}, {site.type!r}, {site.value!r}, {site.which!r}, "
            f"{spec_code(site.spec)}),"
        )
    yield "]"


def _program(program: ExportedProgram | None) -> Iterator[str]:
    yield ""
    if program is None:
        yield "PROGRAM = {}"
        return
    yield "# The step's program with what the plan rematerializes and computes by other"
    yield "# kernels, as StableHLO: zlib, base 85. SITES tells its constraints."
    yield "PROGRAM = {"
    yield f"    'jax': {jax.__version__!r},"
    yield f"    'platform': {program.platform!r},"
    yield f"    'digest': {program.digest!r},"
    yield "    'bytecode': ("
    text = base64.b85encode(zlib.compress(program.bytecode, 9)).decode()
    for start in range(0, len(text), _LINE):
        yield f"        {text[start : start + _LINE]!r}"
    yield "    ),"
    yield "}"


_LINE = 76  # Characters.


def spec_code(spec: Spec, kind: str | None = None) -> str:
    """A sharding as Python: ``P(None, 'x')``.

    Args:
        kind: the type of the tensor, where JAX may show fewer dims than the program.
    """
    rank = len(spec) if kind is None else len(shape_of(kind))
    parts = [
        repr(names[0]) if len(names) == 1 else repr(tuple(names)) if names else "None"
        for names in spec[:rank]
    ]
    while parts and parts[-1] == "None":
        parts.pop()
    return f"P({', '.join(parts)})"


# ------------------------------------------------------------------------------- sites


def sites_of(
    step: FlatStep, mesh: Mesh, fingerprint: str, constraints: Constraints
) -> Sites | None:
    """The sites of a plan's constraints; None if the step does not show them.

    Args:
        constraints: by the program's values and ops.
    """
    placed = place(step, mesh, fingerprint, constraints)
    if placed is None:
        return None
    keys = [equation_key(eqn) for eqn in equations(step.traced.jaxpr.jaxpr)]
    seen: Counter[tuple[str, str]] = Counter()
    numbers = []
    for key in keys:
        numbers.append(seen[key])
        seen[key] += 1
    groups: dict[tuple[str, str, str, Spec, str], list[int]] = {}
    for where, spec in placed.places.items():
        primitive, kind = keys[where.equation]
        value = f"{where.value} {where.index}"
        source = short_source(placed.sources[where.equation])
        members = groups.setdefault((primitive, kind, value, spec, source), [])
        members.append(numbers[where.equation])
    return Sites(
        sites=tuple(
            Site(
                primitive=primitive,
                type=kind,
                value=value,
                which=ranges(members),
                spec=spec,
                source=source,
            )
            for (primitive, kind, value, spec, source), members in groups.items()
        ),
        equations=len(keys),
        digest=digest(keys),
        inner=len(placed.lost),
    )


def ranges(numbers: list[int]) -> str:
    """Rising numbers in short: ``0-3,8``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


Names = tuple[str | None, ...]
Axes = tuple[str, ...]
Rules = tuple[tuple[str, Axes], ...]

_TRY = "cfp export --python, which names every argument by itself"


def names_by_path(plan: Plan, names: Sequence[Any]) -> dict[str, Names]:
    """Names of dims for a plan's arguments, by the arguments' paths.

    Args:
        names: for each argument of the step that is not static a pytree like it, with
            a ``PartitionSpec`` of names in place of each array; None for an argument,
            or a part of one, without names.
    """
    roots = dict.fromkeys(path.partition("/")[0] for path in plan.arg_names)
    found: dict[str, Names] = {}
    for root, tree in zip(roots, names, strict=False):
        leaves = tree_flatten_with_path(
            tree, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
        )[0]
        for path, leaf in leaves:
            rest = path_text(path)
            if len(leaf):
                found[f"{root}/{rest}" if rest else root] = tuple(leaf)
    return found


def logical_rules(plan: Plan, names: Mapping[str, Sequence[str | None]]) -> Rules:
    """Rules that shard all tensors that have names as a plan does.

    Args:
        names: for arguments, by path as in ``plan.arg_names``, a name for each dim, or
            None for a dim without.

    Returns:
        (name, axes) in order of precedence; names that stay whole have no axes.

    Raises:
        PlanMismatch: there are no names, or no such rules.
    """
    specs = dict(zip(plan.arg_names, plan.arg_specs, strict=True))
    known = {path: tuple(dims) for path, dims in names.items() if path in specs}
    if not any(any(dims) for dims in known.values()):
        what = f"{len(names)} names for other paths" if names else "none"
        raise PlanMismatch(
            "The plan's arguments have no logical names.",
            expected=f"names for arguments such as {next(iter(specs), 'none')}",
            got=what,
            attempt=_TRY,
        )
    axes: dict[str, tuple[Axes, str]] = {}
    for path, dims in known.items():
        spec = specs[path]
        if len(dims) != len(spec):
            _refuse(path, f"{len(spec)} names of dims", f"{dims}")
        for name, wanted in zip(dims, spec, strict=True):
            if not wanted:
                continue
            if name is None:
                _refuse(path, "a name for each dim that is sharded", f"{dims}, {spec}")
            elif name in axes and axes[name][0] != wanted:
                other, where = axes[name]
                _refuse(
                    path,
                    f"one sharding for the name {name!r}: {_text(other)} as in {where}",
                    _text(wanted),
                )
            else:
                axes[name] = wanted, path
    every = dict.fromkeys(name for dims in known.values() for name in dims if name)
    chosen = {name: axes[name][0] if name in axes else () for name in every}
    rules = tuple(
        (name, chosen[name]) for name in _ordered(chosen, known, specs) if name
    )
    for path, dims in known.items():
        if (made := applied(rules, dims)) != specs[path]:
            _refuse(path, f"{specs[path]}", f"{made} by the rules {dict(rules)}")
    return rules


def applied(rules: Rules, names: Sequence[str | None]) -> tuple[Axes, ...]:
    """Derives the sharding that rules give a tensor with dims of these names."""
    spec: list[Axes] = [() for _ in names]
    used: set[str] = set()
    for name, axes in rules:
        if name in names and used.isdisjoint(axes):
            spec[[*names].index(name)] = axes
            used.update(axes)
    return tuple(spec)


def _ordered(
    chosen: Mapping[str, Axes],
    known: Mapping[str, Names],
    specs: Mapping[str, Sequence[Axes]],
) -> list[str]:
    """The names, each behind those that come before it in some tensor."""
    before: dict[str, set[str]] = {name: set() for name in chosen}
    for path, dims in known.items():
        spec = specs[path]
        for name, have in zip(dims, spec, strict=True):
            if name is None or have or not chosen[name]:
                continue
            holders = [
                other
                for other, axes in zip(dims, spec, strict=True)
                if other and other != name and set(axes) & set(chosen[name])
            ]
            if not holders:
                _refuse(
                    path,
                    f"{name!r} sharded over {_text(chosen[name])}, as elsewhere",
                    "a dim of that name that stays whole",
                )
            before[name].update(holders[:1])
    try:
        return [*TopologicalSorter(before).static_order()]
    except CycleError as error:
        names = ", ".join(map(repr, dict.fromkeys(error.args[1])))
        raise PlanMismatch(
            "No order of the logical names fits all tensors.",
            expected="one of two names to go first wherever they share an axis",
            got=f"tensors that want it otherwise: {names}",
            attempt=_TRY,
        ) from error


def _text(axes: Axes) -> str:
    return ",".join(axes) or "whole"


def _refuse(path: str, expected: str, got: str) -> None:
    raise PlanMismatch(
        f"Rules for logical names cannot say how {path} is sharded.",
        expected=expected,
        got=got,
        attempt=_TRY,
    )
