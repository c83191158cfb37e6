"""Steps of two GPUs, beside what one GPU that plays two runs and predicts of them.

    python -m cfp_test.bench.played run --out FOLDER [--p2p-off] [--garbage]
        [--rounds 8] [--seconds 500] [--first N] [--work FOLDER] [--tiny]
    python -m cfp_test.bench.played run --out FOLDER --four [--p2p-off] ...
    python -m cfp_test.bench.played_page FOLDER/played.json

Two processes build the same programs: one for two GPUs, and one for two that its own
GPU plays. With ``--p2p-off`` a third has two GPUs without peer-to-peer access. Then
they run in turn, a sample of each program a round: the whole step on two; one device's
computation on real numbers (`cfp.program.local`); and, with ``--garbage``, for some
programs the partitioned one with collectives that do nothing, as it is and after the
GPU's memory was filled with small numbers. Clocks and power stand beside each. Kernels
are tuned once and kept in ``--work``, for the next run on the same machine.

With ``--four`` the programs are those recorded on four H200
(`cfp_test.bench.recorded`), over NVLink or, with ``--p2p-off``, without peer-to-peer
access alone, and one GPU plays four; their steps are under "two" and "off", too.
Programs that differ only in how collectives run have one computation, which runs in
the first rounds.

With ``--tiny`` on CPUs small models run on virtual devices, to try it out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from cfp import platform
from cfp.analysis.analyze import Analysis
from cfp.cost.schedule import schedule_of
from cfp.devices import described
from cfp.passes.pipeline import analyze_step
from cfp.presets.presets import presets
from cfp.profiling.builder import BuildEnvironment, Built, Job, build, one_device
from cfp.profiling.collectives import measure_rates
from cfp.profiling.compiler_options import without_collectives
from cfp.profiling.inputs import generator, input_kinds, local_kinds
from cfp.profiling.record import ProfileRecord
from cfp.profiling.runner import execute
from cfp.profiling.store import ProfileStore
from cfp.profiling.timing import TimingOptions
from cfp.program.graph import Program
from cfp.program.step import FlatStep, flatten_step
from cfp.program.trace import planning_mesh
from cfp.report.plots import curves_data
from cfp.search.jobs import whole_job
from cfp.targets import resolve
from cfp_test.bench.decoder import MODELS, make_step
from cfp_test.bench.one_as_n_data import (
    computed_to_json,
    races_of,
    schedule_to_json,
)
from cfp_test.bench.recorded import MOE_OF_TWO, OPTIONS, TINY, cases, tiny_cases
from cfp_test.bench.recorded import Case as RecordedCase

_AXIS = "x"
# One sample a turn, behind a warm-up in which the clock sinks to what the power allows.
_TIMING = TimingOptions(
    warmup_seconds=0.4,
    min_samples=1,
    max_samples=1,
    budget_seconds=1.2,
    min_sample_ms=250.0,
    min_repeat=2,
)
# Bytes that are small numbers in every type of floats: 0.03 and less.
_SMALL_BYTES = 0x3C
# A computation varies less from run to run than steps without peer-to-peer access.
_ROUNDS_OF_SHARED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program for two.

    Attributes:
        model: of `cfp_test.bench.decoder`, or "moe" of the zoo.
        kernel: whether attention is cuDNN's.
        how: a preset, or "by hand": parameters sharded on their largest dim, the
            activations between layers on the batch.
        garbage: whether the partitioned program runs, too.
    """

    model: str
    kernel: bool
    how: str
    garbage: bool = False

    @property
    def name(self) -> str:
        return f"{self.model}{', cuDNN' if self.kernel else ''}, {self.how}"

    @property
    def step(self) -> tuple[str, bool]:
        """Model and kernel from which its step follows."""
        return self.model, self.kernel

    @property
    def computation(self) -> Any:
        """The same for programs of which one device computes the same."""
        return self

    def flatten(self, tiny: bool) -> Any:
        """The step."""
        if self.model == "moe":
            return _flatten(TINY["moe"] if tiny else MOE_OF_TWO)
        sizes = MODELS[self.model]
        if self.kernel:
            sizes = replace(sizes, attention="cudnn")
        step, args = make_step(sizes)

        def train_step(state: Any, tokens: jax.Array) -> Any:
            return step(state, tokens)

        return flatten_step(train_step, args, {}, donate_argnums=0)

    def job(self, analysis: Analysis, options: Mapping[str, str]) -> Job:
        """The whole program."""
        named = presets(analysis.frame)
        by_hand = self.how == "by hand"
        choice = named["fully_sharded" if by_hand else self.how]
        job = whole_job(analysis, choice, (), self.name, options=dict(options))
        return _by_hand(job, analysis.frame.program, self.model) if by_hand else job


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A program that was recorded on four."""

    case: RecordedCase
    garbage: bool = False

    @property
    def name(self) -> str:
        return f"{self.step.split()[0]}, {self.case.name}"

    @property
    def step(self) -> str:
        """The target from which its step follows."""
        return self.case.target

    @property
    def computation(self) -> Any:
        """The same for programs of which one device computes the same."""
        options = tuple(OPTIONS[self.case.options].items())
        kept = tuple(without_collectives(options))
        return self.case.target, self.case.preset, self.case.level, kept

    def flatten(self, tiny: bool) -> Any:
        """The step."""
        return _flatten(self.case.target)

    def job(self, analysis: Analysis, options: Mapping[str, str]) -> Job:
        """The whole program."""
        more = OPTIONS[self.case.options]
        choice = presets(analysis.frame)[self.case.preset]
        options = {**options, **more}
        return whole_job(analysis, choice, (), self.name, self.case.level, options)


CASES = (
    Case(model="gpt", kernel=True, how="by hand", garbage=True),
    Case(model="llama4k", kernel=True, how="by hand", garbage=True),
    Case(model="gpt", kernel=True, how="fully_sharded", garbage=True),
    Case(model="gpt", kernel=True, how="data_parallel"),
    Case(model="gpt", kernel=True, how="tensor_parallel"),
    Case(model="gpt", kernel=False, how="fully_sharded"),
    Case(model="moe", kernel=False, how="fully_sharded"),
    Case(model="moe", kernel=False, how="expert_parallel"),
    Case(model="moe", kernel=False, how="data_parallel"),
    Case(model="llama4k", kernel=True, how="fully_sharded"),
    Case(model="llama4k", kernel=True, how="data_parallel"),
    Case(model="llama4k", kernel=True, how="tensor_parallel"),
    Case(model="gpt", kernel=True, how="zero1"),
    Case(model="bert", kernel=True, how="fully_sharded"),
)
TINY_CASES = tuple(
    Case(model=model, kernel=False, how=how, garbage=how == "by hand")
    for model, hows in (
        ("tiny", ("by hand", "fully_sharded", "tensor_parallel")),
        ("moe", ("expert_parallel",)),
    )
    for how in hows
)


def chosen(given: argparse.Namespace) -> tuple[Case | Recorded, ...]:
    """The programs that are asked for."""
    if not given.four:
        return (TINY_CASES if given.tiny else CASES)[: given.first]
    links = "P2P off" if given.p2p_off else "NVLink"
    known = [
        Recorded(case=case)
        for case in (tiny_cases if given.tiny else cases)(4)
        if not case.preset.endswith(".json")
        and (given.tiny or races_of((4, case.target, links, case.name)))
    ]
    return tuple(known[: given.first])


def _flatten(target: str) -> FlatStep:
    name, *words = target.split()
    return resolve(name, words).flatten()


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A case as it was built."""

    case: Case | Recorded
    program: Program
    job: Job
    built: Built | ProfileRecord


