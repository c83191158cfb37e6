"""Which versions of which packages a platform gets: a lock with hashes.

pip judges markers such as ``python_version < "3.12"`` by the interpreter that runs it;
uv judges them by the platform that is asked for.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from build_jaxlib.platforms import Platform
from build_jaxlib.tools import ROOT, find_uv, run

_ENTRY = re.compile(r"^([A-Za-z0-9_.-]+)==(\S+)", re.MULTILINE)
# Versions that cfp's own tests run with.
TESTED = ROOT / "requirements" / "lock.txt"
# What install.sh runs, so that the other machine's Python needs none.
INSTALLER = ("pip",)


def resolve(
    platform: Platform, extras: Sequence[str] = (), requirements: Sequence[str] = ()
) -> str:
    """Locks what cfp needs there.

    Args:
        platform: where it will be installed.
        extras: of cfp, such as "dev".
        requirements: what else to install, as lines of requirements.

    Returns:
        A requirements file in which each package has one version, and the hashes of
        all wheels of that version.

    Raises:
        CfpError: no versions go together.
    """
    with tempfile.TemporaryDirectory() as made:
        wanted = Path(made) / "wanted.txt"
        lines = [platform.accelerator.requirement, *INSTALLER, *requirements]
        wanted.write_text("\n".join(lines) + "\n")
        limits = Path(made) / "limits.txt"
        own = platform.accelerator.constraints.read_text()
        tested = TESTED.read_text() if TESTED.exists() else ""
        limits.write_text(own + pins_but_for(tested, names(own)))
        extra = [word for name in extras for word in ("--extra", name)]
        tag = f"{platform.architecture}-manylinux_2_{platform.glibc}"
        return run(
            [
                *(find_uv(), "pip", "compile", "--quiet", "--no-header"),
                *("--python-platform", tag, "--python-version", platform.python),
                *("--generate-hashes", "--no-emit-index-url", "--only-binary", ":all:"),
                *("--constraints", limits, *extra, wanted, ROOT / "pyproject.toml"),
            ],
            attempt=f"loosen {platform.accelerator.constraints.relative_to(ROOT)}, or "
            "choose another --python",
        )


def pins_but_for(lock: str, left_out: set[str]) -> str:
    """A lock's pins as constraints, without hashes, and without some packages."""
    lines = [line.split("\\")[0].strip() for line in lock.splitlines()]
    pins = [line for line in lines if re.match(r"[A-Za-z0-9_.-]+==", line)]
    kept = [line for line in pins if line.split("==")[0] not in left_out]
    return "".join(f"{line}\n" for line in kept)


def names(constraints: str) -> set[str]:
    """The packages that lines of constraints speak of."""
    found = (re.match(r"[A-Za-z0-9_.-]+", line) for line in constraints.splitlines())
    return {match[0] for match in found if match}


def locked(lock: str) -> dict[str, str]:
    """Versions in a lock, by package."""
    return dict(_ENTRY.findall(lock))
