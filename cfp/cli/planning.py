"""The commands of single passes: analyze, profile, search.

``cfp profile`` has modes without a step, too: export, import and curves of links.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import typer

from cfp import platform as platforms
from cfp.analysis.dump import segment_records
from cfp.api import FoundPlan, race_until_fit
from cfp.cli import options as o
from cfp.cli.options import Answer, mode_of, plan_answer
from cfp.cli.session import Session, check_writable, dump_session, open_session
from cfp.context import PlannerSettings, open_context
from cfp.devices.described import description_of
from cfp.errors import CfpError
from cfp.passes.profile import profile as profile_segments
from cfp.passes.search import search as search_choices
from cfp.printable import parse_bytes
from cfp.profiling.collectives import measure_rates
from cfp.profiling.record import environment_parts, other_kind
from cfp.profiling.store import ProfileStore, read_export, store_path
from cfp.profiling.tasks import MeasureOptions
from cfp.search.requests import Profiles
from cfp.view import passes
from cfp.view.console import print_view
from cfp.view.progress import Display


def export_profiles(given: Any) -> None:
    """Writes all stored measurements to a file."""
    path, file = store_path(given.workdir), given.export
    if not path.exists():
        raise CfpError(
            f"There are no measurements to export: {path} does not exist. Run "
            "cfp profile TARGET first, or name its folder with --workdir."
        )
    with ProfileStore(path) as store:
        count = store.export(file)
    print(f"{count} measurements written to {file}")


def import_profiles(given: Any) -> None:
    """Adds measurements of other stores to those stored here."""
    with ProfileStore(store_path(given.workdir)) as store:
        here = environment_parts(jax.devices())
        for file in given.imported:
            print(f"{store.merge(file)} measurements added from {file}")
            kinds = Counter(other_kind(one.parts, here) for one in read_export(file))
            for how, count in kinds.items():
                if how:
                    print(f"  {count} of another kind of machine, kept apart: {how}")
        print(f"{len(store)} in {store.path}")


def measure_curves(given: Any) -> Answer:
    """Measures the rates of collectives over the axes of a mesh, or looks them up."""
    link, describe = given.link, given.describe
    check_writable(describe, "--describe")
    axes = platforms.parse_mesh(given.devices, given.mesh)
    platforms.select(given.platform, axes)
    with (
        ProfileStore(store_path(given.workdir)) as store,
        Display(given.quiet) as display,
    ):
        devices_mesh = platforms.make_mesh(axes)
        if devices_mesh.size == 1:
            raise CfpError(
                "One device sends nothing. Give a mesh of two or more; "
                "--devices 4 --platform cpu shows how it works."
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
    *("static", "attention", "precision", "per_kind", "others", "quick"),
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
        "Add measurements that were exported elsewhere to those stored here; may be "
        "given more than once. Of two measurements of the same thing the one that is "
        "here stays, unless it is a failure and the other is not. A file with an error "
        "in it adds nothing. Those of another kind of machine are kept apart: no plan "
        "here uses them.",
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
    """Measure the strategies of every kind of segment, and store them.

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
        print(f"Kept in {kept}")

    return Answer(lambda: data, show)


@o.command(
    *("target", "devices", "mesh", "platform", "memory_budget", "workdir", "output"),
    *("as_json", "pin", "per_kind", "others", "attention", "precision"),
    *("time_budget", "quick"),
    *("no_race", "retry_failures", "run_timeout", "build_timeout"),
    *("donate", "static", "quiet"),
)
def search(ctx: typer.Context, given: Any) -> Answer:
    """Find the fastest plan from the measurements of cfp profile, then race it.

    Example: cfp search gpt --layers 2 --hidden 128 --seq 64 --vocab 512 --workdir work
    """
    o.supervise(ctx, given.workdir)
    budget = parse_bytes(given.memory_budget)
    check_writable(given.output)
    with Display(given.quiet) as display:
        session = open_session(ctx)
        settings = o.settings(ctx, display.tell)
        made = search_stored(session, given.workdir, budget, settings).plan
    return plan_answer(made, given.output)


def search_stored(
    session: Session,
    workdir: Path | None,
    budget_bytes: int | None,
    settings: PlannerSettings,
) -> FoundPlan:
    """Searches stored measurements; only the race uses the devices.

    Raises:
        CfpError: some measurements are missing.
    """
    analysis = session.analysis
    stored_only = replace(settings, measure=False)
    mesh = session.mesh
    with open_context(mesh, workdir, budget_bytes, stored_only) as context:
        profiles = profile_segments(context, analysis)
        _check_complete(profiles)
    # No other presets are measured where nothing fits.
    profiles = replace(profiles, has_all_presets=True)
    with open_context(mesh, workdir, budget_bytes, settings) as context:
        solution = search_choices(context, analysis, profiles)
        return race_until_fit(context, session, solution)


def _check_complete(profiles: Profiles) -> None:
    wanted = {job.key.digest: job for item in profiles.rounds[0] for job in item.jobs}
    missing = [job for key, job in wanted.items() if key not in profiles.records]
    if missing:
        raise CfpError(
            f"{len(missing)} of {len(wanted)} things to measure have not been "
            f"measured, the first of them {missing[0].label!r}.\nRun the profile pass "
            "(cfp profile) first, with the same target, mesh, --quick, --per-kind, "
            "--pin and --workdir; or cfp plan, which does all (on virtual CPU devices "
            "with --measure)."
        )
