#!/usr/bin/env python3
"""Writes third_party/dependencies.md: each package of the lock, its licence, and why.

    python third_party/dependencies.py          # writes the table
    python third_party/dependencies.py --check  # fails where licences are not allowed,
                                                # or the table is not that of the lock

Run it in an environment that has the lock's packages (`make install`): licences are
what those packages state.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from build_jaxlib.licences import stated

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LOCK = ROOT / "requirements" / "lock.txt"
TABLE = HERE / "dependencies.md"
# Licences that let cfp's Apache-2.0 stand, by words in what packages state.
ALLOWED = re.compile(
    r"\b(Apache|BSD|0BSD|MIT|MIT-0|MIT-CMU|HPND|ISC|PSF|Python Software Foundation|"
    r"CC0|Zlib|MPL|Mozilla|Unlicense|AFL)\b",
    re.IGNORECASE,
)
FORBIDDEN = re.compile(r"\b(AGPL|GPL|LGPL|SSPL|proprietary)\b", re.IGNORECASE)
_HEAD = re.compile(r"^([A-Za-z0-9_.-]+)==(\S+)")
_NOT_HERE = "not installed here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependency:
    """A package of the lock.

    Attributes:
        name: of the package.
        versions: in the lock; several where they depend on Python's version.
        needed_by: the packages that it comes with.
        licence: as the package states it.
    """

    name: str
    versions: tuple[str, ...]
    needed_by: tuple[str, ...]
    licence: str


def read_lock(text: str) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """A lock's packages: name -> (versions, packages that need it)."""
    versions: dict[str, list[str]] = {}
    needed: dict[str, set[str]] = {}
    name = ""
    for line in text.splitlines():
        if match := _HEAD.match(line):
            name = match[1].lower()
            versions.setdefault(name, []).append(match[2])
            needed.setdefault(name, set())
        elif name and line.startswith("    #"):
            words = line.strip().removeprefix("#").strip().removeprefix("via").strip()
            source = words.split(" ")[0]
            if source and source != "cfp":
                needed[name].add(source)
    return {n: (tuple(v), tuple(sorted(needed[n]))) for n, v in versions.items()}


def dependencies(text: str) -> list[Dependency]:
    """The packages of a lock, with the licences of those that are installed."""
    found = []
    for name, (versions, needed_by) in sorted(read_lock(text).items()):
        try:
            licence = stated(metadata.metadata(name))
        except metadata.PackageNotFoundError:
            licence = _NOT_HERE
        found.append(
            Dependency(
                name=name, versions=versions, needed_by=needed_by, licence=licence
            )
        )
    return found


def purposes() -> dict[str, str]:
    """What each direct dependency is for."""
    groups = tomllib.loads((HERE / "purposes.toml").read_text())
    return {name: said for group in groups.values() for name, said in group.items()}


def table(found: list[Dependency]) -> str:
    """The page."""
    said = purposes()
    lines = [
        "# What cfp depends on",
        "",
        "Made by `python third_party/dependencies.py` from `requirements/lock.txt`.",
        "Licences are what the packages themselves state. No sources of others are in",
        "this repository. Wheels for CUDA (`nvidia-*`) are under NVIDIA's own licence;",
        "a wheelhouse lists theirs in `licences/table.md`.",
        "",
        "| package | version | licence | for |",
        "|---|---|---|---|",
    ]
    for each in found:
        why = said.get(each.name) or f"comes with {', '.join(each.needed_by)}"
        versions = ", ".join(each.versions)
        lines.append(f"| {each.name} | {versions} | {each.licence} | {why} |")
    lines += ["", "Used where they are installed, and in no lock:", ""]
    groups = tomllib.loads((HERE / "purposes.toml").read_text())
    lines += [f"- {name}: {why}" for name, why in groups["optional"].items()]
    return "\n".join(lines) + "\n"


def refused(found: list[Dependency]) -> list[str]:
    """What speaks against the licences; one line for each package."""
    lines = []
    for each in found:
        if each.licence == _NOT_HERE:
            continue
        # "A OR B": one that is allowed will do.
        choices = re.split(r"\bOR\b", each.licence)
        if not any(ALLOWED.search(c) and not FORBIDDEN.search(c) for c in choices):
            lines.append(f"{each.name}: {each.licence}")
    return lines


def main() -> int:
    """Writes or checks; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    found = dependencies(LOCK.read_text())
    bad = refused(found)
    for line in bad:
        print(f"licence not allowed: {line}", file=sys.stderr)
    if not options.check:
        TABLE.write_text(table(found))
        print(f"Wrote {TABLE.relative_to(ROOT)}: {len(found)} packages.")
    elif [row[:2] for row in rows(TABLE.read_text())] != [
        row[:2] for row in rows(table(found))
    ]:
        print(
            "third_party/dependencies.md is not that of the lock. Run "
            "python third_party/dependencies.py",
            file=sys.stderr,
        )
        return 1
    else:
        print(f"{len(found)} packages, {len(bad)} with a licence that is not allowed.")
    return int(bool(bad))


def rows(page: str) -> list[list[str]]:
    """The cells of the page's table."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


if __name__ == "__main__":
    raise SystemExit(main())
