"""The doctor as a command, and how it judges what devices answer."""

import json
import subprocess
import sys

import pytest

from cfp.attention.kernels import KERNELS
from cfp.cluster.doctor import (
    CHECKS,
    Absent,
    Check,
    Result,
    Status,
    examine,
    link_kinds,
    main,
    row,
    summary,
    with_needs,
)
from cfp.cluster.machine import Failure, Machine, allows
from cfp.cluster.probes import try_kernel
from cfp.profiling.store import default_cache_dir
from cfp_test.cli.cli_runner import ROOT, environment, run_one
from cfp_test.cluster.sick import fake_module, machine, with_gpus
from cfp_test.support.waiting import GUARD_SECONDS

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\t0-15\t0
GPU1\tNV18\t X \tPHB\t0-15\t0
GPU2\tSYS\tPHB\t X \t16-31\t1

Legend:
  SYS  = Connection traversing PCIe
"""
NVLINK = "GPU 0: NVIDIA H200\n" + "\n".join(
    f"\t Link {index}: 26.562 GB/s" for index in range(18)
)


# ------------------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The doctor where no package is installed at all."""
    home = tmp_path_factory.mktemp("home")
    variables = environment(HOME=str(home), XDG_CACHE_HOME="")
    # -S: without the folder that packages are installed in.
    return subprocess.run(
        [sys.executable, "-S", "-m", "cfp", "doctor", "--json"],
        capture_output=True,
        text=True,
        env=variables,
        timeout=GUARD_SECONDS,
        check=False,
    )


def test_without_any_package_it_says_what_is_missing(bare):
    assert bare.returncode == 1
    assert bare.stderr == ""
    found = {check["name"]: check for check in json.loads(bare.stdout)["checks"]}
    assert [check.name for check in CHECKS] == list(found)
    assert found["jaxlib"]["status"] == found["packages"]["status"] == "FAIL"
    assert "pip install 'jax>=" in found["jaxlib"]["remedy"]
    for name in ("jax", "devices", "shardy", "graft", "all-reduce"):
        assert found[name]["status"] == "ABSENT"
        assert "jaxlib failed" in found[name]["reason"]
    assert found["cache"]["status"] == found["scratch"]["status"] == "PASS"


def test_on_this_machine_a_graft_compiles_and_runs(tmp_path):
    names = ("graft", "all-reduce", "cache")
    words = [word for name in names for word in ("--only", name)]
    flags = "--xla_force_host_platform_device_count=2"
    done = run_one(
        "doctor",
        "--json",
        *words,
        *("--timeout", str(GUARD_SECONDS)),
        folder=tmp_path,
        python=sys.executable,
        XLA_FLAGS=flags,
        JAX_PLATFORMS="cpu",
    )
    document = json.loads(done.out)
    found = {check["name"]: check for check in document["checks"]}
    assert {n: found[n]["status"] for n in names} == dict.fromkeys(names, "PASS"), found
    assert (done.code, document["ok"]) == (0, True)
    assert found["graft"]["numbers"]["devices"] == 2
    assert found["all-reduce"]["reason"].startswith("2 virtual devices")
    assert str(tmp_path) in found["cache"]["reason"]


def test_the_list_names_every_check(tmp_path):
    done = run_one("doctor", "--list", folder=tmp_path, python=sys.executable)
    assert done.code == 0
    assert [line[:16].strip() for line in done.out.splitlines()] == [
        check.name for check in CHECKS
    ]


