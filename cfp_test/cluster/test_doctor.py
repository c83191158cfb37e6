"""The doctor: each fault is named by one check, with what mends it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cfp.cluster.doctor import CHECKS, Result, Status, examine, link_kinds, main, row
from cfp.cluster.machine import Machine, allows
from cfp.cluster.probes import try_kernel
from cfp.profiling.store import default_cache_dir
from cfp_test.cli.cli_runner import ROOT, environment, run_one
from cfp_test.cluster.sick import (
    TOPOLOGY,
    answering,
    machine,
    with_gpus,
    with_jax,
    with_packages,
)
from cfp_test.support.waiting import GUARD_SECONDS

HANG = "exec /bin/sleep 600"  # In place of the shell, so that ending it is enough.
JAX = {"jax": "0.11.2", "jaxlib": "0.11.2"}
# What cfp needs, in the versions that run these tests.
OWN = {
    name: Machine.here().installed()[name].version
    for name in Machine.here().requirements()
    if name != "jax"
}
PLUGIN = {"jax-cuda13-plugin": "0.11.2", "jax-cuda13-pjrt": "0.11.2"}


def check(name: str, made: Machine) -> Result:
    """The result of one check alone."""
    (result,) = examine(made, [name])
    return result


# ------------------------------------------------------------------------ the command


def test_without_any_package_it_says_what_is_missing(tmp_path):
    done = subprocess.run(
        # -S: without the folder that packages are installed in.
        [
            sys.executable,
            "-S",
            "-m",
            "cfp",
            "doctor",
            "--json",
            "--only",
            "packages",
            "--only",
            "folders",
        ],
        capture_output=True,
        text=True,
        env=environment(HOME=str(tmp_path), XDG_CACHE_HOME=""),
        timeout=GUARD_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    packages, folders = json.loads(done.stdout)["checks"]
    assert packages["status"] == "FAIL" and folders["status"] == "PASS"
    assert all(name in packages["reason"] for name in Machine.here().requirements())


def test_on_this_machine_a_graft_compiles_and_runs(tmp_path):
    flags = "--xla_force_host_platform_device_count=2"
    done = run_one(
        *("doctor", "--json", "--timeout", str(GUARD_SECONDS)),
        folder=tmp_path,
        python=sys.executable,
        XLA_FLAGS=flags,
        JAX_PLATFORMS="cpu",
    )
    document = json.loads(done.out)
    found = {one["name"]: one for one in document["checks"]}
    assert list(found) == [one.name for one in CHECKS]
    assert {one["status"] for one in found.values()} == {"PASS", "ABSENT"}, found
    assert (done.code, document["ok"]) == (0, True)
    assert found["graft"]["numbers"]["devices"] == 2
    assert str(tmp_path) in found["folders"]["reason"]
    # Faults of XLA that are worked around do not fill the screen.
    assert found["jax"]["numbers"]["faults"] > 0
    page = re.search(r"docs/\S+\.md", found["jax"]["reason"])
    assert page and (ROOT / page[0]).is_file()


def test_the_list_names_every_check(capsys):
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [one.name for one in CHECKS]


def test_the_package_loads_without_jax():
    code = (
        "import sys, cfp, cfp.cluster.doctor\n"
        "heavy = {'jax', 'numpy', 'typer', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import cfp.plan\n"
        "assert cfp.plan is cfp.api.plan and isinstance(cfp.plan.__name__, str)\n"
        "assert set(cfp.__all__) <= set(dir(cfp))\n"
        "assert all(getattr(cfp, name) is not None for name in cfp.__all__)\n"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True)


def test_a_row_fits_the_console():
    text = row(Result("a", Status.FAIL, "word " * 40, "do " * 40), 80)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.split()[:3] == ["a", "FAIL", "word"] and " -> do" in text


def test_the_cache_is_where_the_planner_has_it(monkeypatch):
    for variables in (
        {"CFP_CACHE_DIR": "/a/b"},
        {"CFP_CACHE_DIR": "~/c"},
        {"XDG_CACHE_HOME": "/x"},
        {"XDG_CACHE_HOME": "relative"},
        {},
    ):
        for name in ("CFP_CACHE_DIR", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert Machine.here().cache == default_cache_dir()


def test_requirements_are_those_of_the_project():
    assert (
        f'"{Machine.here().requirements()["jax"]}"'
        in (ROOT / "pyproject.toml").read_text()
    )
    assert allows("jax>=0.10.2,<0.13", "0.12.0.1") and not allows("jax<0.13", "0.13")


# --------------------------------------------------------------------------- packages


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ({**JAX, "numpy": "2.4.0"}, ("pydantic>=2.6 is missing", "typer is missing")),
        ({**OWN}, ("jax>=0.10.2,<0.13 is missing",)),
        (
            {**OWN, "jax": "0.9.1", "jaxlib": "0.9.1"},
            ("jax is 0.9.1, not jax>=0.10.2",),
        ),
        ({**OWN, **JAX, "jaxlib": "0.11.1"}, ("jaxlib is 0.11.1, not jaxlib==0.11.2",)),
        (
            {**OWN, **JAX, **PLUGIN, "jax-cuda13-plugin": "0.10.2"},
            ("jax-cuda13-plugin is 0.10.2",),
        ),
        (
            {**OWN, **JAX, "jax-cuda13-plugin": "0.11.2"},
            ("jax-cuda13-pjrt==0.11.2 is missing",),
        ),
    ],
)
def test_packages_that_do_not_fit_are_named(installed, words, tmp_path):
    result = check("packages", with_packages(tmp_path, installed))
    assert result.status is Status.FAIL and "--find-links" in result.remedy
    assert [word for word in words if word not in result.reason] == []


@pytest.mark.parametrize("installed", [{**OWN, **JAX}, {**OWN, **JAX, **PLUGIN}])
def test_packages_that_fit_pass(installed, tmp_path):
    result = check("packages", with_packages(tmp_path, installed))
    assert result.status is Status.PASS, result.reason


# ------------------------------------------------------------------------------ faults


def no_nvidia_smi(folder):
    made = machine(folder)
    (made.proc / "driver" / "nvidia").mkdir(parents=True)
    return made


# name -> (machine, check, words of the reason, words of the remedy)
FAULTS = {
    "driver too old": (
        lambda f: with_packages(f, PLUGIN) and
        with_gpus(f, 'echo "NVIDIA A100, 550.54, 8.0"'),
        "driver", "550.54 is older than 580", "jax[cuda12]",
    ),
    "driver that hangs": (
        lambda f: with_gpus(f, HANG, timeout_s=1.0),
        "driver", "did not answer within 1 s", "Xid",
    ),
    "driver updated while it ran": (
        lambda f: with_gpus(f, 'echo "Failed: library version mismatch"; exit 18'),
        "driver", "mismatch", "restart",
    ),
    "no GPU given": (
        lambda f: with_gpus(f, ":"), "driver", "lists no GPU", "--gres=gpu:1",
    ),
    "driver without its tool": (no_nvidia_smi, "driver", "not on the PATH", "Docker"),
    "no place for the cache": (
        lambda f: machine(f, cache=None), "folders", "neither", "CFP_CACHE_DIR",
    ),
    "unwritable cache": (
        # /sys cannot be written by any user.
        lambda f: machine(f, cache=Path("/sys/cfp")),
        "folders", "/sys/cfp", "CFP_CACHE_DIR",
    ),
    "full disk": (
        lambda f: machine(f, enough_bytes=1 << 60), "folders", "MiB free of", "TMPDIR",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_remedy(fault, tmp_path):
    make, name, reason, remedy = FAULTS[fault]
    result = check(name, make(tmp_path))
    assert result.status is Status.FAIL
    assert reason in result.reason and remedy in result.remedy


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise ImportError('libstdc++')", "ImportError: libstdc++"),
        ("import os; os.kill(os.getpid(), 4)", "SIGILL"),
        ("import time; time.sleep(600)", "did not answer within 2 s"),
    ],
)
def test_what_needs_jax_is_not_tried_where_it_fails(text, words, tmp_path):
    with_jax(tmp_path, text)
    names = ["jax", "devices", "graft"]
    first, *rest = examine(machine(tmp_path, timeout_s=2.0), names)
    assert first.status is Status.FAIL and words in first.reason
    assert {one.status for one in rest} == {Status.ABSENT}


def test_shardy_passes_missing(tmp_path):
    """jaxlib is the real one, but for one pass that it does not know."""
    (tmp_path / "sitecustomize.py").write_text(
        "from jax.extend.mlir import passmanager\n"
        "real = passmanager.PassManager.parse\n"
        "def parse(text, *more):\n"
        "    return real(text.replace('populate-op-sharding', 'no-such'), *more)\n"
        "passmanager.PassManager.parse = parse\n",
    )
    result = check("jax", machine(tmp_path))
    assert result.status is Status.FAIL
    assert "no-such" in result.reason and "jaxlib" in result.remedy


# ------------------------------------------------------- what devices answer, judged


def test_links_are_counted_once_for_each_pair(tmp_path):
    assert link_kinds(TOPOLOGY) == {"NV18": 1, "PHB": 1, "SYS": 1}
    assert link_kinds("no GPU here") == {}
    result = check("driver", with_gpus(tmp_path, count=3))
    assert result.status is Status.PASS
    assert result.reason.endswith("links NV18 (1 pairs), PHB (1 pairs), SYS (1 pairs)")


def test_devices_that_are_hidden_are_missed(tmp_path):
    answering(tmp_path, devices={"count": 1, "kind": "H200", "platform": "cuda"})
    result = check("devices", with_gpus(tmp_path))
    assert result.status is Status.PASS
    made = with_gpus(tmp_path, count=2)
    environ = {**made.environ, "CUDA_VISIBLE_DEVICES": "0"}
    result = check("devices", with_gpus(tmp_path, count=2, environ=environ))
    assert result.status is Status.FAIL
    assert "the driver shows 2 GPUs; CUDA_VISIBLE_DEVICES=0" in result.reason


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ({"error": 0.5}, "FAIL", "off by 5.0e-01"),
        ({"error": float("nan")}, "FAIL", "off by nan"),
        # 268 MB to and from each of two devices, in a ring: each sends 268 MB.
        ({}, "PASS", "336 GB/s, 70% of the NVLinks' 478"),
        ({"time_ms": 9.0}, "FAIL", "30 GB/s, 6% of the NVLinks' 478"),
        ({"devices": 1}, "PASS", "is right"),
    ],
)
def test_an_all_reduce_is_held_against_the_link(answer, status, words, tmp_path):
    data = {"devices": 2, "bytes": 256 << 20, "error": 0.0, "time_ms": 0.8, **answer}
    answering(tmp_path, graft=data)
    result = check("graft", with_gpus(tmp_path, count=2))
    assert (result.status, words in result.reason) == (status, True), result.reason


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ({"forward": 2e-3, "dq": 3e-3}, "PASS", "dq 3.0e-03"),
        ({"forward": 2e-3, "dq": 0.5}, "FAIL", "differs from float32"),
        ({"forward": float("nan")}, "FAIL", "differs from float32"),
        ({"trouble": "compute capability 7.0"}, "FAIL", "compute capability 7.0"),
        ({}, "ABSENT", "no GPU"),
    ],
)
def test_kernels_are_held_against_float32(answer, status, words, tmp_path):
    answering(tmp_path, cudnn=answer)
    result = check("cudnn", machine(tmp_path))
    assert (result.status, words in result.reason) == (status, True), result.reason


def test_a_kernel_is_compared_forward_and_backward(monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    found = try_kernel("chunked")
    assert list(found) == ["forward", "dq", "dk", "dv"]
    assert 0 < max(found.values()) < 5e-3
