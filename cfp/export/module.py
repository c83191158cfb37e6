"""Writes a plan as a Python module: tables that people can read, and what uses them."""

from __future__ import annotations

import pprint
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cfp.analysis.strategies import Spec
from cfp.errors import PlanMismatch
from cfp.export.runtime import numbers
from cfp.plan.sites import Sites
from cfp.plan.text import headline
from cfp.printable import printable

if TYPE_CHECKING:
    from cfp.plan.plan import Plan

_RUNTIME = Path(__file__).parent / "runtime.py"
_HEAD = "# The tables. In the module that is written they are filled.\n"
_TAIL = "# ----"


def python_module(plan: Plan, sites: Sites | None) -> str:
    """The text of a module that runs the plan's step with plain JAX.

    Args:
        plan: the plan.
        sites: of its constraints.

    Raises:
        PlanMismatch: the plan says something that such a module cannot.
    """
    if sites is None:
        raise PlanMismatch(
            "The plan does not say where in the step its constraints stand: it was "
            "saved by an older version of cfp, or without its step. Plan again, or "
            "plan.bind(step, *args) and save it."
        )
    if plan.constraints.rematerialized:
        raise PlanMismatch(
            "The plan rematerializes segments, which a module of "
            "plain JAX does not do to a step that has been differentiated. Put "
            "jax.checkpoint around these layers and plan again, or plan with a larger "
            "memory budget."
        )
    if plan.constraints.replaced:
        raise PlanMismatch(
            "The plan computes attentions of the step by other kernels, which a module "
            "of plain JAX does not put into a step. Call cfp.attention or "
            "jax.nn.dot_product_attention there, or plan with --attention none."
        )
    imports, rest = _RUNTIME.read_text(encoding="utf-8").split(_HEAD)
    runtime = rest[rest.index(_TAIL) :]
    imports = imports[imports.index("from __future__") :]
    tables = "\n".join(_tables(plan, sites))
    head = f"{_docstring(plan, sites)}\n\n{imports}P = PartitionSpec\n"
    return f"{head}\n{tables}\n\n{runtime}"


def _docstring(plan: Plan, sites: Sites) -> str:
    count = sum(len(numbers(site.which)) for site in sites.sites)
    lines = [
        "How to shard a training step, as cfp planned it.",
        "",
        headline(plan) + ".",
        "",
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


def spec_code(spec: Spec, kind: str | None = None) -> str:
    """A sharding as Python: ``P(None, 'x')``.

    Args:
        spec: for each dim the axes.
        kind: the type of the tensor, where JAX may show fewer dims than the program.
    """
    rank = len(spec)
    if kind is not None:
        dims = kind.rpartition("[")[2].rstrip("]")
        rank = len(dims.split(",")) if dims else 0
    parts = [
        repr(names[0]) if len(names) == 1 else repr(tuple(names)) if names else "None"
        for names in spec[:rank]
    ]
    while parts and parts[-1] == "None":
        parts.pop()
    return f"P({', '.join(parts)})"
