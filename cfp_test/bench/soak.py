"""Plans, runs, saves, loads, interrupts and kills in a loop, and watches.

    python -m cfp_test.bench soak --seconds 3600 --output soak.json

One process stays for the whole time, as a notebook does. In turn it plans a small step
with a store that is kept, runs, saves and loads the plan; interrupts a planning
by SIGINT at a random moment, and plans again with the same store; and ends a child by
SIGKILL while that measures, and plans on where the child was. Every step is a new
function, and what is measured is measured on four virtual CPU devices.

Once a minute, with JAX's caches cleared, it notes memory, file handles, threads, live
arrays and executables, and the size of the store. Resident memory has what glibc keeps
for later, too; what is in use is noted beside it, and what is resident once glibc was
asked to give back what it can. A second process compiles and
runs as many new steps with nothing but ``jax.jit``: what grows there is JAX's.
Checked in each turn: results equal those of one device, every row of the store can be
read, no record that was stored is measured again, and no file is left over.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cfp_test.support.quick_flags import QUICK_FLAGS

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=4 {QUICK_FLAGS}"

import jax
import jax.numpy as jnp
import numpy as np

import cfp
from cfp.planner_settings import DetailedSettings
from cfp.profiling.store import ProfileStore, store_path
from cfp.profiling.tasks import Progress
from cfp_test.bench.rows import commit

DEVICES = 4
# Rounding of float32 over these sizes, with sums in another order.
_TOLERANCE = 1e-4
# So many new functions the comparison compiles in a turn.
_PLAIN_FUNCTIONS = 8
_GUARD_SECONDS = 900.0
_SELF = (sys.executable, "-m", "cfp_test.bench.soak")
_SAMPLE_SECONDS = 60.0
# What a killed process may leave, and the next one has to tidy up.
_LEFT_OVER = (".new", ".part", ".unfinished", ".alive", ".tmp", ".json")

Step = tuple[Callable[..., Any], tuple[Any, ...]]


def make_step(name: str, batch: int = 16) -> Step:
    """Makes a new function and its arguments."""
    keys = iter(jax.random.split(jax.random.key(7), 8))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / shape[0] ** 0.5

    def train(loss: Callable[..., Any]) -> Callable[..., Any]:
        def step(params: Any, x: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

        return step

    if name == "mlp":
        params = {"up": normal(32, 64), "down": normal(64, 32)}
        return train(
            lambda p, x: ((jnp.tanh(x @ p["up"]) @ p["down"] - x) ** 2).mean()
        ), (params, normal(batch, 32))
    if name == "attention":

        def attend(p: Any, x: Any) -> Any:
            q, k, v = (jnp.einsum("btd,dhe->bthe", x, p[n]) for n in "qkv")
            scores = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k))
            return (jnp.einsum("bhst,bthe->bshe", scores, v) ** 2).mean()

        params = {n: normal(16, 4, 8) for n in "qkv"}
        return train(attend), (params, normal(batch, 8, 16))

    def scan(p: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return x + jax.nn.gelu(x @ w), None

        return (jax.lax.scan(layer, x, p)[0] ** 2).mean()

    return train(scan), (normal(3, 32, 32), normal(batch, 32))


STEPS = ("mlp", "attention", "scan")


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


class _MallInfo(ctypes.Structure):
    """Answer of glibc's ``mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


_LIBC = ctypes.CDLL("libc.so.6")
_LIBC.mallinfo2.restype = _MallInfo


def read_status() -> dict[str, str]:
    """Reads what the kernel says of this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    return dict(line.split(":", 1) for line in status)


def count_live() -> dict[str, Any]:
    """Counts what a process holds, with JAX's caches cleared."""
    jax.clear_caches()
    gc.collect()
    before, heap = read_status(), _LIBC.mallinfo2()
    _LIBC.malloc_trim(0)
    fields = read_status()
    client = jax.devices()[0].client
    return {
        "rss_mib": int(before["VmRSS"].split()[0]) / 1024,
        "trimmed_rss_mib": int(fields["VmRSS"].split()[0]) / 1024,
        "heap_used_mib": (heap.uordblks + heap.hblkhd) / 2**20,
        "heap_held_mib": (heap.arena + heap.hblkhd) / 2**20,
        "rss_file_mib": int(fields["RssFile"].split()[0]) / 1024,
        "rss_anonymous_mib": int(fields["RssAnon"].split()[0]) / 1024,
        "python_blocks": sys.getallocatedblocks(),
        "threads": int(fields["Threads"]),
        "open_files": len(os.listdir("/proc/self/fd")),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "python_objects": len(gc.get_objects()),
        "live_arrays": len(client.live_arrays()),
        "live_executables": len(client.live_executables()),
    }


