"""Kills processes of a Ray cluster while it plans, and sees what comes of it.

    python -m cfp_test.scripts.ray_kills --output kills.json --times 20

Three nodes on this machine: the driver's, and two of which one has the runner. In each
trial a planning is begun with an empty store, and at a random moment of it something is
ended by SIGKILL: a builder, the runner, one of the two nodes, or the driver. A node
that was ended is replaced by a fresh one, a driver by one that is given the same
command. The plan, and the keys in the store, must be those of the undisturbed planning,
and what had been stored must not be run again. Everything runs; times follow from the
compiled program (`cfp_test.support.injected`), so that plans can be compared.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from cfp_test.scripts.rows import commit
from cfp_test.support.quick_flags import QUICK_FLAGS

KINDS = ("builder", "runner", "node", "driver")
DEVICES = 2
CPUS_OF_A_NODE = 2
_LOOK_SECONDS = 0.02
# Builds may be over before they are seen; then there is another trial.
_SEEK_SECONDS = 10.0
_STARTS = 5
_GUARD_SECONDS = 600.0
# How long after that something dies; and where nothing has happened yet.
_LATEST_SECONDS = 0.2
_STARTING_SECONDS = 5.0
# How many things of the undisturbed planning must be left to do when something dies.
_LEFT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One disturbed planning.

    Attributes:
        kind: what was ended; "" for none.
        after: how many builds, runs and puts had begun or ended by then.
        of: how many the planning without disturbance has.
        pid: of the process, or of the node's raylet.
        seconds: of the whole planning.
        same_plan: whether the plan is the undisturbed one.
        same_keys: whether the store has the same keys.
        runs, builds: how many there were.
        again: keys that were run although they were stored.
        records: how many are in the store.
        stored_before: how many were when it died.
    """

    kind: str
    after: int
    of: int
    pid: int
    seconds: float
    same_plan: bool
    same_keys: bool
    runs: int
    builds: int
    again: tuple[str, ...]
    records: int
    stored_before: int


# -------------------------------------------------------------------- in the runner


def step_and_arguments() -> tuple[Any, tuple[Any, ...]]:
    """Two layers of the same kind and one of another, trained by gradient descent."""
    import jax
    import jax.numpy as jnp

    def train_step(weights: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss_fn(weights: Any) -> jax.Array:
            for layer in weights["layers"]:
                x_in = jnp.tanh(loss_fn.x @ layer["up"]) @ layer["down"]
                loss_fn.x = loss_fn.x + x_in
            return ((loss_fn.x @ weights["head"] - y) ** 2).mean()

        loss_fn.x = x
        loss, grads = jax.value_and_grad(loss_fn)(weights)
        new = jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)
        return new, {"loss": loss}

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    layers = [{"up": shape(32, 64), "down": shape(64, 32)} for _ in range(2)]
    weights = {"layers": layers, "head": shape(32, 48)}
    return train_step, (weights, shape(16, 32), shape(16, 48))


class Noted:
    """A place that notes what happens there.

    Args:
        place: the place.
        log: the file with the notes.
    """

    def __init__(self, place: Any, log: Path) -> None:
        self._place, self._log = place, log

    @property
    def at_once(self) -> int:
        return self._place.at_once

    def compiles_for(self, platform: str) -> bool:
        return self._place.compiles_for(platform)

    def compile(self, parcel: Any, options: Any) -> Any:
        note(self._log, "build", "-")
        return self._place.compile(parcel, options)

    def keep(self, records: Any, replace: bool) -> None:
        self._place.keep(records, replace)
        for record in records:
            note(self._log, "stored" if record.ok else "failed", record.key)


