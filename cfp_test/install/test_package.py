"""Contents of the built package, whose parts agree."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import cfp
from cfp_test.support.waiting import GUARD_SECONDS

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

BUILT_FROM = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
_BUILD = """
import sys
from setuptools import build_meta
print("made", build_meta.build_wheel(sys.argv[1]))
"""


def test_the_wheel_has_all_that_the_package_reads(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    # A copy: setuptools leaves its work in the folder that it builds from.
    listed = subprocess.run(
        [
            "git",
            "ls-files",
            "cfp",
            "pyproject.toml",
            "setup.py",
            "README.md",
            "LICENSE",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=GUARD_SECONDS,
        check=True,
    ).stdout.split()
    for name in listed:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, str(tmp_path)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=GUARD_SECONDS,
        check=True,
    )
    wheel = done.stdout.split("made ")[-1].strip()
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        names = set(archive.namelist())
    expected = {name for name in listed if name.startswith("cfp/")}
    left_out = {name for name in expected - names if not name.endswith(".md")}
    assert left_out == set()
    assert "cfp/py.typed" in names
    assert not any(name.startswith(("cfp_test/", "alpa_test/")) for name in names)


def test_docs_are_locked_with_hashes():
    lock = (ROOT / "requirements" / "docs.txt").read_text()
    packages = re.findall(r"^([a-z0-9_.-]+)==", lock, re.MULTILINE)
    for line in (ROOT / "requirements" / "docs.in").read_text().splitlines():
        if not line.startswith("#"):
            assert re.match(r"[a-z0-9_-]+", line)[0] in packages
    assert lock.count("--hash=sha256:") >= len(packages) > 10


def test_every_page_has_its_place_on_the_site():
    listed = re.findall(r"([\w/-]+\.md)", (ROOT / "mkdocs.yml").read_text())
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    assert {page for page in pages if not page.startswith("results/")} == set(listed)


def test_every_public_name_is_in_the_reference():
    page = (ROOT / "docs" / "api.md").read_text()
    documented = re.findall(r"^::: cfp\.(\w+)$", page, re.M)
    assert sorted([*documented, "PRESETS"]) == sorted(cfp.__all__)


def test_type_checkers_follow_an_editable_installation():
    """With this setuptools writes a path; without it, an import hook."""
    assert PROJECT["tool"]["setuptools"]["package-dir"] == {"": "."}


def names_of(requirements):
    return {re.split(r"[^\w-]", one)[0].lower() for one in requirements}


def test_what_the_package_imports_is_declared():
    """A dependency's own dependency may not come with its next release."""
    core = names_of(PROJECT["project"]["dependencies"])
    models = names_of(PROJECT["project"]["optional-dependencies"]["models"])
    imported, by_models = set(), set()
    for file in (ROOT / "cfp").rglob("*.py"):
        room = file.relative_to(ROOT / "cfp").parts[0]
        if file == ROOT / "cfp" / "cluster" / "actors.py":
            continue  # Imported once Ray, an extra, is known to be there.
        found = by_models if room in ("models", "operators") else imported
        # What functions import may be absent: they say what to install. The zoo's do
        # so for what its extra brings.
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree) if room == "models" else tree.body:
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    here = {*sys.stdlib_module_names, "cfp"}
    # The doctor runs without any package, and imports one where it compares; JAX writes
    # what it exports with the other.
    assert imported - here | {"packaging", "flatbuffers"} == core
    assert by_models - here - core == models
