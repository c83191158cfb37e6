"""The recorded programs of 4 H200, compiled for these where there is no GPU.

    python -m cfp_test.bench.one_as_n_compiled --out FILE [--first N] [--threads 2]
    python -m cfp_test.bench.one_as_n_compiled --out FILE --page  # into the page's JSON

Takes the wheels of JAX's CUDA plugin and of nvcc. Kernels are not tuned. Rows are
appended to FILE, a JSON object in a line, as programs are compiled: memory, and the
schedule from which the step is predicted. What stands there is not compiled again.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # Its plugin's own checks ask for a GPU.

from cfp.cli.session import Session, analyse
from cfp.cost.schedule import schedule_of
from cfp.devices.described import described
from cfp.profiling.builder import BuildEnvironment, Built, build
from cfp.profiling.compiler_options import UNTUNED
from cfp.targets import resolve
from cfp_test.bench.one_as_four import job_of
from cfp_test.bench.one_as_n_data import FILE, schedule_to_json, write_page
from cfp_test.bench.recorded import OPTIONS, Case, cases

_DEVICES = 4
# Those with names of race options come behind those that a race has in any case.
_LAST = ("small", "huge", "mid", "overlap4", "analytical", "sol_off", "notriton")


def rows(file: Path) -> list[dict[str, Any]]:
    """Reads the programs that were compiled already."""
    return [json.loads(line) for line in file.open()] if file.exists() else []


def to_page(found: list[dict[str, Any]]) -> None:
    """Keeps the memory of what was compiled in the JSON of `one_as_n_page`."""
    data = json.loads(FILE.read_text())
    names = ("target", "name", "peak_bytes")
    data["without_gpu"] = [
        {name: row[name] for name in names} for row in found if "failure" not in row
    ]
    write_page(data)


def in_turn(found: Sequence[Case]) -> list[Case]:
    """One of each model after another, so that wherever it ends there are some."""
    targets = [case.target for case in found]
    places = [targets[:place].count(target) for place, target in enumerate(targets)]
    order = sorted(range(len(found)), key=places.__getitem__)
    return [found[place] for place in order]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--first", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if options.page:
        to_page(rows(options.out))
        return
    mesh = described(f"{_DEVICES}xh200").by_compiler().stand_in
    assert mesh is not None
    known = {row["file"] for row in rows(options.out)}
    wanted = in_turn(sorted(cases(_DEVICES), key=lambda case: case.options in _LAST))
    wanted = [case for case in wanted[: options.first] if case.file not in known]
    sessions: dict[str, Session] = {}
    for case in wanted:
        if case.target not in sessions:
            words = case.target.split()
            sessions[case.target] = analyse(resolve(words[0], words[1:]), mesh)

    def compiled(case: Case) -> None:
        session = sessions[case.target]
        row: dict[str, Any] = {"file": case.file, "target": case.target}
        try:
            job = job_of(case, session, dict(OPTIONS[case.options]))
        except SystemExit as error:  # A kept plan of another program.
            print(error, flush=True)
            return
        started = time.perf_counter()
        environment = BuildEnvironment(always=UNTUNED)
        program = session.analysis.frame.program
        built = build(program, session.mesh, job, environment)
        row |= {"name": case.name, "seconds": round(time.perf_counter() - started, 1)}
        if isinstance(built, Built):
            schedule = schedule_of(built.compiled.as_text() or "").merged()
            row |= {"peak_bytes": built.peak_bytes, **schedule_to_json(schedule)}
        else:
            row["failure"] = f"{built.status}: {built.reason}"
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(case.file, row["seconds"], row.get("peak_bytes"), flush=True)

    with ThreadPoolExecutor(options.threads) as pool:
        list(pool.map(compiled, wanted))


if __name__ == "__main__":
    main()
