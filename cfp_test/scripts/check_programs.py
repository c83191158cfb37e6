"""Plans programs, runs them for two steps, and compares every result with one device.

    python cfp_test/scripts/check_programs.py [NAME ...] [--mesh x=4] [--out FILE.json]

The programs are those of cfp_test/programs, or with ``--file`` the functions
``*_step()`` of a file, which return ``(step, arguments)`` like them. Where a plan
shards nothing, as is fastest for most programs of this size, the preset that shards
most is checked, too. Prints a line of JSON for each; exit code 1 if any fails.

With ``--out`` the rows are kept in a JSON file, and what it has rows of is not run
again, so that a run that was ended goes on; ``python -m cfp_test.results`` makes the
page of them.
"""

import argparse
import dataclasses
import importlib.util
import inspect
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Values are checked here, not times: not to optimise compiles in half the time.
    os.environ["XLA_FLAGS"] = (
        "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    )
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax

from cfp_test.programs.planned import QUICK, RACED, check_program
from cfp_test.programs.registry import PROGRAMS
from cfp_test.scripts.rows import Rows
from cfp_test.support.checking import MeshSizes

LEVEL = 0  # as above
MESHES = ("x=4", "x=2,y=2")


def mesh_sizes(text: str) -> MeshSizes:
    """``x=2,y=2`` as pairs."""
    pairs = (part.split("=") for part in text.split(","))
    return tuple((name, int(size)) for name, size in pairs)


def programs_of(file: Path) -> dict[str, Callable]:
    """The programs that a file makes."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return {
        name.removesuffix("_step"): make
        for name, make in inspect.getmembers(module, inspect.isfunction)
        if name.endswith("_step") and make.__module__ == module.__name__
    }


def run(
    name: str, make: Callable, mesh: str, cache: Path, race: bool, sharding: bool
) -> dict:
    """One row: of what is planned, or of the preset that shards most."""
    settings = RACED if race else QUICK
    row = {"name": name, "mesh": mesh, "sharding": sharding}
    try:
        found = check_program(name, make, mesh_sizes(mesh), cache, settings, sharding)
    except Exception as error:  # whatever it is, the other programs are to be seen
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        return {**row, "passed": False, "error": text}
    return {**row, **dataclasses.asdict(found), "passed": not found.failed}


def run_all(
    programs: Mapping[str, Callable], meshes: list[str], rows: Rows, race: bool
) -> int:
    """Runs what there is no row of; returns how many rows of these failed."""
    failed = 0
    with tempfile.TemporaryDirectory() as cache:
        for name, make in programs.items():
            for mesh in meshes:
                if getattr(make, "mesh", mesh_sizes(mesh)) != mesh_sizes(mesh):
                    continue  # It names another mesh itself.
                for sharding in (False, True):
                    row = rows.find(name=name, mesh=mesh, sharding=sharding)
                    if row is None:
                        row = run(name, make, mesh, Path(cache), race, sharding)
                        rows.add(row)
                        print(json.dumps(row), flush=True)
                    failed += not row["passed"]
                    sharded = row.get("sharded", {})
                    if sharded.get("arguments") or sharded.get("blocks"):
                        break
            jax.clear_caches()
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="by default all programs")
    parser.add_argument("--mesh", action="append", help="by default x=4 and x=2,y=2")
    parser.add_argument("--file", type=Path, help="a file with other programs")
    parser.add_argument("--race", action="store_true", help="race the candidates, too")
    parser.add_argument("--out", type=Path, help="keep the rows in a file, and go on")
    options = parser.parse_args()
    every = programs_of(options.file) if options.file else PROGRAMS
    programs = {name: every[name] for name in options.names or every}
    head = {
        "meshes": list(MESHES),
        "optimization_level": LEVEL,
        "race": options.race,
    }
    rows = Rows(options.out, head, {"programs": list(every)})
    sys.exit(run_all(programs, options.mesh or [*MESHES], rows, options.race) > 0)


if __name__ == "__main__":
    main()
