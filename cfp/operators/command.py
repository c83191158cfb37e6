"""The command ``cfp operators``, also ``python -m cfp.operators``.

Prints tables by shape and implementation, draws them as bars, writes results to a file,
and finds what became slower since an earlier one.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pydantic import TypeAdapter
from rich import box
from rich.console import Console
from rich.table import Table

from cfp.errors import CfpError
from cfp.operators import benchmark as b
from cfp.operators import matching
from cfp.operators.benchmark import ABSENT, FAILED, MEASURED, Pass, Row
from cfp.operators.cases import Shape, check_dtype
from cfp.operators.operator import Operator, OperatorError
from cfp.operators.probe import environment
from cfp.printable import columns
from cfp.report.plots import check_can_draw, figure
from cfp.view.console import Fitted, literal_console, new_table

_PASSES = {"forward": "forward", "both": "forward and backward"}


def print_environment(found: Mapping[str, Any], console: Console) -> None:
    """The table of what operators run on."""
    console.print("===== Environment =====")
    table = _table("", "Value")
    memory = found["memory_bytes"]
    table.add_row("device", found["device"])
    table.add_row("memory", f"{memory / 2**20:.0f} MB" if memory else "-")
    table.add_row("Python", found["python"])
    table.add_row("backend", found["platform_version"].splitlines()[0] or "-")
    table.add_row("commit", found["commit"] or "-")
    for name, version in found["packages"].items():
        table.add_row(name, version or "not installed")
    console.print(Fitted(table))


def print_list(operators: Sequence[Operator], console: Console) -> None:
    """The operators and their implementations, with what is missing and why."""
    table = _table("operator", "implementation", "library", "here", "what it computes")
    for operator in operators:
        for i, one in enumerate(operator.implementations):
            table.add_row(
                "" if i else operator.name,
                one.name,
                one.library,
                one.probe() or "yes",
                "" if i else operator.summary,
            )
    console.print(Fitted(table))


def print_results(
    operators: Sequence[Operator],
    rows: Sequence[Row],
    console: Console,
    *,
    verbose: bool = False,
) -> None:
    """All tables of what was measured, and what was not with its reason."""
    for operator in operators:
        own = [row for row in rows if row.operator == operator.name]
        for name in _PASSES:
            measured = [row for row in own if name in row.passes]
            if measured:
                _print_pass(operator, measured, name, console)
    _print_rest(rows, console, verbose=verbose)


def _print_pass(
    operator: Operator, rows: Sequence[Row], name: str, console: Console
) -> None:
    cells: tuple[tuple[str, Callable[[Pass], str]], ...] = (
        ("ms", lambda one: f"{one.median_ms:.3f}"),
        ("MB besides inputs and outputs", _megabytes),
        ("% of the roofline", _percent),
        ("s to compile", lambda one: f"{one.compile_seconds:.2f}"),
    )
    names = list(dict.fromkeys(row.implementation for row in rows))
    console.print(f"[{operator.name}: {_PASSES[name]}]")
    table = _table("shape", "type", "", *names)
    for shape, dtype in dict.fromkeys((row.shape, row.dtype) for row in rows):
        here = {
            row.implementation: row.passes[name]
            for row in rows
            if (row.shape, row.dtype) == (shape, dtype)
        }
        for i, (unit, text) in enumerate(cells):
            table.add_row(
                "" if i else f"({shape.replace(',', ', ')})",
                "" if i else dtype,
                unit,
                *(text(here[one]) if one in here else "-" for one in names),
            )
        table.add_section()
    console.print(Fitted(table))


def _print_rest(rows: Sequence[Row], console: Console, *, verbose: bool) -> None:
    rest = [row for row in rows if row.state != MEASURED]
    if not rest:
        return
    console.print("[not measured]")
    table = _table("operator", "implementation", "shapes", "why")
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rest:
        why = row.reason if row.state == ABSENT else f"{row.state}: {row.reason}"
        key = (row.operator, row.implementation, row.state, why)
        groups.setdefault(key, []).append(f"{row.shape} {row.dtype}")
    for (operator, one, state, why), where in groups.items():
        every = "all" if state == ABSENT else "; ".join(where)
        table.add_row(operator, one, every, why)
    console.print(Fitted(table))
    if verbose:
        for row in rest:
            if row.detail:
                console.print(f"{row.operator} by {row.implementation} at {row.shape}:")
                console.print(row.detail)
    elif any(row.state == FAILED for row in rest):
        console.print("--verbose prints the whole messages of what failed.")


def _megabytes(one: Pass) -> str:
    return "-" if one.temp_bytes is None else f"{one.temp_bytes / 1e6:.1f}"


def _percent(one: Pass) -> str:
    return "-" if one.roofline_percent is None else f"{one.roofline_percent:.0f}"


def _table(*headings: str) -> Table:
    return new_table(box.ASCII, None, dict.fromkeys(headings, "text"))


def parse_share(text: str) -> float:
    """5% or 0.05 as 0.05.

    Raises:
        ValueError: it is neither.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*(%?)\s*", text)
    if match is None:
        raise ValueError(text)
    return float(match[1]) / (100 if match[2] else 1)


