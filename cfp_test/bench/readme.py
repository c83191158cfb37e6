"""Measures the README's table: its six rows, on two GPUs.

    python -m cfp_test.bench readme --out FOLDER [--seconds 560] [--rounds 8] [--tiny]

Runs `side_by_side`, `one_gpu` and `full_model`, each from an empty store, and prints
the table. Run again with the same folder, it measures the missing rows. Of a whole
model, the plan and the fastest other preset are those of its race.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cfp.analysis.presets import PRESETS
from cfp_test.bench.side_by_side import joined, rows_of, run_command, say

# A setting of the README, and its piece of `side_by_side`.
PIECES = {
    "NVLink: LLaMA": "llama",
    "slow links: LLaMA": "llama:off",
    "60 % of the memory: LLaMA": "llama:budgets",
    "experts: MoE": "moe",
}
KINDS = ("plan", "by hand", "PyTorch FSDP2", "best preset")
HEAD = ("setting", "cfp", "by hand", "PyTorch FSDP2", "best preset", "planning, s")
TINY_MODEL = "gpt --layers 1 --hidden 32 --heads 2 --seq 16 --vocab 64 --batch 4"


def commands(given: argparse.Namespace) -> Iterator[tuple[Path, list[str]]]:
    """Yields each benchmark's file and words; a file with a result is complete."""
    out, tiny = given.out, ["--tiny"] if given.tiny else []
    for number, piece in enumerate(PIECES.values()):
        words = ["side_by_side", "--out", str(out), "--pieces", piece, *tiny]
        words += ["--shares", "0.6", "--no-cost-model", "--rounds", str(given.rounds)]
        # PyTorch's command is for fast links.
        words += ["--no-torch"] if given.tiny or ":" in piece else []
        yield out / f"side_by_side_{number}", words
    file = out / "one_gpu.json"
    words = ["one_gpu", "--out", str(file), "--models", "gpt", "--shares"]
    yield file, [*words, "--rounds", str(given.rounds), *tiny]
    file = out / "full_model.json"
    model = f"{TINY_MODEL} --platform cpu" if given.tiny else "llama --batch 8"
    words = ["full_model", *model.split(), "--presets", "--json", str(file)]
    yield file, [*words, "--nominal", "989.5"]


def measure(given: argparse.Namespace) -> None:
    """Runs the benchmarks without a result, until time is over."""
    given.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + given.seconds
    environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
    for file, words in commands(given):
        left = end - time.monotonic()
        if file.exists() or left < 30:
            continue
        if words[0] != "full_model":
            words = [*words, "--seconds", f"{left - 10:.0f}"]
        say(f"=== {' '.join(words)}")
        words = [sys.executable, "-m", "cfp_test.bench", *words]
        run_command(words, environment, left, given.out / f"{file.stem}.log")


def rows(out: Path) -> Iterator[tuple[str, ...]]:
    """Yields the table's rows of a folder's results."""
    for piece in joined(out):
        made = {row[3]: row for row in rows_of(piece)}
        names = [title for title, name in PIECES.items() if name == piece["piece"]]
        if names and "plan" in made:
            times = [made[kind][5] if kind in made else "" for kind in KINDS]
            yield *names, *times, made["plan"][10]
    if (file := out / "one_gpu.json").exists():
        for model in json.loads(file.read_text())["models"]:
            yield one_gpu_row(model["ways"])
    if (file := out / "full_model.json").exists():
        for row in json.loads(file.read_text())["rows"]:
            raced = [(name.split(", ")[0], ms) for name, ms in row["race"] if ms]
            names = PRESETS.keys() - {row["winner"].split(", ")[0]}
            others = [ms for name, ms in raced if name in names]
            best = f"{min(others):.1f}" if others else ""
            shown = f"{row['raced_ms']:.1f}" if row["raced_ms"] else ""
            seconds = f"{row['planned_s']:.0f}"
            yield "a whole model: LLaMA-2-7B", shown, "", "", best, seconds


def one_gpu_row(ways: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the row of one GPU; the second time is with FP8 products."""
    ms = {
        name: f"{statistics.median(way['samples_ms']):.2f}"
        for name, way in ways.items()
        if way.get("samples_ms")
    }
    shown = ", ".join(ms[n] for n in ("planned", "planned, FP8") if n in ms)
    by_hand, seconds = ms.get("kernel, jit", ""), ways["planned"].get("planning_s", 0)
    return "one GPU: GPT", shown, by_hand, "", ms.get("jit", ""), f"{seconds:.0f}"


def main() -> None:
    """Measures what is missing, then prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="virtual CPU devices")
    given = parser.parse_args()
    measure(given)
    for cells in (HEAD, ["---"] * len(HEAD), *rows(given.out)):
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
