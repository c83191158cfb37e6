"""Pages of third_party/ say what the lock and pyproject.toml have."""

import re
import tomllib

import pytest

from cfp_test.cli.cli_runner import ROOT
from third_party.dependencies import (
    LOCK,
    TABLE,
    Dependency,
    dependencies,
    purposes,
    read_lock,
    refused,
    rows,
    table,
)


def test_the_table_is_that_of_the_lock():
    made = table(dependencies(LOCK.read_text()))
    assert [row[:2] for row in rows(TABLE.read_text())] == [r[:2] for r in rows(made)]


def test_each_direct_dependency_has_a_purpose():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    lines = project["dependencies"] + [x for extra in optional.values() for x in extra]
    direct = {re.match(r"[\w.-]+", line)[0].lower() for line in lines} - {"cfp"}
    assert direct - set(purposes()) == set()
    for name, (_, needed_by) in read_lock(LOCK.read_text()).items():
        assert needed_by or name in purposes(), name


def test_licences_of_what_is_installed_are_allowed():
    assert refused(dependencies(LOCK.read_text())) == []


@pytest.mark.parametrize(
    ("licence", "good"),
    [
        ("Apache-2.0", True),
        ("MIT OR GPL-3.0", True),
        ("GPL-3.0-only", False),
        ("LGPL-2.1", False),
        ("BSD-3-Clause AND GPL-2.0", False),
        ("Other/Proprietary License", False),
        ("not stated", False),
    ],
)
def test_licences_are_judged(licence, good):
    found = Dependency(name="a", versions=("1",), needed_by=(), licence=licence)
    assert (refused([found]) == []) is good


def test_a_lock_says_what_came_with_what():
    text = (
        "a==1 \\\n    --hash=sha256:x\n    # via\n    #   b\n"
        "    #   cfp (pyproject.toml)\n"
        "b==2 ; python_version < '3.12' \\\n    --hash=sha256:y\n    # via c\n"
        "b==3 ; python_version >= '3.12'\n    # via d\n"
    )
    assert read_lock(text) == {
        "a": (("1",), ("b",)),
        "b": (("2", "3"), ("c", "d")),
    }
