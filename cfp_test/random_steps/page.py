"""The page of random steps: what was run, what was found, what was planted.

    python -m cfp_test.random_steps.page FINDINGS JOURNAL... > docs/results/NAME.json

joins journals of `cfp_test.random_steps` and what FINDINGS, a JSON file, tells of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cfp_test.results.pages import Figures, table

_OUTCOMES = ("right", "wrong", "died", "refused")


def join(findings: Path, journals: Iterable[Path]) -> dict[str, Any]:
    """The page's data."""
    import jax

    from cfp_test.random_steps.run import read

    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "commit": git.stdout.strip(),
        **json.loads(findings.read_text()),
        "rows": [row for journal in journals for row in read(journal)[0]],
    }


def figures(data: Mapping[str, Any]) -> Figures:
    """The page of one joined file."""
    rows = data["rows"]
    counts = Counter(way[2] for row in rows for way in row["ways"])
    ran = sum(counts[outcome] for outcome in _OUTCOMES)
    useless = sum(bool(row["note"]) for row in rows)
    lines = [
        "# Random steps against one device",
        "",
        f"`{data['command']}`, jax {data['jax']}, {data['date']}, commit "
        f"{data['commit']}; virtual CPU devices. {data['goal']}",
        "",
        f"{len(rows)} programs, {ran:,} programs under a strategy: "
        f"{counts['right']:,} right, {counts['wrong']} wrong, {counts['died']} in "
        f"which the process died, {counts['refused']} that a budget or the CPU backend "
        f"refused. {counts['again']:,} more were drawn whose constraints their program "
        f"had before, and {useless} programs left out, on which rounding decides or "
        "which plain jax.jit does not run.",
        "",
        "What passes is measured for each program and leaf: 1e-5, or 10 times what the "
        "last bit of the arguments does on one device; a program of which a leaf "
        "may be off by more than 0.03 is left out. The last column counts what is not "
        "right.",
        "",
        _counted("source of the strategy", _by_source(rows)),
        "",
        _counted("mesh", _by_program(rows, _mesh)),
        "",
        _counted("optimizer", _by_program(rows, lambda row: row["spec"]["optimizer"])),
        "",
        _counted("feature", _by_feature(rows)),
        "",
        _counted("kind of block, nested ones as well", _by_kind(rows)),
        "",
        "## What was found on the way",
        "",
        table(
            "found | mended in | test",
            [[one["what"], one["mended"], one["test"]] for one in data["found"]],
        ),
        "",
        "## Planted faults",
        "",
        "`python -m cfp_test.random_steps.faults NAME`; programs that cannot reach the "
        "fault are counted and not run.",
        "",
        table(
            "fault | found in program | of them run | as",
            [
                [one["fault"], one["programs"], one["ran"], one["wrong"]]
                for one in data["planted"]
            ],
        ),
    ]
    return {"page": "\n".join(lines) + "\n"}


_Counts = dict[str, Counter[str]]


def _counted(head: str, counts: _Counts) -> str:
    rows = [
        [name, found["programs"] or None, found["ran"], found["wrong"]]
        for name, found in sorted(counts.items(), key=lambda pair: -pair[1]["ran"])
    ]
    return table(f"{head} | programs | under a strategy | not right", rows)


def _add(counts: Counter[str], ways: Iterable[list[Any]]) -> None:
    for way in ways:
        counts["ran"] += way[2] in _OUTCOMES
        counts["wrong"] += way[2] in ("wrong", "died")


def _by_source(rows: Iterable[Mapping[str, Any]]) -> _Counts:
    found: _Counts = {}
    for row in rows:
        for way in row["ways"]:
            _add(found.setdefault(way[0] or "unknown", Counter()), [way])
    return found


def _by_program(rows: Iterable[Mapping[str, Any]], name: Any) -> _Counts:
    return _by_names(rows, lambda row: [name(row)])


def _by_names(rows: Iterable[Mapping[str, Any]], names: Any) -> _Counts:
    found: _Counts = {}
    for row in rows:
        if "spec" in row and not row["note"]:
            for name in names(row):
                counts = found.setdefault(name, Counter())
                counts["programs"] += 1
                _add(counts, row["ways"])
    return found


def _by_kind(rows: Iterable[Mapping[str, Any]]) -> _Counts:
    return _by_names(rows, lambda row: sorted(set(row["kinds"])))


def _by_feature(rows: Iterable[Mapping[str, Any]]) -> _Counts:
    def features(row: Mapping[str, Any]) -> list[str]:
        spec = row["spec"]
        every = {
            "state donated": spec["donated"],
            "an argument and a result returned again": spec["echoes"],
            "optimizer's state in the memory of the host": spec["host"],
            "all blocks rematerialized by the step": spec["remat"],
            "microbatches in a scan": spec["microbatches"] > 1,
            "a twin from the same folder of executables": spec["twist"] != 1.0,
        }
        return [name for name, has in every.items() if has]

    return _by_names(rows, features)


def _mesh(row: Mapping[str, Any]) -> str:
    return ",".join(f"{name}={size}" for name, size in row["spec"]["mesh"])


if __name__ == "__main__":
    first, *rest = map(Path, sys.argv[1:])
    print(json.dumps(join(first, rest)))
