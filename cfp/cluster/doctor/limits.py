"""Checks of what the system, a container or a scheduler allows."""

from __future__ import annotations

import os
from pathlib import Path

from cfp.cluster.doctor.machine import UNLIMITED, Machine
from cfp.cluster.doctor.nvidia import gpus
from cfp.cluster.doctor.result import Result, absent, failed, passed
from cfp.cluster.doctor.versions import installed

_SHM_BYTES = 512 << 20
_OPEN_FILES = 1024
_PROCESSES = 512
_MEMORY_BYTES = 3 << 30
_ADDRESS_BYTES = 64 << 30
# A limit of this size is how version 1 of control groups writes "none".
_NO_LIMIT = 1 << 60

# Scheduler -> (variable with the job's number, variable with its GPUs on this node).
SCHEDULERS = {
    "Slurm": ("SLURM_JOB_ID", "SLURM_GPUS_ON_NODE"),
    "LSF": ("LSB_JOBID", "JSM_GPU_COUNT"),
    "PBS": ("PBS_JOBID", "PBS_NGPUS"),
}


def shm(machine: Machine) -> Result:
    """There is shared memory where NCCL, with several GPUs, or Ray needs it."""
    if not machine.shm.is_dir():
        free = 0
    else:
        free = machine.free_bytes(machine.shm)
    users = []
    if installed(machine, "ray") is not None:
        users.append("Ray")
    if machine.shows_nvidia and len(gpus(machine, "index").rows) > 1:
        users.append("NCCL")
    if free < _SHM_BYTES and users:
        return failed(
            "shm",
            f"{machine.shm} has {free >> 20} MiB; {' and '.join(users)} want "
            f"{_SHM_BYTES >> 20} or more",
            "start the container with --shm-size=8g or --ipc=host; elsewhere: mount -o "
            "remount,size=8G /dev/shm, as root",
            free_bytes=free,
        )
    needed = "" if users else "; neither Ray nor several GPUs need it here"
    return passed(
        "shm", f"{machine.shm} has {free / 2**30:.1f} GiB{needed}", free_bytes=free
    )


def ulimit(machine: Machine) -> Result:
    """Limits on files, processes and address space are no obstacle."""
    found = {
        "open files": (machine.soft_limit("RLIMIT_NOFILE"), _OPEN_FILES, "-n 65536"),
        "processes": (machine.soft_limit("RLIMIT_NPROC"), _PROCESSES, "-u unlimited"),
        "bytes of address space": (
            machine.soft_limit("RLIMIT_AS"),
            # CUDA reserves addresses for the memory of all devices.
            _ADDRESS_BYTES,
            "-v unlimited",
        ),
    }
    for what, (limit, least, option) in found.items():
        if limit != UNLIMITED and limit < least:
            return failed(
                "ulimit",
                f"{limit} {what} allowed; {least} or more are wanted",
                f"ulimit {option} before the program (in a container: --ulimit; "
                "for good: /etc/security/limits.conf)",
            )
    files = found["open files"][0]
    locked = machine.soft_limit("RLIMIT_MEMLOCK")
    pinned = "" if locked == UNLIMITED else f"; {locked >> 10} KiB of locked memory"
    return passed(
        "ulimit",
        f"{'any number of' if files == UNLIMITED else files} open files{pinned}"
        + ("" if not pinned else " (InfiniBand wants ulimit -l unlimited)"),
    )


def memory(machine: Machine) -> Result:
    """The container or job leaves enough memory to compile in."""
    total = _memory_total(machine)
    limit, said_by = cgroup_limit(machine)
    if limit is None or limit > total:
        limit, said_by = total, "the machine"
    if 0 < limit < _MEMORY_BYTES:
        return failed(
            "memory",
            f"{limit / 2**30:.1f} GiB, a limit of {said_by}; compiling wants "
            f"{_MEMORY_BYTES >> 30} or more, and ends the process where it gets less",
            "ask for more: --memory=16g (Docker), --mem=16G (Slurm), -M (LSF), "
            "-l mem=16gb (PBS)",
            limit_bytes=limit,
        )
    cores = len(os.sched_getaffinity(0))
    return passed(
        "memory",
        f"{limit / 2**30:.0f} GiB allowed by {said_by}; {cores} cores",
        limit_bytes=limit,
        cores=cores,
    )


def scheduler(machine: Machine) -> Result:
    """The devices that are shown are those that the scheduler gave."""
    for name, (job, count) in SCHEDULERS.items():
        if job not in machine.environ:
            continue
        said = f"{name} job {machine.environ[job]}"
        given = machine.environ.get(count, "")
        shown = len(gpus(machine, "index").rows) if machine.shows_nvidia else 0
        if given.isdigit() and int(given) > shown:
            return failed(
                "scheduler",
                f"{said} was given {given} GPUs on this node; {shown} are shown",
                "start the program in the job's own step: srun --gpus-per-node, "
                "jsrun -g; do not set CUDA_VISIBLE_DEVICES in start-up files",
            )
        return passed("scheduler", f"{said}, {given or 'no'} GPUs on this node")
    return absent("scheduler", "in no job of Slurm, LSF or PBS")


def _memory_total(machine: Machine) -> int:
    for line in (machine.proc / "meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) << 10
    return 0


def cgroup_limit(machine: Machine) -> tuple[int | None, str]:
    """The least memory limit of the control groups of this process, and its file."""
    root = machine.sys / "fs" / "cgroup"
    files: list[Path] = []
    try:
        groups = (machine.proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        groups = []
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if controllers == "":
            base, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        # A limit of a group holds for those inside of it. In a container the path may
        # be that of the host, and its own group the root.
        inner = base / path.lstrip("/")
        files += [f / name for f in (inner, *inner.parents) if f.is_relative_to(base)]
    found = []
    for file in files:
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _NO_LIMIT:
            found.append((int(text), f"the control group ({file.name})"))
    return min(found, default=(None, ""))
