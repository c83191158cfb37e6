"""Plans, runs, saves, loads, interrupts and kills in a loop, and watches.

    python -m cfp_test.bench soak --seconds 3600 --output soak.json

One process stays for the whole time, as a notebook does. In turn it plans a small step
with a store that is kept, runs, saves and loads the plan; interrupts a planning by
SIGINT at a random moment, and plans again with the same store; and ends a child by
SIGKILL while that measures, and plans on in its folder. Every step is a new function,
and measured on four virtual CPU devices.

Once a minute, with JAX's caches cleared, it notes memory, files, threads, arrays and
executables. Checked in each turn: results equal those of one device, every row of the
store can be read, no stored record is measured again, and no file is left over.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cfp_test.support.quick_flags import QUICK_FLAGS

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=4 {QUICK_FLAGS}"

import jax
import numpy as np

import cfp
from cfp.context import DetailedSettings
from cfp.profiling.tasks import Progress
from cfp_test.bench.commit import commit
from cfp_test.support.steps import (
    STEPS,
    Wrong,
    compare,
    logged_puts,
    make_step,
    stored,
)

DEVICES = 4
_GUARD_SECONDS = 900.0
_SELF = (sys.executable, "-m", "cfp_test.bench.soak")
_SAMPLE_SECONDS = 60.0
# What a killed process may leave, and the next one has to tidy up.
_LEFT_OVER = (".new", ".part", ".unfinished", ".alive", ".tmp", ".json")


def make_mesh(devices: int = DEVICES) -> jax.sharding.Mesh:
    """Makes a mesh of one axis over the first devices."""
    axis = jax.sharding.AxisType.Auto
    return jax.make_mesh((devices,), ("x",), (axis,), devices=jax.devices()[:devices])


def settings(
    progress: Callable[[Progress | str], None] | None = None,
) -> cfp.PlannerSettings:
    """Returns settings under which virtual devices measure little, but measure."""
    return DetailedSettings(
        measure=True, per_kind=3, in_context=False, progress=progress
    )


def count_live() -> dict[str, Any]:
    """Counts what this process holds, with JAX's caches cleared."""
    jax.clear_caches()
    gc.collect()
    # Resident memory has what glibc keeps for later, too.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    status = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in status)
    client = jax.devices()[0].client
    return {
        "rss_mib": int(fields["VmRSS"].split()[0]) / 1024,
        "threads": int(fields["Threads"]),
        "open_files": len(os.listdir("/proc/self/fd")),
        "python_blocks": sys.getallocatedblocks(),
        "live_arrays": len(client.live_arrays()),
        "live_executables": len(client.live_executables()),
    }