def _by_hand(job: Job, program: Program, model: str) -> Job:
    """The job with an expert's shardings in place of a preset's."""
    sizes = MODELS[model]
    activations = sizes.batch, sizes.tokens, sizes.width

    def spec(v: int) -> tuple[tuple[str, ...], ...]:
        shape = program.values[v].shape
        if len(shape) < 2:
            return ((),) * len(shape)
        dims = [d for d, size in enumerate(shape) if size % 2 == 0]
        largest = max(dims, key=lambda d: shape[d])
        if "i32" in program.values[v].dtype:
            largest = 0  # Tokens, on the batch.
        return tuple(("x",) if d == largest else () for d in range(len(shape)))

    on_batch = (("x",), (), ())
    values = {
        v: on_batch
        for op in program.ops
        for v in op.results
        if op.parent < 0 and program.values[v].shape == activations
    }
    constraints = replace(job.constraints, values=values, uses={})
    return replace(
        job,
        constraints=constraints,
        in_specs=tuple(map(spec, job.part.inputs)),
        out_specs=tuple(map(spec, job.part.outputs)),
    )


class Worker:
    """Builds the cases, and runs one after another as it is asked to."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.role = given.role
        self.plays = given.role == "play"
        self.cases = chosen(given)
        self.tiny = given.tiny
        self.work = Path(given.work)
        devices = 4 if given.four else 2
        axes = ((_AXIS, devices),)
        if given.tiny:
            platform.select("cpu", axes)
            mesh = platform.make_mesh(axes)
        elif self.plays:
            described.play_one_of(devices)
            mesh = described.mocked_mesh(axes)
        else:
            mesh = jax.make_mesh((devices,), (_AXIS,), axis_types=(AxisType.Auto,))
        self.mesh = planning_mesh(mesh)
        self.common = dict(described.OPTIONS) if self.plays and not given.tiny else {}
        self.made: dict[str, Made] = {}

    def build(self) -> dict[str, Any]:
        analyses: dict[Any, Analysis] = {}
        ahead = []  # Of all with its kernels, which it alone tunes.
        first: dict[Any, str] = {}  # Of those that compute the same.
        for case in self.cases:
            if case.step not in analyses:
                ahead.append(case)
                step = case.flatten(self.tiny)
                analyses[case.step] = analyze_step(step, self.mesh, None).analysis
            first.setdefault(case.computation, case.name)
        tuned = self.work / "tuned"
        alone = set(first.values()) if self.plays else set()

        def make(case: Case | Recorded) -> Made:
            started = time.perf_counter()
            analysis = analyses[case.step]
            program = analysis.frame.program
            job = case.job(analysis, self.common)
            environment = BuildEnvironment(
                autotune_dir=tuned,
                wants_local=(lambda job, text: True) if case.name in alone else None,
            )
            built = build(program, self.mesh, job, environment)
            if isinstance(built, Built):
                kinds, mesh = input_kinds(program, job.part, job.in_specs), self.mesh
                if case.name in alone:
                    kinds, mesh = local_kinds(kinds, mesh), one_device(mesh)
                for kind in kinds:
                    generator(kind, mesh)
            self.say(f"{case.name}: built in {time.perf_counter() - started:.1f} s")
            return Made(case=case, program=program, job=job, built=built)

        rest = [case for case in self.cases if case not in ahead]
        with ThreadPoolExecutor(16) as pool:
            for some in (ahead, rest):
                for one in pool.map(make, some):
                    self.made[one.case.name] = one
        return {name: self._about(one) for name, one in self.made.items()}

    def say(self, text: str) -> None:
        print(f"{self.role}: {text}", file=sys.stderr, flush=True)

    def _about(self, one: Made) -> dict[str, Any]:
        built = one.built
        if not isinstance(built, Built):
            return {"failure": f"{built.status}: {built.reason}"}
        found: dict[str, Any] = {
            "peak_bytes": built.peak_bytes,
            "build_seconds": built.build_seconds,
        }
        text = built.compiled.as_text() or ""
        found["schedule"] = schedule_to_json(schedule_of(text).merged())
        found["kernels"] = text.count("fmhaSoftmax")
        if isinstance(built.local, ProfileRecord):
            found["local_failure"] = f"{built.local.status}: {built.local.reason}"
        elif built.local is not None:
            found["local_peak_bytes"] = built.local.peak_bytes
            found["local_build_seconds"] = built.local.build_seconds
            ran = schedule_of(built.local.compiled.as_text() or "").computation
            found["local_computed"] = computed_to_json(ran)
        return found

    def curves(self) -> dict[str, Any]:
        with ProfileStore(self.work / f"curves_{self.role}.sqlite3") as store:
            return curves_data(measure_rates(self.mesh, store), None)

    def rates(self) -> dict[str, Any]:
        """The rate at which the device moves memory, by copies of 1 GiB."""
        array = jnp.ones((1 << 28,), jnp.float32)
        copy = jax.jit(lambda x: x + 1.0)
        copy(array).block_until_ready()
        started = time.perf_counter()
        for _ in range(20):
            out = copy(array)
        out.block_until_ready()
        return {
            "device_kind": self.mesh.devices.flat[0].device_kind,
            "memory_bytes_per_ms": 40 * 2**30 / (time.perf_counter() - started) / 1e3,
        }

    def run(self, name: str, what: str) -> dict[str, Any]:
        one = self.made[name]
        built = one.built
        if not isinstance(built, Built):
            return {"failure": built.reason[:300]}
        kinds = input_kinds(one.program, one.job.part, one.job.in_specs)
        mesh = self.mesh
        if what == "local":
            if not isinstance(built.local, Built):
                return {"failure": "no local program"}
            built, kinds = built.local, local_kinds(kinds, mesh)
            mesh = one_device(mesh)
        if what == "filled":
            self._fill()
        record = execute(
            built,
            kinds,
            mesh,
            feedback=one.job.feedback,
            timing=_TIMING,
            checked=True,
        )
        return {
            "status": record.status,
            "reason": record.reason[:300],
            "samples_ms": list(record.samples_ms),
            "clock_mhz": record.clock_mhz,
            "power_watts": record.power_watts,
        }

    def _fill(self) -> None:
        device = self.mesh.local_devices[0]
        stats = device.memory_stats() or {}
        free = stats.get("bytes_limit", 1 << 24) - stats.get("bytes_in_use", 0)
        piece = 1 << 28
        with jax.default_device(device):
            held = [
                jnp.full((piece,), _SMALL_BYTES, jnp.uint8)
                for _ in range(max(1, int(0.9 * free) // piece - 1))
            ]
            jax.block_until_ready(held)
        for array in held:
            array.delete()


def work(given: argparse.Namespace) -> None:
    """Answers lines of standard input, each a call of a `Worker`, with JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Whatever else is printed is no answer.
    worker = Worker(given)
    for line in sys.stdin:
        name, *words = json.loads(line)
        try:
            found = getattr(worker, name)(*words)
        except Exception as error:  # What one program fails with is no other's.
            found = {"failure": f"{type(error).__name__}: {error}"[:600]}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


