"""Runs many random steps in processes of their own, and keeps what they found.

A process checks some programs and ends: what XLA aborts ends that process alone, and
is a row like any other.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from cfp_test.random_steps.check import as_row, check, twin_of
from cfp_test.random_steps.program import draw_spec
from cfp_test.random_steps.ways import BUDGET, PLANNED, Way, draw_ways

# Programs of one process: in one, jaxlib 0.10.2 dies after some hundreds of others.
SLICE = 40
# Of one program under all ways; what takes longer hangs.
MOST_SECONDS = 900
TWIN_SHARE, PLANNED_SHARE = 0.15, 0.12
# Ways drawn for each that is wanted: of small programs most are alike.
DRAWS = 6


def ways_of(seed: int, strategies: int) -> list[Way]:
    """The ways in which a seed's program is sharded."""
    rng = random.Random(f"run {seed}")
    ways = draw_ways(seed, DRAWS * strategies)
    if rng.random() < PLANNED_SHARE:
        ways[1:2] = [Way(rng.choice((PLANNED, BUDGET)), rng.randrange(10**6))]
    return ways


def has_twin(seed: int) -> bool:
    """Returns True if a seed's program has another beside it, with the same types."""
    return random.Random(f"twin {seed}").random() < TWIN_SHARE


def check_seed(seed: int, strategies: int, executables: Path) -> list[dict[str, Any]]:
    """Rows of a seed's program, and of its twin, if it has one."""
    spec, ways = draw_spec(seed), ways_of(seed, strategies)
    if not has_twin(seed):
        return [as_row(seed, check(spec, ways, most=strategies))]
    # One after another from one folder of executables: neither may run the other's.
    twin = twin_of(spec)
    first = check(spec, ways, executables, strategies)
    second = check(twin, ways[:1], executables)
    return [as_row(seed, first), as_row(seed, second)]


def run_slice(seeds: list[int], strategies: int, file: Path) -> None:
    """Checks some seeds, and writes a line for each row as it is made."""
    with tempfile.TemporaryDirectory() as folder, file.open("a") as out:
        for seed in seeds:
            print(json.dumps({"started": seed}), file=out, flush=True)
            for row in check_seed(seed, strategies, Path(folder)):
                print(json.dumps(row), file=out, flush=True)
            print(json.dumps({"done": seed}), file=out, flush=True)


def read(file: Path) -> tuple[list[dict[str, Any]], set[int]]:
    """The rows of a journal, and the seeds that are done."""
    rows, done = [], set[int]()
    if file.exists():
        for line in file.read_text().splitlines():
            row = json.loads(line)
            if "done" in row:
                done.add(row["done"])
            elif "started" not in row:
                rows.append(row)
    return [row for row in rows if row["seed"] in done], done


def run(
    first: int, programs: int, strategies: int, file: Path, seconds: float
) -> Counter[str]:
    """Checks programs of consecutive seeds, those that the file does not have.

    Args:
        first: the first seed.
        programs: how many seeds.
        strategies: how many ways for each.
        file: a line for each row.
        seconds: no process is started after so many.

    Returns:
        How many ways had each outcome.
    """
    started = time.monotonic()
    known = read(file)[1].intersection(range(first, first + programs))
    if known:
        print(f"{len(known)} of {programs} programs are in {file} already", flush=True)
    while time.monotonic() - started < seconds:
        _, done = read(file)
        left = [s for s in range(first, first + programs) if s not in done][:SLICE]
        if not left:
            break
        _run_process(left, strategies, file)
        print(_told(file), flush=True)
    return totals(read(file)[0])


def _run_process(seeds: list[int], strategies: int, file: Path) -> None:
    text = ",".join(map(str, seeds))
    command = [sys.executable, "-m", "cfp_test.random_steps", "--slice", text]
    command += ["--strategies", str(strategies), "--json", str(file)]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "XDG_CACHE_HOME": cache}
        limit = MOST_SECONDS + 60.0 * len(seeds)
        try:
            code = subprocess.run(
                command,
                env=environment,
                timeout=limit,
                check=False,
                stderr=subprocess.PIPE,
                text=True,
            )
        except subprocess.TimeoutExpired:
            _note_death(seeds, file, "hung")
            return
    if code.returncode:
        lines = code.stderr.splitlines()
        told = [line for line in lines if "Check failed" in line] or lines[-6:]
        tail = " | ".join(told)[-900:]
        _note_death(seeds, file, f"exit {code.returncode}: {tail}")


def _note_death(seeds: list[int], file: Path, how: str) -> None:
    """Adds a row for the program at which a process died."""
    _, done = read(file)
    started = [
        row["started"]
        for row in map(json.loads, file.read_text().splitlines())
        if "started" in row
    ]
    at = started[-1] if started and started[-1] not in done else seeds[0]
    row = {"seed": at, "note": "", "kinds": [], "ways": [["", 0, "died", how]]}
    with file.open("a") as out:
        print(json.dumps(row), file=out)
        print(json.dumps({"done": at}), file=out)


def totals(rows: list[dict[str, Any]]) -> Counter[str]:
    """Counts ways by their outcomes, and programs that are of no use."""
    found = Counter(way[2] for row in rows for way in row["ways"])
    found["of no use"] = sum(bool(row["note"]) for row in rows)
    found["programs"] = len(rows)
    return found


def _told(file: Path) -> str:
    counts = totals(read(file)[0])
    parts = (f"{count} {name}" for name, count in counts.most_common())
    return f"{time.strftime('%H:%M:%S')} in {file}: {', '.join(parts)}"
