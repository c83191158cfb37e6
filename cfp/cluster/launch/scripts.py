"""What schedulers read: job scripts, a command line, and a manifest.

Under Slurm and Open MPI JAX finds out by itself which process it is in
(``jax.distributed.initialize()``, and ``cfp.join()``). It does not under jsrun, nor
with releases of Open MPI that have no ``orte``: there, as in Kubernetes, where JAX asks
the cluster's server for what a manifest can say, variables say it.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from cfp.cluster.launch.request import (
    COORDINATOR,
    LOCAL_DEVICES,
    PROCESS_ID,
    PROCESSES,
    Launch,
)

# Ports above those that systems give to clients, of which a job has one by its number.
_FIRST_PORT, _PORTS = 61440, 4096
_KUBERNETES_PORT = 55527
_FILES = 'ulimit -n "$(ulimit -Hn)"  # Compilers keep many files open.'


def slurm_script(launch: Launch) -> str:
    """A script for sbatch."""
    gpus, cpus = launch.gpus_per_node, launch.cpus_per_process
    directives = [
        f"--job-name={launch.name}",
        f"--nodes={launch.nodes}",
        f"--ntasks-per-node={launch.processes_per_node}",
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        *([f"--cpus-per-task={cpus}"] if cpus else []),
        f"--time={launch.minutes}",
        "--output=%x-%j.log",
        *launch.options,
    ]
    step = [
        "srun",
        f"--ntasks={launch.processes}",
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        # srun does not take it over from the job.
        *([f"--cpus-per-task={cpus}"] if cpus else []),
        "--cpu-bind=none",
        "--kill-on-bad-exit=1",
    ]
    command = _shell(launch.command, _own_devices(launch, "SLURM_LOCALID"))
    return _script(
        [f"#SBATCH {text}" for text in directives],
        launch,
        [f"exec {shlex.join(step)} {shlex.join(command)}"],
    )


def lsf_script(launch: Launch) -> str:
    """A script for bsub, which starts processes with jsrun.

    A resource set is one process with its GPUs.
    """
    hours, minutes = divmod(launch.minutes, 60)
    cpus = launch.cpus_per_process
    directives = [
        f"-J {launch.name}",
        f"-nnodes {launch.nodes}",
        f"-W {hours}:{minutes:02d}",
        f"-o {launch.name}-%J.log",
        *launch.options,
    ]
    step = [
        "jsrun",
        f"--nrs={launch.processes}",
        f"--rs_per_host={launch.processes_per_node}",
        "--tasks_per_rs=1",
        f"--gpu_per_rs={launch.gpus_per_process}",
        f"--cpu_per_rs={cpus or 'ALL_CPUS'}",
        "--bind=none",
        "--smpiargs=-disable_gpu_hooks",
    ]
    if launch.processes_per_node > 1 and not cpus:
        # All of a host's, in one set, leave none for the next.
        step.remove("--cpu_per_rs=ALL_CPUS")
    port = launch.port or f"$(({_FIRST_PORT} + LSB_JOBID % {_PORTS}))"
    body = [
        "# Process 0 is on the first host that jsrun uses, which is not the one that",
        "# this script runs on.",
        "first=$(jsrun --nrs=1 --tasks_per_rs=1 --cpu_per_rs=1 hostname)",
        f'export {COORDINATOR}="$first:{port}"',
        f"export {PROCESSES}={launch.processes}",
        f"exec {shlex.join(step)} {shlex.join(_numbered(launch.command))}",
    ]
    return _script([f"#BSUB {text}" for text in directives], launch, body)


def mpi_command(launch: Launch, coordinator: str) -> tuple[str, ...]:
    """A command line of Open MPI's mpirun.

    Args:
        launch: what is to be started.
        coordinator: HOST:PORT, where process 0 will be.
    """
    each = launch.processes_per_node
    hosts = ",".join(f"{host}:{each}" for host in launch.hosts)
    command = [
        "mpirun",
        "-np",
        str(launch.processes),
        *(["--host", hosts] if hosts else []),
        "--map-by",
        f"ppr:{each}:node",
        "--bind-to",
        "none",
        "-x",
        f"{COORDINATOR}={coordinator}",
        "-x",
        f"{PROCESSES}={launch.processes}",
        *launch.options,
    ]
    devices = _own_devices(launch, "OMPI_COMM_WORLD_LOCAL_RANK")
    return (*command, *_numbered(launch.command, (*devices, *launch.setup)))


def jobset(launch: Launch) -> dict[str, Any]:
    """A JobSet of Kubernetes: a pod for each process."""
    coordinator = (
        f"{launch.name}-worker-0-0.{launch.name}:{launch.port or _KUBERNETES_PORT}"
    )
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    limits: dict[str, Any] = {}
    if launch.gpus_per_process:
        limits["nvidia.com/gpu"] = launch.gpus_per_process
    if launch.cpus_per_process:
        limits["cpu"] = launch.cpus_per_process
    container: dict[str, Any] = {
        "name": "process",
        "image": launch.image,
        "command": list(_shell(launch.command, launch.setup)),
        "env": [
            {"name": COORDINATOR, "value": coordinator},
            {"name": PROCESSES, "value": str(launch.processes)},
            {"name": PROCESS_ID, "valueFrom": {"fieldRef": {"fieldPath": index}}},
        ],
        "ports": [{"containerPort": launch.port or _KUBERNETES_PORT}],
        "resources": {"limits": limits},
        # NCCL's processes share memory; a container has 64 MiB of it otherwise.
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    pod = {
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }
    job = {
        "parallelism": launch.processes,
        "completions": launch.processes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "activeDeadlineSeconds": 60 * launch.minutes,
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": launch.name},
        "spec": {
            # Names of pods, before they are ready: process 0 waits for the others.
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            # One process that fails ends all.
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [
                {"name": "worker", "replicas": 1, "template": {"spec": job}}
            ],
        },
    }


def jobset_manifest(launch: Launch) -> str:
    """The JobSet as text: JSON, which is YAML, too."""
    return json.dumps(jobset(launch), indent=2) + "\n"


def _script(directives: list[str], launch: Launch, body: list[str]) -> str:
    head = ["#!/bin/bash", *directives, "set -euo pipefail", _FILES]
    return "\n".join([*head, *launch.setup, *body]) + "\n"


def _own_devices(launch: Launch, rank: str) -> tuple[str, ...]:
    """A line of shell that says which GPUs of its host a process has.

    JAX takes one for each process where a scheduler says nothing else.

    Args:
        launch: what is to be started.
        rank: the variable with a process's number on its host.
    """
    share = launch.gpus_per_process
    if not share:
        return ()
    if launch.processes_per_node == 1:
        found = ",".join(map(str, range(share)))
    elif share == 1:
        found = f"${rank}"
    else:
        found = f"$(seq -s, $(({rank} * {share})) $(({rank} * {share} + {share} - 1)))"
    return (f"export {LOCAL_DEVICES}={found}",)


def _numbered(command: tuple[str, ...], setup: tuple[str, ...] = ()) -> tuple[str, ...]:
    """A command that knows its number, as Open MPI and jsrun say it."""
    return _shell(command, (f"export {PROCESS_ID}=$OMPI_COMM_WORLD_RANK", *setup))


def _shell(command: tuple[str, ...], setup: tuple[str, ...]) -> tuple[str, ...]:
    if not setup:
        return command
    return ("sh", "-c", "; ".join([*setup, 'exec "$@"']), "sh", *command)
