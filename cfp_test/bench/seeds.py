"""Runs the seeds' shell scripts on some devices, one after another, and notes all.

    python -m cfp_test.bench seeds --devices 2 --output seeds        # on GPUs
    python -m cfp_test.bench seeds --devices 2 --output seeds --only ulysses
    python -m cfp_test.bench seeds --platform cpu --tiny --devices 2 --output seeds

Each command runs as it would be typed, and is ended when its time is over, or that of
all, `--total`. Begun again, what ended well is left out (but for `--again`), and what
did not goes on from what was measured. Its output is OUTPUT/NAME.txt, rows that it
writes OUTPUT/NAME.json or .jsonl, and OUTPUT/seeds.json has for each what was run, its
exit code, seconds, and the end of its output. With `--tiny` sizes are for a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cfp.cluster.doctor import shows_nvidia
from cfp_test.gpu.place import tail
from cfp_test.support.waiting import end_group

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "cfp_test"
SECONDS = 590.0
_LEAST_SECONDS = 5.0
TINY = "--hidden_size 32 --seq_len 16 --vocab_size 96 --quick --per_kind 2"
# Tokens of the seed's own run.
_SEQ = 6
LENGTHS = (2048, 4096, 8192, 16384, 32768)
# The seeds' settings of their functionality checks, as the scripts name them.
SETTINGS = {
    "moe": ("16x4x32", "16x4x64", "16x2x96", "16x2x128"),
    "llama": ("2x40", "2x80", "4x40", "4x80"),
    "gpt": ("24x2", "32x2", "24x4", "32x4"),
}
TINY_SETTINGS = {"moe": ("2x4x32",), "llama": ("1x8",), "gpt": ("8x1",)}
# What check_qkv compares with the first, whose exchange is in the model's code.
ULYSSES = ("eager", "compile", "deepcompile", "ringattn", "auto")


@dataclass(frozen=True)
class Command:
    """A script, and what it is given.

    Attributes:
        name: of its files.
        group: that `--only` names.
        words: of the command.
        variables: of its environment, besides this process's.
    """

    name: str
    group: str
    words: list[str]
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """The command as it would be typed."""
        given = [f"{k}={shlex.quote(v)}" for k, v in self.variables.items()]
        return " ".join([*given, shlex.join(self.words)])


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

    yield from _ulysses(sh, options, where)
    yield from _passes(sh, options, [*where, *devices])
    ring = [*where, *devices]
    sizes, long = ["--lengths", "64,128"], "64,128"
    if not options.tiny:
        # A few of 32 layers: all would be compiled for minutes, and states of all do
        # not fit beside what long sequences take. What tells most comes first.
        lengths, long = "8192,32768,2048,16384,4096", "16384,65536,32768,131072"
        sizes = ["--model", "7b", "--layers", "4", "--lengths", lengths]
    # One layer's attention, of which published figures are.
    alone = [*sizes[:-1], long, "--alone", "--repeats", 8]
    alone += ["--methods", "flash,all_gather,ring,zigzag,ulysses"]
    for name, kind in (("ring_alone", alone), ("ring", sizes)):
        for what in ("inference", "training"):
            words = [*ring, *kind, "--json", out / f"{name}_{what}.json"]
            words += ["--train"] if what == "training" else []
            yield sh("ring/benchmark_ring.sh", f"{name}_{what}", "ring", *words)
    yield sh("ring/run_inference.sh", "ring_tokens", "ring", *ring, "--method", "ring")


def _passes(sh: Any, options: argparse.Namespace, given: list[str]) -> Any:
    """The scripts of CFP's artifact."""
    out, tiny = options.output, TINY.split() if options.tiny else []
    kept = ["--workdir", out / "work"]
    experts = "--num_experts 4 --expert_group_size 32".split() if options.tiny else []
    ffn = ["--ffn_size", "48"] if options.tiny else []
    heads = ["--num_heads", "4"] if options.tiny else []
    settings = TINY_SETTINGS if options.tiny else SETTINGS
    # The first setting of each model before the second of any.
    order = sorted(
        (index, -len(model), model, setting)
        for model, known in settings.items()
        for index, setting in enumerate(known)
    )
    for _, _, model, setting in order:
        check = f"{model}_functionality_check"
        name = f"{check if model != 'gpt' else 'gpt_A100_8GPU'}_{setting}"
        words = [*given, *kept, "--json", out / f"{name}.jsonl", *tiny]
        if model == "gpt":
            words += ["--settings", setting, *heads]
            yield sh("scripts/gpt_A100_8GPU.sh", name, "passes", *words)
            continue
        words += experts if model == "moe" else [*ffn, *heads]
        one = sh(f"scripts/{check}.sh", name, "passes", *words)
        yield replace(one, variables={"SETTINGS": setting})
    for model, more in (("gpt", heads), ("moe", [*heads, *experts])):
        name = f"{model}_enum_benchmark_comm_comp"
        made = ["--json", out / f"{name}.json", "--plot", out / f"{name}.svg"]
        made = made if find_spec("matplotlib") else made[:2]
        words = [*given, *made, "--limit", options.limit, "--compiles", 6]
        words += ["--workdir", out / "work"]
        if options.tiny:
            sizes = "--hidden_size 32 --seq_len 16 --vocab_size 96 --quick --limit 3"
            words += [*sizes.split(), "--batch_size", "8", "--num_layer", "2", *more]
        yield sh(f"scripts/enum_and_benchmark/{name}.sh", name, "enumerate", *words)