def plot(rows: Sequence[Row], file: Path) -> None:
    """Draws times and memory of everything that was measured.

    Args:
        file: an image; its ending says which kind.

    Raises:
        CfpError: matplotlib is not installed, or does not know the kind of image.
    """
    measured = [row for row in rows if row.passes]
    labels = [
        f"{row.operator}, {row.implementation}\n({row.shape}) {row.dtype}"
        for row in measured
    ]
    passes = [row.passes.get("both", row.passes.get("forward")) for row in measured]
    places = range(len(measured))
    height = max(2.0, 0.42 * len(measured) + 1.0)
    with figure(file, columns=2, figsize=(12, height)) as (times, memory):
        times.barh(places, [one.median_ms for one in passes if one])
        times.set_yticks(places, labels, fontsize=7)
        times.set_xlabel("ms, forward and backward where both were run")
        memory.barh(places, [(one.temp_bytes or 0) / 1e6 for one in passes if one])
        memory.set_yticks(places, [""] * len(measured))
        memory.set_xlabel("MB besides inputs and outputs")
        for axes in (times, memory):
            axes.invert_yaxis()
            axes.set_xscale("symlog", linthresh=0.01)


FORMAT = 1
KIND = "cfp operators"
_ROWS = TypeAdapter(list[Row])


