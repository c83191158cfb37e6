"""Programs for N devices, compiled and run by one GPU that plays one of them.

    python -m cfp_test.bench.one_as_four --devices 4 --out FOLDER [--seconds 280]
        [--threads 12] [--first N] [--times | --texts] [--platform cpu --tiny]

Builds the recorded programs (`cfp_test.bench.recorded`) for the mocked devices, and
writes below FOLDER, for each: samples of one device's computation on real numbers, with
copies in place of gathers (`cfp.program.local`); what it needs of memory; for some what
each kernel takes (``one_as_N.json``); and the text of the compiled program, from which
its schedule follows (``one_as_N_hlo.tar.gz``). Programs that are not reached within the
seconds are left out, and so is one that hangs, with all behind it. With ``--times``
there are times alone; what FOLDER has of an earlier such run is kept and not run again.
With ``--texts`` nothing runs and no kernel is tuned, and there are texts alone, also of
the computations on real numbers.

On a CPU nothing is mocked: virtual devices run everything, to try the script out.
"""

from __future__ import annotations

import argparse
import faulthandler
import io
import json
import re
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from cfp import platform
from cfp.analysis.strategies import Spec
from cfp.cli.session import Session, analyse
from cfp.devices import described
from cfp.presets.presets import presets
from cfp.profiling.builder import BuildEnvironment, Built, Job, build, one_device
from cfp.profiling.collectives import LARGE, SMALL, build_probe, probes
from cfp.profiling.compiler_options import UNTUNED
from cfp.profiling.inputs import generator, input_kinds, local_kinds, make_inputs
from cfp.profiling.key import ProfileKey, environment_parts
from cfp.profiling.meter import limits_of
from cfp.profiling.record import ProfileRecord
from cfp.profiling.runner import execute, run_local, timing_on
from cfp.profiling.timing import TimingOptions
from cfp.program.constrain import Constraints
from cfp.program.rematerialize import Rematerialization
from cfp.program.trace import planning_mesh
from cfp.search.jobs import whole_job
from cfp.targets import resolve
from cfp_test.bench.kernels import device_events
from cfp_test.bench.recorded import OPTIONS, Case, cases, tiny_cases

_RESULTS = Path(__file__).parents[2] / "docs" / "results"
# As in races on GPUs: several steps in a row, after a warm-up.
_LONGEST_SECONDS = 60  # For one program. What hangs is ended, with all behind it.
_TRACED_STEPS = 3
_METADATA = re.compile(r", metadata=\{(?:[^{}\"]|\"(?:[^\"\\]|\\.)*\")*\}")
# Of each model these are built before the rest, which share most of their kernels: two
# builds at once would tune the same ones, and get in each other's way.
_AHEAD = 2


@dataclass(frozen=True, slots=True)
class Made:
    """A case with what was built of it."""

    case: Case
    session: Session
    job: Job
    built: Built | ProfileRecord


def job_of(case: Case, session: Session, options: dict[str, str]) -> Job:
    """The whole program of a case, as races build it."""
    frame = session.analysis.frame
    known = presets(frame)
    saved = case.preset.endswith(".json")
    choice = known["data_parallel" if saved else case.preset]
    job = whole_job(session.analysis, choice, (), case.name, case.level, options)
    if not saved:
        return job
    plan = json.loads((_RESULTS / case.preset).read_text())
    program = frame.program
    argument = {v: i for i, v in enumerate(program.args)}
    output = {v: i for i, v in enumerate(program.outputs)}
    arguments, outputs = plan["arguments"], plan["output_specs"]
    return replace(
        job,
        constraints=_constraints(plan),
        in_specs=tuple(_spec(arguments[argument[v]]["spec"]) for v in job.part.inputs),
        out_specs=tuple(_spec(outputs[output[v]]) for v in job.part.outputs),
    )


def is_buildable(case: Case, session: Session) -> bool:
    """True of presets, and of recorded plans of the program as it is traced today."""
    if not case.preset.endswith(".json"):
        return True
    plan = json.loads((_RESULTS / case.preset).read_text())
    return plan["fingerprint"] == session.analysis.frame.program.fingerprint


def _constraints(plan: Mapping[str, Any]) -> Constraints:
    """Reads a recorded plan, which is of a format that is not loaded any more."""
    values, uses = {}, {}
    for group in plan["constraints"]:
        values.update((int(v), _spec(group["spec"])) for v in group["values"])
        uses.update({tuple(use): _spec(group["spec"]) for use in group["uses"]})
    again = (
        Rematerialization(tuple(one["forward"]), tuple(one["backward"]))
        for one in plan["recompute"]
    )
    return Constraints(values, uses, tuple(again))


def _spec(names: Sequence[Sequence[str]]) -> Spec:
    return tuple(tuple(axes) for axes in names)


