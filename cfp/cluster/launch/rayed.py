"""Several processes on the nodes of a Ray cluster: Ray places them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from cfp.cluster.launch.local import free_port, in_shell
from cfp.cluster.launch.processes import Ended, end, shell_code, start
from cfp.cluster.launch.request import LOCAL_DEVICES, Launch
from cfp.cluster.ray.planning import connected
from cfp.errors import DeviceError, compose

_NODE_SECONDS = 60.0


def bundles(launch: Launch) -> list[dict[str, float]]:
    """What each process's host must have, as Ray's placement groups say it."""
    cpus = float(launch.cpus_per_process or 1) * launch.processes_per_node
    gpus = {"GPU": float(launch.gpus_per_node)} if launch.gpus_per_node else {}
    return [{"CPU": cpus, **gpus} for _ in range(launch.nodes)]


def strategy(launch: Launch) -> str:
    """How they are placed: each bundle on a node of its own."""
    return "STRICT_SPREAD" if launch.nodes > 1 else "STRICT_PACK"


class Process:
    """One process, on the node where this actor is."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def address(self, port: int | None) -> str:
        """HOST:PORT that other nodes reach."""
        import ray

        host = ray.util.get_node_ip_address()
        return f"{host}:{port or free_port()}"

    def run(
        self, command: Sequence[str], variables: Mapping[str, str], folder: str
    ) -> int:
        """Runs the process; its exit code. Its output is what Ray shows of an actor."""
        if os.path.isdir(folder):
            os.chdir(folder)
        self._process = start(command, variables)
        try:
            return shell_code(self._process.wait())
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends the process, while `run` waits for it."""
        if self._process is not None:
            end([self._process])


def launch_on_ray(launch: Launch, address: str) -> Ended:
    """Runs all processes on a cluster, and ends all if one fails.

    Raises:
        CfpError: there is no Ray, no cluster, or no room.
    """
    with connected(address) as ray:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = ray.util.placement_group(bundles(launch), strategy=strategy(launch))
        try:
            ready, _ = ray.wait([group.ready()], timeout=_NODE_SECONDS)
            if not ready:
                raise DeviceError(
                    compose(
                        "The Ray cluster has no room for these processes.",
                        expected=f"{launch.nodes} nodes with {bundles(launch)[0]} free",
                        got=str(ray.available_resources()),
                        attempt="fewer nodes, or wait until others have ended",
                    )
                )
            actors = [
                ray.remote(Process)
                .options(
                    num_cpus=launch.cpus_per_process or 1,
                    num_gpus=launch.gpus_per_process,
                    max_concurrency=2,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        group, number // launch.processes_per_node
                    ),
                )
                .remote()
                for number in range(launch.processes)
            ]
            return _run(ray, launch, actors)
        finally:
            ray.util.remove_placement_group(group)


def _run(ray: Any, launch: Launch, actors: Sequence[Any]) -> Ended:
    coordinator = ray.get(actors[0].address.remote(launch.port))
    running: dict[Any, int] = {}
    for number, actor in enumerate(actors):
        variables = launch.variables(number, coordinator)
        # Ray shows each actor its own GPUs alone.
        variables.pop(LOCAL_DEVICES, None)
        task = actor.run.remote(in_shell(launch), variables, os.getcwd())
        running[task] = number
    try:
        while running:
            [done], _ = ray.wait(list(running))
            number = running.pop(done)
            try:
                code = ray.get(done)
            except ray.exceptions.RayError:
                return Ended(code=1, first=number)  # Its node, or its worker, is lost.
            if code:
                return Ended(code=code, first=number)
        return Ended(code=0)
    finally:
        stops = [actors[number].stop.remote() for number in running.values()]
        ray.wait(stops, num_returns=len(stops)) if stops else None