class Wrong(Exception):
    """Raised where a check of the soak fails."""


def compare(name: str, got: Any, wanted: Any) -> float:
    """Returns the largest difference, relative to each array's largest value.

    Raises:
        Wrong: it is no rounding.
    """
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        worst = max(worst, float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-6)))
    if not worst < _TOLERANCE:
        raise Wrong(f"{name}: results differ from one device's by {worst:.2e}")
    return worst


@contextlib.contextmanager
def logged_puts() -> Iterator[list[str]]:
    """Lists keys of what is stored without being asked to replace anything."""
    keys: list[str] = []
    put_all = ProfileStore.put_all

    def logging(store: ProfileStore, records: Any, *, replace: bool = False) -> int:
        if not replace:
            keys.extend(record.key for record in records if record.ok)
        return put_all(store, records, replace=replace)

    ProfileStore.put_all = logging  # pyright: ignore
    try:
        yield keys
    finally:
        ProfileStore.put_all = put_all


def stored(folder: Path) -> set[str]:
    """Keys of a store's good records.

    Raises:
        Wrong: a row cannot be read, or SQLite finds fault with the file.
    """
    path = store_path(folder)
    if not path.exists():
        return set()
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT count(*) FROM records").fetchone()[0]
        sound = connection.execute("PRAGMA integrity_check").fetchone()[0]
    connection.close()
    with ProfileStore(path) as store:
        records = store.records()
    if sound != "ok" or len(records) != rows:
        raise Wrong(f"{path}: {sound}; {len(records)} of {rows} rows can be read")
    if bad := [one for one in records if one.status == "crashed"]:
        raise Wrong(f"{path}: something counts as the cause of a death: {bad[0]}")
    return {record.key for record in records if record.ok}


def check_files(folder: Path, temporary: Path) -> None:
    """Checks that no process has left a file.

    Raises:
        Wrong: one has.
    """
    left = [
        path
        for path in (*folder.rglob("*"), *temporary.rglob("*"))
        if path.is_file()
        and (
            temporary in path.parents
            or path.suffix in _LEFT_OVER
            or "damaged" in path.name
        )
    ]
    if left:
        raise Wrong(f"left over: {', '.join(map(str, left))}")


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
        self._expected: dict[tuple[str, int], Any] = {}

    def count(self, what: str, times: int = 1) -> None:
        """Counts something that was done."""
        self.counts[what] = self.counts.get(what, 0) + times

    def check(self, what: str, name: str, run: Callable[..., Any], batch: int) -> None:
        """Runs a planned step, and compares it with one device."""
        fn, args = make_step(name, batch)
        if (name, batch) not in self._expected:
            host = jax.tree.map(np.asarray, jax.jit(fn)(*args))
            self._expected[name, batch] = host
        got = run(*args)
        self.worst = max(
            self.worst, compare(f"{what} {name}", got, self._expected[name, batch])
        )
        self.count("compared with one device")

    def plan(self, name: str, folder: Path, **more: Any) -> cfp.Plan:
        """Plans a new function; what the store has may not be measured again."""
        before = stored(folder)
        fn, args = make_step(name)
        with logged_puts() as keys:
            found = cfp.plan(
                fn,
                *args,
                mesh=make_mesh(),
                cache_dir=folder,
                quiet="settings" not in more,
                **{"settings": settings(), **more},
            )
        if again := before & {*keys}:
            raise Wrong(f"{len(again)} of {len(before)} records were measured again")
        self.count("plannings")
        return found

    def use(self, name: str) -> None:
        """Plans with the store that is kept, runs, saves, loads."""
        before, began = stored(self.kept), time.monotonic()
        found = self.plan(name, self.kept)
        if name in self.plan_seconds and stored(self.kept) != before:
            raise Wrong(f"{name} was planned before, and has stored something new")
        self.plan_seconds.setdefault(name, time.monotonic() - began)
        self.check("planned", name, found.compile_bound(), 16)
        file = self.folder / "plan.json"
        found.save(file)
        loaded = cfp.Plan.load(file)
        self.check("loaded", name, loaded.apply(make_step(name)[0]), 16)
        applied = cfp.parallelize(make_step(name)[0], plan=file, cache_dir=self.kept)
        self.check("reused", name, applied, 16)
        self.count("saved, loaded and reused")
        check_files(self.kept, self.temporary)

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
            self.check(outcome, name, found.compile_bound(), 16)
        except KeyboardInterrupt:
            outcome = "interrupted: ended"
        self.count(outcome)
        kept = len(stored(folder))
        self.count("records that an interrupt left", kept)
        check_files(folder, self.temporary)
        self.check(
            "after an interrupt", name, self.plan(name, folder).compile_bound(), 16
        )
        check_files(folder, self.temporary)
        shutil.rmtree(folder)

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
        if child.returncode != -signal.SIGKILL:
            self.count("killed too late")
        self.count(f"killed at {word}")
        self.count("records that a kill left", len(stored(folder)))
        self.check("after a kill", name, self.plan(name, folder).compile_bound(), 16)
        check_files(folder, self.temporary)
        shutil.rmtree(folder)


