"""What launchers write, held to each scheduler's own grammar; and what runs here."""

import json
import os
import re
import shlex
import subprocess
import sys

import jsonschema
import pytest

from cfp.cluster.launch import scripts
from cfp.cluster.launch.local import dry_lines, launch_locally
from cfp.cluster.launch.rayed import bundles, strategy
from cfp.cluster.launch.request import Launch
from cfp.errors import CfpError
from cfp_test.cluster.jobset_schema import JOBSET

PROGRAM = ("python", "train.py", "--text", "a 'b' $HOME")
# The options that are written, as the manuals of sbatch, srun, bsub and jsrun say.
SBATCH = {
    "--job-name": r"\S+",
    "--nodes": r"\d+(-\d+)?",
    "--ntasks-per-node": r"\d+",
    "--gpus-per-node": r"([a-z]\w*:)?\d+",
    "--cpus-per-task": r"\d+",
    "--time": r"\d+",
    "--output": r"\S+",
    "--account": r"\S+",
}
SRUN = {
    "--ntasks": r"\d+",
    "--gpus-per-node": r"([a-z]\w*:)?\d+",
    "--cpus-per-task": r"\d+",
    "--cpu-bind": r"none",
    "--kill-on-bad-exit": r"[01]",
}
BSUB = {
    "-J": r"\S+",
    "-nnodes": r"\d+",
    "-W": r"\d+:[0-5]\d",
    "-o": r"\S+",
    "-P": r"\S+",
}
JSRUN = {
    "--nrs": r"\d+",
    "--rs_per_host": r"\d+",
    "--tasks_per_rs": r"\d+",
    "--gpu_per_rs": r"\d+",
    "--cpu_per_rs": r"\d+|ALL_CPUS",
    "--bind": r"none|rs|packed:\d+",
    "--smpiargs": r"\S+",
}


def check(words, grammar):
    """Takes a launcher's own options off a command line; the rest."""
    found = {}
    words = list(words)
    while words and words[0].startswith("-"):
        name, _, value = words.pop(0).partition("=")
        assert re.fullmatch(grammar[name], value), (name, value)
        found[name] = value
    return found, words


def run_as_script(text, folder, fakes, **variables):
    """Runs a job script whose launcher is a recorded command that runs the rest."""
    for name, body in fakes.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return subprocess.run(
        ["bash", "-s"],
        input=text,
        text=True,
        capture_output=True,
        cwd=folder,
        env={"PATH": f"{folder}:/usr/bin:/bin", **variables},
        check=False,
    )


# Runs what comes after the launcher's own options, once, as the process with a rank.
LAST = 'while [[ ${1:-} == -* ]]; do shift; done; exec "$@"'
SHOW = 'echo "$CFP_COORDINATOR $CFP_PROCESSES $CFP_PROCESS_ID $JAX_LOCAL_DEVICE_IDS|$@"'

SHAPES = [(1, 4, 1), (2, 4, 1), (2, 8, 8), (2, 8, 4), (3, 0, 2)]


def made(nodes, gpus, each, **more):
    return Launch(
        command=PROGRAM,
        nodes=nodes,
        gpus_per_node=gpus,
        processes_per_node=each,
        **more,
    )


@pytest.mark.parametrize(("nodes", "gpus", "each"), SHAPES)
def test_a_script_for_slurm(nodes, gpus, each, tmp_path):
    launch = made(nodes, gpus, each, cpus_per_process=2, options=("--account=a",))
    text = scripts.slurm_script(launch)
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    found, rest = check([line.removeprefix("#SBATCH ") for line in lines], SBATCH)
    assert not rest and found["--nodes"] == str(nodes) and found["--account"] == "a"
    assert found["--ntasks-per-node"] == str(each) and found["--time"] == "60"
    assert found.get("--gpus-per-node") == (str(gpus) if gpus else None)
    words = shlex.split(text.splitlines()[-1])
    assert words[:2] == ["exec", "srun"]
    step, _ = check(words[2:], SRUN)
    assert step["--ntasks"] == str(nodes * each) and step["--cpus-per-task"] == "2"
    done = run_as_script(
        text, tmp_path, {"srun": LAST, "python": SHOW}, SLURM_LOCALID=str(each - 1)
    )
    share = gpus // each
    own = ",".join(str(gpus - share + one) for one in range(share))
    # JAX finds out the rest by itself.
    assert done.stdout == f"   {own}|train.py --text a 'b' $HOME\n", done.stderr


