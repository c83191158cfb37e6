"""Proves the rules of the installed jaxlib: ``python -m cfp_test.proving``.

Each entry of the catalogue runs in a process of its own, since XLA ends the process
over some programs; such an entry runs again with one sharding at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cfp_test.quick_flags import QUICK_FLAGS
from cfp_test.results.pages import RESULTS

_FLAGS = f"{QUICK_FLAGS} --xla_force_host_platform_device_count=8"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the outcomes go")
    parser.add_argument(
        "--page", action="store_true", help="the JSON goes beside the pages of results"
    )
    parser.add_argument("--only", action="append", help="entries, by name")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--child", help="one entry, in this process")
    parser.add_argument("--skip", type=int, default=0, help="shardings to leave out")
    parser.add_argument("--at-once", type=int, default=96)
    options = parser.parse_args(words)
    if options.child:
        _prove_entry(options.child, options.json, options.skip, options.at_once)
        return 0
    from cfp_test.proving.catalogue import ENTRIES

    names = options.only or list(ENTRIES)
    started = time.perf_counter()
    with ThreadPoolExecutor(options.jobs) as pool:
        found = [one for some in pool.map(_in_process, names) for one in some]
    from cfp_test.proving.page import summary

    data = summary(found, time.perf_counter() - started, whole=not options.only)
    file = options.json
    if options.page:
        release, month = data["jaxlib"].replace(".", "_"), time.strftime("%Y%m")
        file = RESULTS / f"rules_{release}_{month}.json"
    if file:
        file.write_text(json.dumps(data, indent=1) + "\n")
    for one in (*data["wrong"], *data["missing"]):
        print(one)
    print(f"{data['checks']} checks, {len(data['wrong'])} wrong, {data['seconds']} s")
    return int(bool(data["wrong"] or data["missing"]))


def _in_process(name: str) -> list[dict[str, Any]]:
    """Proves an entry in a process, and again one by one where that process ends."""
    environment = {**os.environ, "XLA_FLAGS": _FLAGS, "JAX_PLATFORMS": "cpu"}
    lines: list[dict[str, Any]] = []
    at_once = 96
    with TemporaryDirectory() as folder:
        while True:
            file = Path(folder) / "outcomes"
            file.write_text("")
            command = [sys.executable, "-m", "cfp_test.proving", "--child", name]
            command += ["--json", str(file), "--skip", str(len(lines))]
            command += ["--at-once", str(at_once)]
            ended = subprocess.run(
                command, env=environment, check=False, capture_output=True, text=True
            )
            new = [json.loads(line) for line in file.read_text().splitlines()]
            if ended.returncode == 0:
                return [*lines, *(one for one in new if "op" in one)]
            if ended.returncode > 0:
                raise RuntimeError(f"{name}: {ended.stderr[-3000:]}")
            done = [one for one in new if "op" in one]
            if at_once == 1:
                begun = new[-1]["begun"]
                done.append({**begun, "trouble": f"signal {-ended.returncode}"})
            lines, at_once = [*lines, *done], 1


def _prove_entry(name: str, file: Path, skip: int, at_once: int) -> None:
    """Proves an entry; each outcome is a line of a file as soon as it is known."""
    from cfp_test.proving.engine import begun, jobs, prove
    from cfp_test.proving.programs import MESHES, mesh_of, singles_of

    some = singles_of(name)
    todo = [(mesh, job) for mesh in MESHES for job in jobs(some, mesh_of(mesh))][skip:]
    with file.open("a") as out:
        for mesh in MESHES:
            mine = [job for where, job in todo if where == mesh]
            for start in range(0, len(mine), at_once):
                chunk = mine[start : start + at_once]
                if at_once == 1:
                    first = asdict(begun(*chunk[0], mesh_of(mesh)))
                    print(json.dumps({"begun": first}), file=out, flush=True)
                for one in prove(chunk, mesh_of(mesh), at_once):
                    print(json.dumps(asdict(one)), file=out, flush=True)


if __name__ == "__main__":
    sys.exit(main())
