"""The command ``cfp operators``, also ``python -m cfp.operators``.

Prints tables by shape and implementation, writes results to a file, and finds the
medians that became longer since an earlier one.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import jax
from pydantic import TypeAdapter
from rich import box
from rich.console import Console
from rich.table import Table

from cfp.errors import CfpError
from cfp.operators import benchmark, known, matching
from cfp.operators.benchmark import ABSENT, FAILED, MEASURED, WRONG, Row
from cfp.operators.cases import LIMITS, Shape
from cfp.operators.operator import Operator
from cfp.printable import columns
from cfp.view.console import literal_console

_PASSES = {"forward": "forward", "both": "forward and backward"}
_PACKAGES = (
    *("cfp", "jax", "jaxlib", "flax", "jax-cuda13-plugin", "jax-cuda12-plugin"),
    *("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
)


def environment() -> dict[str, Any]:
    """The device, Python, and versions of packages; None for what is missing."""
    device = jax.devices()[0]
    installed = {one.name: one.version for one in metadata.distributions()}
    root = Path(__file__).parents[2]
    commit = None
    if (root / ".git").exists():
        git = ["git", "-C", str(root), "rev-parse", "HEAD"]
        done = subprocess.run(git, capture_output=True, text=True, check=False)
        commit = done.stdout.strip() or None
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "memory_bytes": benchmark.memory_limit(),
        "python": platform.python_version(),
        "commit": commit,
        "packages": {name: installed.get(name) for name in _PACKAGES},
    }


def print_environment(found: Mapping[str, Any], console: Console) -> None:
    """The table of what operators run on."""
    console.print("===== Environment =====")
    table = _table("", "Value")
    for name, value in {**found, **found["packages"]}.items():
        if name != "packages":
            table.add_row(name, "-" if value is None else str(value))
    console.print(table)


def print_list(operators: Sequence[Operator], console: Console) -> None:
    """The operators and their implementations, with what is missing and why."""
    table = _table("operator", "implementation", "library", "here", "what it computes")
    for operator in operators:
        about = (operator.name, operator.summary)
        for name, one in operator.implementations.items():
            table.add_row(about[0], name, one.library, one.probe() or "yes", about[1])
            about = ("", "")
    console.print(table)


def print_results(
    operators: Sequence[Operator],
    rows: Sequence[Row],
    console: Console,
    *,
    verbose: bool = False,
) -> None:
    """All tables of what was measured, and what was not with its reason."""
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
        why = row.reason if row.state == ABSENT else f"{row.state}: {row.reason}"
        where = "all" if row.state == ABSENT else f"{row.shape} {row.dtype}"
        groups.setdefault((row.operator, row.implementation, why), []).append(where)
    for (operator, one, why), where in groups.items():
        table.add_row(operator, one, "; ".join(dict.fromkeys(where)), why)
    console.print(table)
    for row in rest if verbose else ():
        if row.detail:
            console.print(f"{row.operator} by {row.implementation} at {row.shape}:")
            console.print(row.detail)
    if not verbose and any(row.state == FAILED for row in rest):
        console.print("--verbose prints the whole messages of what failed.")


def _figures(rows: Sequence[Row], name: str) -> Table:
    """The figures of a pass of an operator, a column for each implementation."""
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


FORMAT = 1
KIND = "cfp operators"
_ROWS = TypeAdapter(list[Row])


def write(file: Path, environment: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Writes a file in one go, so that an interrupted run leaves a whole one.

    Raises:
        CfpError: it cannot be written.
    """
    data = {"kind": KIND, "format": FORMAT, "environment": dict(environment)}
    data["rows"] = _ROWS.dump_python([*rows], mode="json")
    part = file.with_name(file.name + ".part")
    try:
        part.write_text(json.dumps(data, indent=1) + "\n")
        part.replace(file)
    except OSError as error:
        raise CfpError(f"Cannot write {file}: {error.strerror}.") from error


