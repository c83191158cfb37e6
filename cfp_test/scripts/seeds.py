"""Runs the seeds' shell scripts on some devices, one after another, and notes all.

    python -m cfp_test.scripts.seeds --devices 2 --output seeds        # on GPUs
    python -m cfp_test.scripts.seeds --devices 2 --output seeds --only ulysses
    python -m cfp_test.scripts.seeds --platform cpu --tiny --devices 2 --output seeds

Each command runs as it would be typed, and is ended when its time is over; begun again,
it goes on from what was measured. Its output is OUTPUT/NAME.txt, rows that it writes
OUTPUT/NAME.json or .jsonl, and OUTPUT/seeds.json has for each what was run, its exit
code, seconds, and the end of its output. With `--tiny` sizes are for a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cfp.platform import has_gpu
from cfp_test.gpu.place import tail

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "cfp_test"
SECONDS = 590.0
TINY = "--hidden_size 32 --seq_len 16 --vocab_size 96 --quick --per_kind 2"
# Tokens of the seed's own run.
_SEQ = 6
LENGTHS = (2048, 4096, 8192, 16384, 32768)
# What check_qkv compares with the first, whose exchange is in the model's code.
ULYSSES = ("eager", "compile", "deepcompile", "ringattn", "auto")


@dataclass(frozen=True)
class Command:
    """A script, and what it is given.

    Attributes:
        name: of its files.
        group: that `--only` names.
        words: of the command.
    """

    name: str
    group: str
    words: list[str]


@dataclass
class Row:
    """A command that ran."""

    name: str
    command: str
    code: int | None
    seconds: float
    tail: str
    date: str = field(
        default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds")
    )


def commands(options: argparse.Namespace) -> Iterator[Command]:
    """Yields all commands, in the seeds' order."""
    where = ["--platform", options.platform]
    devices = ["--devices", str(options.devices)]
    out = options.output

    def sh(script: str, name: str, group: str, *words: object) -> Command:
        given = [str(word) for word in words]
        return Command(name, group, ["sh", str(SCRIPTS / script), *given])

    yield from _passes(sh, options, [*where, *devices])
    yield from _ulysses(sh, options, where)
    ring = [*where, *devices]
    sizes = ["--lengths", "64,128"]
    if not options.tiny:
        lengths = ",".join(map(str, LENGTHS))
        sizes = ["--model", "7b", "--lengths", lengths]
    for what in ("inference", "training"):
        words = [*ring, *sizes, "--json", out / f"ring_{what}.json"]
        if what == "training":
            words.append("--train")
            # States of all layers do not fit beside what long sequences take.
            words += [] if options.tiny else ["--layers", "4"]
        yield sh("ring/benchmark_ring.sh", f"ring_{what}", "ring", *words)
    yield sh("ring/run_inference.sh", "ring_tokens", "ring", *ring, "--method", "ring")


def _passes(sh: Any, options: argparse.Namespace, given: list[str]) -> Any:
    """The scripts of CFP's artifact."""
    out, tiny = options.output, TINY.split() if options.tiny else []
    kept = ["--workdir", out / "work"]
    experts = "--num_experts 4 --expert_group_size 32".split() if options.tiny else []
    ffn = "--num_heads 4".split() if options.tiny else []
    for model, more in (("moe", experts), ("llama", ffn)):
        name = f"{model}_functionality_check"
        rows = ["--json", out / f"{name}.jsonl"]
        words = [*given, *kept, *rows, *tiny, *more]
        yield sh(f"scripts/{name}.sh", name, "passes", *words)
    heads = ["--num_heads", "4"] if options.tiny else []
    rows = ["--json", out / "gpt_A100_8GPU.jsonl"]
    words = [*given, *kept, *rows, *tiny, *heads]
    yield sh("scripts/gpt_A100_8GPU.sh", "gpt_A100_8GPU", "passes", *words)
    for model, more in (("gpt", heads), ("moe", [*heads, *experts])):
        name = f"{model}_enum_benchmark_comm_comp"
        made = ["--json", out / f"{name}.json", "--plot", out / f"{name}.svg"]
        words = [*given, *made]
        if options.tiny:
            sizes = "--hidden_size 32 --seq_len 16 --vocab_size 96 --quick --limit 2"
            words += [*sizes.split(), "--batch_size", "8", "--num_layer", "2", *more]
        yield sh(f"scripts/enum_and_benchmark/{name}.sh", name, "enumerate", *words)


def _ulysses(sh: Any, options: argparse.Namespace, where: list[str]) -> Any:
    """Ulysses in all its modes: small in float32, compared; then long, in bfloat16."""
    out = options.output
    spread = [*where, "--sp", options.devices]
    small = ["--dump", out / "qkv"]
    for mode in ULYSSES:
        words = (_SEQ, mode, *spread, *small)
        yield sh("ulysses/run_ulysses.sh", f"ulysses_{mode}", "ulysses", *words)
    for mode in ULYSSES[1:]:
        pair = (out / "qkv" / ULYSSES[0], out / "qkv" / mode)
        name = f"check_qkv_{mode}"
        yield sh("ulysses/check_qkv.sh", name, "ulysses", *pair)
    wide = "--hidden 2048 --heads 16 --layers 2 --vocab 32000 --batch 1 --steps 5"
    if options.tiny:
        wide = "--hidden 32 --heads 4 --layers 1"
    kernel = "chunked" if options.platform == "cpu" else "cudnn"
    for tokens in (64, 128) if options.tiny else LENGTHS:
        for mode in ULYSSES:
            dump = ["--dump", out / "long" / str(tokens)]
            words = [*wide.split(), "--dtype", "bfloat16", *dump]
            words += ["--implementation", kernel]
            name = f"ulysses_{mode}_{tokens}"
            run = (tokens, mode, *spread, *words)
            yield sh("ulysses/run_ulysses.sh", name, "long", *run)


def run(command: Command, options: argparse.Namespace) -> Row:
    """Runs a command, and ends it, with all that it started, when its time is over."""
    began, path = time.monotonic(), options.output / f"{command.name}.txt"
    with path.open("w") as file:
        process = subprocess.Popen(
            command.words,
            env={"PYTHON": sys.executable, **os.environ},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(options.seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    took, text = time.monotonic() - began, path.read_text()
    return Row(command.name, shlex.join(command.words), code, took, tail(text))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--platform", default="cuda" if has_gpu() else "cpu")
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    parser.add_argument("--only", action="append", help="a group, or a name")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--list", action="store_true", help="only print them")
    options = parser.parse_args()
    options.output = options.output.resolve()
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "seeds.json"
    known = json.loads(path.read_text()) if path.exists() else []
    rows = {row["name"]: row for row in known}
    failed = False
    for command in commands(options):
        only = options.only or [command.name]
        if command.name not in only and command.group not in only:
            continue
        if options.list:
            print(f"{command.group} {command.name}: {shlex.join(command.words)}")
            continue
        row = run(command, options)
        rows[row.name] = asdict(row)
        path.write_text(json.dumps([*rows.values()], indent=1) + "\n")
        state = "time over" if row.code is None else f"exit code {row.code}"
        print(f"{row.name}: {state}, {row.seconds:.0f} s", flush=True)
        failed = failed or row.code != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