class Soak:
    """The process that stays.

    Args:
        folder: for stores, plans and temporary files.
        seed: of what is random.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.kept = folder / "kept"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.counts: dict[str, int] = {}
        self.worst = 0.0
        self.plan_seconds: dict[str, float] = {}
        self._expected: dict[str, Any] = {}

    def count(self, what: str, times: int = 1) -> None:
        """Counts something that was done."""
        self.counts[what] = self.counts.get(what, 0) + times

    def check(self, what: str, name: str, run: Callable[..., Any]) -> None:
        """Runs a planned step, and compares it with one device."""
        fn, args = make_step(name)
        if name not in self._expected:
            self._expected[name] = jax.tree.map(np.asarray, jax.jit(fn)(*args))
        off = compare(f"{what} {name}", run(*args), self._expected[name])
        self.worst = max(self.worst, off)
        self.count("compared with one device")

    def plan(self, name: str, folder: Path) -> cfp.Plan:
        """Plans a new function; what the store has may not be measured again."""
        before = stored(folder)
        fn, args = make_step(name)
        how = {"cache_dir": folder, "settings": settings(), "quiet": True}
        with logged_puts() as keys:
            found = cfp.plan(fn, *args, mesh=make_mesh(), **how)
        if again := before & {*keys}:
            raise Wrong(f"{len(again)} of {len(before)} records were measured again")
        self.count("plannings")
        return found

    def check_files(self, folder: Path) -> None:
        """Raises Wrong if a process has left a file."""
        left = [path for path in self.temporary.rglob("*") if path.is_file()]
        left += [
            path
            for path in folder.rglob("*")
            if path.suffix in _LEFT_OVER or "damaged" in path.name
        ]
        if left:
            raise Wrong(f"left over: {', '.join(map(str, left))}")

    def use(self, name: str) -> None:
        """Plans with the store that is kept, runs, saves, loads."""
        before, began = stored(self.kept), time.monotonic()
        found = self.plan(name, self.kept)
        if name in self.plan_seconds and stored(self.kept) != before:
            raise Wrong(f"{name} was planned before, and has stored something new")
        self.plan_seconds.setdefault(name, time.monotonic() - began)
        self.check("planned", name, found.compile_bound())
        file = self.folder / "plan.json"
        found.save(file)
        applied = cfp.parallelize(make_step(name)[0], plan=file, cache_dir=self.kept)
        self.check("loaded", name, applied)
        self.check_files(self.kept)

    def interrupt(self, name: str) -> None:
        """Interrupts a planning at a random moment, and plans again."""
        folder = Path(tempfile.mkdtemp(prefix="interrupted-", dir=self.folder))
        seconds = self.random.uniform(0, 1.2 * self.plan_seconds.get(name, 10.0))
        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(
            seconds, lambda: signal.pthread_kill(main, signal.SIGINT)
        )
        outcome = "not interrupted: planned before"
        try:
            timer.start()
            try:
                found = self.plan(name, folder)
            finally:
                timer.cancel()
                timer.join()
            self.check(outcome, name, found.compile_bound())
        except KeyboardInterrupt:
            outcome = "interrupted"
        self.count(outcome)
        self._plan_again(name, folder, "an interrupt")

    def kill(self, name: str) -> None:
        """Ends a child by SIGKILL while it measures, and plans on."""
        folder = Path(tempfile.mkdtemp(prefix="killed-", dir=self.folder))
        word, after = self.random.choice(("run", "build")), self.random.randint(1, 4)
        child = subprocess.Popen(
            [*_SELF, "--child", name, "--folder", str(folder)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        guard = threading.Timer(_GUARD_SECONDS, child.kill)
        guard.start()
        with child:
            for line in child.stdout:
                after -= line.strip() == word
                if after == 0:
                    break
            child.kill()
        guard.cancel()
        guard.join()
        late = child.returncode != -signal.SIGKILL
        self.count("killed too late" if late else f"killed at {word}")
        self._plan_again(name, folder, "a kill")

    def _plan_again(self, name: str, folder: Path, what: str) -> None:
        """Plans with what was stored, checks the step, and clears up."""
        self.count(f"records that {what} left", len(stored(folder)))
        self.check(f"after {what}", name, self.plan(name, folder).compile_bound())
        self.check_files(folder)
        shutil.rmtree(folder)


def run_child(name: str, folder: Path) -> None:
    """Plans, and tells what it is at."""

    def tell(event: Progress | str) -> None:
        if isinstance(event, Progress):
            print(event.phase, flush=True)

    fn, args = make_step(name)
    cfp.plan(fn, *args, mesh=make_mesh(), cache_dir=folder, settings=settings(tell))


def soak(seconds: float, folder: Path, seed: int, output: Path) -> int:
    """Runs the loop, and writes what it notes; returns 1 if something was wrong."""
    os.environ["TMPDIR"] = str(folder / "tmp")
    tempfile.tempdir = None
    loop = Soak(folder, seed)
    head = {"seconds": seconds, "seed": seed, "devices": DEVICES, "commit": commit()}
    head |= {"jax": jax.__version__, "date": time.strftime("%Y-%m-%d", time.gmtime())}
    began, turn, samples, wrong = time.monotonic(), 0, [], []
    sampled = -_SAMPLE_SECONDS
    turns = [
        (what, name)
        for name in STEPS
        for what in (loop.use, loop.interrupt, loop.use, loop.kill)
    ]
    while (elapsed := time.monotonic() - began) < seconds:
        what, name = turns[turn % len(turns)]
        try:
            what(name)
        except (Wrong, cfp.CfpError) as error:
            wrong.append({"turn": turn, "what": what.__name__, "why": str(error)})
            print(f"WRONG: {wrong[-1]}", flush=True)
        turn += 1
        elapsed = time.monotonic() - began
        if elapsed - sampled >= _SAMPLE_SECONDS or elapsed >= seconds:
            sampled = elapsed
            held = {**count_live(), "store_records": len(stored(loop.kept))}
            samples.append({"seconds": round(elapsed, 1), "turns": turn, **held})
            found = {"turns": turn, "counts": loop.counts, "wrong": wrong}
            found |= {"largest_difference": loop.worst, "samples": samples}
            output.write_text(json.dumps({**head, **found}, indent=1) + "\n")
            print(samples[-1], flush=True)
    print(f"{turn} turns, {len(wrong)} wrong, {loop.counts}")
    return bool(wrong)


def main() -> int:
    """Runs the soak, or one of its children."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--output", type=Path, default=Path("soak.json"))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    # Shells have what they start in the background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if options.child:
        run_child(options.child, options.folder)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        where = options.folder or Path(folder)
        return soak(options.seconds, where, options.seed, options.output)


if __name__ == "__main__":
    sys.exit(main())
