"""The command ``cfp operators``, also ``python -m cfp.operators``.

Prints tables by shape and implementation; ``--json FILE`` also writes the results.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from shutil import which
from typing import Any, NoReturn

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from cfp.errors import CfpError
from cfp.operators import benchmark, known, matching
from cfp.operators.benchmark import FAILED, MEASURED, WRONG, Row
from cfp.operators.cases import LIMITS, Shape, refusal
from cfp.operators.operator import Operator
from cfp.printable import columns
from cfp.view.console import literal_console

_PASSES = {"forward": "forward", "both": "forward and backward"}
_PACKAGES = (
    *("cfp", "jax", "jaxlib", "flax", "jax-cuda13-plugin", "jax-cuda12-plugin"),
    *("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
)

# GPT-2 medium (as BERT-large), and a wide model with short and long sequences.
SHAPES = ("8,1024,1024,16,50257", "16,512,8192,64,50264", "4,2048,8192,64,50264")
# Small default on CPUs, to try the command.
CPU_SHAPES = ("2,128,128,4,1024",)


def environment() -> dict[str, Any]:
    """Describes device, commit, Python and packages; None for unknown values."""
    device = jax.devices()[0]
    installed = {one.name: one.version for one in metadata.distributions()}
    root = Path(__file__).parents[2]
    commit = None
    if (root / ".git").exists() and which("git"):
        git = ["git", "-C", str(root), "rev-parse", "HEAD"]
        done = subprocess.run(git, capture_output=True, text=True, check=False)
        commit = done.stdout.strip() or None
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        "python": platform.python_version(),
        "commit": commit,
        "packages": {name: installed.get(name) for name in _PACKAGES},
    }


def print_environment(found: Mapping[str, Any], console: Console) -> None:
    """Prints a table of device and versions."""
    console.print("===== Environment =====")
    table = _table("", "Value")
    for name, value in {**found, **found["packages"]}.items():
        if name != "packages":
            table.add_row(name, "-" if value is None else str(value))
    console.print(table)


def print_list(operators: Sequence[Operator], console: Console) -> None:
    """Prints "yes" for implementations that take a small bfloat16 case, or why not."""
    table = _table("operator", "implementation", "here", "result")
    shape = Shape.parse(CPU_SHAPES[0])
    for operator in operators:
        about = (operator.name, operator.summary)
        for name in operator.implementations:
            here = refusal(operator, name, shape, "bfloat16") or "yes"
            table.add_row(about[0], name, here, about[1])
            about = ("", "")
    console.print(table)


def print_results(
    operators: Sequence[Operator],
    rows: Sequence[Row],
    console: Console,
    *,
    verbose: bool = False,
) -> None:
    """Prints measurements, reasons for missing ones, and (`verbose`) tracebacks."""
    for operator in operators:
        for name in _PASSES:
            own = [r for r in rows if r.operator == operator.name and name in r.passes]
            if own:
                console.print(f"[{operator.name}: {_PASSES[name]}]")
                console.print(_figures(own, name))
    rest = [row for row in rows if row.state != MEASURED]
    if not rest:
        return
    console.print("[not measured]")
    table = _table("operator", "implementation", "shapes", "why")
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rest:
        case = row.operator, row.implementation, f"{row.state}: {row.reason}"
        groups.setdefault(case, []).append(f"{row.shape} {row.dtype}")
    for (operator, one, why), where in groups.items():
        table.add_row(operator, one, "; ".join(where), why)
    console.print(table)
    for row in rest if verbose else ():
        if row.detail:
            console.print(f"{row.operator} by {row.implementation} at {row.shape}:")
            console.print(row.detail)
    if not verbose and any(row.state == FAILED for row in rest):
        console.print("--verbose prints the tracebacks of failures.")


def _figures(rows: Sequence[Row], name: str) -> Table:
    """Table of one operator's rows in pass `name`, a column per implementation."""
    names = list(dict.fromkeys(row.implementation for row in rows))
    table = _table("shape", "type", "", *names)
    for shape, dtype in dict.fromkeys((row.shape, row.dtype) for row in rows):
        here = {
            row.implementation: row.passes[name]
            for row in rows
            if (row.shape, row.dtype) == (shape, dtype)
        }
        begin = (f"({shape.replace(',', ', ')})", dtype)
        for unit, figure in {
            "ms": lambda p: f"{p.median_ms:.3f}",
            "MB besides inputs and outputs": lambda p: (
                "-" if p.temp_bytes is None else f"{p.temp_bytes / 1e6:.1f}"
            ),
            "% of the roofline": lambda p: (
                "-" if p.roofline_percent is None else f"{p.roofline_percent:.0f}"
            ),
            "s to compile": lambda p: f"{p.compile_seconds:.2f}",
        }.items():
            cells = [figure(here[one]) if one in here else "-" for one in names]
            table.add_row(*begin, unit, *cells)
            begin = ("", "")
        table.add_section()
    return table


