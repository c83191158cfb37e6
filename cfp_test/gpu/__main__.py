"""Checks cfp on this machine's GPUs, and prints a page to attach to an issue.

    python -m cfp_test.gpu                  # on all GPUs; --page FILE has the page, too
    python -m cfp_test.gpu --only "memory budget"
    python -m cfp_test.gpu --planted        # plants four faults: each must be caught
    python -m cfp_test.gpu --cpu 2          # the same on two virtual CPU devices, small

The exit code is 1 if anything failed. Each check has a process of its own: one that
dies or hangs is a line of the page. When the time of `--seconds` is over, what is left
has failed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path

from cfp_test.support.quick_flags import QUICK_FLAGS

SECONDS = 600.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cfp_test.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="one of them")
    parser.add_argument("--list", action="store_true", help="names of checks, faults")
    parser.add_argument("--planted", action="store_true", help="plant faults instead")
    parser.add_argument("--page", type=Path, metavar="FILE", help="a file for the page")
    parser.add_argument("--cpu", type=int, metavar="N", help="virtual CPU devices")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="in all")
    for hidden in ("--part", "--plant", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    return parser


def main() -> int:
    given = _parser().parse_args()
    if given.cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
        count = f"--xla_force_host_platform_device_count={given.cpu}"
        os.environ["XLA_FLAGS"] = f"{QUICK_FLAGS} {count}"
    words = ["--cpu", str(given.cpu)] if given.cpu else []
    from cfp_test.gpu.planted import FAULTS
    from cfp_test.gpu.suite import CHECKS, run_here

    if given.part:
        if given.plant is not None:
            FAULTS[given.plant].plant(setattr)
            words += ["--plant", given.plant]
        return run_here(given.part, Path(given.folder), words)
    names = list(FAULTS if given.planted else CHECKS)
    if given.list:
        print("\n".join([*CHECKS, *FAULTS]))
        return 0
    if unknown := {*(given.only or ())} - {*names}:
        print(
            f"No {', '.join(unknown)}; there are: {', '.join(names)}", file=sys.stderr
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="cfp_gpu_") as folder:
        return _run(given, given.only or names, Path(folder), words)


def _run(
    given: argparse.Namespace, names: list[str], folder: Path, words: list[str]
) -> int:
    from cfp_test.gpu.page import page, versions
    from cfp_test.gpu.place import Place
    from cfp_test.gpu.suite import (
        FAILED,
        FAULTS,
        described,
        run_all,
        run_check,
        run_planted,
    )

    end = time.monotonic() + given.seconds
    place = Place(folder, tuple(words))
    try:
        machine = described(place, given.seconds)
    except RuntimeError as error:
        print(f"JAX finds no devices: {error}", file=sys.stderr)
        return 1
    run = run_planted if given.planted else run_check
    count, _, kind = machine["devices"].partition(" × ")
    if not given.cpu and kind.endswith("(cpu)"):
        print(
            "Expected GPUs, and JAX finds CPUs only. Install cfp with "
            "\"pip install -e '.[cuda]'\", and see what `cfp doctor` says; or try the "
            "checks on virtual CPU devices, with --cpu 2.",
            file=sys.stderr,
        )
        return 1
    checks = [FAULTS[name].check if given.planted else name for name in names]
    outcomes = []
    for found in run_all(
        names,
        lambda name: run(name, place, int(count), end - time.monotonic()),
        checks,
    ):
        outcomes.append(found)
        print(
            f"{found.outcome}  {found.name}  {found.seconds:.0f} s  {found.said}",
            file=sys.stderr,
            flush=True,
        )
    outcomes.sort(key=lambda found: names.index(found.name))
    command = shlex.join(["python", "-m", "cfp_test.gpu", *sys.argv[1:]])
    text = page(command, {**machine, **versions()}, outcomes)
    if given.page:
        given.page.parent.mkdir(parents=True, exist_ok=True)
        given.page.write_text(text)
    print(text)
    return 1 if any(one.outcome == FAILED for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
