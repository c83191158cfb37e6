"""Tries damaged and hostile plan files and record exports, and makes a page of it.

    python cfp_test/scripts/hostile_files.py [--out docs/results/hostile_files_202611]

Writes FILE.json and FILE.md; the page is made of the JSON alone. Exit code 1 if any
file did harm. Uses virtual CPU devices, and measures nothing.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # Its page alone is made by other processes, too.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    )
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax

from cfp_test.plan import hostile

OUT = Path(__file__).parents[2] / "docs" / "results" / "hostile_files_202611"


def try_all(folder: Path) -> list[dict[str, Any]]:
    """One row for each mutation."""
    made = hostile.sound(folder / "cache")
    rows = []
    for kind, mutations, attempt in (
        ("plan", hostile.PLANS, hostile.try_plan),
        ("export", hostile.RECORDS, hostile.try_record),
    ):
        for number, mutation in enumerate(mutations):
            place = folder / f"{kind}{number}"
            place.mkdir()
            before = dict(os.environ)
            tried = attempt(mutation, made, place)
            rows.append(
                {
                    "file": kind,
                    "mutation": mutation.name,
                    "message": tried.message,
                    "relative_l2": tried.difference,
                    "records_kept": tried.kept,
                    "files_written": list(tried.written),
                    "environment_changed": dict(os.environ) != before,
                }
            )
            print(f"{kind}: {mutation.name}: {_outcome(rows[-1])}", flush=True)
    return rows


def did_harm(row: dict[str, Any]) -> bool:
    """Returns True if a file was written, a variable set, or a number changed."""
    ran = row["file"] == "plan" and not row["message"]
    wrong = ran and not hostile.same_numbers(row["relative_l2"])
    kept = bool(row["message"]) and row["records_kept"] > 0
    return bool(row["files_written"]) or row["environment_changed"] or wrong or kept


def page(data: dict[str, Any]) -> str:
    """The page, from the JSON."""
    rows = data["rows"]
    refused = [row for row in rows if row["message"]]
    plans = [row for row in rows if row["file"] == "plan"]
    lines = [
        "# Damaged and hostile files, November 2026",
        "",
        f"{len(plans)} mutations of a plan file and {len(rows) - len(plans)} of a "
        f"record export. {len(refused)} are refused with a reason; the other "
        f"{len(rows) - len(refused)} are harmless: under these plans the step "
        "computes what it does on one device, and these records are kept as they are. "
        f"{sum(map(did_harm, rows))} wrote a file, set a variable or changed a number.",
        "",
        f"jax {data['jax']}, virtual CPU devices. Made by "
        "`python cfp_test/scripts/hostile_files.py`; raw: "
        "[JSON](hostile_files_202611.json). The same mutations are tests in "
        "`cfp_test/plan/test_hostile.py`.",
        "",
        "| file | mutation | what came of it |",
        "|---|---|---|",
    ]
    lines += [
        f"| {row['file']} | {_cell(row['mutation'])} | {_cell(_outcome(row))} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def _outcome(row: dict[str, Any]) -> str:
    if row["message"]:
        words = row["message"].replace("\n  ", "; ").replace("\n", "; ")
        return "refused: " + words.partition("; try:")[0]
    if row["file"] == "export":
        return f"harmless: {row['records_kept']} record kept"
    return f"harmless: results differ by {row['relative_l2']:.1e}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT, help="without a suffix")
    parser.add_argument("--page", action="store_true", help="only make the page again")
    options = parser.parse_args()
    raw, made = (options.out.with_suffix(suffix) for suffix in (".json", ".md"))
    if not options.page:
        # Temporary folders have names of their own: messages say FOLDER.
        with tempfile.TemporaryDirectory() as folder:
            rows = try_all(Path(folder))
            text = json.dumps({"jax": jax.__version__, "rows": rows}, indent=1)
            raw.write_text(text.replace(folder, "FOLDER") + "\n")
    data = json.loads(raw.read_text())
    made.write_text(page(data))
    sys.exit(any(map(did_harm, data["rows"])))


if __name__ == "__main__":
    main()
