"""Faults, each of them named by one check, with what mends it."""

import re
from pathlib import Path

import pytest

from cfp.cluster.doctor import CHECKS, Result, Status, examine, with_needs
from cfp.cluster.machine import Machine
from cfp_test.cluster.sick import (
    PLUGIN,
    SOUND,
    fake_module,
    machine,
    with_gpus,
    with_packages,
)

ROOT = Path(__file__).parents[2]

# What cfp needs, in the versions that run these tests.
OWN = {
    name: Machine.here().installed(name)
    for name in Machine.here().requirements()
    if name not in SOUND
}
BY_NAME = {check.name: check for check in CHECKS}
HANG = "exec /bin/sleep 600"  # In place of the shell, so that ending it is enough.


def check(name: str, made: Machine) -> Result:
    """Runs one check, whatever those that it needs would say."""
    (result,) = examine(made, [BY_NAME[name]])
    return result


def fake_python(folder, **modules: str) -> dict[str, str]:
    """Environment in which Python finds these modules first."""
    for name, text in modules.items():
        fake_module(folder, name, text)
    return {"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"}


def less(amount: int):
    return lambda _: amount


# name -> (machine, check, words of the reason, words of the remedy)
FAULTS = {
    "old Python": (
        lambda f: machine(f, version=(3, 9, 1)),
        "python",
        ("3.9.1", "3.11"),
        "python3.12 -m venv",
    ),
    "packages missing": (
        lambda f: with_packages(f, {"numpy": "2.4.0"}),
        "packages",
        ("missing", "pydantic", "typer"),
        "--no-index --find-links",
    ),
    "JAX missing": (
        lambda f: with_packages(f, {}),
        "jax",
        ("not installed",),
        "pip install 'jax>=0.10.2,<0.13'",
    ),
    "JAX too old": (
        lambda f: with_packages(f, {"jax": "0.9.1", "jaxlib": "0.9.1"}),
        "jax",
        ("0.9.1", ">=0.10.2,<0.13"),
        "pip install 'jax>=0.10.2,<0.13'",
    ),
    "jaxlib of another JAX": (
        lambda f: with_packages(f, {"jax": "0.11.2", "jaxlib": "0.11.1"}),
        "jaxlib",
        ("0.11.1", "0.11.2"),
        "pip install jaxlib==0.11.2",
    ),
    "JAX that cannot be imported": (
        lambda f: with_packages(
            f, SOUND, environ=fake_python(f, jax="raise ImportError('libstdc++')")
        ),
        "jax",
        ("ImportError: libstdc++",),
        "--force-reinstall",
    ),
    "jaxlib for another processor": (
        lambda f: with_packages(
            f,
            SOUND,
            environ=fake_python(f, jax="import os; os.kill(os.getpid(), 4)"),
        ),
        "jax",
        ("SIGILL",),
        "from source",
    ),
    "JAX on a file system that hangs": (
        lambda f: with_packages(
            f,
            SOUND,
            environ=fake_python(f, jax="import time; time.sleep(600)"),
            timeout_s=1.0,
        ),
        "jax",
        ("did not answer within 1 s",),
        "local disk",
    ),
    "plugin missing": (
        lambda f: with_gpus(f, packages=SOUND),
        "plugin",
        ("NVIDIA driver", "no CUDA plugin"),
        "pip install 'jax[cuda13]==0.11.2'",
    ),
    "plugin of another JAX": (
        lambda f: with_gpus(
            f, packages={**SOUND, **PLUGIN, "jax-cuda13-plugin": "0.10.2"}
        ),
        "plugin",
        ("jax-cuda13-plugin 0.10.2", "jaxlib 0.11.2"),
        "pip install jax-cuda13-plugin==0.11.2",
    ),
    "half of a plugin": (
        lambda f: with_packages(f, {**SOUND, "jax-cuda13-plugin": "0.11.2"}),
        "plugin",
        ("without jax-cuda13-pjrt",),
        "pip install jax-cuda13-pjrt==0.11.2",
    ),
    "driver too old": (
        lambda f: with_gpus(f, driver='echo "NVIDIA A100, 550.54, 8.0"'),
        "driver",
        ("550.54", "580"),
        "jax[cuda12]",
    ),
    "driver that hangs": (
        lambda f: with_gpus(f, driver=HANG, tool_timeout_s=1.0),
        "driver",
        ("did not answer within 1 s",),
        "Xid",
    ),
    "driver updated while it ran": (
        lambda f: with_gpus(
            f,
            driver='echo "Failed to initialize NVML: Driver/library version mismatch"; '
            "exit 18",
        ),
        "driver",
        ("mismatch",),
        "restart",
    ),
    "no GPU given": (
        lambda f: with_gpus(f, driver=":"),
        "driver",
        ("lists no GPU",),
        "--gres=gpu:1",
    ),
    "device hidden": (
        lambda f: with_gpus(
            f,
            count=2,
            environ={
                **fake_python(
                    f,
                    jax="class D: platform='cuda'; device_kind='H200'\n"
                    "def local_devices(): return [D]",
                ),
                "PATH": str(f / "bin"),
                "CUDA_VISIBLE_DEVICES": "0",
            },
        ),
        "devices",
        ("1 × H200 (cuda)", "the driver shows 2", "CUDA_VISIBLE_DEVICES='0'"),
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "no place for the cache": (
        lambda f: machine(f, cache=None),
        "cache",
        ("no place",),
        "CFP_CACHE_DIR",
    ),
    "unwritable cache": (
        # /sys cannot be written by any user.
        lambda f: machine(f, cache=Path("/sys/cfp")),
        "cache",
        ("/sys/cfp cannot be written",),
        "CFP_CACHE_DIR",
    ),
    "full cache": (
        lambda f: machine(f, free_bytes=less(3 << 20)),
        "cache",
        ("3 MiB left",),
        "make space",
    ),
    "no space for temporary files": (
        lambda f: machine(f, free_bytes=less(1 << 20)),
        "scratch",
        ("1 MiB left",),
        "TMPDIR",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_remedy(fault, tmp_path):
    make, name, reason, remedy = FAULTS[fault]
    result = check(name, make(tmp_path))
    assert result.status is Status.FAIL
    assert [word for word in reason if word not in result.reason] == []
    assert remedy in result.remedy
    assert "Traceback" not in result.reason + result.remedy


def test_each_of_these_checks_passes_where_there_is_no_fault(tmp_path):
    made = with_gpus(
        tmp_path,
        environ={
            **fake_python(
                tmp_path,
                jax="__version__ = '0.11.2'\n"
                "class D: platform='cuda'; device_kind='H200'\n"
                "def local_devices(): return [D]",
            ),
            "PATH": str(tmp_path / "bin"),
        },
        packages={
            **SOUND,
            **PLUGIN,
            **OWN,
        },
    )
    names = {name for _, name, _, _ in FAULTS.values()}
    results = [r for r in examine(made, with_needs(names)) if r.name in names]
    assert {r.name: (r.status, r.reason) for r in results if r.status != "PASS"} == {}
    assert {r.name for r in results} == names


def test_faults_of_xla_that_are_worked_around_do_not_fill_the_screen(tmp_path):
    result = check("shardy", machine(tmp_path))
    assert result.status is Status.PASS
    assert result.numbers["faults"] > 0
    assert len(result.reason) < 200
    page = re.search(r"docs/\S+\.md", result.reason)
    assert page and (ROOT / page[0]).is_file()


def test_shardy_passes_missing(tmp_path):
    """jaxlib is the real one, but for one pass that it does not know."""
    fake_module(
        tmp_path,
        "sitecustomize",
        "from jax.extend.mlir import passmanager\n"
        "real = passmanager.PassManager.parse\n"
        "def parse(text, *more):\n"
        "    return real(text.replace('populate-op-sharding', 'no-such'), *more)\n"
        "passmanager.PassManager.parse = parse\n",
    )
    made = machine(tmp_path, environ={"PYTHONPATH": str(tmp_path)})
    result = check("shardy", made)
    assert result.status is Status.FAIL
    assert "lacks 1 of the 4 pipelines" in result.reason
    assert "no-such" in result.reason
    assert "pip install jax" in result.remedy
