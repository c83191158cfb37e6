"""The command ``python -m cfp.operators``, also ``cfp operators``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cfp.errors import CfpError
from cfp.operators import benchmark as b
from cfp.operators.cases import Shape, check_dtype
from cfp.operators.document import changes, read, write
from cfp.operators.environment import environment
from cfp.operators.inventory import matching
from cfp.operators.tables import (
    parse_share,
    plot,
    print_environment,
    print_list,
    print_results,
)
from cfp.printable import columns
from cfp.report.console import literal_console
from cfp.report.plots import check_can_draw

# Of a BERT-large or GPT-2 medium, and of a wide model with short and long sequences.
SHAPES = ("8,1024,1024,16,50257", "16,512,8192,64,50264", "4,2048,8192,64,50264")
# What a CPU is asked for, to see the command work.
CPU_SHAPES = ("2,128,128,4,1024",)
INTERRUPTED = 130


def main(words: Sequence[str]) -> int:
    """Measures operators.

    Args:
        words: the command's own words.

    Returns:
        0; 1 if an implementation computes something else than the oracle, or became
        slower than is allowed; 2 for wrong use.
    """
    options = _parser().parse_args(words)
    try:
        return _run(options)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cfp.operators",
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