@pytest.mark.parametrize(("nodes", "gpus", "each"), SHAPES)
def test_a_script_for_jsrun(nodes, gpus, each, tmp_path):
    launch = made(nodes, gpus, each, minutes=90, options=("-P abc",))
    text = scripts.lsf_script(launch)
    lines = [line.split()[1:] for line in text.splitlines() if line[:5] == "#BSUB"]
    for name, value in lines:
        assert re.fullmatch(BSUB[name], value), (name, value)
    assert dict(lines)["-nnodes"] == str(nodes) and dict(lines)["-W"] == "1:30"
    words = shlex.split(text.splitlines()[-1])
    assert words[:2] == ["exec", "jsrun"]
    step, _ = check(words[2:], JSRUN)
    assert step["--nrs"] == str(nodes * each)
    assert step["--rs_per_host"] == str(each)
    assert step["--gpu_per_rs"] == str(gpus // each)
    done = run_as_script(
        text,
        tmp_path,
        {"jsrun": LAST, "python": SHOW, "hostname": "echo node7"},
        LSB_JOBID="4100",
        OMPI_COMM_WORLD_RANK="1",
    )
    assert done.stdout == (
        f"node7:61444 {nodes * each} 1 |train.py --text a 'b' $HOME\n"
    ), done.stderr


@pytest.mark.parametrize("writes", [scripts.slurm_script, scripts.lsf_script])
def test_a_job_on_a_sick_node_ends_before_its_program(writes, tmp_path):
    fakes = {"cfp": "exit 1", "srun": "echo ran", "jsrun": "echo ran", "hostname": ""}
    text = writes(made(1, 4, 1, setup=("cfp doctor",)))
    done = run_as_script(text, tmp_path, fakes, LSB_JOBID="1")
    assert done.returncode == 1 and done.stdout == ""
    (tmp_path / "cfp").write_text("#!/bin/sh\nexit 0\n")
    done = run_as_script(text, tmp_path, {}, LSB_JOBID="1")
    assert done.returncode == 0 and "ran" in done.stdout


@pytest.mark.parametrize(("nodes", "gpus", "each"), SHAPES)
def test_a_command_line_of_open_mpi(nodes, gpus, each, tmp_path):
    hosts = tuple(f"h{number}" for number in range(nodes))
    words = scripts.mpi_command(made(nodes, gpus, each, hosts=hosts), "h0:5")
    name, value = words[0], dict(zip(words[1::2], words[2::2], strict=False))
    assert name == "mpirun" and value["-np"] == str(nodes * each)
    assert value["--host"] == ",".join(f"{host}:{each}" for host in hosts)
    assert value["--map-by"] == f"ppr:{each}:node" and value["--bind-to"] == "none"
    command = words[words.index("sh") :]
    done = run_as_script(
        shlex.join(command),
        tmp_path,
        {"python": SHOW},
        CFP_COORDINATOR="h0:5",
        CFP_PROCESSES=str(nodes * each),
        OMPI_COMM_WORLD_RANK="2",
        OMPI_COMM_WORLD_LOCAL_RANK=str(each - 1),
    )
    share = gpus // each
    own = ",".join(str(gpus - share + one) for one in range(share))
    assert done.stdout == (
        f"h0:5 {nodes * each} 2 {own}|train.py --text a 'b' $HOME\n"
    ), done.stderr


@pytest.mark.parametrize(("nodes", "gpus", "each"), SHAPES)
def test_a_jobset_keeps_its_schema(nodes, gpus, each):
    launch = made(nodes, gpus, each, image="host/cfp:1", setup=("echo hello",))
    found = json.loads(scripts.jobset_manifest(launch))
    jsonschema.validate(found, JOBSET)
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["parallelism"] == job["completions"] == nodes * each
    [container] = job["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert limits == ({"nvidia.com/gpu": gpus // each} if gpus else {})
    variables = {one["name"]: one for one in container["env"]}
    # As JobSet names pods: JOBSET-REPLICATEDJOB-JOB-POD, in the domain of the JobSet.
    assert variables["CFP_COORDINATOR"]["value"] == "cfp-worker-0-0.cfp:55527"
    assert variables["CFP_PROCESSES"]["value"] == str(nodes * each)
    assert container["command"][-len(PROGRAM) :] == list(PROGRAM)
    broken = json.loads(json.dumps(found).replace("replicatedJobs", "replicaJobs"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, JOBSET)


def test_processes_of_a_ray_cluster_are_placed():
    one, two = made(1, 4, 2, cpus_per_process=3), made(2, 0, 1)
    assert bundles(one) == [{"CPU": 6.0, "GPU": 4.0}]
    assert strategy(one) == "STRICT_PACK"
    assert bundles(two) == [{"CPU": 1.0}, {"CPU": 1.0}]
    assert strategy(two) == "STRICT_SPREAD"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"command": ()}, "nothing to start"),
        ({"gpus_per_node": 3, "processes_per_node": 2}, "cannot be shared out"),
        ({"name": "Cfp_1"}, "no name of a job"),
        ({"nodes": 2, "hosts": ("a",)}, "a name for each of 2 nodes"),
        ({"options": ("--account=a\nrm -r",)}, "one line"),
    ],
)
def test_what_cannot_be_started(change, said):
    with pytest.raises(CfpError, match=said):
        Launch(**{"command": PROGRAM, **change})


