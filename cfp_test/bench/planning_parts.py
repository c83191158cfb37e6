"""Counts what planning on GPUs builds, runs and times, with made-up times.

    python cfp_test/bench/planning_parts.py --json FILE [gpt llama moe]

Models are planned by the rules for GPUs, from an empty store. Nothing is compiled and
nothing runs: a program takes as long as its contractions would on an H100, give or take
3 %, and 0.4 % from one sample to the next. So what is counted is what two GPUs would
build and time, but for what depends on times.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
from jax.sharding import Mesh

from cfp import settings
from cfp.analysis.analyze import Analysis
from cfp.context import open_context
from cfp.devices.described import cluster_of
from cfp.devices.described import mesh_of as described_mesh
from cfp.passes import profile as profile_pass
from cfp.passes.pipeline import analyze_step
from cfp.passes.search import search
from cfp.planner_settings import PlannerSettings
from cfp.profiling import measurer, runner
from cfp.profiling.builder import Built, Job
from cfp.profiling.rates import Rates
from cfp.profiling.record import ProfileRecord
from cfp.program.graph import op_flops
from cfp.program.step import flatten_step
from cfp.race import compile as race_compile
from cfp.race import turns
from cfp.race.race import race
from cfp.targets import resolve
from cfp_test.support.checking import make_mesh

MODELS = {
    "gpt": "gpt --layers 4 --hidden 4096 --heads 32 --batch 12 --seq 1024",
    "llama": "llama --layers 4 --hidden 4096 --heads 32 --batch 4 --seq 4096",
    "moe": "moe --layers 4 --batch 32",
}

_FLOPS_PER_MS = 650e9  # As matrix products of these shapes run on one H100.
_ON_GPUS = replace(settings.defaults_of("gpu"), limits_memory=False)


def made_up_ms(program: Any, job: Job, spread: float) -> float:
    """The time of a job: its contractions, and less where a kernel computes some."""
    kinds = ("dot_general", "convolution")
    ops = [program.ops[op] for op in program.with_bodies(job.part.ops)]
    flops = sum(op_flops(program, op) for op in ops if op.kind in kinds and op.rule)
    kernels = len({one.name for one in job.constraints.replaced})
    luck = random.Random(job.key.digest).uniform(-spread, spread)
    return flops / 2 / _FLOPS_PER_MS * (1.0 + luck) * (0.85 if kernels else 1.0) + 0.1


@contextmanager
def counted(rates: Rates) -> Iterator[Counter[str]]:
    """Counts what is tuned, built and run, by part; made-up times in place of all."""
    counts: Counter[str] = Counter()
    noise = random.Random(0)

    def made_up(job: Job) -> Built:
        nothing: Any = None  # Nothing here runs it, or reads its text.
        return Built(key=job.key, compiled=nothing, temp_bytes=2**30)

    def tuned(_: Any, mesh: Mesh, jobs: Sequence[Job], *__: Any, **___: Any) -> Any:
        every = {job.key.digest: job for job in jobs}
        counts["tuned"] += len(every)
        # One device takes as many as another, the first for the mesh as it is.
        mine = [*every][:: mesh.devices.size]
        return {digest: made_up(every[digest]) for digest in mine}

    def building(name: str) -> Any:
        def built(
            _program: Any, _mesh: Any, job: Job, _environment: Any, known: Any = None
        ) -> Built:
            if known and job.key.digest in known:
                return known.pop(job.key.digest)
            counts[name] += 1
            return made_up(job)

        return built

    def running(name: str, error: float) -> Any:
        def ran(
            built: Built, job: Job, program: Any, mesh: Any, *, timing: Any = None
        ) -> ProfileRecord:
            counts[name] += 1
            ms = made_up_ms(program, job, 0.03) * (1.0 + noise.gauss(0.0, error))
            return built.record("ok", samples_ms=[ms], run_seconds=0.0)

        return ran

    with ExitStack() as stack:
        for room, function, other in (
            (profile_pass, "measured_rates", lambda _: rates),
            (measurer, "tune_kernels", tuned),
            (runner, "_build", building("segments_built")),
            (runner, "run", running("segments_run", 0.01)),
            (race_compile, "build", building("whole_built")),
            (turns, "run", running("race_runs", 0.004)),
        ):
            stack.enter_context(mock.patch.object(room, function, other))
        yield counts


def row(name: str) -> dict[str, Any]:
    """Plans one model from an empty store, and counts."""
    model, *rest = MODELS[name].split()
    target = resolve(model, rest, donate=(), static=())
    mesh = make_mesh((("x", 2),))
    step = flatten_step(target.step, target.args, {}, donate_argnums=target.donate)
    analysis: Analysis = analyze_step(step, mesh).analysis
    rates = described_mesh(cluster_of("2xh100"), None).rates
    told: list[str] = []
    how = PlannerSettings(measure=True, progress=lambda event: told.append(str(event)))
    with (
        tempfile.TemporaryDirectory() as cache,
        mock.patch.dict(settings._PLATFORMS, {"cpu": _ON_GPUS}),
        counted(rates) as counts,
        open_context(mesh, cache, None, how) as context,
    ):
        changed = {**dict(context.environment), "platform": "gpu"}
        context = replace(context, environment=tuple(changed.items()))
        profiles = profile_pass.profile(context, analysis)
        outcome = race(context, analysis, search(context, analysis, profiles))
    raced = [r for r in outcome.rows if r.time_ms is not None]
    return {
        "name": name,
        "strategies": int(profiles.counts["strategies_measured"]),
        **counts,
        "raced": len(raced),
        "winner": outcome.winner.name,
        "behind": round(outcome.result.time_ms / min(r.time_ms for r in raced) - 1, 4),
        "turns": [len(r.samples_ms) for r in raced],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--json", type=Path, required=True, help="where rows are kept")
    options = parser.parse_args()
    data = {
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "command": "python cfp_test/bench/planning_parts.py --json FILE",
        "rows": [],
    }
    for name in options.names or MODELS:
        data["rows"].append(row(name))
        print(json.dumps(data["rows"][-1]), flush=True)
        options.json.write_text(json.dumps(data, indent=1))
        jax.clear_caches()


if __name__ == "__main__":
    main()
