"""A plan's shardings as Python, to paste into a program."""

from __future__ import annotations

from collections.abc import Iterator

from cfp.analysis.strategies import Spec
from cfp.plan.parts import shape_of
from cfp.plan.plan import Plan
from cfp.printable import counted, printable
from cfp.view.words import headline


def python_text(plan: Plan) -> str:
    """Writes shardings of arguments, results and constraints, by source line."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: Plan) -> Iterator[str]:
    yield f"# {printable(headline(plan))}"
    yield "from jax.sharding import PartitionSpec as P"
    yield ""
    yield f"MESH = {dict(plan.mesh_axes)!r}"
    if plan.options:
        yield f"COMPILER_OPTIONS = {dict(plan.options)!r}"
    yield ""
    yield "# Leaves of the arguments, for in_shardings of jax.jit."
    yield "ARGUMENTS = {"
    host = {argument for argument, _ in plan.in_host}
    rows = zip(
        plan.arg_names, plan.arg_types, plan.arg_specs, plan.donated, strict=True
    )
    for place, (name, kind, spec, donated) in enumerate(rows):
        more = ", donated" * donated + ", in host memory" * (place in host)
        yield f"    {name!r}: {_code(spec, kind)},  # {kind}{more}"
    yield "}"
    yield ""
    yield "# Leaves of the results, for out_shardings."
    yield "RESULTS = ["
    yield from (f"    {_code(spec)}," for spec in plan.output_specs)
    yield "]"
    yield ""
    yield "# Values inside: jax.lax.with_sharding_constraint(value, P(...))."
    yield "CONSTRAINTS = ["
    for site in plan.sites:
        count = counted(site.count, "value", "values")
        line = f"{printable(site.source) or 'no line of the step'}, {count}"
        yield f"    ({site.type!r}, {_code(site.spec, site.type)}),  # {line}"
    yield "]"


def _code(spec: Spec, kind: str | None = None) -> str:
    """Writes a sharding as Python: ``P(None, 'x')``.

    Args:
        kind: the tensor's type; JAX may show fewer dims than the program has.
    """
    rank = len(spec) if kind is None else len(shape_of(kind))
    dims = spec[:rank]
    parts = [repr(one[0]) if len(one) == 1 else repr(one or None) for one in dims]
    while parts and parts[-1] == "None":
        parts.pop()
    return f"P({', '.join(parts)})"