def note(log: Path, what: str, key: str) -> None:
    """Appends a line, whole or not at all."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, f"{what} {key}\n".encode())
    finally:
        os.close(file)


def planning(log: Path, place: Any, folder: Path) -> str:
    """Acts as the runner; returns the plan as JSON."""
    import pytest

    import cfp
    from cfp import platform
    from cfp.planner_settings import DetailedSettings
    from cfp.profiling import collectives, runner
    from cfp_test.support.injected import hold_times

    platform.select("cpu", (("x", DEVICES),))
    with pytest.MonkeyPatch.context() as patch:
        hold_times(patch)
        for module in (collectives, runner):
            patch.setattr(module, "execute", _noting(module.execute, log))
        step, args = step_and_arguments()
        made = cfp.plan(
            step,
            *args,
            mesh=platform.make_mesh((("x", DEVICES),)),
            cache_dir=folder,
            settings=DetailedSettings(
                measure=True, per_kind=2, in_context=False, remote=Noted(place, log)
            ),
        )
    return made.to_json()


def _noting(execute: Any, log: Path) -> Any:
    def noted(built: Any, *args: Any, **options: Any) -> Any:
        note(log, "run", built.key.digest)
        return execute(built, *args, **options)

    return noted


# ------------------------------------------------------------------------ the driver


def drive(address: str, pipe: Connection) -> None:
    """A driver: plans what comes through the pipe, until it is closed."""
    from cfp.cluster.on_ray import connected, plan_on_ray

    with connected(address):
        while True:
            try:
                folder = pipe.recv()
            except EOFError:
                return
            found = plan_on_ray(
                partial(planning, folder / "log"),
                address=address,
                store=folder / "profiles.sqlite",
                planning=str(folder),
            )
            pipe.send(found)


class Driver:
    """A driver in a process of its own."""

    def __init__(self, address: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "cfp.api"])
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=drive, args=(address, theirs), daemon=True
        )
        self.process.start()
        theirs.close()

    def end(self) -> None:
        """Closes the pipe, and waits."""
        self.pipe.close()
        self.process.join()


# ------------------------------------------------------------------------- the trials


class Trials:
    """A cluster, and plannings on it.

    Args:
        folder: of everything; on one file system.
        seed: of the moments.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        from ray.cluster_utils import Cluster

        self._folder = folder
        self._random = random.Random(seed)
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "object_store_memory": 100 * 2**20,
                # A node counts as lost when it has not answered for so long.
                "_system_config": {
                    "health_check_period_ms": 1000,
                    "health_check_failure_threshold": 10,
                },
            },
        )
        self._nodes = [self._add_node() for _ in range(2)]
        self._driver = Driver(self._cluster.address)
        self._count = 0
        self._reference: tuple[Any, frozenset[str]] | None = None
        self._things = self._builds = 0

    def close(self) -> None:
        """Ends everything."""
        self._driver.end()
        self._cluster.shutdown()

    def _add_node(self) -> Any:
        for left in reversed(range(_STARTS)):
            try:
                return self._cluster.add_node(
                    num_cpus=CPUS_OF_A_NODE, object_store_memory=100 * 2**20
                )
            except Exception as error:  # Ray's has no type of its own.
                # A busy machine may take longer than the 30 s that Ray waits for.
                if not left or "timed out during startup" not in str(error):
                    raise
        raise AssertionError("the last start returns or raises")

    def run(self, kind: str) -> Trial:
        """One planning, disturbed or not."""
        folder = self._folder / f"{self._count}"
        self._count += 1
        folder.mkdir()
        log = folder / "log"
        log.touch()
        # A builder is at work only after something was given to it.
        counted = "build " if kind == "builder" else ""
        most = self._builds + 1 if kind == "builder" else self._things - _LEFT
        after = self._random.randrange(1 if counted else 0, most) if kind else 0
        latest = _LATEST_SECONDS if after else _STARTING_SECONDS
        late = 0.0 if counted else self._random.uniform(0.0, latest)
        started = time.monotonic()
        self._driver.pipe.send(folder)
        pid = before = 0
        if kind:
            self._wait_for(log, counted, after)
            time.sleep(late)
            pid = self._kill(kind)
            lines = log.read_text().splitlines()
            after, before = len(lines), sum(one.startswith("stored") for one in lines)
            if kind == "driver":
                self._driver.process.join()
                self._driver = Driver(self._cluster.address)
                self._driver.pipe.send(folder)
            if kind == "node":
                self._nodes.append(self._add_node())
        if not self._driver.pipe.poll(_GUARD_SECONDS):
            raise TimeoutError(f"{kind}: no plan after {_GUARD_SECONDS:.0f} s")
        plan = comparable(self._driver.pipe.recv())
        seconds = time.monotonic() - started
        keys = keys_of(folder / "profiles.sqlite")
        if self._reference is None:
            self._reference = (plan, keys)
        lines = log.read_text().splitlines()
        if not kind:
            self._things = len(lines)
            self._builds = sum(one.startswith("build ") for one in lines)
        trial = Trial(
            kind=kind,
            after=after,
            of=self._things,
            pid=pid,
            seconds=round(seconds, 2),
            same_plan=plan == self._reference[0],
            same_keys=keys == self._reference[1],
            runs=sum(one.startswith("run ") for one in lines),
            builds=sum(one.startswith("build ") for one in lines),
            again=run_again(lines),
            records=len(keys),
            stored_before=before,
        )
        if trial.same_plan and trial.same_keys and not trial.again:
            shutil.rmtree(folder)
        return trial

    def _wait_for(self, log: Path, start: str, count: int) -> None:
        while sum(o.startswith(start) for o in log.read_text().splitlines()) < count:
            if self._driver.pipe.poll(_LOOK_SECONDS):
                return

    def _kill(self, kind: str) -> int:
        if kind == "driver":
            pid = self._driver.process.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            return pid
        if kind == "node":
            node = self._nodes.pop(self._random.randrange(len(self._nodes)))
            [raylet] = node.all_processes["raylet"]
            pid = raylet.process.pid
            # A machine that is lost takes all with it.
            for each in (pid, *children_of(pid)):
                os.kill(each, signal.SIGKILL)
            self._cluster.remove_node(node, allow_graceful=False)
            return pid
        title = {"builder": b"ray::cfp build", "runner": b"ray::Runner"}[kind]
        end = time.monotonic() + _SEEK_SECONDS
        while not self._driver.pipe.poll() and time.monotonic() < end:
            raylets = [
                info.process.pid
                for node in self._nodes
                for info in node.all_processes["raylet"]
            ]
            workers = [pid for one in raylets for pid in children_of(one)]
            found = [pid for pid in workers if command_of(pid).startswith(title)]
            if found:
                pid = self._random.choice(found)
                os.kill(pid, signal.SIGKILL)
                return pid
            time.sleep(_LOOK_SECONDS)
        return 0