def _ulysses(sh: Any, options: argparse.Namespace, where: list[str]) -> Any:
    """Ulysses in all its modes: small in float32, compared; then long, in bfloat16."""
    out, script = options.output, "ulysses/run_ulysses.sh"
    spread = [*where, "--sp", options.devices]
    # Of all that computes attention in float32, on any device, and can be in a ring.
    small = ["--dump", out / "qkv", "--implementation", "chunked"]
    small += ["--json", out / "ulysses_all.json"]
    yield sh(script, "ulysses_all", "ulysses", _SEQ, "all", *spread, *small)
    for mode in ULYSSES[1:]:
        pair = (out / "qkv" / ULYSSES[0], out / "qkv" / mode)
        name = f"check_qkv_{mode}"
        yield sh("ulysses/check_qkv.sh", name, "ulysses", *pair)
    wide = "--hidden 2048 --heads 16 --layers 2 --vocab 32000 --batch 1 --steps 12"
    if options.tiny:
        wide = "--hidden 32 --heads 4 --layers 1"
    lengths = (64, 128) if options.tiny else LENGTHS
    kernel = "chunked" if options.platform == "cpu" else "cudnn"
    words = [*spread, *wide.split(), "--dtype", "bfloat16", "--implementation", kernel]
    words += ["--dump", out / "long"]
    rows = ["--json", out / "ulysses_long.json", "--no_save"]
    every = ",".join(map(str, lengths))
    long = "compile", "deepcompile", "ringattn"
    yield sh(script, "ulysses_long", "long", every, *long, *words, *rows)
    yield sh(script, "ulysses_long_eager", "long", every, "eager", *words, *rows)
    planned = f"{lengths[-1]},{lengths[len(lengths) // 2]}"
    yield sh(script, "ulysses_long_auto", "long", planned, "auto", *words, *rows)
    yield sh(script, "ulysses_saved", "long", lengths[0], *long, *words)
    for mode in long[1:]:
        pair = (out / "long" / long[0], out / "long" / mode)
        yield sh("ulysses/check_qkv.sh", f"check_qkv_long_{mode}", "long", *pair)


def chosen(found: Iterable[Command], only: Sequence[str] | None) -> list[Command]:
    """Picks commands by their names or groups, in the order of these; all without."""
    every = list(found)
    if only is None:
        return every
    named = [c for name in only for c in every if name in (c.name, c.group)]
    return list({command.name: command for command in named}.values())


def run(command: Command, options: argparse.Namespace, seconds: float) -> Row:
    """Runs a command, and ends it, with all that it started, when its time is over."""
    began, path = time.monotonic(), options.output / f"{command.name}.txt"
    with path.open("w") as file:
        process = subprocess.Popen(
            command.words,
            cwd=ROOT,
            env={"PYTHON": sys.executable, **os.environ, **command.variables},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            end_group(process)
            process.wait()
    took, text = time.monotonic() - began, path.read_text()
    return Row(command.name, command.line, code, took, tail(text))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--platform", default="cuda" if shows_nvidia() else "cpu")
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    parser.add_argument("--only", action="append", help="group or name, in order")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each")
    parser.add_argument("--total", type=float, default=1e9, help="seconds of all")
    parser.add_argument("--limit", type=int, default=64, help="combinations")
    parser.add_argument("--again", action="store_true", help="what ended well, too")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--list", action="store_true", help="only print them")
    options = parser.parse_args()
    options.output = options.output.resolve()
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "seeds.json"
    known = json.loads(path.read_text()) if path.exists() else []
    rows = {row["name"]: row for row in known}
    began, failed = time.monotonic(), False
    for command in chosen(commands(options), options.only):
        if options.list:
            print(f"{command.group} {command.name}: {command.line}")
            continue
        before = rows.get(command.name, {})
        ended_well = before.get("code") == 0 and before["command"] == command.line
        if ended_well and not options.again:
            continue
        left = options.total - (time.monotonic() - began)
        if left < _LEAST_SECONDS:
            print(f"{command.name}: no time was left", flush=True)
            failed = True
            continue
        seconds = min(left, options.seconds)
        row = run(command, options, seconds)
        rows[row.name] = asdict(row)
        path.write_text(json.dumps([*rows.values()], indent=1) + "\n")
        state = "time over" if row.code is None else f"exit code {row.code}"
        print(f"{row.name}: {state}, {row.seconds:.0f} s", flush=True)
        failed = failed or row.code != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
