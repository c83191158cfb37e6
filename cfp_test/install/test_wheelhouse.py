"""Contents of a wheelhouse; nothing here needs a network."""

import ensurepip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from build_jaxlib import build, fetch, source, verify
from build_jaxlib.licences import licence_of, write_licences
from build_jaxlib.platforms import ACCELERATORS, ARCHITECTURES, platform_of
from build_jaxlib.resolve import locked, names, pins_but_for
from cfp.errors import CfpError
from cfp_test.cli.cli_runner import ROOT

LOCK = """\
# made by uv
jax==0.10.2 ; python_full_version < '3.12' \\
    --hash=sha256:aa \\
    --hash=sha256:bb
    # via cfp
jax==0.12.0 ; python_full_version >= '3.12' \\
    --hash=sha256:cc
numpy==2.4.6 \\
    --hash=sha256:dd
"""


def wheel(folder, name="some-thing", version="1.2", **more: str):
    """A wheel with metadata and licence texts."""
    stem = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    fields = {"License_Expression": "MIT", **more}
    lines = "".join(
        f"{key.replace('_', '-')}: {text}\n" for key, text in fields.items() if text
    )
    info = f"{stem}.dist-info"
    with ZipFile(path, "w") as archive:
        archive.writestr(
            f"{info}/METADATA", f"Name: {name}\nVersion: {version}\n{lines}"
        )
        archive.writestr(f"{info}/licenses/LICENSE", "Do as you like.")
        archive.writestr("some_thing/LICENSE.py", "not a text")
    return path


# ---------------------------------------------------------------------------- platforms


def test_wheels_exist_for_all_but_three():
    refused = []
    for name in ACCELERATORS:
        for architecture in (*ARCHITECTURES, "ppc64le"):
            try:
                platform_of(name, architecture, "3.12")
            except CfpError as error:
                assert str(error).count(". ") == 1
                refused.append((name, architecture))
    assert refused == [
        ("cpu", "ppc64le"),
        ("cuda12", "ppc64le"),
        ("cuda13", "ppc64le"),
        ("cuda12-local", "ppc64le"),
        ("cuda13-local", "ppc64le"),
        ("rocm", "aarch64"),
        ("rocm", "ppc64le"),
        ("tpu", "aarch64"),
        ("tpu", "ppc64le"),
    ]


def test_platform_tags_are_all_that_run_there():
    tags = platform_of("cuda13", "aarch64", "3.12").tags
    assert tags[0] == "manylinux_2_28_aarch64"
    assert "manylinux_2_17_aarch64" in tags
    assert "manylinux2014_aarch64" in tags
    assert "manylinux_2_31_aarch64" not in tags
    assert "manylinux2010_aarch64" not in tags
    assert platform_of("tpu", "x86_64", "3.12").tags[0] == "manylinux_2_31_x86_64"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("cpu", "x86_64", "3.10"), "does not run on this version of Python"),
        (("tpu", "x86_64", "3.12", 28), "need a newer glibc"),
    ],
)
def test_what_cannot_be_is_refused(words, said):
    with pytest.raises(CfpError, match=said):
        platform_of(*words)


def test_the_seed_command_means_cuda(tmp_path, capsys):
    words = ["--enable_cuda", "--dev_install", "--architecture", "s390x"]
    assert build.main(words) == 2
    assert "no wheels for s390x" in capsys.readouterr().err


def test_the_help_names_extras_that_exist(capsys):
    with pytest.raises(SystemExit):
        build.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    offered = re.search(r"of cfp, beside (.*?); may be given", text)[1]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(re.split("[:,] ", offered))
    assert len(extras) > 2 and extras <= project["optional-dependencies"].keys()


def test_each_accelerator_has_constraints():
    for each in ACCELERATORS.values():
        lines = each.constraints.read_text().splitlines()
        assert lines[0].startswith("# ")
        for line in lines:
            assert line.startswith("#") or names(line), line


# --------------------------------------------------------------------------- resolution


def test_tested_versions_are_limits_but_where_a_platform_says_otherwise():
    assert pins_but_for(LOCK, {"jax"}) == "numpy==2.4.6\n"
    assert pins_but_for(LOCK, set()).splitlines() == [
        "jax==0.10.2 ; python_full_version < '3.12'",
        "jax==0.12.0 ; python_full_version >= '3.12'",
        "numpy==2.4.6",
    ]
    assert names("# jax\njax<0.12.0.1\nnvidia-nccl-cu13>=2\n") == {
        "jax",
        "nvidia-nccl-cu13",
    }


def test_a_lock_is_read():
    assert locked("jax==0.12.0 \\\n    --hash=sha256:a\nml-dtypes==0.6\n") == {
        "jax": "0.12.0",
        "ml-dtypes": "0.6",
    }


# ------------------------------------------------------------------------- what came


def test_the_lock_of_a_wheelhouse_allows_its_files_alone(tmp_path):
    one, other = wheel(tmp_path), wheel(tmp_path, "Other_Thing", "3")
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (one, other)]
    assert fetch.exact_lock([one, other]) == (
        f"other-thing==3 --hash=sha256:{hashes[1]}\n"
        f"some-thing==1.2 --hash=sha256:{hashes[0]}\n"
    )


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ({}, "MIT"),
        ({"License_Expression": "", "License": "BSD-3-Clause"}, "BSD-3-Clause"),
        (
            {
                "License_Expression": "",
                "License": "x" * 99,
                "Classifier": "License :: OSI Approved :: ISC License (ISCL)",
            },
            "ISC License (ISCL)",
        ),
        (
            {"License_Expression": "", "Classifier": "License :: Other/Proprietary"},
            "Other/Proprietary",
        ),
        ({"License_Expression": ""}, "not stated"),
    ],
)
def test_licences_are_what_packages_state(fields, licence, tmp_path):
    found = licence_of(wheel(tmp_path, **fields))
    assert found.licence == licence
    assert found.texts == ("some_thing-1.2.dist-info/licenses/LICENSE",)