class Side:
    """A worker in a process of its own."""

    def __init__(self, role: str, given: argparse.Namespace) -> None:
        words = [sys.executable, "-m", "cfp_test.bench.played", "work", "--role", role]
        words += ["--out", str(given.out), "--work", str(given.work)]
        words += ["--first", str(given.first)] if given.first else []
        words += ["--tiny"] if given.tiny else []
        words += ["--four"] if given.four else []
        words += ["--p2p-off"] if given.p2p_off else []
        # All of them stand on the first GPU; the largest program needs 23 GB.
        share = "0.3" if given.p2p_off and not given.four else "0.46"
        environment = dict(os.environ, XLA_PYTHON_CLIENT_MEM_FRACTION=share)
        if role == "play":
            environment["CUDA_VISIBLE_DEVICES"] = "0"
        if role == "off":
            environment["NCCL_P2P_DISABLE"] = "1"
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, *words: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"failure": "the process is gone"}

    def call(self, *words: Any) -> dict[str, Any]:
        self.ask(*words)
        return self.answer()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def run(given: argparse.Namespace) -> None:
    """Builds and runs everything, and writes what is known after each round."""
    started = time.perf_counter()
    given.out.mkdir(parents=True, exist_ok=True)
    given.work.mkdir(parents=True, exist_ok=True)

    def say(text: str) -> None:
        print(f"{time.perf_counter() - started:6.1f} s: {text}", flush=True)

    cases = chosen(given)
    roles = ("two", "play", "off") if given.p2p_off else ("two", "play")
    if given.four and given.p2p_off:
        roles = ("off", "play")
    sides = {role: Side(role, given) for role in roles}
    whole, *others = roles
    play = sides["play"]
    found: dict[str, Any] = {"jax": jax.__version__, "programs": {}}

    def write() -> None:
        (given.out / "played.json").write_text(json.dumps(found, indent=1) + "\n")

    built = {whole: sides[whole].call("build")}
    say("built for all GPUs")
    found["curves"] = {whole: sides[whole].call("curves")}
    say("curves")
    # Kernels are tuned once: those of all GPUs are there when the others look.
    for role in others:
        sides[role].ask("build")
    built |= {role: sides[role].answer() for role in others}
    say("built for one that plays them")
    for role in roles[2:]:
        found["curves"][role] = sides[role].call("curves")
        say("curves without peer-to-peer access")
    found |= play.call("rates")
    for case in cases:
        found["programs"][case.name] = {
            **asdict(case),
            **{side: rows.get(case.name, rows) for side, rows in built.items()},
            "runs": {},
        }
    write()
    for turn in range(given.rounds):
        for case in cases:
            if time.perf_counter() - started > given.seconds:
                say("the time is over")
                break
            runs = found["programs"][case.name]["runs"]
            ways = [(sides[role], role) for role in roles if role != "play"]
            if "local_computed" in built["play"].get(case.name, {}) and (
                turn < _ROUNDS_OF_SHARED or not given.four
            ):
                ways += [(play, "local")]
            if case.garbage and given.garbage:
                ways += [(play, "garbage"), *([(play, "filled")] if not turn else [])]
            shift = turn % len(ways)
            for side, what in ways[shift:] + ways[:shift]:
                row = side.call("run", case.name, what)
                runs.setdefault(what, []).append(row)
                times = [round(ms, 1) for ms in row.get("samples_ms", ())]
                about = row.get("failure") or row["reason"]
                load = f"{row.get('clock_mhz')} MHz, {row.get('power_watts')} W"
                say(f"{case.name}: {what} {times} {load} {about[:150]}")
        write()
    for side in sides.values():
        side.end()
    say("done")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("run", "work"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--role", choices=("two", "play", "off"))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--first", type=int, help="only so many programs")
    parser.add_argument("--p2p-off", action="store_true")
    parser.add_argument("--four", action="store_true")
    parser.add_argument("--garbage", action="store_true")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "cfp_played"
    )
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    (run if given.what == "run" else work)(given)


if __name__ == "__main__":
    main()