def comparable(text: str) -> Any:
    """A plan without what no two plannings share: how long they took."""
    data = json.loads(text)
    del data["search"]
    return data


def keys_of(path: Path) -> frozenset[str]:
    """The keys in a store."""
    from cfp.profiling.store import ProfileStore

    with ProfileStore(path) as store:
        return frozenset(record.key for record in store.records())


def run_again(lines: list[str]) -> tuple[str, ...]:
    """Keys that were run after a good record of them was stored."""
    stored: set[str] = set()
    again = []
    for line in lines:
        what, key = line.split()
        if what == "stored":
            stored.add(key)
        elif what == "run" and key in stored:
            again.append(key)
    return tuple(again)


def children_of(parent: int) -> list[int]:
    """Ids of the processes that one has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # It has ended meanwhile.
        if int(status.rpartition(")")[2].split()[1]) == parent:
            found.append(int(folder.name))
    return found


def command_of(pid: int) -> bytes:
    """A process's title; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    root = str(Path(__file__).parent.parent.parent)
    os.environ |= {
        "PYTHONPATH": root,
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Workers do not stand back for others: no nodes are lost for being slow.
        "RAY_worker_niceness": "0",
        "XLA_FLAGS": QUICK_FLAGS,
    }
    import ray

    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    os.environ["CFP_CACHE_DIR"] = str(folder / "cache")
    trials = Trials(folder, given.seed)
    found: list[Trial] = []
    document = {
        "what": "planning on a Ray cluster, with kills",
        "commit": commit(),
        "ray": ray.__version__,
        "seed": given.seed,
        "nodes": 3,
        "trials": found,
    }
    try:
        todo = ["", "", *list(given.kinds) * given.times]
        while todo:
            trial = trials.run(todo[0])
            print(f"{len(found)} {trial}", flush=True)
            if trial.kind and not trial.pid:
                continue  # It was over before anything could be ended.
            found.append(trial)
            del todo[0]
            text = json.dumps({**document, "trials": [asdict(one) for one in found]})
            given.output.write_text(text + "\n")
    finally:
        trials.close()
    good = [t.same_plan and t.same_keys and not t.again for t in found]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    # What travels to other processes is found there by the module's own name.
    from cfp_test.scripts import ray_kills

    ray_kills.main()
