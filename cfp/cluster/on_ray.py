"""Planning on a Ray cluster: an actor (the runner) plans on the devices of one node."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh

from cfp.context import DetailedSettings, PlannerSettings
from cfp.errors import CfpError
from cfp.plan.plan import Plan
from cfp.profiling.files import cache_dir
from cfp.profiling.record import ProfileRecord
from cfp.profiling.store import ProfileStore, store_path
from cfp.profiling.tasks import is_late

LOCAL = "local"
# Restarts of a runner, which a candidate program may crash. A program that crashed is
# not run again. The number is a guess.
RUNNER_RESTARTS = 20
# Waiting time for a suitable node, which may be about to join.
_NODE_SECONDS = 60.0
_LEAST_CPUS = 2

# Prefixes of variables passed to the runner: they affect compiled programs and times.
_FORWARDED = ("JAX_", "LIBTPU_", "NCCL_", "XLA_")
_LOOK_SECONDS = 1.0

_Result = TypeVar("_Result")


Axes = Sequence[tuple[str, int]]


def gpus_for(
    platform: str | None, axes: Axes | None, nodes: Iterable[Mapping[str, Any]]
) -> int:
    """Number of GPUs that a runner's node must have; 0 to plan on virtual CPU devices.

    Args:
        platform: "cpu" or "cuda"; None for GPUs if the cluster has any.
        axes: names and sizes of the mesh's axes; None for all GPUs of the largest node.
        nodes: result of `ray.nodes()`.
    """
    most = max((int(node["Resources"].get("GPU", 0)) for node in nodes), default=0)
    if platform == "cpu" or (platform is None and not most):
        return 0
    return most if axes is None else prod(size for _, size in axes)


class Runner:
    """Ray actor that owns the devices of one mesh, and plans on them.

    If the runner dies, Ray restarts it, and planning continues from its store of
    profiling records.

    Args:
        planning: names the runner's store; later plannings of this name find it.
    """

    def __init__(self, planning: str) -> None:
        digest = hashlib.sha256(planning.encode()).hexdigest()[:16]
        self._folder = cache_dir() / "ray" / digest

    def plan(
        self, work: Callable[[Path], Any], known: Sequence[ProfileRecord]
    ) -> tuple[Any, list[ProfileRecord]]:
        """Calls `work` with the folder of the runner's store.

        Args:
            known: records of the caller's store, copied into the runner's.

        Returns:
            The result of `work` or its CfpError, and all records of the runner's store.
        """
        with ProfileStore(store_path(self._folder)) as store:
            store.put_all(known)
            ends = threading.Event()
            arguments = (store, ends)
            threading.Thread(target=_end_if_late, args=arguments, daemon=True).start()
            try:
                made = work(self._folder)
            except CfpError as error:
                made = CfpError(str(error))
            ends.set()
            return made, [*store.records()]


def _end_if_late(store: ProfileStore, ends: threading.Event) -> None:
    """Kills this process if recorded work passes its deadline before `ends` is set."""
    while not ends.wait(_LOOK_SECONDS):
        if is_late(store, os.getpid()):
            os.kill(os.getpid(), signal.SIGKILL)


def plan_on_ray(
    work: Callable[[Path], _Result],
    *,
    address: str,
    store: Path,
    needs: tuple[str | None, Axes | None],
) -> _Result:
    """Runs `work` in a runner (an actor) of a Ray cluster, and returns its result.

    Args:
        work: function of the folder of the runner's store; does the planning.
        address: the cluster's address as for `ray.init` ("auto", "host:port"); "local"
            starts a cluster on this machine.
        store: this machine's store; exchanges records with the runner's.
        needs: platform and mesh axes, as in `gpus_for`.

    Raises:
        CfpError: planning failed, or Ray, the cluster or a suitable node is missing.
    """
    with ProfileStore(store) as kept, connected(address) as ray:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        gpus = gpus_for(*needs, ray.nodes())
        here = ray.get_runtime_context().get_node_id()
        # The group keeps a restarted runner on the same node, which has its store.
        bundle = {"CPU": 1.0, **({"GPU": float(gpus)} if gpus else {})}
        group = ray.util.placement_group([bundle], strategy="STRICT_PACK")
        if not ray.wait([group.ready()], timeout=_NODE_SECONDS)[0]:
            ray.util.remove_placement_group(group)
            raise _no_node(gpus, ray.nodes())
        given = {k: v for k, v in os.environ.items() if k.startswith(_FORWARDED)}
        runner = (
            ray.remote(Runner)
            .options(
                num_cpus=1,
                num_gpus=gpus,
                max_restarts=RUNNER_RESTARTS,
                # Retry until all restarts are used.
                max_task_retries=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group),
                runtime_env={"env_vars": given},
            )
            .remote(f"{here} {store.resolve()}")
        )
        try:
            made, found = ray.get(runner.plan.remote(work, [*kept.records()]))
        except ray.exceptions.RayActorError as error:
            raise CfpError(
                f"The runner crashed, after up to {RUNNER_RESTARTS} restarts: {error}. "
                "Check that JAX runs on the devices, then plan again."
            ) from error
        finally:
            ray.kill(runner)
            ray.util.remove_placement_group(group)
        kept.put_all(found)
    if isinstance(made, CfpError):
        raise made
    return made


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """Gives `ray`, as connected before, else connected to `address` until the exit.

    "local" starts a cluster. Raises CfpError if Ray or the cluster is missing.
    """
    if importlib.util.find_spec("ray") is None:
        raise CfpError(
            'Ray is not installed in this Python. Run pip install "cfp[cluster]" '
            "here and on all nodes of the cluster."
        )
    import ray

    if ray.is_initialized():
        yield ray  # Keeps the caller's connection.
        return
    options: dict[str, Any] = {"address": address}
    if address == LOCAL:
        options["num_cpus"] = max(_LEAST_CPUS, os.cpu_count() or 1)
        # Ray lowers workers' priority, which would slow down timed programs.
        options["_system_config"] = {"worker_niceness": 0}
        options["include_dashboard"] = False
    try:
        ray.init(logging_level=logging.WARNING, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise CfpError(
            f"Cannot connect to a Ray cluster, {address}: "
            f"{str(error).strip().partition(chr(10))[0]}. Give a running cluster's "
            "address, and use its versions of Python and Ray; or give --ray local."
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _no_node(gpus: int, nodes: list[dict[str, Any]]) -> CfpError:
    found = [node["Resources"] for node in nodes if node["Alive"]]
    shown = "; ".join(
        f"{one.get('CPU', 0):.0f} CPUs, {one.get('GPU', 0):.0f} GPUs" for one in found
    )
    return CfpError(
        f"No node of the Ray cluster has {gpus} free GPUs and a free CPU: "
        f"nodes have {shown}, maybe partly in use. Plan for fewer devices; for a "
        "mesh of several hosts see docs/launching.md."
    )


def plan_step(
    plan: Callable[..., Plan],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: Mesh | AbstractMesh,
    *,
    cache_dir: str | Path | None,
    settings: PlannerSettings,
    **options: Any,
) -> Plan:
    """Plans a step on the Ray cluster of `settings.ray`.

    Args:
        plan: :func:`cfp.plan`.
        mesh: gives axes and platform; planning uses the runner's first devices.
        options: as for :func:`cfp.plan`.

    Returns:
        The plan, bound to the step; on the mesh, unless it is abstract.
    """
    assert settings.ray is not None, "planning is for a Ray cluster"
    given_args, given_kwargs = jax.tree.map(_shape_of, (args, dict(kwargs)))
    call = partial(plan, fn, *given_args, quiet=True, **options, **given_kwargs)
    axes = tuple(mesh.shape.items())
    detailed = DetailedSettings.of(replace(settings, ray=None, progress=None))
    platform = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else None
    made = plan_on_ray(
        partial(_plan_there, call, axes, detailed),
        address=settings.ray,
        store=store_path(cache_dir),
        needs=(platform, axes),
    )
    made = made.on(mesh) if isinstance(mesh, Mesh) else made
    return made.bind(fn, *args, **kwargs)


def _plan_there(
    call: Callable[..., Plan],
    axes: tuple[tuple[str, int], ...],
    settings: DetailedSettings,
    folder: Path,
) -> Plan:
    names = tuple(name for name, _ in axes)
    sizes = tuple(size for _, size in axes)
    devices = jax.devices()
    count = AbstractMesh(sizes, names).size
    if len(devices) < count:
        raise CfpError(
            f"Ray's runner has too few devices: the mesh needs {count}, and there are "
            f"{len(devices)} of platform {devices[0].platform}. Give a smaller mesh, "
            f"or XLA_FLAGS=--xla_force_host_platform_device_count={count} on CPUs."
        )
    made = call(
        mesh=jax.make_mesh(sizes, names, devices=devices[:count]),
        cache_dir=folder,
        settings=settings,
    )
    return made.as_in_file()


def _shape_of(value: Any) -> Any:
    if isinstance(value, jax.Array):
        return jax.ShapeDtypeStruct(value.shape, value.dtype)
    return value
