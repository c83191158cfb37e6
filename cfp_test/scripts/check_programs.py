"""Plans programs, runs them for two steps, and compares every result with one device.

    python cfp_test/scripts/check_programs.py [NAME ...] [--mesh x=4] [--out FILE]

The programs are those of cfp_test/programs, or with ``--file`` the functions
``*_step()`` of a file, which return ``(step, arguments)`` like them. Prints a line of
JSON for each program and mesh; exit code 1 if any fails.
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
from collections.abc import Callable
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# Values are checked here, not times: to compile without optimising takes half as long.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax

from cfp_test.checking import MeshSizes
from cfp_test.planned import QUICK, RACED, check_program
from cfp_test.programs.registry import PROGRAMS


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


def run(name: str, make: Callable, mesh: str, cache: Path, race: bool) -> dict:
    """One line of the table."""
    settings = RACED if race else QUICK
    try:
        found = check_program(name, make, mesh_sizes(mesh), cache, settings)
    except Exception as error:  # whatever it is, the other programs are to be seen
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        return {"name": name, "mesh": mesh, "passed": False, "error": text}
    return {**dataclasses.asdict(found), "passed": not found.failed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="by default all programs")
    parser.add_argument("--mesh", action="append", help="by default x=4 and x=2,y=2")
    parser.add_argument("--file", type=Path, help="a file with other programs")
    parser.add_argument("--race", action="store_true", help="race the finalists, too")
    parser.add_argument("--out", type=Path, help="append the lines to a file")
    options = parser.parse_args()
    programs = programs_of(options.file) if options.file else PROGRAMS
    failed = 0
    with tempfile.TemporaryDirectory() as cache:
        for name in options.names or programs:
            make = programs[name]
            for mesh in options.mesh or ["x=4", "x=2,y=2"]:
                if getattr(make, "mesh", mesh_sizes(mesh)) != mesh_sizes(mesh):
                    continue  # It names another mesh itself.
                row = run(name, make, mesh, Path(cache), options.race)
                failed += not row["passed"]
                line = json.dumps(row)
                print(line, flush=True)
                if options.out:
                    with options.out.open("a") as file:
                        file.write(line + "\n")
            jax.clear_caches()
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
