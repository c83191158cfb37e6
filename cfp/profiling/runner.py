"""Runs built programs on the devices, and times them until the result is reliable.

`cfp.profiling.builder` builds, this module runs, `cfp.profiling.store` stores, and
`cfp.profiling.jobs` combines them. A callable `run(n)` executes n times and returns
once the devices are done; a sample is its time divided by n. A sample is so long that
one launch and one wait are a small share (`TimingOptions`).

In a program of several processes, all must execute equally often. Otherwise their
collectives wait for ever. `announce` tells the others the number.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from cfp.errors import CfpError
from cfp.profiling.builder import (
    BuildEnvironment,
    Built,
    Job,
    build,
    default_threads,
    is_out_of_memory,
    reason_of,
)
from cfp.profiling.coordination import is_shared, leading
from cfp.profiling.inputs import InputKind, generator, input_kinds, make_inputs
from cfp.profiling.record import ProfileRecord
from cfp.program.graph import Program

Run = Callable[[int], object]

# Warm-up samples are shorter by this factor, since many are needed.
_WARMUP_PART = 3
_STEADY_TOLERANCE = 0.02
_LARGEST_REPEAT = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingOptions:
    """Limits of one measurement by `measure`.

    The defaults are for GPUs, where a program is launched while the one before still
    runs, as in training. On CPUs (`ON_CPUS`), programs run one at a time.

    Attributes:
      warmup_seconds: shortest warm-up, unless half of the budget is less.
      warmup_window: least number of its samples that are compared with as many before.
      min_samples: least number of samples before `target_spread` can end the sampling.
      max_samples: largest number of samples.
      target_spread: `relative_spread` at which the sampling ends.
      budget_seconds: no new sample starts after this time, warm-up included; one is
        always taken, even if that is fewer than `min_samples`.
      min_sample_ms: intended least duration of one sample.
      min_repeat: least number of executions in one sample.
      long_sample_ms: duration of a sample that may have fewer than `min_repeat`.
    """

    # On 4 H200 a step of 76 ms took 2.3 ms less if three ran in a row. Without
    # peer-to-peer access, times vary by some percent, and half of a profile's runs use
    # their whole budget. On 2 H200, two samples that agree, or those of 0.7 s, are off
    # by 1.0% on average; three samples, or those of 1 s, by 0.5%. A warm-up that ends
    # with two samples that agree, and samples half as long, save a third of the time;
    # two machines then differ by 1.7% on average, instead of 1.5%. A launch takes half
    # a percent of half a second: steps that long need no repetition.
    warmup_seconds: float = 0.05
    warmup_window: int = 1
    min_samples: int = 2
    max_samples: int = 50
    target_spread: float = 0.01
    budget_seconds: float = 0.7
    min_sample_ms: float = 30.0
    min_repeat: int = 3
    long_sample_ms: float = 500.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_samples <= self.max_samples:
            raise ValueError(
                f"expected 1 <= min_samples <= max_samples, got {self.min_samples} and "
                f"{self.max_samples}"
            )


ON_CPUS = TimingOptions(
    warmup_seconds=0.1,
    warmup_window=3,
    min_samples=3,
    budget_seconds=2.0,
    min_sample_ms=5.0,
    min_repeat=1,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of one measurement: every sample, none discarded.

    Attributes:
      samples_ms: milliseconds per execution, in the order taken.
      warmup_ms: the same for the samples of the warm-up.
    """

    samples_ms: tuple[float, ...]
    warmup_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)


def interquartile_range(samples: Sequence[float]) -> float:
    """Returns third minus first quartile, as numpy's; infinity below two samples."""
    if len(samples) < 2:
        return math.inf
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return third - first


def relative_spread(samples: Sequence[float]) -> float:
    """Returns the relative uncertainty of the median: IQR / (sqrt(n) * median)."""
    width = interquartile_range(samples)
    if width in (0.0, math.inf):
        return width
    median = statistics.median(samples)
    return width / (math.sqrt(len(samples)) * median) if median else math.inf