def read(file: Path) -> list[Row]:
    """The rows of a file.

    Raises:
        CfpError: it is no such file.
    """
    try:
        data = json.loads(file.read_text())
        if data["kind"] != KIND or data["format"] != FORMAT:
            raise ValueError(f"kind {data['kind']!r}, format {data['format']!r}")
        return _ROWS.validate_python(data["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CfpError(
            f"{file} holds no results of operators: {type(error).__name__}: "
            f"{error}. Give a file that this version's cfp operators --json FILE "
            "wrote."
        ) from error


def _case(row: Row) -> str:
    return f"{row.operator} by {row.implementation}, ({row.shape}) {row.dtype}"


# Of a BERT-large or GPT-2 medium, and of a wide model with short and long sequences.
SHAPES = ("8,1024,1024,16,50257", "16,512,8192,64,50264", "4,2048,8192,64,50264")
# What a CPU is asked for, to see the command work.
CPU_SHAPES = ("2,128,128,4,1024",)
INTERRUPTED = 130


def main(words: Sequence[str]) -> int:
    """Measures operators.

    Returns:
        0; 1 if an implementation computes something else than the oracle, or became
        slower than is allowed; 2 for wrong use.
    """
    try:
        return _run(_parser().parse_args(words))
    except CfpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: Interrupted.", file=sys.stderr)
        return INTERRUPTED


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
    if options.fail_if_regression is not None and options.compare is None:
        raise CfpError("--fail-if-regression needs --compare FILE.")
    earlier = read(options.compare) if options.compare else None
    print_environment(found, console)
    how: dict[str, Any] = {"forward_only": options.forward_only}
    if options.seconds:
        how["seconds"] = options.seconds
    rows: list[Row] = []
    for row in benchmark.run(operators, shapes, dtypes, **how):
        rows.append(row)
        _tell(row)
        if options.json:
            write(options.json, found, rows)
    print_results(operators, rows, console, verbose=options.verbose)
    slower = False
    if earlier is not None:
        slower = compare(earlier, rows, options.fail_if_regression)
    wrong = [row for row in rows if row.state == WRONG]
    for row in wrong:
        print(f"error: {_case(row)} is wrong: {row.reason}", file=sys.stderr)
    return int(bool(wrong) or slower)


def _tell(row: Row) -> None:
    """One line for what was just found, on the error stream."""
    found = f"{row.state}: {row.reason}"
    if row.state == MEASURED:
        times = ", ".join(f"{n} {p.median_ms:.3f} ms" for n, p in row.passes.items())
        worst = max(error or 0.0 for error in row.errors.values())
        found = f"right within {worst:.1e}; {times}"
    print(f"{_case(row)}: {found}", file=sys.stderr)


def compare(earlier: Sequence[Row], rows: Sequence[Row], allowed: float | None) -> bool:
    """Prints which medians changed, the most slowed first.

    Returns:
        True if one became longer by more than the allowed share.
    """
    old, new = (
        {
            f"{_case(row)} {name}": one.median_ms
            for row in every
            for name, one in row.passes.items()
        }
        for every in (earlier, rows)
    )
    shares = {name: ms / old[name] - 1.0 for name, ms in new.items() if name in old}
    over = {n for n, x in shares.items() if allowed is not None and x > allowed}
    print(f"compared with before: {len(shares)} medians")
    for name, share in sorted(shares.items(), key=lambda one: -one[1]):
        print(
            f"{name}: {old[name]:.3f} -> {new[name]:.3f} ms ({100 * share:+.1f}%)"
            f"{', a regression' if name in over else ''}"
        )
    return bool(over)


def parse_share(text: str) -> float:
    """5% or 0.05 as 0.05.

    Raises:
        CfpError: it is neither.
    """
    try:
        return float(text.strip().removesuffix("%")) / (100 if "%" in text else 1)
    except ValueError as error:
        raise CfpError(f"Expected a share such as 5% or 0.05, got {text!r}.") from error


class _Parser(argparse.ArgumentParser):
    """Errors of use are as those of the other commands."""

    def error(self, message: str) -> NoReturn:
        """Raises what argparse would print with its usage."""
        raise CfpError(
            f"{message[0].upper()}{message[1:]}. {self.prog} --help lists all options."
        )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="cfp operators",
        description="Checks all implementations of the operators that models are made "
        "of against a float32 oracle, outputs and gradients, and times those that are "
        "right. The exit code is 1 if one is wrong.",
    )

    def add(name: str, text: str, metavar: str = "", **how: Any) -> None:
        how |= {"metavar": metavar} if metavar else {"action": "store_true"}
        parser.add_argument(name, help=text, **how)

    words = "operators with one of these words in their names"
    add("--only-run", words, "A,B", default="")
    add("--forward-only", "without the backward pass")
    add("--verbose", "whole messages of what failed")
    add("--list", "list what there is, and measure nothing")
    add("--json", "write results here as they come", "FILE", type=Path)
    add("--compare", "an earlier file of --json", "FILE", type=Path)
    longer = "with --compare: exit code 1 if a median is longer by more, such as 5%%"
    add("--fail-if-regression", longer, "SHARE", type=parse_share)
    sizes = "batch, tokens, hidden, heads, vocabulary; default on GPUs: "
    add("--shapes", sizes + " ".join(SHAPES), "B,S,H,N,V", nargs="+")
    types = "float32, bfloat16, float16 (default: %(default)s)"
    add("--dtypes", types, "A,B", default="bfloat16")
    add("--seconds", "begin no implementation after so many seconds", "S", type=float)
    return parser