def _table(*headings: str) -> Table:
    table = Table(box=box.ASCII, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def write(file: Path, environment: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Writes environment and rows as JSON, atomically: never half a file.

    Raises:
        CfpError: the file cannot be written.
    """
    data = {"environment": dict(environment), "rows": [asdict(row) for row in rows]}
    part = file.with_name(file.name + ".part")
    try:
        part.write_text(json.dumps(data, indent=1) + "\n")
        part.replace(file)
    except OSError as error:
        raise CfpError(f"Cannot write {file}: {error.strerror}.") from error


def _case(row: Row) -> str:
    return f"{row.operator} by {row.implementation}, ({row.shape}) {row.dtype}"


def main(words: Sequence[str]) -> int:
    """Runs the command with its arguments `words`.

    Returns:
        Exit code: 1 if an implementation's results are wrong; 2 for a `CfpError`, such
        as wrong use; 130 after Ctrl-C; else 0, also if implementations failed.
    """
    try:
        return _run(_parser().parse_args(words))
    except CfpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: Interrupted.", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace) -> int:
    operators = matching(options.only_run)
    console = literal_console()
    if not console.is_terminal:
        console = literal_console(width=columns())
    if options.list:
        print_list(operators, console)
        return 0
    found = environment()
    default = SHAPES if found["platform"] == "gpu" else CPU_SHAPES
    shapes = [Shape.parse(text) for text in options.shapes or default]
    dtypes = options.dtypes.split(",")
    for name in dtypes:
        known("type that operators are tried in", name, LIMITS)
    print_environment(found, console)
    how: dict[str, Any] = {"forward_only": options.forward_only}
    if options.seconds is not None:
        how["seconds"] = options.seconds
    rows: list[Row] = []
    for row in benchmark.run(operators, shapes, dtypes, **how):
        rows.append(row)
        _tell(row)
        if options.json:
            write(options.json, found, rows)
    print_results(operators, rows, console, verbose=options.verbose)
    wrong = [row for row in rows if row.state == WRONG]
    for row in wrong:
        print(f"error: {_case(row)} is wrong: {row.reason}", file=sys.stderr)
    return int(bool(wrong))


def _tell(row: Row) -> None:
    found = f"{row.state}: {row.reason}"
    if row.state == MEASURED:
        times = ", ".join(f"{n} {p.median_ms:.3f} ms" for n, p in row.passes.items())
        worst = max(error or 0.0 for error in row.errors.values())
        found = f"right within {worst:.1e}; {times}"
    print(f"{_case(row)}: {found}", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    """Argument parser that raises CfpError, as the other commands do."""

    def error(self, message: str) -> NoReturn:
        said = f"{message[0].upper()}{message[1:]}."
        raise CfpError(f"{said} {self.prog} --help lists all options.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="cfp operators",
        description="Checks all implementations of the operators that models are made "
        "of against a float32 oracle, outputs and gradients, and times the right ones. "
        "The exit code is 1 if an implementation is wrong.",
    )

    def add(name: str, text: str, metavar: str = "", **how: Any) -> None:
        how |= {"metavar": metavar} if metavar else {"action": "store_true"}
        parser.add_argument(name, help=text, **how)

    words = "operators with one of these words in their names"
    add("--only-run", words, "A,B", default="")
    add("--forward-only", "without the backward pass")
    add("--verbose", "print tracebacks of failures")
    add("--list", "list operators and implementations, and measure nothing")
    add("--json", "write results here after each measurement", "FILE", type=Path)
    sizes = "batch, tokens, hidden, heads, vocabulary; default on GPUs: "
    add("--shapes", sizes + " ".join(SHAPES), "B,S,H,N,V", nargs="+")
    types = "float32, bfloat16, float16 (default: %(default)s)"
    add("--dtypes", types, "A,B", default="bfloat16")
    add("--seconds", "start no implementation after S seconds", "S", type=float)
    return parser