def measure(
    run: Run,
    options: TimingOptions,
    *,
    clock: Callable[[], float] = time.perf_counter,
    announce: Callable[[int], object] = int,
) -> Timing:
    """Times a callable: a warm-up until times are steady, then samples.

    The warm-up ends after `warmup_seconds`, once the last quarter of its samples (at
    least `warmup_window`) agrees with the quarter before, within 2% in the median. It
    ends anyhow at half of the budget, once the length of samples is known. Clocks drop
    under load, so early samples are too fast. Warm-up samples are a third as long. If
    the warm-up takes the whole budget, its last sample is the only one. The first
    execution, which loads code, does not count for the budget.

    Args:
      run: `run(n)` executes n times and blocks until the devices are done.
      clock: monotonic clock, in seconds.
      announce: called with n before each `run(n)`.
    """
    subject = _Subject(run, options, clock, announce)
    while not subject.calibrated or (
        subject.spent_seconds < options.budget_seconds / 2
        and (subject.spent_seconds < options.warmup_seconds or not subject.steady)
    ):
        subject.warm_up()
    is_long = 0 < options.budget_seconds <= subject.spent_seconds
    samples_ms = [subject.warmup_ms.pop()] if is_long else list[float]()
    while len(samples_ms) < options.max_samples:
        if samples_ms and subject.spent_seconds >= options.budget_seconds:
            break
        samples_ms.append(subject.sample())
        if len(samples_ms) >= options.min_samples:
            if relative_spread(samples_ms) <= options.target_spread:
                break
    return Timing(samples_ms=tuple(samples_ms), warmup_ms=tuple(subject.warmup_ms))


