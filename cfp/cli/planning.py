"""The commands that plan: plan, and the single passes analyze, profile and search.

A variant of a step is a mesh, maybe with a number of microbatches. ``cfp profile`` also
has modes without a step: --export, --import and --curves (rates of links).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import typer
from jax.sharding import Mesh

from cfp import platform
from cfp.analysis.dump import segment_records
from cfp.api import Fastest, FoundPlan, Variant, plan_fastest, run_passes
from cfp.cli import options as o
from cfp.cli.options import Answer, leave_printing_to_process_0, mode_of, plan_answer
from cfp.cli.session import (
    Session,
    check_writable,
    dump_session,
    open_session,
    parse_pins,
)
from cfp.cluster.on_ray import plan_on_ray
from cfp.context import PlannerSettings, dimensions_of, open_context
from cfp.cost.described import (
    Cluster,
    DescribedMesh,
    cluster_of,
    description_of,
    mesh_of,
)
from cfp.errors import CfpError
from cfp.passes import PlanOptions
from cfp.passes import profile as profile_segments
from cfp.printable import counted, mesh_text, parse_bytes
from cfp.profiling.collectives import measure_rates
from cfp.profiling.record import environment_parts, other_kind
from cfp.profiling.store import ProfileStore, read_export, store_path
from cfp.profiling.tasks import MeasureOptions
from cfp.settings import Dimension
from cfp.targets import Target, resolve
from cfp.view import passes
from cfp.view.console import Display, print_view

_ALL, _MEASUREMENTS = "all", ("measurement", "measurements")


def variants_of(ctx: typer.Context) -> dict[str, Any]:
    """Selects the platform; returns `plan_fastest`'s variants, argnums and `leaner`.

    Variants are the options' meshes with each number of microbatches. Without mesh,
    devices and preset, meshes of one or two axes compete if --choose allows.
    ``leaner()`` yields variants with more microbatches, if options and target allow.

    Raises:
        CfpError: the target or platform is unknown, devices are missing, options are
            invalid, or the target does not take these microbatches.
    """
    given = ctx.params
    chosen = dimensions_of((given.get("choose") or ",".join(Dimension)).split(","))
    for option, dimension in _VARIED.items():
        if given[option] and dimension not in chosen:
            flag = f"--{option.replace('_', '-')}"
            raise CfpError(
                f"{flag} needs a kind of choice that --choose leaves out. Add "
                f"{dimension} to --choose, or leave out {flag}."
            )
    counts = _counts(given["microbatches"])
    shapes, every = shapes_of(given)
    cluster = _cluster(given)
    platform.select("cpu" if cluster else given["platform"], shapes[0])
    leave_printing_to_process_0()

    def find(count: int | None) -> Target:
        return resolve(
            given["target"],
            [*ctx.args, *([f"{_MICROBATCHES}={count}"] if count else [])],
            donate=given["donate"] or (),
            static=given["static"] or (),
        )

    # The targets first: unknown targets are reported without devices.
    targets = {count: find(count) for count in counts}

    def make(axes: platform.Axes | None) -> Mesh | DescribedMesh:
        if cluster is None:
            return platform.make_command_mesh(axes)
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
        asked = _MICROBATCHES in (word.partition("=")[0] for word in ctx.args)
        if asked or counts != [None] or Dimension.MICROBATCHES not in chosen:
            return
        for count in _MORE_MICROBATCHES:
            try:
                target = find(count)
            except CfpError:  # No such option, or `count` does not divide the batch.
                continue
            yield from (vary(mesh, count, target) for mesh in meshes)

    return {
        "variants": [vary(mesh, *one) for mesh in meshes for one in targets.items()],
        "static_argnums": targets[counts[0]].static,
        "donate_argnums": targets[counts[0]].donate,
        "leaner": leaner,
    }


# Options that name variants, each with its kind of choice.
_VARIED = {"mesh_shapes": Dimension.MESH, "microbatches": Dimension.MICROBATCHES}
_MICROBATCHES = "--microbatches"
# Numbers of microbatches to try if nothing fits otherwise.
_MORE_MICROBATCHES = (2, 4, 8)


def _cluster(given: dict[str, Any]) -> Cluster | None:
    """Reads the cluster of --for, or None; CfpError for options that --for excludes."""
    text = given.get("described")
    for option in ("platform", "devices", "measure", "ray") if text else ():
        if given.get(option):
            value = "" if given[option] is True else f" {given[option]}"
            raise CfpError(
                f"--{option}{value} does not go with --for {text}. Leave out "
                f"--{option}; --mesh gives other axes than the cluster's own."
            )
    return None if text is None else cluster_of(text)


def _counts(text: str | None) -> list[int | None]:
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
    """Returns the given meshes' axes, or [None]; and True if more shapes are tried."""
    devices, mesh, texts = given["devices"], given["mesh"], given["mesh_shapes"] or []
    if mesh is not None and texts:
        raise CfpError("Give --mesh for one mesh or --mesh-shapes for more, not both.")
    named = [text for text in texts if text != _ALL] or [mesh]
    shapes = [*dict.fromkeys(platform.parse_mesh(devices, text) for text in named)]
    if len({prod(size for _, size in axes or ()) for axes in shapes}) > 1:
        raise CfpError(
            f"The mesh shapes {'; '.join(texts)} have different numbers of devices. "
            "Give shapes of equally many devices, or --mesh-shapes all --devices N."
        )
    is_open = not (devices or mesh or texts or given["preset"])
    return shapes, _ALL in texts or is_open