def build_all(
    wanted: list[Case], mesh: Mesh, common: dict[str, str], threads: int, tuned: Path
) -> list[Made]:
    """Builds all cases, a few of each model before the rest.

    Recorded plans that were made for another program are left out.
    """
    sessions: dict[str, Session] = {}
    for case in wanted:
        if case.target not in sessions:
            words = case.target.split()
            sessions[case.target] = analyse(resolve(words[0], words[1:]), mesh)
    for case in [c for c in wanted if not is_buildable(c, sessions[c.target])]:
        say(f"{case.file}: left out, since the plan was made for another program")
        wanted.remove(case)
    environment = BuildEnvironment(
        autotune_dir=tuned, wants_local=lambda job, text: True
    )

    def make(case: Case) -> Made:
        session = sessions[case.target]
        job = job_of(case, session, {**common, **OPTIONS[case.options]})
        program = session.analysis.frame.program
        started = time.perf_counter()
        built = build(program, session.mesh, job, environment)
        if isinstance(built, Built):
            kinds = input_kinds(program, job.part, job.in_specs)
            for kind in local_kinds(kinds, session.mesh):
                generator(kind, one_device(session.mesh))
        say(f"built {case.file}, {time.perf_counter() - started:.1f} s")
        return Made(case, session, job, built)

    seen: Counter[str] = Counter()
    ahead: dict[str, list[Case]] = {}
    rest = []
    for case in wanted:
        seen[case.target] += 1
        if seen[case.target] <= _AHEAD:
            ahead.setdefault(case.target, []).append(case)
        else:
            rest.append(case)
    done: dict[Case, Made] = {}
    with ThreadPoolExecutor(threads) as pool:
        for chain in pool.map(lambda some: [make(one) for one in some], ahead.values()):
            done |= {made.case: made for made in chain}
        done |= dict(zip(rest, pool.map(make, rest), strict=True))
    return [done[case] for case in wanted]


def _timing(mesh: Mesh) -> TimingOptions:
    return timing_on(
        mesh,
        warmup_seconds=0.4,
        min_samples=4,
        max_samples=8,
        budget_seconds=1.2,
    )


def rates_of(mesh: Mesh) -> dict[str, float]:
    """Rates at which the device multiplies and moves memory, in units a millisecond."""
    sizes = SMALL if mesh.devices.flat[0].platform == "cpu" else LARGE
    found = {}
    for probe in probes(mesh, sizes):
        parts = dict(probe.parts)
        if parts["what"] in ("matmul", "memory"):
            built = build_probe(ProfileKey(probe.parts), probe, mesh)
            if isinstance(built, Built):
                how = {"feedback": probe.feedback, "timing": _timing(mesh)}
                record = execute(built, probe.inputs, mesh, **how)
                name = parts.get("dtype", parts["what"])
                if record.ok:
                    found[name] = probe.work * probe.count / record.time_ms
    return found


def row_of(made: Made) -> dict[str, Any]:
    """Facts that are known of a program before it runs."""
    case, built = made.case, made.built
    row: dict[str, Any] = {
        **asdict(case),
        "name": case.name,
        "file": case.file,
        "compiler_options": dict(made.job.options),
    }
    if not isinstance(built, Built):
        return row | {"failure": f"{built.status}: {built.reason}"}
    return row | {
        "peak_bytes": built.peak_bytes,
        "argument_bytes": built.argument_bytes,
        "temp_bytes": built.temp_bytes,
        "build_seconds": built.build_seconds,
        "collectives": [asdict(one) for one in built.collectives],
    }


def kernels_of(made: Made) -> dict[str, tuple[float, float]]:
    """Times each kernel of a step: (milliseconds, executions), by op and name."""
    built, job, session = made.built, made.job, made.session
    assert isinstance(built, Built)
    mesh = session.mesh
    kinds = input_kinds(session.analysis.frame.program, job.part, job.in_specs)
    inputs = make_inputs(kinds, mesh, [put for put, _ in job.feedback])
    results: Any = ()
    with tempfile.TemporaryDirectory() as folder:
        for times in (2, _TRACED_STEPS):
            if times == _TRACED_STEPS:
                jax.profiler.start_trace(folder)
            for _ in range(times):
                results = ()
                results = built.compiled(*inputs)
                for put, got in job.feedback:
                    inputs[put] = results[got]
            jax.block_until_ready(results)
        jax.profiler.stop_trace()
        found: Counter[str] = Counter()
        count: Counter[str] = Counter()
        for file in sorted(Path(folder).rglob("*.xplane.pb")):
            for _, name, (start, end) in device_events(file):
                found[name] += (end - start) / 1e6 / _TRACED_STEPS
                count[name] += 1
    for array in jax.tree.leaves((inputs, results)):
        if not array.is_deleted():
            array.delete()
    return {
        name: (round(ms, 5), round(count[name] / _TRACED_STEPS, 2))
        for name, ms in found.most_common()
    }


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The programs that an earlier run has timed."""
    if not file.exists():
        return []
    return [row for row in json.loads(file.read_text())["rows"] if "samples_ms" in row]


def write_texts(file: Path, all_made: Sequence[Made]) -> None:
    """Writes the texts of compiled programs, and of their computations' programs."""
    with tarfile.open(file, "w:gz", compresslevel=6) as tar:
        for made in all_made:
            built = made.built
            local = built.local if isinstance(built, Built) else None
            for one, suffix in ((built, ""), (local, "_local")):
                if isinstance(one, Built):
                    text = one.compiled.as_text() or ""
                    content = _METADATA.sub("", text).encode()
                    info = tarfile.TarInfo(f"{made.case.file}{suffix}.txt")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


