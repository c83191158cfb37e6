#!/usr/bin/env python3
"""Writes a module file for Lmod, so that ``module load cfp`` gives the command.

    sh WHEELHOUSE/install.sh /sw/cfp/0.1.0
    python build_jaxlib/modulefile.py /sw/cfp/0.1.0 --modules /sw/modulefiles \\
        --cache '$SCRATCH/cfp' --needs cuda/13
    module use /sw/modulefiles && module load cfp
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cfp.errors import CfpError

_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)\}")
_VERSION = "import importlib.metadata as m; print(m.version('cfp'))"


def module_file(
    environment: Path, version: str, *, cache: str = "", needs: Sequence[str] = ()
) -> str:
    """The text of a module file.

    Args:
        environment: where cfp is installed.
        version: of cfp.
        cache: where measurements go; ``$NAME`` is the user's variable of that name.
        needs: modules to load first.
    """
    where = quoted(str(environment))
    lines = [
        f"-- cfp {version}, installed in {environment}",
        f"whatis({quoted('Name: cfp')})",
        f"whatis({quoted('Version: ' + version)})",
        f"whatis({quoted('Description: automatic sharding for JAX')})",
        f"help({quoted('cfp --help lists the commands; cfp doctor says what works.')})",
        'conflict("cfp")',
        *(f"depends_on({quoted(name)})" for name in needs),
        f'prepend_path("PATH", pathJoin({where}, "bin"))',
        f'setenv("VIRTUAL_ENV", {where})',
        # A user's own packages would come before those of the environment.
        'setenv("PYTHONNOUSERSITE", "1")',
        'unsetenv("PYTHONHOME")',
    ]
    if cache:
        lines.append(f'setenv("CFP_CACHE_DIR", {expression(cache)})')
    return "\n".join(lines) + "\n"


def expression(text: str) -> str:
    """A text with ``$NAME`` in it, as Lua that looks the variables up when loading."""
    parts, last = [], 0
    for match in _VARIABLE.finditer(text):
        if match.start() > last:
            parts.append(quoted(text[last : match.start()]))
        parts.append(f'(os.getenv({quoted(match[1] or match[2])}) or "/tmp")')
        last = match.end()
    if last < len(text) or not parts:
        parts.append(quoted(text[last:]))
    return " .. ".join(parts)


def quoted(text: str) -> str:
    """A text as a literal of Lua, which escapes what it must as JSON does."""
    return json.dumps(text, ensure_ascii=False)


def installed_version(environment: Path) -> str:
    """The version of cfp in an environment.

    Raises:
        CfpError: there is none.
    """
    done = subprocess.run(
        [environment / "bin" / "python", "-c", _VERSION],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env={name: v for name, v in os.environ.items() if name != "PYTHONPATH"},
    )
    if done.returncode:
        raise CfpError(
            f"cfp is not installed in {environment}. Run sh "
            f"WHEELHOUSE/install.sh {environment}."
        )
    return done.stdout.strip()


def main() -> int:
    """Writes the file; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("environment", type=Path, help="where cfp is installed")
    parser.add_argument(
        "--modules",
        type=Path,
        default=Path("modulefiles"),
        help="the folder for `module use` (default: %(default)s)",
    )
    parser.add_argument("--cache", default="", help="CFP_CACHE_DIR of all users")
    parser.add_argument(
        "--needs", action="append", default=[], help="a module to load first"
    )
    options = parser.parse_args()
    environment = options.environment.resolve()
    try:
        version = installed_version(environment)
    except (CfpError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    path = options.modules / "cfp" / f"{version}.lua"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        module_file(environment, version, cache=options.cache, needs=options.needs)
    )
    print(f"Wrote {path}. Try it: module use {options.modules}; module load cfp")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
