"""`cfp plan`: all passes, for a step or the fastest of its variants; its modes.

Variants of a step are the meshes and microbatches that it is planned for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typer
from jax.sharding import Mesh

from cfp import platform
from cfp.api import Fastest, Variant, plan_fastest
from cfp.cli import options as o
from cfp.cli.options import Answer, leave_printing_to_process_0, plan_answer
from cfp.cli.session import check_writable, parse_pins
from cfp.cluster.on_ray import plan_on_ray
from cfp.context import dimensions_of
from cfp.devices.described import Cluster, DescribedMesh, cluster_of, mesh_of
from cfp.errors import CfpError
from cfp.printable import mesh_text, parse_bytes
from cfp.profiling.store import store_path
from cfp.settings import Dimension
from cfp.targets import MICROBATCHES, Target, resolve
from cfp.view.progress import Display

_ALL = "all"


def variants_of(ctx: typer.Context) -> dict[str, Any]:
    """Returns the variants that a command plans, as `plan_fastest` takes them.

    Without a mesh or a number of devices these are all meshes of one or two axes of all
    devices. If none fits in memory, the step in several microbatches follows, if the
    target takes microbatches.

    Raises:
        CfpError: the target, mesh, platform or number of devices is unknown, or the
            target does not take these microbatches.
    """
    given = ctx.params
    chosen = dimensions_of((given.get("choose") or ",".join(Dimension)).split(","))
    for option, dimension in _VARIED.items():
        if given[option] and dimension not in chosen:
            flag = f"--{option.replace('_', '-')}"
            raise CfpError(
                f"{flag} is for what --choose leaves out. Add {dimension} to --choose, "
                f"or leave out {flag}."
            )
    counts = _counts(given["microbatches"])
    shapes, every = shapes_of(given)
    cluster = _cluster(given)
    platform.select("cpu" if cluster else given["platform"], shapes[0])
    leave_printing_to_process_0()

    def find(count: int | None) -> Target:
        return resolve(
            given["target"],
            [*ctx.args, *([f"{MICROBATCHES.flag}={count}"] if count else [])],
            donate=given["donate"] or (),
            static=given["static"] or (),
        )

    # The targets first: to say that they do not exist takes no device.
    targets = {count: find(count) for count in counts}

    def make(axes: platform.Axes | None) -> Mesh | DescribedMesh:
        if cluster is None:
            return platform.make_asked_mesh(axes)
        return mesh_of(cluster, axes)

    meshes = [make(shape) for shape in shapes]
    if every and Dimension.MESH in chosen:
        known = [tuple(mesh.shape.items()) for mesh in meshes]
        most = 3 if given["mesh_shapes"] else 2
        more = [
            axes
            for axes in platform.mesh_shapes(prod(size for _, size in known[0]))
            if len(axes) <= most and (not cluster or cluster.has(axes))
        ]
        meshes = [make(axes) for axes in dict.fromkeys([*more, *known])]

    def vary(mesh: Mesh | DescribedMesh, count: int | None, target: Target) -> Variant:
        parts = "" if count is None else f", microbatches {count}"
        name = mesh_text(mesh.shape.items()) + parts
        return Variant(name=name, fn=target.step, args=target.args, mesh=mesh)

    def leaner() -> Iterator[Variant]:
        asked = MICROBATCHES.flag in (word.partition("=")[0] for word in ctx.args)
        if asked or counts != [None] or Dimension.MICROBATCHES not in chosen:
            return
        for count in _MORE_MICROBATCHES:
            try:
                target = find(count)
            except CfpError:  # It takes none, or its batch is not divided by so many.
                continue
            yield from (vary(mesh, count, target) for mesh in meshes)

    return {
        "variants": [vary(mesh, *one) for mesh in meshes for one in targets.items()],
        "static_argnums": targets[counts[0]].static,
        "donate_argnums": targets[counts[0]].donate,
        "leaner": leaner,
    }


# Options that name variants, and what these are of.
_VARIED = {"mesh_shapes": Dimension.MESH, "microbatches": Dimension.MICROBATCHES}
# Numbers of microbatches that are tried where nothing fits otherwise.
_MORE_MICROBATCHES = (2, 4, 8)


def _cluster(given: dict[str, Any]) -> Cluster | None:
    """Reads --for, if it was given."""
    text = given.get("described")
    if text is None and given.get("compile"):
        raise CfpError("--compile is for devices that --for describes. Leave it out.")
    for option in ("platform", "devices", "measure", "ray") if text else ():
        if given.get(option):
            value = "" if given[option] is True else f" {given[option]}"
            raise CfpError(
                f"--{option}{value} does not go with --for {text}. Leave it out, or "
                "give --mesh for other axes than the cluster's own."
            )
    return None if text is None else cluster_of(text)


def _counts(text: str | None) -> list[int | None]:
    """Parses the numbers of `--microbatches`; [None] leaves them to the target."""
    if text is None:
        return [None]
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise CfpError(
            f"--microbatches {text} cannot be read. Give positive numbers with commas "
            "in between: --microbatches 1,2,4."
        )
    return list(dict.fromkeys(map(int, words)))


def shapes_of(given: dict[str, Any]) -> tuple[list[platform.Axes | None], bool]:
    """Returns the meshes to compare, and whether the search may choose among all."""
    devices, mesh, texts = given["devices"], given["mesh"], given["mesh_shapes"] or []
    if mesh is not None and texts:
        raise CfpError("Give --mesh for one mesh or --mesh-shapes for more, not both.")
    named = [text for text in texts if text != _ALL] or [mesh]
    shapes = [*dict.fromkeys(platform.parse_mesh(devices, text) for text in named)]
    if len({prod(size for _, size in axes or ()) for axes in shapes}) > 1:
        raise CfpError(
            f"The mesh shapes {'; '.join(texts)} are not of equally many devices. "
            "--mesh-shapes all with --devices N plans all of N devices."
        )
    is_open = not (devices or mesh or texts or given["preset"])
    return shapes, _ALL in texts or is_open


@o.command(
    *("target", "devices", "mesh", "described", "platform", "memory_budget"),
    *("time_budget", "preset", "choose", "pin", "donate", "output"),
    *("mesh_shapes", "microbatches", "static", "attention"),
    *("precision", "per_kind", "others", "quick", "measure", "no_race", "compile"),
    *("ray", "retry_failures"),
    *("run_timeout", "build_timeout", "workdir", "as_json", "quiet"),
    mesh_shapes=o.Option(
        list[str],
        "A mesh to plan for, such as x=2,y=4. May be given more than once: the "
        "fastest of the shapes is kept. all: every shape of the devices with up to "
        "three axes.",
        under=o.VARIANTS,
        metavar="AXES",
    ),
    microbatches=o.Option(
        str,
        "Number of parts in which the batch goes through the step, such as 1,2,4: the "
        "fastest is kept. For models, and functions that take an argument "
        "microbatches.",
        under=o.VARIANTS,
        metavar="N,N",
    ),
)
def plan(ctx: typer.Context, given: Any) -> Answer:
    """Plan how to shard a step: analyze, profile, search, race.

    Example: cfp plan gpt --layers 2 --hidden 128 --seq 64 --vocab 512 --platform cpu

    For devices that are not here: cfp plan gpt --for 2x8xh100 --mesh x=2,y=8.
    """
    o.supervise(ctx, given.workdir)
    parse_bytes(given.memory_budget)
    parse_pins(given.pin)
    check_writable(given.output)
    found = find(ctx) if given.ray is None else find_on_ray(ctx)
    _, _, count = found.name.partition(", microbatches ")
    more = [f"Give cfp run --microbatches {count}, too."] * bool(count)
    return plan_answer(found.plan, given.output, *more)


def find(given: Any) -> Fastest:
    """Runs all passes on the devices of this process.

    Args:
        given: the command's context; of it the params, the args and the obj.
    """
    options = given.params
    with Display(options["quiet"]) as display:
        wanted = variants_of(given)
        settings = o.settings(given, display.tell)
        return plan_fastest(
            **wanted,
            memory_budget=parse_bytes(options["memory_budget"]),
            pins=parse_pins(options["pin"]),
            preset=options["preset"],
            cache_dir=options["workdir"],
            settings=settings,
        )


def find_on_ray(ctx: typer.Context) -> Fastest:
    """Runs all passes on the devices of a node of a Ray cluster."""
    options = ctx.params
    _cluster(options)
    shapes, _ = shapes_of(options)
    return plan_on_ray(
        partial(_find_there, dict(options), list(ctx.args), ctx.obj, os.getcwd()),
        address=options["ray"],
        store=store_path(options["workdir"]),
        needs=(options["platform"], shapes[0]),
    )


def _find_there(
    params: dict[str, Any],
    args: list[str],
    obj: Any,
    folder: str,
    workdir: Path,
) -> Fastest:
    # Where hosts share a file system, names of files mean the same there.
    if os.path.isdir(folder):
        os.chdir(folder)
    given = SimpleNamespace(params=params | {"workdir": workdir}, args=args, obj=obj)
    found = find(given)
    return replace(found, plan=found.plan.as_in_file())
