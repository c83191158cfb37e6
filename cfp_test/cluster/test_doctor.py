"""The doctor: each fault is named by one check, with what mends it."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from cfp.cluster import doctor
from cfp.cluster.doctor import CHECKS, Result, allows, examine, main, row
from cfp.kernels import call
from cfp_test.cli.cli_runner import ROOT, environment, run_one
from cfp_test.cluster.sick import Machine
from cfp_test.support.waiting import GUARD_SECONDS

HANG = "exec /bin/sleep 600"  # In place of the shell, so that ending it is enough.
JAX = {"jax": "0.11.2", "jaxlib": "0.11.2"}
NAMES = [doctor.package_name(line) for line in doctor.requirements()]
# What cfp needs, in the versions that run these tests.
OWN = {n: doctor.installed()[n].version for n in NAMES if n != "jax"}
PLUGIN = {"jax-cuda13-plugin": "0.11.2", "jax-cuda13-pjrt": "0.11.2"}


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


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
    assert all(name in packages["reason"] for name in NAMES)


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
    assert found["graft"]["reason"].startswith("2 devices: an all-reduce of ")
    assert str(tmp_path) in found["folders"]["reason"]
    # Faults of XLA that are worked around do not fill the screen.
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
    text = row(Result("a", "FAIL", "word " * 40, "do " * 40), 80)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.split()[:3] == ["a", "FAIL", "word"] and " -> do" in text


def test_requirements_are_those_of_the_project():
    [own] = [line for line in doctor.requirements() if line.startswith("jax>")]
    assert f'"{own}"' in (ROOT / "pyproject.toml").read_text()
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
def test_packages_that_do_not_fit_are_named(installed, words, machine):
    machine.install(installed)
    result = machine.check("packages")
    assert result.status == "FAIL" and "--find-links" in result.remedy
    assert [word for word in words if word not in result.reason] == []


@pytest.mark.parametrize("installed", [{**OWN, **JAX}, {**OWN, **JAX, **PLUGIN}])
def test_packages_that_fit_pass(installed, machine):
    machine.install(installed)
    result = machine.check("packages")
    assert result.status == "PASS", result.reason


# ------------------------------------------------------------------------------ faults


def old_driver(machine):
    machine.install(PLUGIN)
    machine.plug_in_gpus('echo "NVIDIA A100, 550.54, 8.0"')


def hanging_driver(machine):
    machine.patch.setattr(doctor, "TOOL_SECONDS", 1.0)
    machine.plug_in_gpus(HANG)


def updated_driver(machine):
    machine.plug_in_gpus('echo "Failed: library version mismatch"; exit 18')


def no_gpu_given(machine):
    machine.plug_in_gpus(":")


def no_nvidia_smi(machine):
    (machine.folder / "nvidia").mkdir()


def no_place(machine):
    def homeless():
        raise RuntimeError("no home directory")

    machine.patch.delenv("CFP_CACHE_DIR", raising=False)
    machine.patch.delenv("XDG_CACHE_HOME", raising=False)
    machine.patch.setattr(doctor.Path, "home", homeless)


def unwritable(machine):
    machine.patch.setenv("CFP_CACHE_DIR", "/sys/cfp")  # By any user.


def full_disk(machine):
    machine.patch.setattr(doctor, "ENOUGH_BYTES", 1 << 60)


@pytest.mark.parametrize(
    ("fault", "name", "reason", "remedy"),
    [
        (old_driver, "driver", "needs 580 or newer", "jax[cuda12]"),
        (hanging_driver, "driver", "did not answer within 1 s", "Xid"),
        (updated_driver, "driver", "mismatch", "restart"),
        (no_gpu_given, "driver", "lists no GPU", "--gres=gpu:1"),
        (no_nvidia_smi, "driver", "not on the PATH", "Docker"),
        (no_place, "folders", "no home directory", "CFP_CACHE_DIR"),
        (unwritable, "folders", "/sys/cfp", "CFP_CACHE_DIR"),
        (full_disk, "folders", "MiB needed", "TMPDIR"),
    ],
)
def test_a_fault_is_named_with_its_remedy(fault, name, reason, remedy, machine):
    fault(machine)
    result = machine.check(name)
    assert result.status == "FAIL"
    assert reason in result.reason and remedy in result.remedy


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise ImportError('libstdc++')", "ImportError: libstdc++"),
        ("import os; os.kill(os.getpid(), 4)", "SIGILL"),
        ("import time; time.sleep(600)", "did not answer within 2 s"),
    ],
)
def test_what_needs_jax_is_not_tried_where_it_fails(text, words, machine):
    machine.replace_jax(text)
    first, *rest = examine(["jax", "devices", "graft"], jax_timeout_s=2.0)
    assert first.status == "FAIL" and words in first.reason
    assert [one.status for one in rest] == ["ABSENT"] * 2
    assert {one.reason for one in rest} == {"not tried, as jax failed"}


def test_shardy_passes_missing(machine):
    """jaxlib is the real one, but for one pass that it does not know."""
    (machine.folder / "sitecustomize.py").write_text(
        "from jax.extend.mlir import passmanager\n"
        "real = passmanager.PassManager.parse\n"
        "def parse(text, *more):\n"
        "    return real(text.replace('populate-op-sharding', 'no-such'), *more)\n"
        "passmanager.PassManager.parse = parse\n",
    )
    result = machine.check("jax")
    assert result.status == "FAIL"
    assert "no-such" in result.reason and "jaxlib" in result.remedy


# ------------------------------------------------------- what devices answer, judged


def judged(check) -> tuple[str, str]:
    """Status and reason of a check that runs in this process."""
    found = doctor.Check(check, "").result()
    return found.status, found.reason


def test_devices_that_are_hidden_are_missed(machine, monkeypatch):
    one = SimpleNamespace(platform="cuda", device_kind="H200")
    monkeypatch.setattr(jax, "local_devices", lambda: [one])
    machine.plug_in_gpus()
    assert judged(doctor.devices) == ("PASS", "1 × H200 (cuda)")
    machine.plug_in_gpus(count=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    status, reason = judged(doctor.devices)
    assert status == "FAIL"
    assert "the driver shows 2 GPUs; CUDA_VISIBLE_DEVICES=0" in reason


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ({"error": 0.5}, "FAIL", "off by 5.0e-01 of the sum; limit 1e-05"),
        ({"error": float("nan")}, "FAIL", "off by nan of the sum"),
        # 268 MB to and from each of two devices, in a ring: each sends 268 MB.
        ({}, "PASS", "336 GB/s, 70% of the NVLinks' 478"),
        ({"time_ms": 9.0}, "FAIL", "30 GB/s, 6% of the NVLinks' 478"),
        ({"count": 1}, "PASS", "is right"),
    ],
)
def test_an_all_reduce_is_held_against_the_link(answer, status, words, machine):
    data = {"count": 2, "size_bytes": 256 << 20, "error": 0.0, "time_ms": 0.8}
    machine.plug_in_gpus(count=2)
    found, reason = judged(lambda: doctor.judged_sum(**data | answer))
    assert (found, words in reason) == (status, True), reason


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        (0.0, "PASS", "forward and backward; relative forward"),
        (0.5, "FAIL", "differs from float32: forward 5.0e-01, dq"),
        (float("nan"), "FAIL", "differs from float32: forward nan"),
    ],
)
def test_kernels_are_held_against_float32(fault, status, words, monkeypatch):
    assert judged(doctor.cudnn) == ("ABSENT", "no GPU")

    def faulty(q, k, v, *, implementation, **how):
        out = call.attention(q, k, v, implementation=implementation, **how)
        return out if implementation == "xla" else out * (1 + fault)

    plain = SimpleNamespace(attention=faulty)
    monkeypatch.setitem(sys.modules, "cfp.kernels.call", plain)
    found, reason = judged(lambda: doctor.judged_kernel("chunked"))
    assert (found, words in reason) == (status, True), reason
