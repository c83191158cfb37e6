"""Checks random steps under random shardings against one device.

    python -m cfp_test.random_steps --seed 0 --programs 1000 --strategies 10 --json F

F gets a line for each program as it is done, and a run that is started again goes on
where it was, whatever has changed since: take another file for other code. Counts are
of programs under a strategy ("again": constraints that the program had before), and of
programs; of some a twin is checked, too, and some are of no use, since rounding decides
what they compute. What is wrong is shown with the command that shrinks it:

    python -m cfp_test.random_steps --shrink SEED --strategies 10
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from cfp_test.support.quick_flags import QUICK_FLAGS


def prepare() -> None:
    """Eight virtual CPU devices, before JAX is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    count = "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = f"{QUICK_FLAGS} {count}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="cfp_test.random_steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--strategies", type=int, default=10, help="for each program")
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("random_steps.jsonl"),
        help="rows; default: %(default)s",
    )
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--shrink", type=int, metavar="SEED")
    parser.add_argument("--slice", help=argparse.SUPPRESS)
    given = parser.parse_args()
    prepare()
    from cfp_test.random_steps.run import read, run, run_slice

    if given.slice:
        seeds = [int(seed) for seed in given.slice.split(",")]
        run_slice(seeds, given.strategies, given.json)
        return 0
    if given.shrink is not None:
        from cfp_test.random_steps.shrink import shrink_seed

        print(shrink_seed(given.shrink, given.strategies))
        return 0
    counts = run(
        given.seed, given.programs, given.strategies, given.json, given.seconds
    )
    for row in read(given.json)[0]:
        for source, seed, outcome, why in row["ways"]:
            if outcome in ("wrong", "died"):
                print(f"seed {row['seed']}, {source} {seed}: {outcome}: {why}")
    return 1 if counts["wrong"] or counts["died"] else 0


if __name__ == "__main__":
    sys.exit(main())