@pytest.mark.parametrize(
    ("words", "why", "near"),
    [
        (["--only", "dvices"], "Argument --only: invalid choice: 'dv", "'devices'"),
        (["--jsn"], "Unrecognized arguments: --jsn.", "'--json'"),
        (["everything"], "Unrecognized arguments: everything.", ""),
        (["--timeout", "soon"], "Argument --timeout: invalid float value: 'soon'.", ""),
    ],
)
def test_words_that_are_not_understood_are_refused(words, why, near, capsys):
    """As other commands do, not with a page of usage."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {why}")
    assert last.startswith(f"  try: did you mean {near}? " if near else "  try: cfp")
    assert last.endswith("--help lists the options, cfp doctor --list the checks")


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


# ------------------------------------------------------------------------- the checks


def test_what_needs_a_failed_check_is_not_tried():
    def run(_):
        raise AssertionError("it was tried")

    def broken(_):
        raise Failure("broken")

    def absent(_):
        raise Absent("no such thing")

    chain = [
        Check("a", broken, "mend it"),
        Check("b", run, "", needs=("a",)),
        Check("c", absent, ""),
        Check("d", run, "", needs=("c",)),
        Check("e", lambda _: ("fine", {}), ""),
        Check("f", run, ""),
    ]
    results = list(examine(Machine.here(), chain))
    said = [(r.status.value, r.reason, r.remedy) for r in results]
    assert said[:5] == [
        ("FAIL", "broken", "mend it"),
        ("ABSENT", "not tried, as a failed", ""),
        ("ABSENT", "no such thing", ""),
        ("ABSENT", "no such thing", ""),
        ("PASS", "fine", ""),
    ]
    status, reason, remedy = said[5]
    assert reason == "the check itself broke: AssertionError: it was tried"
    assert status == "FAIL" and "report it" in remedy
    assert summary(results) == "1 PASS, 2 FAIL, 3 ABSENT: a, f"
    assert all(check.remedy for check in CHECKS)


def test_names_bring_what_they_need():
    assert [c.name for c in with_needs(["graft"])] == [
        "jaxlib",
        "jax",
        "devices",
        "shardy",
        "graft",
    ]
    order = [check.name for check in CHECKS]
    for index, check in enumerate(CHECKS):
        assert all(need in order[:index] for need in check.needs)


def test_a_row_fits_the_console():
    result = Result(
        name="a", status=Status.FAIL, reason="word " * 40, remedy="do " * 40
    )
    text = row(result, 80)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.startswith("a             FAIL   word")
    assert "\n" + " " * 21 + "-> do" in text


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
    here = Machine.here()
    text = (ROOT / "pyproject.toml").read_text()
    assert f'"{here.requirements()["jax"]}"' in text
    for name, requirement in here.requirements().items():
        version = here.installed(name)
        assert version is not None and allows(requirement, version), name
    assert allows("jax>=0.10.2,<0.13", "0.12.0.1") and not allows("jax<0.13", "0.13")


# ------------------------------------------------------- what devices answer, judged


def test_links_are_counted_once_for_each_pair(tmp_path):
    assert link_kinds(TOPOLOGY) == {"NV18": 1, "PHB": 1, "SYS": 1}
    assert link_kinds("no GPU here") == {}
    (tmp_path / "topology").write_text(TOPOLOGY)
    show = f"/bin/cat {tmp_path / 'topology'}"
    (tmp_path / "links").write_text(NVLINK)
    rates = f"/bin/cat {tmp_path / 'links'}"
    (result,) = checked("links", with_gpus(tmp_path, count=3, topo=show, nvlink=rates))
    assert result.status is Status.PASS
    assert result.numbers["nvlink_gb_per_s"] == pytest.approx(478.1, abs=0.1)
    assert result.reason.startswith("NV18 (1 pairs), PHB (1 pairs), SYS (1 pairs); NV")


def checked(name, made):
    """The result of one check, whatever those that it needs would say."""
    return examine(made, [one for one in CHECKS if one.name == name])


def answering(folder, data, **fields):
    """A machine with two GPUs, whose probes answer with this."""
    line = f"cfp-doctor: {json.dumps(data)}"
    fake_module(folder, "jax", f"print({line!r})\nraise SystemExit")
    environ = {"PYTHONPATH": str(folder), "PATH": str(folder / "bin")}
    return with_gpus(folder, count=2, environ=environ, **fields)


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ({"right": False, "median_ms": 1.0}, "FAIL", "the sum is wrong"),
        # 268 MB to and from each of two devices, in a ring: each sends 268 MB.
        (
            {"right": True, "median_ms": 0.8},
            "PASS",
            "336 GB/s, 70% of the NVLink's 478",
        ),
        ({"right": True, "median_ms": 9.0}, "FAIL", "30 GB/s, 6% of the NVLink's 478"),
    ],
)
def test_an_all_reduce_is_held_against_the_link(answer, status, words, tmp_path):
    (tmp_path / "links").write_text(NVLINK)
    data = {"devices": 2, "bytes": 256 << 20, **answer}
    made = answering(tmp_path, data, nvlink=f"/bin/cat {tmp_path / 'links'}")
    (result,) = checked("all-reduce", made)
    assert result.status == status
    assert words in result.reason


def test_one_device_has_no_link(tmp_path):
    data = {"devices": 1, "bytes": 1, "right": True, "median_ms": 1.0}
    (result,) = checked("all-reduce", answering(tmp_path, data))
    assert result.status is Status.PASS
    assert "no link is used" in result.reason


KERNEL_CHECKS = [kernel.name for kernel in KERNELS.values() if kernel.remedy]


@pytest.mark.parametrize("name", KERNEL_CHECKS)
@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ({"forward": 2e-3, "dq": 3e-3}, "PASS", "dq 3.0e-03"),
        ({"forward": 2e-3, "dq": 0.5}, "FAIL", "differs from float32"),
        ({"forward": float("nan")}, "FAIL", "differs from float32"),
        ({"refusal": "compute capability 7.0"}, "FAIL", "compute capability 7.0"),
    ],
)
def test_kernels_are_held_against_float32(name, answer, status, words, tmp_path):
    packages = {"jax": "0.12.0"}
    device = answering(tmp_path, answer, packages=packages)
    (result,) = checked(name, device)
    assert (result.status, words in result.reason) == (status, True), result.reason
    assert name in [check.name for check in CHECKS]


def test_a_kernel_is_compared_forward_and_backward():
    found = try_kernel("xla")
    assert list(found) == ["forward", "dq", "dk", "dv"]
    assert 0 < max(found.values()) < 5e-3
    assert "platform cpu" in try_kernel("cudnn")["refusal"]


ON_GPUS = [c for c in CHECKS if c.name in ("driver", "cudnn")]


@pytest.mark.parametrize("check", ON_GPUS, ids=lambda check: check.name)
def test_without_a_gpu_its_checks_are_absent(check, tmp_path):
    (result,) = examine(machine(tmp_path), [check])
    assert result.status is Status.ABSENT
    assert "no NVIDIA GPU" in result.reason
