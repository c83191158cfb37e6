"""The command ``cfp doctor``. It needs nothing but Python's own library."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from cfp.cluster.doctor.checks import CHECKS, examine, with_needs
from cfp.cluster.doctor.machine import Machine
from cfp.cluster.doctor.result import Status, document, row, summary

_WIDEST = 120
INTERRUPTED = 130


def main(words: Sequence[str]) -> int:
    """Examines this machine.

    Args:
        words: the command's own words, without ``cfp doctor``.

    Returns:
        0 if no check failed, 1 if one did; 2 for words that are not understood.
    """
    options = _parser().parse_args(words)
    if options.list:
        for check in CHECKS:
            print(f"{check.name:<16}{check.summary}")
        return 0
    machine = Machine.here(cache=options.cache, timeout_s=options.timeout)
    checks = with_needs(options.only) if options.only else CHECKS
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    results = []
    try:
        for result in examine(machine, checks):
            results.append(result)
            if not options.json:
                print(row(result, width), flush=True)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
    if options.json:
        print(json.dumps(document(machine, results), indent=2))
    else:
        print(f"\n{summary(results)}")
    return int(any(result.status is Status.FAIL for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cfp doctor",
        description="Checks this machine for planning, with a remedy for each failure. "
        "Works where JAX is missing or broken. The exit code is 0 if nothing failed, "
        "else 1.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--only",
        action="append",
        choices=[check.name for check in CHECKS],
        metavar="NAME",
        help="this check and those that it needs; may be given several times",
    )
    parser.add_argument("--list", action="store_true", help="list the checks")
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="examine this cache directory in place of the one that cfp would use",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=120,
        metavar="S",
        help="time limit of one check, in seconds (default: %(default)g)",
    )
    return parser
