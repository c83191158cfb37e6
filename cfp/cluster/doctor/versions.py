"""Installed packages and their versions, without importing any of them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from operator import eq, ge, gt, le, lt, ne

from cfp.cluster.doctor.machine import PACKAGE_ROOT, Machine

_OPERATORS = {">=": ge, "<=": le, "==": eq, "!=": ne, ">": gt, "<": lt}
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(?:\[[^]]*\])?\s*([^;]*?)\s*(;.*)?")
_CLAUSE = re.compile(r"(>=|<=|==|!=|>|<|~=)\s*([0-9][0-9.]*)")
# Names of JAX's plugins for GPUs.
GPU_PLUGIN = r"jax-(cuda1[23]|rocm\w*)-(plugin|pjrt)"
_EXTRA = re.compile(r"extra\s*==")


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A package that is needed.

    Attributes:
        name: of the package.
        versions: a range, as in ``>=0.10.2,<0.13``; empty for any.
    """

    name: str
    versions: str

    def allows(self, version: str) -> bool:
        """Returns True if a version will do."""
        found = release(version)
        for sign, text in _CLAUSE.findall(self.versions):
            wanted = release(text)
            if sign == "~=":
                up_to = (*wanted[:-2], wanted[-2] + 1)
                if not (_padded(wanted) <= _padded(found) < _padded(up_to)):
                    return False
            elif not _OPERATORS[sign](_padded(found), _padded(wanted)):
                return False
        return True


def installed(machine: Machine, name: str) -> str | None:
    """Returns the version in a package's metadata; None if it is missing."""
    places = list(machine.search_path)
    for found in metadata.distributions(name=name, path=places):
        return found.version
    return None


def names_like(machine: Machine, pattern: str) -> dict[str, str]:
    """Finds all packages with a name that matches; versions by name."""
    found: dict[str, str] = {}
    for each in metadata.distributions(path=list(machine.search_path)):
        name = re.sub(r"[-_.]+", "-", each.metadata["Name"] or "").lower()
        if re.fullmatch(pattern, name):
            found.setdefault(name, each.version)
    return dict(sorted(found.items()))


def requirements(machine: Machine) -> list[Requirement]:
    """Reads cfp's requirements, from its pyproject.toml or its installed metadata."""
    project = PACKAGE_ROOT / "pyproject.toml"
    lines: Iterable[str]
    if project.is_file():
        lines = tomllib.loads(project.read_text())["project"]["dependencies"]
    else:
        found = list(metadata.distributions(name="cfp", path=list(machine.search_path)))
        lines = (found[0].requires or []) if found else []
    return [parse(line) for line in lines if not _EXTRA.search(line)]


def parse(line: str) -> Requirement:
    """Reads a line such as ``jax[cuda13]>=0.10.2,<0.13``."""
    match = _REQUIREMENT.fullmatch(line)
    if match is None:
        raise ValueError(f"not a requirement: {line!r}")
    return Requirement(name=match[1], versions=match[2].strip("() "))


def release(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version: ``0.11.2.dev1`` gives (0, 11, 2)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else (0,)


def same_release(one: str, other: str) -> bool:
    """Returns True if the first three numbers of two versions agree."""
    return _padded(release(one))[:3] == _padded(release(other))[:3]


def _padded(numbers: tuple[int, ...]) -> tuple[int, ...]:
    return (*numbers, 0, 0, 0, 0)[:4]