@o.command(
    *("target", "devices", "mesh", "described", "platform", "memory_budget"),
    *("time_budget", "preset", "choose", "pin", "donate", "output"),
    *("mesh_shapes", "microbatches", "static", "kernels"),
    *("precision", "per_kind", "others", "quick", "measure", "no_race"),
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
    parse_pins(given.pin)
    check_writable(given.output)
    found = find(ctx) if given.ray is None else find_on_ray(ctx)
    _, _, count = found.name.partition(", microbatches ")
    more = [f"Give cfp run --microbatches {count}, too."] * bool(count)
    return plan_answer(found.plan, given.output, *more)


def find(given: Any) -> Fastest:
    """Plans a command's target on JAX's devices here, or for the devices of --for.

    Args:
        given: the command's context, or an object with its params, args and obj.
    """
    options = given.params
    with Display(options["quiet"]) as display:
        wanted = variants_of(given)
        return plan_fastest(
            **wanted,
            memory_budget=options["memory_budget"],
            pins=parse_pins(options["pin"]),
            preset=options["preset"],
            cache_dir=options["workdir"],
            settings=o.settings(given, display.tell),
        )


def find_on_ray(ctx: typer.Context) -> Fastest:
    """Plans a command's target on the devices of a node of a Ray cluster."""
    options = ctx.params
    _cluster(options)
    shapes, _ = shapes_of(options)
    given = SimpleNamespace(params=dict(options), args=list(ctx.args), obj=ctx.obj)
    return plan_on_ray(
        partial(_find_there, given, os.getcwd()),
        address=options["ray"],
        store=store_path(options["workdir"]),
        needs=(options["platform"], shapes[0]),
    )


def _find_there(given: SimpleNamespace, folder: str, workdir: Path) -> Fastest:
    # On a shared file system, relative file names then mean the same.
    if os.path.isdir(folder):
        os.chdir(folder)
    given.params["workdir"] = workdir
    found = find(given)
    return replace(found, plan=found.plan.as_in_file())


def export_profiles(given: Any) -> None:
    """Writes all stored measurements to the file of --export; CfpError if none."""
    path, file = store_path(given.workdir), given.export
    if not path.exists():
        raise CfpError(
            f"There are no measurements to export: {path} does not exist. Run "
            "cfp profile TARGET first, or name another folder with --workdir."
        )
    with ProfileStore(path) as store:
        count = store.export(file)
    print(f"{counted(count, *_MEASUREMENTS)} written to {file}")


def import_profiles(given: Any) -> None:
    """Adds measurements of the files of --import to the store."""
    with ProfileStore(store_path(given.workdir)) as store:
        here = environment_parts(jax.devices())
        for file in given.imported:
            added = counted(store.merge(file), *_MEASUREMENTS)
            print(f"{added} added from {file}")
            kinds = Counter(other_kind(one.parts, here) for one in read_export(file))
            for how, count in kinds.items():
                if how:
                    print(f"  {count} of another kind of machine, kept apart: {how}")
        print(f"{counted(len(store), *_MEASUREMENTS)} in {store.path}")


def measure_curves(given: Any) -> Answer:
    """Measures a mesh's rates unless stored; writes --describe's file if given."""
    link, describe = given.link, given.describe
    check_writable(describe, "--describe")
    axes = platform.parse_mesh(given.devices, given.mesh)
    platform.select(given.platform, axes)
    with (
        ProfileStore(store_path(given.workdir)) as store,
        Display(given.quiet) as display,
    ):
        devices_mesh = platform.make_mesh(axes)
        if devices_mesh.size == 1:
            raise CfpError(
                "One device has no links to measure. Give a mesh of two or more, such "
                "as --devices 4 --platform cpu for virtual devices."
            )
        rates = measure_rates(
            devices_mesh, store, MeasureOptions(progress=display.tell)
        )
    if describe is not None:
        describe.parent.mkdir(parents=True, exist_ok=True)
        describe.write_text(description_of(devices_mesh, rates))
    return Answer(
        partial(passes.curves_data, rates, link),
        lambda: print_view(passes.curves_rows(rates, link).table),
    )


# Modes of cfp profile, by parameter, with the options that go with each.
_MODES = {
    "export": (export_profiles, ("workdir",)),
    "imported": (import_profiles, ("workdir",)),
    "curves": (
        measure_curves,
        (
            *("devices", "mesh", "platform", "workdir"),
            *("link", "describe", "as_json", "quiet"),
        ),
    ),
}


@o.command(
    *("target", "devices", "mesh", "platform", "workdir", "as_json", "pin", "donate"),
    "static",
)
def analyze(ctx: typer.Context, given: Any) -> Answer:
    """Show a step's blocks, their strategies and its segments. Runs nothing.

    Example: cfp analyze moe --layers 4 --platform cpu --workdir debug
    """
    session = open_session(ctx)
    folder = dump_session(session, given.workdir)
    data = passes.analysis_data(session.analysis, session.seconds)

    def show() -> None:
        print_view(partial(passes.analysis_view, data))
        if folder is not None:
            print(f"Details: {folder}")

    return Answer(lambda: data, show)


_INSTEAD = "Instead of a step's measurements"
_CURVES = "Curves of links"


@o.command(
    *("target", "devices", "mesh", "platform", "memory_budget", "time_budget", "pin"),
    *("donate", "export", "imported", "curves", "link", "describe"),
    *("static", "kernels", "precision", "per_kind", "others", "quick"),
    *("retry_failures", "run_timeout", "build_timeout", "workdir", "as_json", "quiet"),
    target=o.argument("TARGET", o.TARGET_TEXT, default=None),
    export=o.Option(
        Path,
        "Write all stored measurements to a file, to be imported elsewhere.",
        under=_INSTEAD,
        metavar="FILE",
    ),
    imported=o.Option(
        list[Path],
        "Add measurements of a file of --export to those stored here; may be given "
        "more than once. A stored measurement stays, unless it failed and the file's "
        "did not. A file with an error adds nothing. Measurements of another kind of "
        "machine are kept apart, and no plan here uses them.",
        "--import",
        under=_INSTEAD,
        metavar="FILE",
    ),
    curves=o.Option(
        bool,
        "Measure the rates of collectives over each axis of a mesh, or look them up.",
        under=_INSTEAD,
    ),
    link=o.Option(
        float,
        "Rate of one device's links, to compare with: 450 for an H200.",
        under=_CURVES,
        metavar="GB/S",
        min=0.001,
    ),
    describe=o.Option(
        Path,
        "Write a description of these devices for cfp plan --for, as .toml.",
        under=_CURVES,
        metavar="FILE",
    ),
)
def profile(ctx: typer.Context, given: Any) -> Answer | None:
    """Measure strategies of every kind of segment, and store the measurements.

    Or, without a TARGET: carry stored measurements between machines (--export,
    --import), or measure the links of a mesh (--curves).

    Example: cfp profile gpt --layers 2 --hidden 128 --seq 64 --vocab 512 --workdir work

    Example: cfp profile --curves --mesh x=4 --link 450
    """
    modes = {name: takes for name, (_, takes) in _MODES.items()}
    mode = mode_of(ctx, modes, {"link": "curves", "describe": "curves"})
    if mode is None and given.target is None:
        raise CfpError(
            "Name a step to profile: cfp profile TARGET; or give --export, --import or "
            "--curves."
        )
    if mode in (None, "curves"):
        o.supervise(ctx, given.workdir)
    if mode is not None:
        return _MODES[mode][0](given)
    budget = parse_bytes(given.memory_budget)
    with Display(given.quiet) as display:
        session = open_session(ctx)
        settings = o.settings(ctx, display.tell)
        with open_context(session.mesh, given.workdir, budget, settings) as context:
            kept = context.store.path
            found = profile_segments(context, session.analysis, races=False)
    data = passes.profiles_data(session.analysis, found)

    def show() -> None:
        segments = segment_records(session.analysis)
        print_view(partial(passes.profiles_view, data, segments))
        print(f"Measurements are kept in {kept}")

    return Answer(lambda: data, show)


@o.command(
    *("target", "devices", "mesh", "platform", "memory_budget", "workdir", "output"),
    *("as_json", "pin", "per_kind", "others", "kernels", "precision"),
    *("time_budget", "quick"),
    *("no_race", "retry_failures", "run_timeout", "build_timeout"),
    *("donate", "static", "quiet"),
)
def search(ctx: typer.Context, given: Any) -> Answer:
    """Find fast plans from the measurements of cfp profile, then race them.

    Example: cfp search gpt --layers 2 --hidden 128 --seq 64 --vocab 512 --workdir work
    """
    o.supervise(ctx, given.workdir)
    check_writable(given.output)
    with Display(given.quiet) as display:
        session = open_session(ctx)
        settings = o.settings(ctx, display.tell)
        made = search_stored(session, given.workdir, given.memory_budget, settings).plan
    return plan_answer(made, given.output)


def search_stored(
    session: Session,
    workdir: Path | None,
    memory_budget: str | None,
    settings: PlannerSettings,
) -> FoundPlan:
    """Plans from stored measurements of segments.

    Devices run the race and check kernels. After a wrong kernel, segments are measured.

    Raises:
        CfpError: measurements are missing.
    """
    how = {"cache_dir": workdir, "memory_budget": memory_budget}
    options = PlanOptions(**how, settings=settings)
    stored = replace(options, settings=replace(settings, measure=False))
    with stored.context(session.mesh) as context:
        profiles = profile_segments(context, session.analysis)
        jobs = (job for item in profiles.rounds[0] for job in item.jobs)
        wanted = {job.key.digest: job for job in jobs}
        missing = [job for key, job in wanted.items() if key not in profiles.records]
        if missing:
            raise CfpError(
                f"{len(missing)} of {len(wanted)} measurements are missing, first "
                f"{missing[0].label!r}.\nRun cfp profile first, with the same target "
                "and options, or cfp plan (with --measure on virtual CPU devices)."
            )
    # If nothing fits, no further presets are measured.
    profiles = replace(profiles, has_all_presets=True)
    return run_passes(replace(session, profiles=profiles), options)
