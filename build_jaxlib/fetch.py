"""Fetches the wheels of a lock, and writes down what came."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

from build_jaxlib.platforms import Platform
from build_jaxlib.tools import ROOT, run

SUMS = "SHA256SUMS"


def fetch(platform: Platform, lock: Path, wheels: Path) -> None:
    """Downloads what a lock names for a platform; pip checks the hashes.

    Raises:
        CfpError: something cannot be had.
    """
    digits = platform.python.replace(".", "")
    tags = [word for tag in platform.tags for word in ("--platform", tag)]
    abis = [word for abi in (f"cp{digits}", "abi3", "none") for word in ("--abi", abi)]
    run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--require-hashes", "--only-binary", ":all:", "--dest", wheels),
            *("--python-version", platform.python, "--implementation", "cp"),
            *(*abis, *tags, "--requirement", lock),
        ],
        attempt="see that the network is there, and run it again: what came is kept",
    )


def build_cfp(wheels: Path) -> None:
    """Builds cfp's own wheel, from this clone.

    Raises:
        CfpError: it cannot be built.
    """
    for old in wheels.glob("cfp-*.whl"):
        old.unlink()
    run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"),
            *("--wheel-dir", wheels, ROOT),
        ],
        attempt="pip install --upgrade pip setuptools",
    )


def exact_lock(wheels: Iterable[Path]) -> str:
    """A lock that allows these wheels and no others: one hash for each."""
    lines = []
    for wheel in sorted(wheels):
        described = metadata(wheel)
        name = described["Name"].lower().replace("_", "-")
        lines.append(f"{name}=={described['Version']} --hash=sha256:{digest(wheel)}\n")
    return "".join(lines)


def metadata(wheel: Path):
    """The fields of a wheel's METADATA."""
    with ZipFile(wheel) as archive:
        (name,) = (
            n
            for n in archive.namelist()
            if n.endswith(".dist-info/METADATA") and n.count("/") == 1
        )
        return HeaderParser().parsestr(archive.read(name).decode())


def digest(file: Path) -> str:
    """A file's SHA-256, as hexadecimal digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def write_sums(folder: Path) -> None:
    """Lists the SHA-256 of all files below a folder; ``sha256sum -c`` checks them."""
    files = sorted(f for f in folder.rglob("*") if f.is_file() and f.name != SUMS)
    lines = [f"{digest(f)}  {f.relative_to(folder).as_posix()}\n" for f in files]
    (folder / SUMS).write_text("".join(lines))
