"""The meshes and microbatches that a step is planned for: variants of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Annotated, Any

import typer
from jax.sharding import Mesh
from rich import box
from rich.console import Group, RenderableType
from rich.text import Text

from cfp import platform
from cfp.cli import options as o
from cfp.cli.output import leave_printing_to_process_0
from cfp.devices import mock
from cfp.devices.described import Cluster, DescribedMesh, cluster_of, mesh_of
from cfp.errors import CfpError, MeshError, compose
from cfp.planner_settings import dimensions_of
from cfp.settings import Dimension
from cfp.targets import MICROBATCHES, Target, resolve
from cfp.units import format_bytes
from cfp.variants import Basis, Fastest, Outcome, Variant
from cfp.view.console import Fitted, new_table

_ALL = "all"

MeshShapes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="AXES",
        help="A mesh to plan for, such as x=2,y=4. May be given more than once: the "
        "fastest of the shapes is kept. all: every shape of the devices with up to "
        "three axes.",
        rich_help_panel=o.VARIANTS,
    ),
]
Microbatches = Annotated[
    str | None,
    typer.Option(
        metavar="N,N",
        help="Number of parts in which the batch goes through the step, such as 1,2,4: "
        "the fastest is kept. For models, and functions that take an argument "
        "microbatches.",
        rich_help_panel=o.VARIANTS,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantRequest:
    """Variants that a command is to plan.

    Attributes:
        target: whose static and donated arguments are those of all variants.
        variants: of its step.
        rule_out: whether estimates may rule out some, which nobody named.
        leaner: makes variants that need less memory.
    """

    target: Target
    variants: list[Variant]
    rule_out: bool
    leaner: Callable[[], Iterable[Variant]]


def variants_of(ctx: typer.Context) -> VariantRequest:
    """Returns the variants that a command is to plan.

    Without a mesh or a number of devices that is every mesh of up to two axes of the
    devices that are there; and where none of them fits in memory, the step in several
    microbatches, if it takes them.

    Raises:
        CfpError: there is no such target, mesh, platform or number of devices, or the
            target does not take these microbatches.
    """
    given = ctx.params
    chosen = dimensions_of(given["choose"].split(",")) if given.get("choose") else None
    for option, dimension in _VARIED.items():
        if given[option] and chosen is not None and dimension not in chosen:
            flag = f"--{option.replace('_', '-')}"
            raise CfpError(
                f"{flag} is for what --choose leaves out. Add {dimension} to --choose, "
                f"or leave out {flag}."
            )
    counts = _counts(given["microbatches"])
    shapes, every = shapes_of(given)
    every = every and (chosen is None or Dimension.MESH in chosen)
    cluster = _cluster(given)
    plays = cluster is not None and _plays(cluster, given)
    if cluster is None or not plays:
        platform.select("cpu" if cluster else given["platform"], shapes[0])
    else:  # Before a target asks for a device.
        mock.play_one_of(cluster.count)
    leave_printing_to_process_0()

    def find(count: int | None) -> Target:
        return resolve(
            given["target"],
            [*ctx.args, *([f"{MICROBATCHES.flag}={count}"] if count else [])],
            donate=given["donate"] or (),
            static=given["static"] or (),
        )

    # The targets first: to say that they do not exist takes no device.
    targets = [find(count) for count in counts]

    def make(axes: platform.Axes | None) -> Mesh | DescribedMesh:
        if cluster is None:
            return platform.make_asked_mesh(axes)
        described = mesh_of(cluster, axes)
        if given.get("compiled"):
            return described.by_compiler()
        return described.on_one_device() if plays else described

    meshes = [make(shape) for shape in shapes]
    if every:
        known = [tuple(mesh.shape.items()) for mesh in meshes]
        count = prod(size for _, size in known[0])
        most = 3 if given["mesh_shapes"] else 2
        shapes = [axes for axes in platform.mesh_shapes(count) if len(axes) <= most]
        meshes = [make(axes) for axes in dict.fromkeys([*shapes, *known])]

    def vary(mesh: Mesh | DescribedMesh, count: int | None, target: Target) -> Variant:
        name = _name(tuple(mesh.shape.items()), count)
        return Variant(
            name=name,
            fn=target.step,
            args=target.args,
            mesh=mesh,
            microbatches=count,
        )

    def leaner() -> Iterator[Variant]:
        asked = MICROBATCHES.flag in (word.partition("=")[0] for word in ctx.args)
        if given["microbatches"] is not None or asked:
            return
        if chosen is not None and Dimension.MICROBATCHES not in chosen:
            return
        for count in _MORE_MICROBATCHES:
            try:
                target = find(count)
            except CfpError:  # It takes none, or its batch is not divided by so many.
                continue
            yield from (vary(mesh, count, target) for mesh in meshes)

    numbered = zip(counts, targets, strict=True)
    return VariantRequest(
        target=targets[0],
        variants=[vary(mesh, *one) for mesh, one in product(meshes, numbered)],
        rule_out=every and not given["mesh_shapes"],
        leaner=leaner,
    )


# Options that name variants, and what these are of.
_VARIED = {
    "mesh_shapes": Dimension.MESH,
    "microbatches": Dimension.MICROBATCHES,
}

# Numbers of microbatches that are tried where nothing fits otherwise.
_MORE_MICROBATCHES = (2, 4, 8)


def _cluster(given: dict[str, Any]) -> Cluster | None:
    """Reads --for, if it was given."""
    text = given.get("described")
    if text is None:
        if given.get("compiled"):
            raise CfpError(
                "--compile is for devices that are described: give --for CLUSTER, too."
            )
        return None
    for option in ("platform", "devices", "measure"):
        if given.get(option):
            raise CfpError(
                compose(
                    f"--{option} does not go with --for.",
                    expected="--for CLUSTER, and --mesh for other axes than its own",
                    got=f"--for {text} --{option} {given[option]}",
                    attempt=f"--for {text} by itself",
                )
            )
    return cluster_of(text)


def _plays(cluster: Cluster, given: dict[str, Any]) -> bool:
    """Returns True if a GPU of this machine stands in for one of a cluster's."""
    rung_0 = given.get("no_race") or given.get("compiled")
    return cluster.count > 1 and not rung_0 and mock.can_play(cluster.kind.device_kind)


