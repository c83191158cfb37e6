"""Whole steps with their attentions replaced and not, by one GPU that plays N.

    python cfp_test/scripts/attention_plans_gpu.py OUT.json [--seconds 280]
        [--part steps|llama|both] [--tiny]

Part one: GPT, LLaMA and MoE steps for 4 devices, fully sharded: the computation of a
step and the peak of its memory, as the models have it and with cuDNN's attention put in
place. Part two, in a process of its own: training of a model shaped like LLaMA-2-7B on
8 devices at 8k to 512k tokens: compiled, not run, for what it needs of memory.

OUT.json is written after each row. What is not reached within the seconds is left out.
With ``--tiny`` sizes are small, and virtual CPU devices run everything.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax

from cfp import platform
from cfp.attention.matching.matches import attentions
from cfp.cli.session import analyse
from cfp.devices import described
from cfp.presets.presets import presets
from cfp.profiling.builder import BuildEnvironment, Built, build
from cfp.profiling.runner import run_local
from cfp.profiling.timing import TimingOptions
from cfp.program.trace import planning_mesh
from cfp.search.jobs import whole_job
from cfp.targets import resolve
from cfp_test.support.named_kernels import kernels_named

_TIMING = TimingOptions(
    warmup_seconds=0.4, min_samples=4, max_samples=8, budget_seconds=1.2
)
_STARTED = time.perf_counter()
_TINY = "--layers 2 --hidden 64 --heads 4 --seq 32 --vocab 128 --batch 8"
STEPS = {
    "gpt 1k": "gpt --layers 4 --hidden 4096 --heads 32 --batch 24 --seq 1024",
    "moe 1k": "moe --layers 4 --batch 64",
    "llama 4k": "llama --layers 4 --hidden 4096 --ffn 11008 --heads 32 --kv_heads 32 "
    "--batch 8 --seq 4096",
    "gpt 4k": "gpt --layers 4 --hidden 4096 --heads 32 --batch 8 --seq 4096",
}
TINY_STEPS = {"gpt tiny": f"gpt {_TINY}", "llama tiny": f"llama {_TINY} --kv_heads 2"}
# (tokens, sequences, preset)
LLAMA = (
    (8192, 8, "fully_sharded"),
    (8192, 8, "tensor_sequence_parallel"),
    (32768, 8, "fully_sharded"),
    (32768, 1, "tensor_sequence_parallel"),
    (131072, 1, "tensor_sequence_parallel"),
    (524288, 1, "tensor_sequence_parallel"),
)
TINY_LLAMA = ((64, 8, "fully_sharded"), (64, 8, "tensor_sequence_parallel"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=280)
    parser.add_argument("--part", choices=("steps", "llama", "both"), default="both")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.part == "both":
        # A process plays one number of devices.
        for part, share in (("steps", 0.6), ("llama", 1.0)):
            left = options.seconds * share - (time.perf_counter() - _STARTED)
            words = [sys.executable, __file__, str(options.out), "--part", part]
            words += ["--seconds", str(left), *(["--tiny"] if options.tiny else [])]
            if subprocess.call(words, timeout=left + 120):
                print(f"{part} ended with an error", flush=True)
        return
    count = 4 if options.part == "steps" else 8
    mesh, common = _mesh(count, options.tiny)
    page = _Page(options.out, options.seconds)
    if options.part == "steps":
        kernel = "chunked" if options.tiny else "cudnn"
        for name, target in (TINY_STEPS if options.tiny else STEPS).items():
            for chosen in ("", kernel):
                page.add(
                    f"{name}, {chosen or 'as written'}",
                    mesh,
                    common,
                    target=target,
                    preset="fully_sharded",
                    kernel=chosen,
                )
        return
    kernel = "chunked" if options.tiny else "cudnn"
    for tokens, batch, preset in TINY_LLAMA if options.tiny else LLAMA:
        size = (
            _TINY
            if options.tiny
            else ("--layers 32 --hidden 4096 --ffn 11008 --heads 32 --kv_heads 32")
        )
        target = f"llama {size} --seq {tokens} --batch {batch} --scan --remat"
        for chosen in (kernel, ""):
            if not chosen and tokens > 32768:
                continue  # Its scores alone are larger than the memory.
            page.add(
                f"llama-2-7b {tokens} x {batch}, {preset}, {chosen or 'as written'}",
                mesh,
                common,
                target=target,
                preset=preset,
                kernel=chosen,
                runs=False,
            )


def _mesh(count: int, tiny: bool) -> tuple[Any, dict[str, str]]:
    axes = (("x", count),)
    if tiny:
        platform.select("cpu", axes)
        return planning_mesh(platform.make_mesh(axes)), {}
    described.play_one_of(count)
    return planning_mesh(described.mocked_mesh(axes)), dict(described.OPTIONS)


class _Page:
    """Rows, written after each."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.seconds = path, seconds
        self.page = json.loads(path.read_text()) if path.exists() else {"rows": []}

    def add(self, name: str, mesh: Any, common: dict[str, str], **how: Any) -> None:
        """Builds a program, and runs it if it is to be run."""
        if time.perf_counter() - _STARTED > self.seconds:
            print(f"no time for {name}", flush=True)
            return
        row = {"name": name, "devices": mesh.size, **how}
        self.page["rows"].append(row)
        self.page["jax"] = jax.__version__
        self.page["hardware"] = str(mesh.devices.flat[0].device_kind)
        try:
            row |= _measured(mesh, common, **how)
        except Exception as error:  # One row that fails is a row.
            row["failure"] = f"{type(error).__name__}: {error}"[:600]
        print(f"{time.perf_counter() - _STARTED:6.1f} s {json.dumps(row)}", flush=True)
        self.path.write_text(json.dumps(self.page, indent=1) + "\n")


def _measured(
    mesh: Any,
    common: dict[str, str],
    *,
    target: str,
    preset: str,
    kernel: str,
    runs: bool = True,
) -> dict[str, Any]:
    words = target.split()
    session = analyse(resolve(words[0], words[1:]), mesh)
    analysis = session.analysis
    program = analysis.frame.program
    found = attentions(program)
    choice = presets(analysis.frame)[preset]
    if kernel:
        every = tuple((s.index, kernels_named(kernel)) for s in analysis.segments)
        choice = replace(choice, kernels=every)
    job = whole_job(analysis, choice, (), target, options=common)
    started = time.perf_counter()
    environment = BuildEnvironment(wants_local=lambda job, text: True)
    built = build(program, session.mesh, job, environment)
    row: dict[str, Any] = {
        "attentions": len(found.found),
        "left_alone": [one.reason for one in found.left_alone],
        "replaced": len(job.constraints.replaced),
        "build_seconds": time.perf_counter() - started,
    }
    if not isinstance(built, Built):
        return row | {"failure": f"{built.status}: {built.reason}"[:600]}
    row |= {
        "peak_bytes": built.peak_bytes,
        "temp_bytes": built.temp_bytes,
        "argument_bytes": built.argument_bytes,
    }
    row["fused"] = (built.compiled.as_text() or "").count('custom_call_target="__cudnn')
    if runs:
        record = run_local(built, job, program, session.mesh, timing=_TIMING)
        row["samples_ms"] = list(record.samples_ms)
        if record.ok:
            row["time_ms"] = median(record.samples_ms)
        else:
            row["failure"] = f"{record.status}: {record.reason}"[:600]
    return row


if __name__ == "__main__":
    main()