def say(text: str) -> None:
    """Prints a line at once: what is killed has said how far it was."""
    print(f"{time.perf_counter() - _STARTED:7.1f} s: {text}", flush=True)


_STARTED = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=280)
    parser.add_argument("--threads", type=int, default=12)
    parser.add_argument("--platform", choices=platform.PLATFORMS)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--first", type=int, help="only so many programs")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--times", action="store_true", help="no kernels, no texts")
    only.add_argument("--texts", action="store_true", help="nothing runs")
    parser.add_argument("--tuned", type=Path, default=Path("/tmp/one_as_n_tuned"))
    options = parser.parse_args()
    axes = (("x", options.devices),)
    if options.platform == "cpu":
        platform.select("cpu", axes)
        mesh, common = platform.make_mesh(axes), {}
    else:
        described.play_one_of(options.devices)
        mesh, common = described.mocked_mesh(axes), dict(described.OPTIONS)
    mesh = planning_mesh(mesh)
    if options.texts and options.platform != "cpu":
        common |= UNTUNED
    wanted = (tiny_cases if options.tiny else cases)(options.devices)[: options.first]
    options.out.mkdir(parents=True, exist_ok=True)
    base = options.out / f"one_as_{options.devices}"
    kept = rows_of(base.with_suffix(".json")) if options.times else []
    known = {row["file"] for row in kept}
    wanted = [case for case in wanted if case.file not in known]
    faulthandler.dump_traceback_later(options.seconds + 60, exit=True)
    say(f"{len(wanted)} programs, jax {jax.__version__}, {mesh.devices.flat[0]}")
    all_made = build_all(wanted, mesh, common, options.threads, options.tuned)
    say("all built")
    if not options.times:
        write_texts(Path(f"{base}_hlo.tar.gz"), all_made)
        say("texts written")
    if options.texts:
        return
    rows = [row_of(made) for made in all_made]
    page = {
        "hardware": str(mesh.devices.flat[0].device_kind),
        "environment": dict(environment_parts(list(mesh.devices.flat))),
        "devices": options.devices,
        "rates_per_ms": rates_of(mesh),
        "highest_mhz": limits_of(mesh.local_devices[0])[0],
        "rows": [*kept, *rows],
    }

    def write() -> None:
        base.with_suffix(".json").write_text(json.dumps(page, indent=1) + "\n")

    write()
    say(f"a millisecond: {page['rates_per_ms']}")
    for row, made in zip(rows, all_made, strict=True):
        if not isinstance(made.built, Built):
            say(f"{row['file']}: {row['failure'][:300]}")
            continue
        if time.perf_counter() - _STARTED > options.seconds:
            say("the time is over")
            break
        faulthandler.dump_traceback_later(_LONGEST_SECONDS, exit=True)
        program = made.session.analysis.frame.program
        mesh = made.session.mesh
        record = run_local(made.built, made.job, program, mesh, timing=_timing(mesh))
        row["samples_ms"] = list(record.samples_ms)
        row["clock_mhz"], row["power_watts"] = record.clock_mhz, record.power_watts
        if not record.ok:
            row["failure"] = f"{record.status}: {record.reason}"
        say(
            f"{row['file']}: {[round(ms, 2) for ms in record.samples_ms]} ms, "
            f"{row['peak_bytes'] / 1e9:.3f} GB {row.get('failure', '')[:200]}"
        )
        write()
    for row, made in zip(rows, all_made, strict=True):
        if options.times or not made.case.trace or not row.get("samples_ms"):
            continue
        if time.perf_counter() - _STARTED > options.seconds:
            break
        faulthandler.dump_traceback_later(_LONGEST_SECONDS, exit=True)
        row["kernels"] = kernels_of(made)
        write()
    faulthandler.cancel_dump_traceback_later()
    write()
    say("done")


if __name__ == "__main__":
    main()
