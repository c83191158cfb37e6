"""Module files, and what the job scripts would run."""

import os
import re
import subprocess

import pytest

from build_jaxlib.modulefile import expression, installed_version, module_file
from cfp.errors import CfpError
from cfp_test.cli.cli_runner import ROOT

SITE = ROOT / "build_jaxlib" / "site"
JOBS = {
    "pbs": {"PBS_JOBID": "7.server", "PBS_O_WORKDIR": "."},
}
# Stands for commands of the cluster: writes down the call.
RECORD = """#!/bin/bash
echo "$(basename "$0") $*" >>"$LOG"
[ "$1" != doctor ] || exit "$DOCTOR"
"""


def run_job(name, folder, doctor=0, **more):
    """Runs a job script among recorded commands; its exit code, and the calls."""
    for command in ("cfp", "module"):
        (folder / command).write_text(RECORD)
        (folder / command).chmod(0o755)
    log = folder / "log"
    log.write_text("")
    variables = {
        "PATH": f"{folder}{os.pathsep}/usr/bin:/bin",
        "HOME": str(folder),
        "LOG": str(log),
        "DOCTOR": str(doctor),
        **JOBS[name],
        **more,
    }
    done = subprocess.run(
        ["bash", SITE / f"{name}.sh"],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, log.read_text().splitlines(), done.stderr


@pytest.mark.parametrize("name", JOBS)
def test_a_job_sees_the_doctor_first_and_then_plans(name, tmp_path):
    code, calls, errors = run_job(name, tmp_path, TARGET="train.py:tiny --donate 0")
    assert (code, errors) == (0, "")
    assert calls[0] == "module load cfp"
    assert [call for call in calls if call.startswith("cfp ")] == [
        "cfp doctor",
        "cfp plan train.py:tiny --donate 0 --platform cuda --devices 4 -o plan-7.json",
    ]


@pytest.mark.parametrize("name", JOBS)
def test_a_job_on_a_sick_node_ends_before_it_plans(name, tmp_path):
    code, calls, _ = run_job(name, tmp_path, doctor=1)
    assert code == 1
    assert [call for call in calls if call.startswith("cfp ")] == ["cfp doctor"]


def test_a_module_file(tmp_path):
    text = module_file(tmp_path, "1.2", cache="$SCRATCH/cfp", needs=["cuda/13"])
    assert f'prepend_path("PATH", pathJoin("{tmp_path}", "bin"))' in text
    assert 'depends_on("cuda/13")' in text
    assert 'setenv("CFP_CACHE_DIR", (os.getenv("SCRATCH") or "/tmp") .. "/cfp")' in text
    assert "CFP_CACHE_DIR" not in module_file(tmp_path, "1.2")


@pytest.mark.parametrize(
    ("text", "lua"),
    [
        ("/a b", '"/a b"'),
        ('/"x"', '"/\\"x\\""'),
        ("$A", '(os.getenv("A") or "/tmp")'),
        (
            "/s/${USER}/$B",
            '"/s/" .. (os.getenv("USER") or "/tmp") .. "/" .. '
            '(os.getenv("B") or "/tmp")',
        ),
    ],
)
def test_variables_are_looked_up_when_the_module_is_loaded(text, lua):
    assert expression(text) == lua


def test_a_module_needs_an_installation(tmp_path):
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(CfpError, match=r"install\.sh"):
        installed_version(tmp_path)


@pytest.mark.parametrize("name", ["Containerfile", "apptainer.def"])
def test_containers_run_the_same_steps(name):
    text = (SITE / name).read_text()
    assert re.search(r"^\s*(sh|RUN.*\n.*\n.*sh) \S*steps\.sh", text, re.MULTILINE)
    assert "debian:bookworm" in text
