"""``python -m cfp`` is the ``cfp`` command."""

from __future__ import annotations

import gc
import sys

OLDEST_PYTHON = (3, 11)


def main() -> None:
    """The entry point of the ``cfp`` command.

    `cfp doctor` needs neither JAX nor any other package, so that it can say what is
    missing; all other commands load what they need.
    """
    if sys.version_info < OLDEST_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        sys.exit(
            f"cfp needs Python 3.11, 3.12 or 3.13; this is {found}, {sys.executable}.\n"
            "  try: python3.11 -m venv, and install cfp there"
        )
    if sys.argv[1:2] == ["doctor"]:
        from cfp.cluster.doctor import main as doctor

        sys.exit(doctor(sys.argv[2:]))
    # While modules are loaded nothing is garbage, and what they hold stays: looking at
    # it again and again took the collector a third of the time until a command begins.
    gc.disable()
    try:
        from cfp.cli import main as command
    except KeyboardInterrupt:
        print("error: Interrupted.", file=sys.stderr)
        sys.exit(130)
    gc.freeze()
    gc.enable()
    command()


if __name__ == "__main__":
    main()
