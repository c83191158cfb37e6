"""A slow link appears between two processes: the plan made with it, and without it.

    python cfp_test/scripts/slow_link.py FILE.json

Two network namespaces of this machine, a process with two virtual devices in each, and
a link between them (`cfp_test.distributed.slow_link`): fast at first, as fast as this
machine carries packets, then with 1 Gbit/s and 10 ms in each direction. Plans with
both, and times both plans over the slow link, in turn, in one run. Needs Linux, root
and iproute2. ``python -m cfp_test.results`` makes the page.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from cfp_test.distributed.several import Ended, described, ends, variables
from cfp_test.distributed.slow_link import Link, namespaces
from cfp_test.scripts.rows import Rows

WORKER = Path(__file__).parent / "slow_link_worker.py"
PORT = 5544
BYTES_PER_SECOND, DELAY_SECONDS = 125e6, 0.010
DEVICES = 2


def run(link: Link, folder: Path, *words: str) -> dict:
    """One program of two processes, one on each side.

    Raises:
        RuntimeError: one of them failed.
    """
    started = []
    for side in range(2):
        env = variables(side, 2, PORT, DEVICES)
        env["CFP_COORDINATOR"] = f"{link.addresses[0]}:{PORT}"
        # What is timed here is optimised as ever.
        env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
        command = [sys.executable, str(WORKER), words[0], str(folder), *words[1:]]
        started.append(
            subprocess.Popen(
                link.command(side, command),
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    found: list[Ended] = ends(started)
    lines = [line for line in found[0].out.splitlines() if line.startswith("ROW ")]
    if any(one.code for one in found) or not lines:
        raise RuntimeError(described(found))
    return json.loads(lines[0].removeprefix("ROW "))


def main() -> None:
    """Plans with the fast link and the slow one, and times both over the slow one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    head = {
        "mesh": "x=2 across, y=2 inside",
        "bytes_per_second": BYTES_PER_SECOND,
        "delay_seconds": DELAY_SECONDS,
        "cores": os.cpu_count(),
    }
    rows = Rows(given.file, head)
    with tempfile.TemporaryDirectory() as place, namespaces() as link:
        folder = Path(place)
        rows.add({"what": "plan", "link": "fast", **run(link, folder, "plan", "fast")})
        print(json.dumps(rows.rows[-1]), flush=True)
        link.bytes_per_second, link.delay_seconds = BYTES_PER_SECOND, DELAY_SECONDS
        rows.add({"what": "plan", "link": "slow", **run(link, folder, "plan", "slow")})
        print(json.dumps(rows.rows[-1]), flush=True)
        timed = run(link, folder, "time", "fast", "slow")
        rows.add({"what": "time", "link": "slow", **timed})
        print(json.dumps(rows.rows[-1]), flush=True)


if __name__ == "__main__":
    main()
