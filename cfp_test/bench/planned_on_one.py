"""Plans made on one GPU for many of its kind: what is chosen, and how planning grows.

    python -m cfp_test.bench.planned_on_one --out FOLDER [--seconds 520]
        [--parts chosen,ladder] [--platform cpu --tiny]

On a machine with one H200. `chosen`: GPT and MoE for 4 H200, over NVLink and without
peer-to-peer access. `ladder`: LLaMA-2-7B, a 70B of the same shape, GPT and MoE for 8,
64 and 1,024 H200, on one axis, and GPT and MoE also with an axis of hosts and one of
eight devices; of each the best by estimate and the best preset are compiled. Each
number of devices is planned for in a process of its own. Rows are appended to
``FOLDER/planned_on_one.jsonl`` as they are done; what is not reached within the seconds
is left out, and what is there, or in the page of ``--known``, is not planned again. On
a CPU virtual devices stand in, to try it out; or, with ``--compiled``, JAX's CUDA
plugin compiles for H200 that are not here.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

_LLAMA = "llama --layers 32 --batch {batch}"
_LARGE_LLAMA = (
    "llama --hidden 8192 --layers 80 --heads 64 --kv_heads 8 --ffn 28672 "
    "--batch {batch}"
)
_GPT = "gpt --layers 4 --hidden 4096 --heads 32 --batch {batch} --seq 1024"
_MOE = "moe --layers 4 --batch {batch}"
_TINY_GPT = "gpt --layers 6 --hidden 64 --heads 4 --seq 32 --vocab 128 --batch {batch}"
# Sequences of a batch for each device: of the ladder every device has as many.
_LADDER = (("GPT", _GPT, 6), ("LLaMA-2-7B", _LLAMA, 4), ("MoE", _MOE, 16))
_LARGE = ("70B", _LARGE_LLAMA, 1)
_SIZES = {8: "8xh200", 64: "8x8xh200", 1024: "128x8xh200"}
# Of one row, after which the next is begun; and from where on what is left of it is
# predicted from truncated programs.
_ROW_SECONDS = 150
_LADDER_ROW_SECONDS = 90
_LARGE_ROW_SECONDS = 200
_CHOSEN_SECONDS = 60
_LADDER_SECONDS = 20
# How far behind the best by estimate a program of the ladder may be, to be compiled:
# that one and the best preset are in any case.
_LADDER_REACH = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One plan.

    Attributes:
        part: "chosen" or "ladder".
        name: of the model.
        target: and its options.
        cluster: for which devices; "P2P off" for four whose curves are those.
        devices: how many they are.
        hosts: the size of the mesh's first axis, where it has one of hosts; else 0.
    """

    part: str
    name: str
    target: str
    cluster: str
    devices: int
    hosts: int = 0

    @property
    def axes(self) -> dict[str, int]:
        """The mesh's axes; none where it has one alone."""
        if not self.hosts:
            return {}
        return {"host": self.hosts, "gpu": self.devices // self.hosts}

    @property
    def row_seconds(self) -> float:
        """After which the next one is begun."""
        if self.part == "chosen":
            return _ROW_SECONDS
        return _LARGE_ROW_SECONDS if self.name == "70B" else _LADDER_ROW_SECONDS


def cells(parts: list[str], tiny: bool) -> list[Cell]:
    """All plans that are to be made, those of most use first."""
    found = []
    if tiny:
        for devices, cluster in ((4, "4xh200"), (4, "P2P off"), (8, "2x4xh200")):
            target = _TINY_GPT.format(batch=4 * devices)
            part = "ladder" if devices == 8 else "chosen"
            one = Cell(
                part=part, name="GPT", target=target, cluster=cluster, devices=devices
            )
            found += [one] if part in parts else []
        return found
    if "chosen" in parts:
        for name, target in (("GPT", _GPT), ("MoE", _MOE)):
            for cluster in ("4xh200", "P2P off"):
                text = target.format(batch=24 if name == "GPT" else 64)
                how = {"part": "chosen", "name": name, "target": text, "devices": 4}
                found.append(Cell(**how, cluster=cluster))
    if "ladder" in parts:
        one_axis = [cell for n in _SIZES for cell in _ladder(n, _LADDER)]
        hosts = [
            replace(cell, hosts=n // 8)
            for n in list(_SIZES)[1:]
            for cell in _ladder(n, (_LADDER[0], _LADDER[2]))
        ]
        large = [cell for n in (64, 1024, 8) for cell in _ladder(n, (_LARGE,))]
        found += [*one_axis, *large, *hosts]
    return found


def _ladder(devices: int, models: Sequence[tuple[str, str, int]]) -> list[Cell]:
    """Plans of some models for as many devices."""
    return [
        Cell(
            part="ladder",
            name=name,
            target=target.format(batch=each * devices),
            cluster=_SIZES[devices],
            devices=devices,
        )
        for name, target, each in models
    ]


def description(cluster: str, folder: Path) -> str:
    """A cluster as `cfp.described` reads it."""
    if cluster != "P2P off":
        return cluster
    from cfp_test.bench.one_as_n_estimated import p2p_off

    return p2p_off(folder)


def planned(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    """One plan by this process, which plays one of the cell's devices."""
    from cfp import described
    from cfp.context import open_context
    from cfp.passes.pipeline import analyze_step, decide
    from cfp.passes.profile import profile
    from cfp.passes.search import search
    from cfp.planner_settings import DetailedSettings
    from cfp.settings import ConstraintLevel
    from cfp.targets import resolve
    from cfp_test.bench.one_as_n_data import schedule_to_json

    seconds = _CHOSEN_SECONDS if cell.part == "chosen" else _LADDER_SECONDS
    seconds = options.seconds if options.compiled else seconds
    folder = options.out
    mesh = described(description(cell.cluster, folder), **cell.axes)
    if options.compiled:
        mesh = mesh.by_compiler()
    elif not options.estimated:
        on_cpu = options.platform == "cpu"
        mesh = stand_in(mesh) if on_cpu else mesh.on_one_device()
    marks = [time.perf_counter()]
    words = cell.target.split()
    target = resolve(words[0], words[1:])
    step = target.flatten()
    analyzed = analyze_step(step, mesh)
    analysis = analyzed.analysis
    marks.append(time.perf_counter())
    settings = DetailedSettings(seconds=seconds, progress=tell)
    if cell.part == "ladder" or options.compiled:  # As with --quick.
        settings = replace(
            settings,
            plans=1,
            reach=_LADDER_REACH if cell.part == "ladder" else None,
            constraint_levels=(ConstraintLevel.EVERYTHING,),
            compiler_options={},
        )
    with open_context(analyzed.mesh, folder / "store", None, settings) as context:
        solution = search(context, analysis, profile(context, analysis))
        marks.append(time.perf_counter())
        plan, outcome = decide(context, analysis, solution)
        marks.append(time.perf_counter())
        made = context.predictor
        programs = [
            {
                "name": one.label,
                "alone_ms": [round(ms, 3) for ms in one.local_ms],
                "predicted_ms": [round(ms, 3) for ms in one.record.samples_ms],
                "failure": "" if one.record.ok else one.record.reason[:300],
                "peak_bytes": one.record.peak_bytes,
                "build_seconds": round(one.record.build_seconds, 2),
                "run_seconds": round(one.record.run_seconds, 2),
                **(
                    schedule_to_json(one.schedule)
                    if one.schedule is not None and cell.part == "chosen"
                    else {}
                ),
            }
            for one in (made.known.values() if made else ())
        ]
        timed = len(made.timed) if made else 0
        here = context.devices.devices.flat[0].device_kind if made else "none"
    parts = ("analyze", "estimate_and_search", "compile_and_run")
    row = {
        **asdict(cell),
        "device": str(here),
        "seconds": {
            name: round(b - a, 2)
            for name, a, b in zip(parts, marks[:-1], marks[1:], strict=True)
        },
        "winner": plan.winner,
        "level": outcome.winner.level,
        "options": dict(plan.options),
        "rung": plan.rung,
        "predicted_ms": plan.predicted_ms,
        "predicted_bytes": plan.predicted_bytes,
        "crosses_hosts": plan.environment["crosses_hosts"],
        "computations_timed": timed,
        "programs": programs,
        "search": dict(plan.search),
        "race": [asdict(one) for one in plan.race],
        "told": repr(plan),
    }
    if cell.part == "chosen":
        row["plan"] = json.loads(plan.to_json())
    return row


def stand_in(mesh: Any) -> Any:
    """A described mesh for which virtual devices stand in."""
    from cfp.platform import make_mesh
    from cfp.program.trace import planning_mesh

    here = planning_mesh(make_mesh(mesh.axes))
    return replace(mesh, stand_in=here, runs=True)


def tell(event: Any) -> None:
    """Prints at once what is being done: what is ended has said how far it was."""
    if isinstance(event, str):
        print(f"    {time.strftime('%X')} {event}", flush=True)


def child(options: argparse.Namespace) -> None:
    """Plans some cells of one number of devices."""
    from cfp import platform

    wanted = [Cell(**data) for data in json.loads(options.child)]
    if options.platform == "cpu" or options.compiled or options.estimated:
        platform.select("cpu", (("x", wanted[0].devices),))
    for cell in wanted:
        left = options.end - time.time()
        if left < 15:
            break
        longest = left if options.compiled else min(left, cell.row_seconds)
        faulthandler.dump_traceback_later(longest, exit=True)
        print(f"{cell.name} for {cell.cluster} {cell.axes or ''}", flush=True)
        try:
            row = planned(cell, options)
        except Exception as error:  # A row of its own, and the others go on.
            told = "".join(traceback.format_exception(error))
            row = {**asdict(cell), "failure": str(error), "told": told[-3000:]}
        print(f"  {row.get('winner')}: {row.get('predicted_ms')} ms", flush=True)
        with file_of(options.out).open("a") as file:
            file.write(json.dumps(row) + "\n")
    faulthandler.cancel_dump_traceback_later()


def file_of(folder: Path) -> Path:
    """File that rows go to."""
    return folder / "planned_on_one.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=520)
    parser.add_argument("--parts", default="chosen,ladder")
    parser.add_argument("--platform", choices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--estimated", action="store_true", help="nothing compiles")
    parser.add_argument("--sizes", help="of the ladder, such as 64,1024")
    parser.add_argument("--models", help="of the ladder, such as 70B,GPT")
    parser.add_argument("--known", type=Path, help="JSON of a page with rows")
    parser.add_argument("--compiled", action="store_true", help="without a GPU")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.time() + options.seconds
    known = rows(options.out)
    if options.known:
        page = json.loads(options.known.read_text())["rows"]
        known += [row for row in page if row.get("rung") == "one device"]
    done = {(row["target"], row["cluster"], row.get("hosts", 0)) for row in known}
    wanted = cells(options.parts.split(","), options.tiny)
    wanted = [one for one in wanted if (one.target, one.cluster, one.hosts) not in done]
    if options.sizes:
        sizes = set(map(int, options.sizes.split(",")))
        wanted = [one for one in wanted if one.devices in sizes]
    if options.models:
        wanted = [one for one in wanted if one.name in options.models.split(",")]
    while wanted and time.time() < end:
        other = (i for i, c in enumerate(wanted) if c.devices != wanted[0].devices)
        now = wanted[: next(other, len(wanted))]
        before = len(rows(options.out))
        told = json.dumps([asdict(one) for one in now])
        words = [sys.executable, "-m", "cfp_test.bench.planned_on_one"]
        words += ["--child", told, "--end", str(end), "--out", str(options.out)]
        words += ["--platform", options.platform] if options.platform else []
        words += ["--compiled"] if options.compiled else []
        words += ["--estimated"] if options.estimated else []
        subprocess.run(words, check=False, env=dict(os.environ))
        done = len(rows(options.out)) - before
        # What was being planned when the process ended is not tried again.
        gone = now[: done + 1]
        wanted = [one for one in wanted if one not in gone]
    print(f"{len(rows(options.out))} rows in {file_of(options.out)}")


def rows(folder: Path) -> list[dict[str, Any]]:
    """Lists the rows that are done."""
    file = file_of(folder)
    return [json.loads(line) for line in file.open()] if file.exists() else []


if __name__ == "__main__":
    main()
