"""The job scripts of docs/launching.md, run with stand-ins for each launcher."""

import json
import re
import subprocess

import jsonschema
import pytest
import yaml

from cfp_test.cli.cli_runner import ROOT
from cfp_test.install.jobset_schema import JOBSET

PAGE = (ROOT / "docs" / "launching.md").read_text()
# Runs the program after the launcher's own options; mpirun's take values.
JSRUN = 'while [[ ${1:-} == -* ]]; do shift; done; exec "$@"'
MPIRUN = """
while [[ ${1:-} == -* ]]; do
    [[ $1 == -x ]] && export "$2"
    shift 2
done
exec "$@"
"""
SHOW = 'echo "$CFP_COORDINATOR $CFP_PROCESSES $CFP_PROCESS_ID $JAX_LOCAL_DEVICE_IDS|$@"'
FAKES = {"srun": JSRUN, "jsrun": JSRUN, "mpirun": MPIRUN, "hostname": "echo node7"}
VARIABLES = {"LSB_JOBID": "4100", "OMPI_COMM_WORLD_RANK": "1"}
ALL = "0,1,2,3,4,5,6,7"


def section(title: str, language: str) -> str:
    text = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    [found] = re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)
    return found


def run(script: str, folder, python: str) -> subprocess.CompletedProcess[str]:
    """Runs a job script with stand-ins for its launcher and its program."""
    for name, body in {**FAKES, "python": python}.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return subprocess.run(
        ["bash", "-c", script],
        text=True,
        capture_output=True,
        cwd=folder,
        env={"PATH": f"{folder}:/usr/bin:/bin", **VARIABLES},
        check=False,
    )


@pytest.mark.parametrize(
    ("title", "shown"),
    [
        # JAX finds coordinator and number by itself.
        ("Slurm", [f"   {ALL}|train.py"]),
        ("Open MPI", [f"node1:55527 2 1 {ALL}|train.py"]),
        ("LSF with jsrun", ["node7:61444 2 1 |train.py"]),
        (
            "By hand",
            ["127.0.0.1:55527 2 0 0,1|train.py", "127.0.0.1:55527 2 1 2,3|train.py"],
        ),
    ],
)
def test_each_process_knows_its_number_and_its_gpus(title, shown, tmp_path):
    done = run(section(title, "bash"), tmp_path, SHOW)
    assert sorted(done.stdout.splitlines()) == shown, done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("title", ["Slurm", "Open MPI", "LSF with jsrun", "By hand"])
def test_a_job_ends_with_the_exit_code_of_a_process_that_fails(title, tmp_path):
    assert run(section(title, "bash"), tmp_path, "exit 3").returncode == 3


def test_the_jobset_keeps_its_schema():
    found = yaml.safe_load(section("Kubernetes", "yaml"))
    jsonschema.validate(found, JOBSET)
    name = found["metadata"]["name"]
    [replicated] = found["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    [container] = job["template"]["spec"]["containers"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    # Pods are called JOBSET-REPLICATEDJOB-JOB-POD, in the domain of the JobSet.
    port = container["ports"][0]["containerPort"]
    coordinator = f"{name}-{replicated['name']}-0-0.{name}:{port}"
    assert variables["CFP_COORDINATOR"] == coordinator
    assert variables["CFP_PROCESSES"] == str(job["parallelism"])
    assert job["parallelism"] == job["completions"]
    broken = json.loads(json.dumps(found).replace("replicatedJobs", "replicaJobs"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, JOBSET)