def to_json(environment: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Everything that was found, as plain data."""
    return {
        "kind": KIND,
        "format": FORMAT,
        "environment": dict(environment),
        "rows": _ROWS.dump_python([*rows], mode="json"),
    }


def write(file: Path, environment: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Writes a file in one go, so that an interrupted run leaves a whole one.

    Raises:
        CfpError: it cannot be written.
    """
    text = json.dumps(to_json(environment, rows), indent=1) + "\n"
    part = file.with_name(file.name + ".part")
    try:
        part.write_text(text)
        part.replace(file)
    except OSError as error:
        raise CfpError(f"Cannot write {file}: {error.strerror}.") from error


def read(file: Path) -> tuple[dict[str, Any], list[Row]]:
    """The environment and the rows of a file.

    Raises:
        OperatorError: it is no such file.
    """
    try:
        data = json.loads(file.read_text())
        if data["kind"] != KIND or data["format"] != FORMAT:
            raise ValueError(f"kind {data['kind']!r}, format {data['format']!r}")
        return data["environment"], _ROWS.validate_python(data["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OperatorError(
            f"{file} holds no results of operators.",
            expected=f'what --json writes: kind "{KIND}", format {FORMAT}',
            got=f"{type(error).__name__}: {error}",
            attempt="cfp operators --json FILE",
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Change of the median of one pass.

    Attributes:
        name: of operator, implementation, shape, type and pass.
        before_ms, now_ms: medians.
    """

    name: str
    before_ms: float
    now_ms: float

    @property
    def share(self) -> float:
        """Slowdown, as a share of the time before."""
        return self.now_ms / self.before_ms - 1.0


def changes(before: Sequence[Row], now: Sequence[Row]) -> list[Change]:
    """Pairs the rows that both have measured, the most slowed first."""
    known = {row.key: row for row in before}
    found = [
        Change(
            name=" ".join((*row.key, name)),
            before_ms=known[row.key].passes[name].median_ms,
            now_ms=one.median_ms,
        )
        for row in now
        if row.key in known
        for name, one in row.passes.items()
        if name in known[row.key].passes
    ]
    return sorted(found, key=lambda change: -change.share)


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
    dtypes = [check_dtype(name) for name in options.dtypes.split(",")]
    earlier = read(options.compare)[1] if options.compare else []
    allowed = _allowed(options)
    if options.plot:
        check_can_draw(options.plot)
    print_environment(found, console)
    settings = b.Settings(
        forward_only=options.forward_only, seconds=options.seconds or float("inf")
    )
    rows: list[b.Row] = []
    for row in b.run(operators, shapes, dtypes, settings):
        rows.append(row)
        _tell(row)
        if options.json:
            write(options.json, found, rows)
    print_results(operators, rows, console, verbose=options.verbose)
    if options.plot:
        plot(rows, options.plot)
    b.check_shapes(operators, rows)
    slower = _compared(earlier, rows, allowed) if options.compare else False
    wrong = [row for row in rows if row.state == b.WRONG]
    for row in wrong:
        print(
            f"error: {row.operator} by {row.implementation} is wrong at ({row.shape}) "
            f"{row.dtype}: {row.reason}",
            file=sys.stderr,
        )
    return int(bool(wrong) or slower)


def _allowed(options: argparse.Namespace) -> float | None:
    if options.fail_if_regression is None:
        return None
    if options.compare is None:
        raise CfpError("--fail-if-regression needs --compare FILE, to compare with.")
    try:
        return parse_share(options.fail_if_regression)
    except ValueError as error:
        raise CfpError(
            f"Expected a share such as 5% or 0.05 for --fail-if-regression, got "
            f"{options.fail_if_regression!r}."
        ) from error


def _tell(row: b.Row) -> None:
    """One line for what was just found, on the error stream."""
    what = f"{row.operator} by {row.implementation}, ({row.shape}) {row.dtype}"
    if row.state == b.MEASURED:
        times = ", ".join(f"{n} {p.median_ms:.3f} ms" for n, p in row.passes.items())
        worst = max(error or 0.0 for error in row.errors.values())
        print(f"{what}: right within {worst:.1e}; {times}", file=sys.stderr)
    else:
        print(f"{what}: {row.state}: {row.reason}", file=sys.stderr)


def _compared(
    earlier: Sequence[b.Row], rows: Sequence[b.Row], allowed: float | None
) -> bool:
    """Prints what changed, and says whether something is slower than is allowed."""
    slower = False
    found = changes(earlier, rows)
    print(f"compared with before: {len(found)} medians")
    for change in found:
        over = allowed is not None and change.share > allowed
        slower |= over
        print(
            f"{change.name}: {change.before_ms:.3f} -> {change.now_ms:.3f} ms "
            f"({100 * change.share:+.1f}%){', a regression' if over else ''}"
        )
    return slower


class _Parser(argparse.ArgumentParser):
    """Errors of use are as those of the other commands."""

    def error(self, message: str) -> NoReturn:
        """Raises what argparse would print with its usage."""
        raise CfpError(
            f"{message[0].upper()}{message[1:]}.",
            attempt=f"{self.prog} --help, which lists all options",
        )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="cfp operators",
        description="Checks all implementations of the operators that models are made "
        "of against a float32 oracle, outputs and gradients, and times those that are "
        "right. The exit code is 1 if one is wrong.",
    )
    add = parser.add_argument
    add(
        "--only-run",
        default="",
        metavar="A,B",
        help="operators with one of these words in their names",
    )
    add("--forward-only", action="store_true", help="without the backward pass")
    add("--verbose", action="store_true", help="whole messages of what failed")
    add("--list", action="store_true", help="list what there is, and measure nothing")
    add("--json", type=Path, metavar="FILE", help="write results here as they come")
    add("--compare", type=Path, metavar="FILE", help="an earlier file of --json")
    add(
        "--fail-if-regression",
        metavar="SHARE",
        help="with --compare: exit code 1 if a median is longer by more, such as 5%%",
    )
    add(
        "--shapes",
        nargs="+",
        metavar="B,S,H,N,V",
        help="batch, tokens, hidden, heads, vocabulary; default on GPUs: "
        + " ".join(SHAPES),
    )
    add(
        "--dtypes",
        default="bfloat16",
        metavar="A,B",
        help="float32, bfloat16, float16 (default: %(default)s)",
    )
    add("--plot", type=Path, metavar="FILE", help="draw times and memory as bars")
    add(
        "--seconds",
        type=float,
        metavar="S",
        help="begin no implementation after so many seconds",
    )
    return parser
