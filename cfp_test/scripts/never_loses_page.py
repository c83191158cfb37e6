"""Makes a table of what cfp_test/scripts/never_loses.py measured.

    python cfp_test/scripts/never_loses_page.py FILE.json [FILE.json ...]

Prints Markdown: a line for each plan that was made with an empty or another plan's
store, with the seconds that the same took from what was stored; and in how many cells
the plan is at most 1% slower than the best classic, and at least 5% faster. Of two
races with classics, the plan's own and the one with those that were left out of it, the
one counts in which the plan does worse.
"""

import argparse
import json
from pathlib import Path

_NEVER_LOSES, _FASTER = 1.01, 0.95


def links_of(row: dict) -> str:
    """Names the links between the devices."""
    return "P2P off" if "P2P_DISABLE=1" in row["environment"].get("nccl", "") else "P2P"


def type_of(row: dict) -> str:
    """Names the types that the model computes in."""
    options = row["target"]
    return options[options.index("--dtype") + 1] if "--dtype" in options else "bfloat16"


def ratio_of(row: dict) -> float | None:
    """The plan's time over the best classic's, in the race where it does worse."""
    known = [row.get("ratio"), row.get("compared_ratio")]
    return max((ratio for ratio in known if ratio), default=None)


def line_of(row: dict, again: dict | None) -> str:
    """A plan, as a line of the table."""
    classic = "none that fits"
    if row["best_classic_ms"]:
        name = row["best_classic"].replace("_", " ")
        classic = f"{row['best_classic_ms']:.2f}, {name}"
        if row.get("compared_classic") and ratio_of(row) != row["ratio"]:
            classic += f"; {row['compared_classic'].replace('_', ' ')}"
    cells = [
        row["target"][0],
        type_of(row),
        links_of(row),
        row["what"].removesuffix(", cold"),
        f"{row['measured_ms']:.2f}",
        classic,
        f"{ratio:.3f}" if (ratio := ratio_of(row)) else "",
        f"{row['peak_bytes'] / 2**30:.2f}",
        f"{row['plan_seconds']:.0f}",
        f"{again['plan_seconds']:.1f}" if again else "",
    ]
    return "| " + " | ".join(cells) + " |"


def table(rows: list[dict]) -> list[str]:
    """All plans of one or more runs, as Markdown."""
    lines = [
        "| model | type | links | budget | planned ms | best classic ms | ratio | GiB "
        "| cold s | warm s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    warm = {
        (*row["target"], links_of(row), row["what"].removesuffix(", warm")): row
        for row in rows
        if row["what"].endswith(", warm") and "measured_ms" in row
    }
    cold = [row for row in rows if row["what"].endswith(", cold")]
    for row in cold:
        if "measured_ms" not in row:
            least = f"{row['least_bytes'] / 2**30:.2f} GiB would do"
            lines.append(
                f"| {row['target'][0]} | | | {row['what']} | {least} | | | | | |"
            )
            continue
        what = row["what"].removesuffix(", cold")
        lines.append(line_of(row, warm.get((*row["target"], links_of(row), what))))
    ratios = [ratio for row in cold if (ratio := ratio_of(row))]
    good = sum(ratio <= _NEVER_LOSES for ratio in ratios)
    better = sum(ratio < _FASTER for ratio in ratios)
    return [
        *lines,
        "",
        f"Of {len(ratios)} cells with a classic that fits, {good} are at most "
        f"{_NEVER_LOSES} times the best classic, and {better} below {_FASTER}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    rows = [
        json.loads(line)
        for file in parser.parse_args().files
        for line in file.read_text().splitlines()
    ]
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
