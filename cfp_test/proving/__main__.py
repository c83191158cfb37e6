"""Proves the rules of the installed jaxlib: ``python -m cfp_test.proving``.

Each entry of the catalogue runs in a process of its own, since XLA ends the process
over some programs; such an entry goes on with one sharding at a time. With ``--keep``
the outcomes are kept in a folder as soon as they are known, and a run that was ended
goes on from there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cfp_test.cli.cli_runner import ROOT
from cfp_test.proving.catalogue import ENTRIES
from cfp_test.support.quick_flags import QUICK_FLAGS

_FLAGS = f"{QUICK_FLAGS} --xla_force_host_platform_device_count=8"
_AT_ONCE = 96  # shardings in a program


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the outcomes go")
    parser.add_argument(
        "--keep", type=Path, help="folder of what is known; a run goes on from there"
    )
    parser.add_argument(
        "--only", action="append", choices=sorted(ENTRIES), help="entries, by name"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--child", help="one entry, in this process")
    parser.add_argument("--skip", type=int, default=0, help="shardings to leave out")
    parser.add_argument("--one-by-one", action="store_true")
    options = parser.parse_args(words)
    if options.child:
        one_by_one = options.one_by_one
        _prove_entry(options.child, options.json, options.skip, one_by_one=one_by_one)
        return 0
    names = options.only or list(ENTRIES)
    with TemporaryDirectory() as temporary, ThreadPoolExecutor(options.jobs) as pool:
        folder = (options.keep or Path(temporary)) / _digest()
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"{name}.jsonl" for name in names]
        entries = list(pool.map(_in_process, names, files))
    from cfp_test.proving.summary import summary

    found = [one for outcomes, _ in entries for one in outcomes]
    seconds = sum(each for _, each in entries)
    data = summary(found, seconds, names)
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    for one in (*data["wrong"], *data["unkept"], *data["missing"]):
        print(one)
    print(
        f"{data['checks']} checks, {len(data['wrong'])} wrong, "
        f"{data['processor_seconds']} processor seconds"
    )
    return int(bool(data["wrong"] or data["unkept"] or data["missing"]))


def _digest() -> str:
    """A digest of what decides outcomes: jaxlib's release, and the code of both rooms.

    What is known of other code, or of another jaxlib, is not known of this.
    """
    found = hashlib.sha256(version("jaxlib").encode())
    rooms = (ROOT / "cfp" / "program", ROOT / "cfp" / "analysis", Path(__file__).parent)
    for file in sorted(file for room in rooms for file in room.rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def _in_process(name: str, file: Path) -> tuple[list[dict[str, Any]], float]:
    """Proves an entry in processes; outcomes, and processor seconds that they took.

    Where a process ends over a program, its shardings run one by one in the next.

    Args:
        name: of the entry.
        file: lines of JSON, with what is known already.
    """
    environment = {**os.environ, "XLA_FLAGS": _FLAGS, "JAX_PLATFORMS": "cpu"}
    file.touch()
    _drop_unfinished(file)
    one_by_one = False
    while not (lines := _lines(file)) or "done" not in lines[-1]:
        command = [sys.executable, "-m", "cfp_test.proving", "--child", name]
        command += ["--json", str(file), "--skip", str(sum("op" in x for x in lines))]
        command += ["--one-by-one"] * one_by_one
        ended = subprocess.run(
            command, env=environment, check=False, capture_output=True, text=True
        )
        if ended.returncode > 0:
            raise RuntimeError(f"{name}: {ended.stderr[-3000:]}")
        _drop_unfinished(file)
        *_, last = _lines(file) or [{}]
        if ended.returncode and one_by_one and "begun" in last:
            _append(file, {**last["begun"], "trouble": f"signal {-ended.returncode}"})
        one_by_one = bool(ended.returncode)
    seconds = sum(line.get("seconds", 0.0) for line in lines)
    outcomes = [line for line in lines if "op" in line]
    print(f"{name}: {len(outcomes)} checks, {seconds:.0f} s", flush=True)
    return outcomes, seconds


def _drop_unfinished(file: Path) -> None:
    """Takes a line away that a run which was ended has not written to its end."""
    text = file.read_text()
    file.write_text(text[: text.rfind("\n") + 1])


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _append(file: Path, line: Any) -> None:
    with file.open("a") as out:
        print(json.dumps(line), file=out)


def _prove_entry(name: str, file: Path, skip: int, *, one_by_one: bool) -> None:
    """Proves an entry; each outcome is a line of a file as soon as it is known.

    Args:
        name: of the entry.
        file: to add to.
        skip: shardings that are known.
        one_by_one: whether to run as many as one program holds, each by itself.
    """
    from cfp_test.proving.engine import begun, jobs, prove
    from cfp_test.proving.programs import MESHES, mesh_of, singles_of

    now = 0.0
    some = singles_of(name)
    todo = [(mesh, job) for mesh in MESHES for job in jobs(some, mesh_of(mesh))][skip:]
    at_once = 1 if one_by_one else _AT_ONCE
    taken = todo[:_AT_ONCE] if one_by_one else todo
    with file.open("a") as out:
        for mesh in MESHES:
            mine = [job for where, job in taken if where == mesh]
            for start in range(0, len(mine), at_once):
                chunk = mine[start : start + at_once]
                if one_by_one:
                    first = asdict(begun(*chunk[0], mesh_of(mesh)))
                    print(json.dumps({"begun": first}), file=out, flush=True)
                for one in prove(chunk, mesh_of(mesh), at_once):
                    print(json.dumps(asdict(one)), file=out, flush=True)
                before, now = now, time.process_time()
                print(json.dumps({"seconds": now - before}), file=out, flush=True)
        if len(taken) == len(todo):
            print(json.dumps({"done": name}), file=out)


if __name__ == "__main__":
    sys.exit(main())