def test_licence_texts_come_along(tmp_path):
    write_licences([wheel(tmp_path)], tmp_path / "licences")
    table = (tmp_path / "licences" / "table.md").read_text()
    assert "| some-thing | 1.2 | MIT |" in table
    text = tmp_path / "licences" / "some-thing" / "licenses-LICENSE"
    assert text.read_text() == "Do as you like."


@pytest.fixture
def carried(tmp_path):
    """A wheelhouse for this Python, with one wheel."""
    folder = tmp_path / "carried"
    (folder / "wheels").mkdir(parents=True)
    made = wheel(folder / "wheels")
    (folder / "lock.txt").write_text(fetch.exact_lock([made]))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "wheelhouse.json").write_text(f'{{\n  "python": "{version}"\n}}\n')
    shutil.copy(ROOT / "build_jaxlib" / "install.sh", folder)
    fetch.write_sums(folder)
    return folder


def install(folder, *words):
    return subprocess.run(
        ["sh", folder / "install.sh", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )


def test_a_wheelhouse_that_was_changed_is_not_installed(carried, tmp_path):
    (made,) = (carried / "wheels").iterdir()
    made.write_bytes(made.read_bytes() + b"x")
    done = install(carried, tmp_path / "venv", sys.executable)
    assert done.returncode != 0
    assert f"wheels/{made.name}: FAILED" in done.stdout
    assert not (tmp_path / "venv").exists()


def test_a_python_without_venv_has_a_remedy(tmp_path):
    with pytest.raises(CfpError, match=r"install python3-venv, or run build\.py by"):
        verify.create(tmp_path / "venv", "false")


def test_a_wheelhouse_for_another_python_is_not_installed(carried, tmp_path):
    (carried / "wheelhouse.json").write_text('{\n  "python": "3.99"\n}\n')
    done = install(carried, tmp_path / "venv", sys.executable)
    assert done.returncode == 1
    assert "These wheels are for Python 3.99" in done.stderr
    assert not (tmp_path / "venv").exists()


# As Debian has it without python3-venv: environments, but no pip to put into them.
WITHOUT_ENSUREPIP = """#!/bin/sh
case "$*" in
"-m venv --without-pip "*) ;;
"-m venv "*) echo "ensurepip is not available." >&2; exit 1 ;;
esac
exec '{python}' "$@"
"""


def test_installing_needs_no_pip_of_the_other_machine(carried, tmp_path):
    for other in (carried / "wheels").iterdir():
        other.unlink()
    # Debian keeps them in a folder of the system.
    beside = Path(ensurepip.__file__).parent / "_bundled"
    folder = sysconfig.get_config_var("WHEEL_PKG_DIR") or beside
    (bundled,) = Path(folder).glob("pip-*.whl")
    shutil.copy(bundled, carried / "wheels")
    (carried / "lock.txt").write_text(fetch.exact_lock([bundled]))
    fetch.write_sums(carried)
    python = tmp_path / "python"
    python.write_text(WITHOUT_ENSUREPIP.format(python=sys.executable))
    python.chmod(0o755)
    done = install(carried, tmp_path / "venv", python)
    assert (done.returncode, done.stderr) == (0, "")
    said = subprocess.check_output(
        [tmp_path / "venv" / "bin" / "python", "-m", "pip", "--version"], text=True
    )
    assert said.split()[1] == bundled.name.split("-")[1]
    assert str(tmp_path / "venv") in said


# -------------------------------------------------------------------------- from source


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "jax"
    for name in ("build", "jax"):
        (folder / name).mkdir(parents=True)
    (folder / "build" / "build.py").write_text("")
    (folder / "jax" / "version.py").write_text('_version = "0.12.0"\n')
    return folder


def test_the_command_that_builds_jaxlib(checkout, tmp_path):
    options = ["--override_repository=xla=/x"]
    words = source.command(
        checkout,
        tmp_path,
        "cuda13",
        options,
        build_options=["--bazel_path=/b"],
        force=True,
    )
    assert words[1:4] == [
        "build/build.py",
        "build",
        "--wheels=jaxlib,jax-cuda-plugin,jax-cuda-pjrt",
    ]
    assert f"--output_path={tmp_path}" in words
    assert "--cuda_major_version=13" in words
    assert "--cuda_major_version=12" in source.command(
        checkout, tmp_path, "cuda12-local", [], force=True
    )
    assert words[-2:] == [
        "--bazel_path=/b",
        "--bazel_options=--override_repository=xla=/x",
    ]


def refusal(checkout, tmp_path, accelerator="cpu") -> str:
    with pytest.raises(CfpError) as caught:
        source.command(checkout, tmp_path, accelerator, [])
    return str(caught.value)


def test_what_cannot_be_built_is_refused_with_the_reason(
    checkout, tmp_path, monkeypatch
):
    monkeypatch.setattr(source.shutil, "which", lambda _: None)
    monkeypatch.setattr(source.platform, "machine", lambda: "aarch64")
    assert "no compiler" in refusal(checkout, tmp_path)
    assert "libtpu's sources are not public" in refusal(checkout, tmp_path, "tpu")
    monkeypatch.setattr(source.platform, "machine", lambda: "ppc64le")
    assert "docs/install/ppc64le.md" in refusal(checkout, tmp_path)
    (checkout / "jax" / "version.py").write_text('_version = "0.4.6"\n')
    assert "got 0.4.6" in refusal(checkout, tmp_path)
    assert "no checkout of JAX" in refusal(tmp_path, tmp_path)
