"""The same plans with cuDNN's attention and without, timed on two real devices.

    python -m cfp_test.bench.attention_pair OUT.json [--known PAGE.json]
        [--seconds 190] [--tiny]

GPT at 1,024 tokens and LLaMA at 4,096, data parallel and fully sharded over two
devices: each whole step is compiled and run as it is written, and with a kernel in
the place of every attention that the kernel may compute, from the same arguments.
Rows hold all step times, losses, and what the compiler says of memory. Small steps with
the same attention are checked against one device, as ``cfp run --check`` does it; and
the planner itself chooses, with the kernel allowed and not.

OUT.json is written after each row, and rows in it already, or in ``--known``, are not
made again. With ``--tiny`` virtual CPU devices run all.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

_STARTED = time.perf_counter()
_LARGE = "--layers 4 --hidden 4096 --heads 32"
_SMALL = "--layers 2 --hidden 512 --heads 4 --vocab 1024 --batch 2"
_TINY = "--layers 2 --hidden 64 --heads 8 --vocab 128 --batch 4 --seq 32"
STEPS = {
    "gpt 1k": f"gpt {_LARGE} --batch 12 --seq 1024",
    "llama 4k": f"llama {_LARGE} --ffn 11008 --kv_heads 32 --batch 4 --seq 4096",
}
CHECKED = {
    "gpt 1k, small": f"gpt {_SMALL} --seq 1024",
    "llama 4k, small": f"llama {_SMALL} --ffn 1376 --kv_heads 4 --seq 4096",
}
TINY = {"gpt tiny": f"gpt {_TINY}"}
PRESETS = ("fully_sharded", "data_parallel")
_STEPS, _WARMUP = 16, 4
_LAST = 8  # Seconds that must be left for one more row.


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=190)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--known", type=Path, help="a page's JSON, to go on from")
    options = parser.parse_args()
    if options.tiny:
        from cfp import platform

        platform.select("cpu", (("x", 2),))
    pair = Pair(options)
    steps = TINY if options.tiny else STEPS
    checked = TINY if options.tiny else CHECKED
    kernel = "chunked" if options.tiny else "cudnn"
    for name, target in checked.items():
        pair.add("checked", name, target, PRESETS[0], kernel)
    # What decides comes first.
    for name, target in steps.items():
        for one in ("", kernel):
            pair.add("timed", name, target, PRESETS[0], one)
    for one in (kernel, ""):
        for name, target in steps.items():
            pair.add("planned", name, target, "", one)
    for name, target in steps.items():
        for one in ("", kernel):
            pair.add("timed", name, target, PRESETS[1], one)


def _run(plan: Any, target: Any) -> dict[str, Any]:
    """Some steps of a plan, each from the state that the last one made."""
    import jax

    started = time.perf_counter()
    compiled = plan.compile_bound()
    build_seconds = round(time.perf_counter() - started, 1)
    memory = compiled.compiled.memory_analysis()
    state, batch = target.make_args(plan.in_shardings, 0)
    losses, samples = [], []
    for _ in range(_STEPS):
        started = time.perf_counter()
        state, metrics = jax.block_until_ready(compiled(state, batch))
        samples.append((time.perf_counter() - started) * 1000)
        losses.append(float(metrics["loss"]))
    temp = memory.temp_size_in_bytes
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return {
        "build_seconds": build_seconds,
        "losses": losses,
        "samples_ms": samples[_WARMUP:],
        "time_ms": median(samples[_WARMUP:]),
        "peak_bytes": kept - memory.alias_size_in_bytes + temp,
        "temp_bytes": temp,
    }


class Pair:
    """Makes the rows of two devices."""

    def __init__(self, options: argparse.Namespace) -> None:
        import jax

        self.options = options
        from cfp.program.trace import planning_mesh

        mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
        self.mesh = planning_mesh(mesh)
        self.folder = Path(tempfile.mkdtemp())
        files = (options.out, options.known)
        path = next((one for one in files if one and one.exists()), None)
        self.page = json.loads(path.read_text()) if path else {"rows": []}
        self.page |= {
            "jax": jax.__version__,
            "hardware": str(jax.devices()[0].device_kind),
            "devices": 2,
            "command": "python -m cfp_test.bench.attention_pair FILE",
        }

    def add(self, what: str, name: str, target: str, preset: str, kernel: str) -> None:
        """Makes a row that is not there yet, if there is time."""
        row = {"what": what, "name": name, "target": target}
        row |= {"preset": preset, "kernel": kernel}
        for known in self.page["rows"]:
            if all(known.get(key) == value for key, value in row.items()):
                return
        spent = time.perf_counter() - _STARTED
        if spent > self.options.seconds - _LAST:
            print(f"no time for {row}", flush=True)
            return
        started = time.perf_counter()
        made: dict[str, Any]
        try:
            make = self._planned if what == "planned" else self._by_hand
            made = make(row)
        except Exception as error:  # One row that fails is a row.
            made = {"failure": f"{type(error).__name__}: {error}"[:600]}
        made["seconds"] = round(time.perf_counter() - started, 1)
        self.page["rows"].append(row | made)
        self.options.out.write_text(json.dumps(self.page, indent=1) + "\n")
        print(
            f"{time.perf_counter() - _STARTED:6.1f} s {json.dumps(row | made)[:700]}",
            flush=True,
        )

    def _by_hand(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A preset, with a kernel in all segments or in none, run or checked."""
        from cfp.checking.trial import run_trial
        from cfp.cli.session import analyse
        from cfp.context import open_context
        from cfp.passes.pipeline import decide
        from cfp.planner_settings import PlannerSettings
        from cfp.presets.presets import presets
        from cfp.solution import Candidate, Solution
        from cfp.targets import resolve

        words = row["target"].split()
        target = resolve(words[0], words[1:])
        session = analyse(target, self.mesh)
        analysis = session.analysis
        choice = presets(analysis.frame)[row["preset"]]
        if row["kernel"]:
            kernels = self._kernels(analysis, choice, row["kernel"])
            choice = replace(choice, kernels=kernels)
        settings = PlannerSettings(race=False)
        with open_context(self.mesh, self.folder, None, settings) as context:
            solution = Solution([Candidate(row["preset"], choice)])
            plan, _ = decide(context, analysis, solution)
        plan = replace(plan, step=session.step)
        found: dict[str, Any] = {
            "replaced": [
                [one.op, *one.functions.how] for one in plan.constraints.replaced
            ]
        }
        if row["what"] == "checked":
            trial = run_trial(plan, target, steps=2, check=True)
            worst = trial.largest
            return found | {
                "tolerance": trial.tolerance,
                "losses": [step.metrics["loss"] for step in trial.steps],
                "failures": [str(one) for one in trial.failures],
                "worst": worst and [worst.path, worst.relative_l2],
            }
        return found | _run(plan, target)

    def _kernels(
        self, analysis: Any, choice: Any, kernel: str
    ) -> tuple[tuple[int, Any], ...]:
        """The kernel in each segment that can have it under a choice."""
        from cfp.cost.choice import segment_candidate
        from cfp.search.choices import kernel_variants
        from cfp.settings import Replacing

        platform = self.mesh.devices.flat[0].platform
        known = Replacing(attention=(kernel,), platform=platform)
        found = []
        for segment in analysis.segments:
            candidate = segment_candidate(analysis, segment.index, choice)
            variants = kernel_variants(analysis, segment.kind, candidate, known)
            found += [(segment.index, one.kernels) for one in variants[:1]]
        return tuple(found)

    def _planned(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the planner's choice, and the time that it takes."""
        import cfp
        from cfp.planner_settings import DetailedSettings
        from cfp.settings import ConstraintLevel
        from cfp.targets import resolve

        words = row["target"].split()
        target = resolve(words[0], words[1:])
        left = self.options.seconds - (time.perf_counter() - _STARTED)
        settings = DetailedSettings(
            attention=(row["kernel"],) if row["kernel"] else (),
            seconds=max(1.0, min(30.0, left - 20)),
            per_kind=3,
            others=0,
            in_context=False,
            compiler_options={},
            constraint_levels=(ConstraintLevel.EVERYTHING,),
        )
        plan = cfp.plan(
            target.step,
            *target.args,
            mesh=self.mesh,
            donate_argnums=target.donate,
            cache_dir=self.folder,
            settings=settings,
        )
        return {
            "winner": plan.winner,
            "measured_ms": plan.measured_ms,
            "peak_bytes": plan.peak_bytes,
            "race": [[one.name, one.time_ms, one.note] for one in plan.race],
            "replaced": [
                [one.op, *one.functions.how] for one in plan.constraints.replaced
            ],
        }


if __name__ == "__main__":
    main()
    sys.stdout.flush()