@dataclass(slots=True)
class _Subject:
    """A callable under measurement, with its repetitions per sample and time spent."""

    run: Run
    options: TimingOptions
    clock: Callable[[], float]
    announce: Callable[[int], object]
    repeat: int = 1
    sample_repeat: int = 1
    calibrated: bool = False
    spent_seconds: float = 0.0
    warmup_ms: list[float] = field(default_factory=list)

    @property
    def steady(self) -> bool:
        """True if the last warm-up samples agree with the samples before."""
        # Without the first, which is always far off.
        warmup_ms = self.warmup_ms[1:]
        # Windows grow with the warm-up: adjacent samples, milliseconds apart, do not
        # show a drop over seconds.
        window = max(self.options.warmup_window, len(warmup_ms) // 4)
        if len(warmup_ms) < 2 * window:
            return False
        before = statistics.median(warmup_ms[-2 * window : -window])
        after = statistics.median(warmup_ms[-window:])
        return abs(after - before) <= _STEADY_TOLERANCE * before

    def warm_up(self) -> None:
        """Takes a warm-up sample, and adjusts the repetitions per sample."""
        seconds = self._time(self.repeat)
        self.warmup_ms.append(seconds / self.repeat * 1e3)
        if len(self.warmup_ms) == 1:
            # The first execution loads code and opens communicators.
            self.spent_seconds = 0.0
            return
        wanted = self.options.min_sample_ms / 1e3
        least = wanted / _WARMUP_PART
        if self.repeat < _LARGEST_REPEAT and seconds < least:
            # A short sample is mostly launch and wait: grow tenfold at most.
            self.repeat = self._grown(least, seconds, at_most=10.0)
        else:
            self.calibrated = True
            repeat = self.repeat if seconds >= wanted else self._grown(wanted, seconds)
            # The first long sample may have been delayed: later ones count, too.
            times = self.options.long_sample_ms / max(self.warmup_ms[-1], 1e-6)
            least_repeat = math.ceil(min(self.options.min_repeat, times))
            self.sample_repeat = max(self.sample_repeat, repeat, least_repeat)

    def sample(self) -> float:
        """Takes one sample; returns milliseconds per execution."""
        return self._time(self.sample_repeat) / self.sample_repeat * 1e3

    def _grown(self, wanted: float, seconds: float, at_most: float = math.inf) -> int:
        """Scales repetitions to 1.1 times `wanted` seconds, at most `at_most`-fold."""
        growth = min(1.1 * wanted / max(seconds, 1e-9), at_most)
        repeat = math.ceil(self.repeat * growth)
        return min(max(repeat, self.repeat + 1), _LARGEST_REPEAT)

    def _time(self, repeat: int) -> float:
        self.announce(repeat)
        start = self.clock()
        self.run(repeat)
        seconds = self.clock() - start
        self.spent_seconds += seconds
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A mesh with functions that build and run jobs there.

    Attributes:
      build: builds a job, called in a thread; returns `Built`, or a failure's record.
      run: times a job's built program; returns the record of the times or a failure.
      tune: has the compiler tune a job's kernels on one device, ahead of its build;
        None if builds do so, or nothing is tuned.
      tuners: largest number of calls of `tune` at once.
      tuned: keys in `Task.kernels` that are tuned already; extended by builds.
      open_links: called with the first new job and its built program, beside builds of
        other jobs: the first run on devices may take seconds to begin.
    """

    mesh: Mesh
    build: Callable[[Any], Built | ProfileRecord]
    run: Callable[[Any, Built], ProfileRecord]
    tune: Callable[[Any], object] | None = None
    tuners: int = 1
    tuned: set[Hashable] = field(default_factory=set)
    open_links: Callable[[Any, Built], object] | None = None

    @property
    def threads(self) -> int:
        """Largest number of jobs that are built side by side."""
        return default_threads(self.mesh.devices.flat[0].platform)

    def check(self, crash: ProfileRecord) -> None:
        """Raises CfpError if the devices no longer work after a crash."""
        check_devices(self.mesh, crash)


def place_of_parts(
    program: Program,
    mesh: Mesh,
    environment: BuildEnvironment,
    *,
    timing: TimingOptions | None = None,
) -> Place:
    """Makes a `Place` whose functions build and time parts of a program on a mesh."""
    platform = mesh.devices.flat[0].platform
    tuners = 1 if is_shared(mesh) else min(mesh.devices.size, default_threads(platform))
    orders = SimpleQueue[Mesh]()
    for count in range(tuners):  # Each has another device first.
        devices = np.roll(mesh.devices.flatten(), -count).reshape(mesh.devices.shape)
        orders.put(Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types))

    made = dict[str, Built | ProfileRecord]()  # Tuned on the mesh as it is.

    def tune_job(job: Job) -> None:
        order = orders.get()
        try:
            outcome = build(program, order, job, environment)
        finally:
            orders.put(order)
        if order == mesh:
            made[job.key.digest] = outcome

    def build_job(job: Job) -> Built | ProfileRecord:
        outcome = made.pop(job.key.digest, None)
        outcome = outcome or build(program, mesh, job, environment)
        if isinstance(outcome, Built):
            compile_generators(program, mesh, job)
        return outcome

    def run_job(job: Job, built: Built) -> ProfileRecord:
        return run(built, job, program, mesh, timing=timing)

    tune = tune_job if environment.options(platform) else None
    return Place(mesh=mesh, build=build_job, run=run_job, tune=tune, tuners=tuners)


def timing_on(mesh: Mesh, **limits: Any) -> TimingOptions:
    """Returns timing options for a mesh's platform, with some replaced by `limits`."""
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    return replace(ON_CPUS if is_cpu else TimingOptions(), **limits)


def run(
    built: Built,
    job: Job,
    program: Program,
    mesh: Mesh,
    *,
    timing: TimingOptions | None = None,
) -> ProfileRecord:
    """Times a built job with inputs of `make_inputs`; a failure becomes a record."""
    kinds = input_kinds(program, job.part, job.in_specs)
    return execute(built, kinds, mesh, feedback=job.feedback, timing=timing)


def execute(
    built: Built,
    kinds: Sequence[InputKind],
    mesh: Mesh,
    *,
    feedback: Sequence[tuple[int, int]] = (),
    timing: TimingOptions | None = None,
) -> ProfileRecord:
    """Times a compiled program; called in process 0, the mesh's others follow.

    Returns the record of a failure if memory is short or the program crashes.

    Args:
      feedback: (input position, output position) pairs, as in `Job`.
    """
    timing = timing or timing_on(mesh)
    if reason := shortage(built, mesh):
        return built.record("out_of_memory", reason=reason)
    how = kinds, mesh, feedback
    if (talk := leading(mesh)) is None:
        return execute_here(built, *how, lambda run: measure(run, timing).samples_ms)
    assert built.shared is not None, "it was built in all processes"
    said = talk.say("run", built.shared.number, *how)
    order = talk.order(said)
    timed = partial(measure, options=timing, announce=order)
    record = execute_here(built, *how, lambda run: timed(run).samples_ms)
    order(0)
    talk.settle(said, "" if record.ok else record.reason)
    return record


def execute_here(
    built: Built,
    kinds: Sequence[InputKind],
    mesh: Mesh,
    feedback: Sequence[tuple[int, int]],
    time_all: Callable[[Run], Sequence[float]],
) -> ProfileRecord:
    """Records `time_all`'s samples (ms) in this process, or a failure, as `execute`."""
    started = time.perf_counter()
    loop = _Loop(built.compiled, feedback, mesh.devices.flat[0].platform == "cpu")
    try:
        loop.inputs = make_inputs(kinds, mesh, [place for place, _ in feedback])
        samples_ms = time_all(loop)
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        return built.record(
            "out_of_memory" if is_out_of_memory(error) else "crashed",
            reason=reason_of(error),
            run_seconds=time.perf_counter() - started,
        )
    finally:
        loop.free()
    return built.record(
        "ok", samples_ms=samples_ms, run_seconds=time.perf_counter() - started
    )


def compile_generators(program: Program, mesh: Mesh, job: Job) -> None:
    """Compiles functions that make a job's inputs; their use repeats XLA's errors."""
    # Failures repeat, and are recorded, when the inputs are made.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        for kind in input_kinds(program, job.part, job.in_specs):
            generator(kind, mesh)


def check_devices(mesh: Mesh, crash: ProfileRecord) -> None:
    """Raises CfpError if devices stopped working after a crash."""
    probe = InputKind((8,), "float32", ((),))
    try:
        jax.block_until_ready(make_inputs([probe], mesh))
    except jax.errors.JaxRuntimeError as error:
        raise CfpError(
            f"The devices stopped working ({reason_of(error)}) after a program crashed "
            f"({crash.reason}). Start again: measurements are kept, and by default "
            "the crashed program is not tried again."
        ) from error


def shortage(built: Built, mesh: Mesh) -> str:
    """Describes by how much a program exceeds a device's memory; "" if it may fit."""
    # Some allocators take seconds to run out of memory; this check is quick.
    for device in mesh.local_devices:
        stats = device.memory_stats() if device.platform != "cpu" else None
        limit = (stats or {}).get("bytes_limit", 0)
        if limit and built.peak_bytes > limit:
            return (
                f"needs {built.peak_bytes / 2**30:.3f} GiB on each device, which has "
                f"{limit / 2**30:.3f} GiB"
            )
    return ""


@dataclass(slots=True)
class _Loop:
    """A program that runs repeatedly, with fed-back outputs as inputs.

    Attributes:
      one_at_a_time: True on CPUs: overlapping runs would compete for the threads in
        which their collectives wait.
      outputs: outputs of the last run: a tuple, or one array.
    """

    compiled: jax.stages.Compiled
    feedback: Sequence[tuple[int, int]]
    one_at_a_time: bool
    inputs: list[jax.Array] = field(default_factory=list)
    outputs: Any = ()

    def __call__(self, times: int) -> None:
        for _ in range(times):
            # Frees outputs that are not fed back before the next run.
            self.outputs = ()
            self.outputs = self.compiled(*self.inputs)
            for put, got in self.feedback:
                self.inputs[put] = self.outputs[got]
            if self.one_at_a_time:
                jax.block_until_ready(self.outputs)
        jax.block_until_ready(self.outputs)

    def free(self) -> None:
        """Deletes inputs and outputs at once, even if other references exist."""
        for array in jax.tree.leaves((self.inputs, self.outputs)):
            if not array.is_deleted():
                array.delete()
        self.inputs, self.outputs = [], ()
