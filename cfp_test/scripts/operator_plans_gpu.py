"""Plans with operators against plans without, by one GPU that plays four.

    python cfp_test/scripts/operator_plans_gpu.py OUT.json [--seconds 450] [--kind h200]
        [--tiny | --compiled]

For GPT, LLaMA and MoE. First fully sharded steps as they are written, with their
cross-entropy over parts of the vocabulary, with cuDNN's attention, and with both: the
computation and the peak of memory. Then what is planned without operators and with
them, and at last GPT's again with less memory. OUT.json is written after each row; what
it has is not done again, unless it failed; what is not reached within the seconds is
left out. With ``--tiny`` virtual CPU devices stand in. With ``--compiled`` steps are
only compiled, by JAX's CUDA plugin, where there is no GPU: for their memory.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from cfp.planner_settings import DetailedSettings
from cfp_test.support.named_kernels import kernels_named, name_of

sys.path.insert(0, str(Path(__file__).parents[2]))

TARGETS = {
    "gpt": "gpt --layers 4 --hidden 4096 --heads 32 --batch 24 --seq 1024",
    "llama": "llama --layers 4 --hidden 4096 --ffn 11008 --heads 32 --kv_heads 32 "
    "--batch 8 --seq 4096",
    "moe": "moe --layers 4 --batch 64",
}
_TINY = "--layers 2 --hidden 64 --heads 4 --seq 32 --vocab 512 --batch 8"
TINY = {"gpt": f"gpt {_TINY}", "llama": f"llama {_TINY} --kv_heads 2"}
PARTS = "vocabulary/8"
# Of a plan, after which it is decided between what is there.
_PLAN_SECONDS = 60
_SHORT_BYTES = 10_000_000_000
_TINY_SHORT_BYTES = 3_000_000


def wanted(tiny: bool) -> list[dict[str, Any]]:
    """All rows, those of most use first."""
    kernel = "chunked" if tiny else "cudnn"
    found: list[dict[str, Any]] = []
    for model in TINY if tiny else TARGETS:
        kernels = ["", PARTS]
        if model != "moe":  # Its heads are wider than cuDNN takes.
            kernels += [kernel, f"{kernel}+{PARTS}"]
        found += [{"what": "step", "model": model, "kernel": one} for one in kernels]
    for model in TINY if tiny else TARGETS:
        for operators in (False, True):
            found.append({"what": "plan", "model": model, "operators": operators})
    short = _TINY_SHORT_BYTES if tiny else _SHORT_BYTES
    for operators in (False, True):
        how = {"what": "plan", "model": "gpt", "operators": operators}
        found.append({**how, "budget_bytes": short})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=450)
    parser.add_argument("--kind", default="h200")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rows:
        for row in json.loads(options.rows):
            if time.time() < options.end:
                add(options, row)
        return
    end = time.time() + options.seconds
    rows = page_of(options.out)["rows"]
    known = [one["row"] for one in rows if "failure" not in one]
    todo = wanted(options.tiny)
    if options.compiled:
        steps = [row for row in todo if row["what"] == "step"]
        # What needs no cuDNN first, which may ask for a device.
        steps.sort(key=lambda row: "cudnn" in row["kernel"])
        todo = [{**row, "what": "compiled"} for row in steps]
    todo = [row for row in todo if row not in known]
    while todo and time.time() < end:
        # One process for steps, and one for plans: each plays four in its own way.
        first = todo[0]
        own = [r for r in todo if all(r[n] == first[n] for n in ("what", "model"))]
        own = own[:1] if options.compiled else own  # What crashes takes one along.
        todo = [row for row in todo if row not in own]
        words = [sys.executable, __file__, str(options.out), "--rows", json.dumps(own)]
        words += ["--end", str(end), "--kind", options.kind]
        words += ["--tiny"] if options.tiny else []
        words += ["--compiled"] if options.compiled else []
        left = end - time.time() + 60
        try:
            subprocess.run(words, timeout=left, check=False, env=dict(os.environ))
        except subprocess.TimeoutExpired:
            print(f"{own} took longer than {left:.0f} s", flush=True)


def page_of(out: Path) -> dict[str, Any]:
    """Reads the rows that are known."""
    return json.loads(out.read_text()) if out.exists() else {"rows": []}


def add(options: argparse.Namespace, row: dict[str, Any]) -> None:
    """Measures one row and writes it."""
    import jax

    started = time.perf_counter()
    made = {"step": measured_step, "plan": planned, "compiled": compiled}[row["what"]]
    try:
        found = made(options, row)
    except Exception as error:  # One row that fails is a row.
        found = {"failure": f"{type(error).__name__}: {error}"[:1500]}
    found["wall_seconds"] = round(time.perf_counter() - started, 1)
    page = page_of(options.out)
    page |= {"jax": jax.__version__}
    if row["what"] != "compiled":
        page["hardware"] = str(jax.devices()[0].device_kind)
    page["date"] = time.strftime("%Y-%m-%d")
    page["rows"] = [one for one in page["rows"] if one["row"] != row]
    page["rows"].append({"row": row, **found})
    options.out.write_text(json.dumps(page, indent=1) + "\n")
    brief = {k: v for k, v in found.items() if k not in ("plan", "race", "programs")}
    print(json.dumps({**row, **brief}), flush=True)


def measured_step(options: argparse.Namespace, row: dict[str, Any]) -> dict[str, Any]:
    """The computation of a fully sharded step, and its memory."""
    from cfp import platform
    from cfp.cli.session import analyse
    from cfp.devices import described
    from cfp.presets.presets import presets
    from cfp.profiling.builder import BuildEnvironment, Built, build
    from cfp.profiling.runner import run_local
    from cfp.profiling.timing import TimingOptions
    from cfp.program.trace import planning_mesh
    from cfp.search.jobs import whole_job
    from cfp.targets import resolve

    axes, common = (("x", 4),), {}
    if options.tiny:
        platform.select("cpu", axes)
        mesh = planning_mesh(platform.make_mesh(axes))
    else:
        described.play_one_of(4)
        mesh, common = (
            planning_mesh(described.mocked_mesh(axes)),
            dict(described.OPTIONS),
        )
    target = (TINY if options.tiny else TARGETS)[row["model"]]
    words = target.split()
    session = analyse(resolve(words[0], words[1:]), mesh)
    analysis = session.analysis
    frame, segments = analysis.frame, analysis.segments
    choice = presets(frame)["fully_sharded"]
    if row["kernel"]:
        kernels = kernels_named(row["kernel"])
        every = tuple((segment.index, kernels) for segment in segments)
        choice = replace(choice, kernels=every)
    job = whole_job(analysis, choice, (), target, options=common)
    environment = BuildEnvironment(wants_local=lambda job, text: True)
    built = build(frame.program, session.mesh, job, environment)
    if not isinstance(built, Built):
        return {"failure": f"{built.status}: {built.reason}"[:1500]}
    timing = TimingOptions(
        warmup_seconds=0.4, min_samples=6, max_samples=20, budget_seconds=2.0
    )
    record = run_local(built, job, frame.program, session.mesh, timing=timing)
    found: dict[str, Any] = {
        "target": target,
        "replaced": [one.name for one in job.constraints.replaced],
        "peak_bytes": built.peak_bytes,
        "temp_bytes": built.temp_bytes,
        "samples_ms": list(record.samples_ms),
    }
    if record.ok:
        found["time_ms"] = median(record.samples_ms)
    else:
        found["failure"] = f"{record.status}: {record.reason}"[:1500]
    return found


def compiled(options: argparse.Namespace, row: dict[str, Any]) -> dict[str, Any]:
    """The memory of a fully sharded step, without a GPU."""
    from cfp import described, platform
    from cfp.context import open_context
    from cfp.passes.pipeline import analyze_step
    from cfp.planner_settings import PlannerSettings
    from cfp.presets.presets import presets
    from cfp.profiling.builder import BuildEnvironment, Built, build
    from cfp.search.jobs import whole_job
    from cfp.targets import resolve

    platform.select("cpu", (("x", 4),))
    mesh = described(f"4x{options.kind}").by_compiler()
    target = TARGETS[row["model"]]
    words = target.split()
    source = resolve(words[0], words[1:])
    step = source.flatten()
    analyzed = analyze_step(step, mesh)
    frame, segments = analyzed.analysis.frame, analyzed.analysis.segments
    choice = presets(frame)["fully_sharded"]
    if row["kernel"]:
        kernels = kernels_named(row["kernel"])
        every = tuple((segment.index, kernels) for segment in segments)
        choice = replace(choice, kernels=every)
    store = options.out.parent / "operator_plans"
    with open_context(analyzed.mesh, store, None, PlannerSettings()) as context:
        common = dict(context.predictor.compiler_options) if context.predictor else {}
        job = whole_job(
            analyzed.analysis, choice, context.environment, target, options=common
        )
        built = build(frame.program, context.devices, job, BuildEnvironment())
    if not isinstance(built, Built):
        return {"failure": f"{built.status}: {built.reason}"[:1500]}
    return {
        "target": target,
        "replaced": [one.name for one in job.constraints.replaced],
        "peak_bytes": built.peak_bytes,
        "temp_bytes": built.temp_bytes,
    }


def planned(options: argparse.Namespace, row: dict[str, Any]) -> dict[str, Any]:
    """Plans, and lists what each program that was compiled computes."""
    from cfp import described, platform
    from cfp.context import open_context
    from cfp.passes.pipeline import analyze_step, decide
    from cfp.passes.profile import profile
    from cfp.passes.search import search
    from cfp.settings import ConstraintLevel
    from cfp.targets import resolve
    from cfp_test.bench.planned_on_one import stand_in, tell

    mesh = described(f"4x{options.kind}")
    if options.tiny:
        platform.select("cpu", (("x", 4),))
        mesh = stand_in(mesh)
    else:
        mesh = mesh.on_one_device()
    target = (TINY if options.tiny else TARGETS)[row["model"]]
    words = target.split()
    source = resolve(words[0], words[1:])
    step = source.flatten()
    analyzed = analyze_step(step, mesh)
    analysis = analyzed.analysis
    seconds = min(_PLAN_SECONDS, options.end - time.time())
    settings = DetailedSettings(
        seconds=seconds,
        progress=tell,
        plans=2,
        constraint_levels=(ConstraintLevel.EVERYTHING,),
        compiler_options={},
    )
    if row["operators"]:
        kernel = "chunked" if options.tiny else "cudnn"
        settings = replace(settings, attention=(kernel,), cross_entropy=8)
    else:
        settings = replace(settings, attention=())
    store, budget = options.out.parent / "operator_plans", row.get("budget_bytes")
    with open_context(analyzed.mesh, store, budget, settings) as context:
        solution = search(context, analysis, profile(context, analysis))
        plan, outcome = decide(context, analysis, solution)
        made = context.predictor
        programs = [
            {
                "name": one.label,
                "alone_ms": list(one.local_ms),
                "predicted_ms": list(one.record.samples_ms),
                "failure": "" if one.record.ok else one.record.reason[:300],
                "peak_bytes": one.record.peak_bytes,
            }
            for one in (made.known.values() if made else ())
        ]
    replaced = outcome.winner.choice.kernels
    return {
        "target": target,
        "winner": plan.winner,
        "level": outcome.winner.level,
        "kernels": sorted({name_of(kernels) for _, kernels in replaced}),
        "predicted_ms": plan.predicted_ms,
        "predicted_bytes": plan.predicted_bytes,
        "told": repr(plan),
        "programs": programs,
        "race": [asdict(one) for one in plan.race],
        "plan": json.loads(plan.to_json()),
    }


if __name__ == "__main__":
    main()
