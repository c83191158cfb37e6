"""The processes of a planning on Ray: builders, the runner and the keeper of records.

Importing this imports Ray.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import ray
from ray.exceptions import RayError, WorkerCrashedError

from cfp.errors import CfpError
from cfp.platform import flags_for_devices
from cfp.profiling.builder import is_out_of_memory
from cfp.profiling.in_flight import is_late
from cfp.profiling.record import ProfileRecord, Status
from cfp.profiling.remote import Executable, RefusedElsewhere, compile_parcel
from cfp.profiling.store import ProfileStore, default_cache_dir, store_path
from cfp.program.signature import Parcel, WrongPlace

# A builder that dies may have been ended with its node. What ends four in a row does
# so by itself. Guess.
BUILD_RETRIES = 3
# So that a node that joins has work at once.
_WAITING_BESIDE_CPUS = 4
_MOST_AT_ONCE = 256
# Variables of these names decide what compilers make, and what programs cost.
_FORWARDED = ("JAX_", "LIBTPU_", "NCCL_", "XLA_")


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a builder could not compile something; errors may not travel."""

    kind: str
    message: str
    status: Status


def compile_there(parcel: Parcel, options: Mapping[str, str]) -> Executable | Refusal:
    """The task of a builder."""
    try:
        return compile_parcel(parcel, options)
    except (AssertionError, WrongPlace):
        raise  # Neither says anything about the program.
    except Exception as error:  # The compiler's errors have no type in common.
        status = "out_of_memory" if is_out_of_memory(error) else "compile_error"
        return Refusal(type(error).__name__, str(error), status)


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that another process of this planning needs, too."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_FORWARDED)
    }


class RayPlace:
    """Compiles in tasks of Ray, and hands records to the keeper.

    To be made in a process that is connected to Ray, whose devices the programs are
    for. A task whose worker or node is lost is started again by Ray, elsewhere.
    """

    def __init__(self, keeper: Any) -> None:
        self._keeper = keeper

    @property
    def at_once(self) -> int:
        """As many as there are CPUs just now, and a few more."""
        cpus = int(ray.cluster_resources().get("CPU", 0))
        return min(_MOST_AT_ONCE, cpus + _WAITING_BESIDE_CPUS)

    def compiles_for(self, platform: str) -> bool:
        """On CPUs alone: kernels for GPUs are chosen by timing them on one."""
        return platform == "cpu"

    def compile(self, parcel: Parcel, options: Mapping[str, str]) -> Executable:
        """Compiles a program on some node of the cluster.

        Raises:
            RefusedElsewhere: it cannot be compiled, or ends builders.
            WrongPlace: the cluster cannot do it.
        """
        try:
            made: Any = ray.get(self._task.remote(parcel, dict(options)))
        except WorkerCrashedError as error:
            tries = BUILD_RETRIES + 1
            reason = f"the process that compiled it died {tries} times"
            raise RefusedElsewhere("WorkerCrashedError", reason, "crashed") from error
        except RayError as error:
            if isinstance(error, AssertionError):
                raise
            raise WrongPlace(str(error).strip().splitlines()[-1]) from error
        if isinstance(made, Refusal):
            raise RefusedElsewhere(made.kind, made.message, made.status)
        return made

    def keep(self, records: Sequence[ProfileRecord], replace: bool) -> None:
        """Waits until the keeper has records, too."""
        lines = [record.to_json() for record in records]
        ray.get(self._keeper.put_all.remote(lines, replace))

    @cached_property
    def _task(self) -> Any:
        # Workers with other variables are other processes: JAX reads them once.
        variables = {
            **forwarded(os.environ),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags_for_devices(len(jax.devices())),
        }
        return ray.remote(compile_there).options(
            num_cpus=1,
            max_retries=BUILD_RETRIES,
            runtime_env={"env_vars": variables},
            name="cfp build",
        )


_LOOK_SECONDS = 1.0

# Gets the place to compile in, and the folder of the runner's store.
Work = Callable[[RayPlace, Path], Any]


class Keeper:
    """Has the one store that all records of a planning go to.

    Lives on the node of the driver, and is started again there if it dies.
    """

    def __init__(self, path: Path) -> None:
        self._store = ProfileStore(path)

    def lines(self) -> list[str]:
        """All records, as JSON."""
        return [record.to_json() for record in self._store.records()]

    def put_all(self, lines: Sequence[str], replace: bool) -> int:
        """Keeps records, as a store does; to do it twice changes nothing."""
        records = [ProfileRecord.from_json(line.encode()) for line in lines]
        return self._store.put_all(records, replace=replace)


class Runner:
    """Has the devices of one mesh, and plans on them.

    If it dies, Ray starts it again, and the planning with it, which finds what was
    measured in the store.

    Args:
        planning: what is planned, in a word that no other planning has: the runner's
            own store, on its host, is named by it.
    """

    def __init__(self, planning: str) -> None:
        digest = hashlib.sha256(planning.encode()).hexdigest()[:16]
        self._folder = default_cache_dir() / "ray" / digest

    def plan(self, keeper: Any, work: Work) -> tuple[Any, str | None]:
        """Does the work.

        Returns:
            What came of it, or what is wrong.
        """
        path = store_path(self._folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        with ProfileStore(path) as store:
            lines = ray.get(keeper.lines.remote())
            store.put_all([ProfileRecord.from_json(line.encode()) for line in lines])
        ends = threading.Event()
        watch = threading.Thread(target=_end_if_late, args=(path, ends), daemon=True)
        watch.start()
        try:
            return work(RayPlace(keeper), self._folder), None
        except CfpError as error:
            return None, str(error)
        finally:
            ends.set()


def _end_if_late(path: Path, ends: threading.Event) -> None:
    """Ends this process if something hangs: then it is known what, and what is next."""
    with ProfileStore(path) as store:
        while not ends.wait(_LOOK_SECONDS):
            if is_late(store, os.getpid()):
                os.kill(os.getpid(), signal.SIGKILL)