def _name(axes: platform.Axes, count: int | None) -> str:
    parts = "" if count is None else f", microbatches {count}"
    return platform.mesh_text(axes) + parts


def _counts(text: str | None) -> list[int | None]:
    """Numbers of microbatches; None where the target is to decide."""
    if text is None:
        return [None]
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise CfpError(
            compose(
                "The numbers of microbatches cannot be read.",
                expected="positive numbers with commas in between",
                got=text,
                attempt="--microbatches 1,2,4",
            )
        )
    return list(dict.fromkeys(map(int, words)))


def shapes_of(given: dict[str, Any]) -> tuple[list[platform.Axes | None], bool]:
    """Meshes that were asked for, and whether all others of their devices are, too."""
    devices, mesh, texts = given["devices"], given["mesh"], given["mesh_shapes"] or []
    if mesh is not None and texts:
        raise CfpError("Give --mesh for one mesh or --mesh-shapes for more, not both.")
    named = [text for text in texts if text != _ALL] or [mesh]
    shapes = dict.fromkeys(platform.parse_mesh(devices, text) for text in named)
    sizes = {
        platform.mesh_text(axes): prod(size for _, size in axes)
        for axes in shapes
        if axes is not None
    }
    if len(set(sizes.values())) > 1:
        raise MeshError(
            compose(
                "The mesh shapes are not of the same devices.",
                expected="shapes of equally many devices",
                got="; ".join(f"{text} of {n}" for text, n in sizes.items()),
                attempt="--mesh-shapes all, with --devices N",
            )
        )
    return list(shapes), _ALL in texts or _is_open(given)


def _is_open(given: dict[str, Any]) -> bool:
    """Returns whether nobody has named a mesh, so that a search chooses it."""
    names = ("devices", "mesh", "mesh_shapes", "preset")
    return not any(given[name] for name in names)


# ---------------------------------------------------------------------------- output

_BASIS_WORDS = {
    Basis.RACED: "Step times: the fastest plan of each, timed in turn in one race.",
    Basis.MEASURED: "Step times: of each plan's own race, which compare only roughly.",
    Basis.PREDICTED: "Step times: predicted.",
}


def _memory_text(outcome: Outcome) -> str:
    plan = outcome.plan
    if plan is not None and plan.peak_bytes is not None:
        return format_bytes(plan.peak_bytes)
    if plan is not None and plan.predicted_bytes is not None:
        return f"{format_bytes(plan.predicted_bytes)}, estimated"
    return "-"


def _behind_text(step_ms: float | None, best_ms: float | None) -> str:
    """Says how much slower than the fastest something is; empty for the fastest."""
    if step_ms is None or not best_ms or step_ms <= best_ms:
        return ""
    return f"{step_ms / best_ms - 1.0:.1%} slower".replace("%", " %")


def variants_view(found: Fastest, border: box.Box) -> RenderableType:
    """The variants as a table, the fastest first."""
    numbers = dict.fromkeys(("step ms", "memory", "planned in"), "number")
    headings = {"": "word", "variant": "text", "plan": "text", **numbers}
    table = new_table(border, "Variants", {**headings, "note": "text"})
    every = ranked(found.outcomes)
    best_ms = every[0].step_ms
    for outcome in every:
        plan, won = outcome.plan, outcome.name == found.name
        table.add_row(
            "*" if won else "",
            outcome.name,
            plan.winner if plan is not None else "-",
            "-" if outcome.step_ms is None else f"{outcome.step_ms:.3f}",
            _memory_text(outcome),
            f"{outcome.seconds:.1f} s",
            outcome.note.partition("\n")[0] or _behind_text(outcome.step_ms, best_ms),
            style="bold" if won else None,
        )
    compared = sum(outcome.step_ms is not None for outcome in found.outcomes) > 1
    return Group(
        Fitted(table), Text(f"{_BASIS_WORDS[found.basis]}\n" if compared else "")
    )


def ranked(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The fastest first; what has no time last."""
    return sorted(
        outcomes, key=lambda o: float("inf") if o.step_ms is None else o.step_ms
    )


def variants_data(found: Fastest) -> dict[str, Any]:
    """The variants as plain data."""
    return {
        "fastest": found.name,
        "basis": str(found.basis),
        "outcomes": [
            {
                "name": outcome.name,
                "plan": outcome.plan.winner if outcome.plan is not None else None,
                "step_ms": outcome.step_ms,
                "peak_bytes": outcome.plan.peak_bytes if outcome.plan else None,
                "seconds": outcome.seconds,
                "note": outcome.note,
            }
            for outcome in found.outcomes
        ],
    }