# ------------------------------------------------------------------ what runs here

SUM = """
import os
import sys
import jax
import numpy as np
from jax.experimental import multihost_utils
jax.distributed.initialize(
    os.environ["CFP_COORDINATOR"],
    int(os.environ["CFP_PROCESSES"]),
    int(os.environ["CFP_PROCESS_ID"]),
)
mine = np.int32(10 ** jax.process_index())
found = int(multihost_utils.process_allgather(mine).sum())
# In one write, since JAX's libraries write to the same stream meanwhile.
sys.stdout.write(f"\\nsum {found}\\n")
"""
# Process 1 fails; process 0 waits, and says where it is.
FAILS = """
import os, pathlib, sys, time
if os.environ["CFP_PROCESS_ID"] == "1":
    while not pathlib.Path("pid").exists():
        time.sleep(0.01)
    sys.exit(3)
pathlib.Path("pid.new").write_text(str(os.getpid()))
os.rename("pid.new", "pid")
time.sleep(600)
"""


def local(program, **more):
    return Launch(command=(sys.executable, "-c", program), nodes=2, **more)


def test_two_processes_here_are_one_program(monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    ended = launch_locally(local(SUM, setup=("export A=1",)))
    assert (ended.code, ended.first) == (0, None)
    lines = capsys.readouterr().out.splitlines()
    assert {"[0] sum 11", "[1] sum 11"} <= set(lines)


def test_one_that_fails_ends_the_others(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    ended = launch_locally(local(FAILS))
    assert (ended.code, ended.first) == (3, 1)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_what_would_run_here():
    launch = made(2, 4, 2, port=7)
    first, *_, last = dry_lines(launch)
    assert first == (
        "CFP_COORDINATOR=127.0.0.1:7 CFP_PROCESSES=4 CFP_PROCESS_ID=0 "
        f"JAX_LOCAL_DEVICE_IDS=0,1 {shlex.join(PROGRAM)}"
    )
    assert "CFP_PROCESS_ID=3 JAX_LOCAL_DEVICE_IDS=2,3 " in last