def folder_bytes(folder: Path) -> int:
    """Adds up the sizes of files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def run_child(name: str, folder: Path) -> None:
    """Plans, and tells what it is at."""

    def tell(event: Progress | str) -> None:
        if isinstance(event, Progress):
            print(event.phase, flush=True)

    fn, args = make_step(name)
    cfp.plan(fn, *args, mesh=make_mesh(), cache_dir=folder, settings=settings(tell))


def run_plain() -> None:
    """Compiles new functions by jax.jit each time a line comes."""
    for line in sys.stdin:
        sharding = jax.NamedSharding(make_mesh(), jax.P("x"))
        for _ in range(_PLAIN_FUNCTIONS):
            fn, (params, x) = make_step(line.strip())
            jax.block_until_ready(jax.jit(fn)(params, jax.device_put(x, sharding)))
            del fn, params, x
        held = {**count_live(), "cpu_seconds": time.process_time()}
        print(json.dumps(held), flush=True)


def spent_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(
            resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
    )


def soak(seconds: float, folder: Path, seed: int, output: Path, share: float) -> int:
    """Runs the loop, and writes what it notes.

    Returns:
        The exit status: 1 if something was wrong.
    """
    os.environ["TMPDIR"] = str(folder / "tmp")
    tempfile.tempdir = None
    loop = Soak(folder, seed)
    plain = subprocess.Popen(
        [*_SELF, "--plain"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert plain.stdin is not None and plain.stdout is not None
    head = {
        "seconds": seconds,
        "seed": seed,
        "devices": DEVICES,
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    began, turn, samples, wrong = time.monotonic(), 0, [], []
    sampled, beside = -_SAMPLE_SECONDS, {"cpu_seconds": 0.0}
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
            wrong.append(
                {"turn": turn, "what": what.__name__, "step": name, "why": str(error)}
            )
            print(f"WRONG: {wrong[-1]}", flush=True)
        turn += 1
        plain.stdin.write(f"{name}\n")
        plain.stdin.flush()
        beside = json.loads(plain.stdout.readline())
        elapsed = time.monotonic() - began
        if elapsed - sampled >= _SAMPLE_SECONDS or turn < len(turns):
            sampled = elapsed
            samples.append(
                {
                    "seconds": round(elapsed, 1),
                    "turns": turn,
                    **count_live(),
                    "store_bytes": folder_bytes(loop.kept),
                    "store_records": len(stored(loop.kept)),
                    "plain": beside,
                }
            )
            found = {"turns": turn, "counts": loop.counts, "wrong": wrong}
            found |= {"largest_difference": loop.worst, "samples": samples}
            found |= {"plan_seconds": loop.plan_seconds}
            part = output.with_suffix(".part")
            part.write_text(json.dumps({**head, **found}, indent=1) + "\n")
            part.replace(output)
            print({k: v for k, v in samples[-1].items() if k != "plain"}, flush=True)
        used = spent_seconds() + beside["cpu_seconds"]
        time.sleep(max(0.0, used / share - (time.monotonic() - began)))
    plain.stdin.close()
    plain.wait()
    print(f"{turn} turns, {len(wrong)} wrong, {loop.counts}")
    return bool(wrong)


def main() -> int:
    """Runs the soak, or one of its children."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--output", type=Path, default=Path("soak.json"))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--share", type=float, default=0.5, help="of one processor, on average"
    )
    parser.add_argument("--child", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    # Shells have what they start in the background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if options.plain:
        run_plain()
        return 0
    if options.child:
        run_child(options.child, options.folder)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return soak(
            options.seconds,
            options.folder or Path(folder),
            options.seed,
            options.output,
            options.share,
        )


if __name__ == "__main__":
    sys.exit(main())
