"""Plans with kernels of attention and without, made on one GPU that plays one of N.

    python -m cfp_test.bench.attention_planned OUT.json [--seconds 400]
        [--parts steps,hand,planned] [--known PAGE.json] [--again] [--tiny]

``steps``: GPT at 1,024 and 4,096 tokens and LLaMA at 4,096 on 4 devices: what a plan of
the rung "one device" chooses, with attentions as they are written and with cuDNN's in
their place, what it computes and needs. ``hand``: LLaMA-2-7B on 8 devices at 8k to 512k
tokens under strategies by hand, with kernels and as it is written, each compiled for
what it needs; what is short is run, too; and from two lengths of a strategy the longest
that fits, compiled as well. One sequence is spread by its heads, or by its tokens, as a
ring. ``planned``: what is chosen by estimates for these lengths with all memory and
within a budget.

OUT.json is written after each row; rows in it already are not made again, nor those of
``--known``, unless they failed otherwise than for memory; with ``--again`` those of
``planned`` are. What is not reached within the seconds is left out. With ``--tiny``
virtual CPU devices run all.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cfp.planner_settings import DetailedSettings

_STARTED = time.perf_counter()
_TINY = "--layers 2 --hidden 64 --heads 8 --vocab 128"
_SEVEN = "--layers 32 --hidden 4096 --ffn 11008 --heads 32 --kv_heads 32"
_LARGE = "--layers 4 --hidden 4096 --heads 32"
STEPS = {
    "gpt 1k": f"gpt {_LARGE} --batch 24 --seq 1024",
    "llama 4k": f"llama {_LARGE} --ffn 11008 --kv_heads 32 --batch 8 --seq 4096",
    "gpt 4k": f"gpt {_LARGE} --batch 8 --seq 4096",
}
TINY_STEPS = {"gpt tiny": f"gpt {_TINY} --seq 32 --batch 8"}
# (tokens, sequences of a batch)
LENGTHS = ((8192, 8), (32768, 8), (131072, 1), (524288, 1))
TINY_LENGTHS = ((64, 8), (128, 8), (64, 1), (128, 1))
_MOST_RUN = 8192  # What is longer is not run: a step takes 8 seconds and more.
# As it is written, 32k tokens and more are beyond the compiler.
LENGTHS_AS_WRITTEN = ((8192, 8), (32768, 8), (131072, 1), (4096, 8))
# Strategies by hand: of several sequences, and of one, which is spread.
_OF_SEVERAL = ("fully_sharded", "tensor_sequence_parallel")
RING = "ring, fully sharded"
_OF_ONE = ("tensor_sequence_parallel", RING)
_NO_MEMORY = "out_of_memory"
PARTS_OF_VOCABULARY = 16
BUDGET_BYTES = 40 * 10**9
_PLAN_SECONDS = 25


def long_target(tokens: int, batch: int, tiny: bool) -> str:
    """LLaMA-2-7B, or a tiny one, rematerialized layer by layer."""
    size = _TINY if tiny else _SEVEN
    return f"llama {size} --seq {tokens} --batch {batch} --scan --remat"


def tokens_spread(frame: Any) -> Any:
    """Parameters fully sharded, and of each sequence the tokens: in scores, queries."""
    from cfp.analysis.layout import Choice, Storage
    from cfp.analysis.strategies import AxisChoice
    from cfp.attention.matching.matches import attentions
    from cfp.presets.roles import axis_walk

    [(_, size)] = frame.mesh
    choices = axis_walk(frame, "data", size, dim=1)
    program = frame.program
    queries = {}
    for op, match in attentions(program).found.items():
        rule = program.ops[op].rule
        place = match.found.scores.letters.index(match.meaning.tokens)
        queries[op] = AxisChoice(rule.major(rule.results[0][place]))
    strategies = [
        (queries.get(block.anchor, one),)
        for block, one in zip(frame.blocks, choices, strict=True)
    ]
    return Choice(tuple(strategies), (Storage.SHARDED,) * len(frame.groups))


def estimated(analyzed: Any, choice: Any, rates: Any) -> dict[str, Any]:
    """Estimates time and memory of a choice as plans are chosen by."""
    from cfp.cost.costs import Costs
    from cfp.search.choices import estimate_kinds
    from cfp.search.expected import build_problem, estimate_options
    from cfp.settings import Replacing
    from cfp.solution import prediction_of

    analysis = analyzed.analysis
    costs = Costs(analysis, rates)
    options = estimate_options(
        estimate_kinds(analysis, rates),
        {"by hand": choice},
        costs,
        per_kind=0,
        budget_bytes=None,
        replacing=Replacing(),
    )
    problem = build_problem(costs, options.estimated, None)
    found = prediction_of(analysis, problem, choice)
    return {"estimated_ms": found.time_ms, "estimated_bytes": found.peak_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--parts", default="steps,hand,planned")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--known", type=Path, help="a page's JSON, to go on from")
    parser.add_argument("--again", action="store_true", help="rows of plans, too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        Maker(options).make(options.child)
        return
    if options.known and not options.out.exists():
        page = json.loads(options.known.read_text())
        page["rows"] = [
            row
            for row in page["rows"]
            if row.get("failure", _NO_MEMORY).startswith(_NO_MEMORY)
            and not (options.again and "budget" in row)
        ]
        options.out.write_text(json.dumps(page, indent=1) + "\n")
    parts = options.parts.split(",")
    for number, part in enumerate(parts):
        # A process plays one number of devices.
        left = options.seconds - (time.perf_counter() - _STARTED)
        share = left / (len(parts) - number)
        words = [sys.executable, "-m", "cfp_test.bench.attention_planned"]
        words += [str(options.out), "--seconds", str(share), "--child", part]
        words += ["--tiny"] if options.tiny else []
        try:
            if subprocess.run(words, check=False, timeout=share + 45).returncode:
                print(f"{part} ended with an error", flush=True)
        except subprocess.TimeoutExpired:
            print(f"{part} was ended: its time was over", flush=True)


def _kind(tiny: bool) -> str:
    """Names the GPU, which JAX may not be asked for before it plays one of several."""
    if tiny:
        return "h100"
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    told = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return "h200" if "H200" in told else "h100"


class Maker:
    """Makes the rows of one part, in a process that plays one of its devices."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.tiny = options, options.tiny
        self.kernels = ("chunked",) if options.tiny else ("cudnn", "chunked")
        path = options.out
        self.page = json.loads(path.read_text()) if path.exists() else {"rows": []}
        self.folder = Path(tempfile.mkdtemp())

    def make(self, part: str) -> None:
        """All rows of a part, those of most use first."""
        from cfp.devices.described import described

        count = 4 if part == "steps" else 8
        mesh = described(f"{count}x{_kind(self.tiny)}", x=count)
        if self.tiny:
            from cfp import platform
            from cfp_test.bench.planned_on_one import stand_in

            platform.select("cpu", mesh.axes)
            self.mesh = stand_in(mesh)
        else:
            self.mesh = mesh.on_one_device()
        if part == "steps":
            for name, target in (TINY_STEPS if self.tiny else STEPS).items():
                for kernels in ((), self.kernels):
                    self._add({"name": name, "target": target, "kernels": kernels})
            return
        lengths = TINY_LENGTHS if self.tiny else LENGTHS
        if part == "planned":
            for tokens, batch in lengths:
                for budget in (None, BUDGET_BYTES):
                    row = self._long(tokens, batch, self.kernels)
                    self._add(row | {"budget": budget})
            return
        as_written = lengths if self.tiny else LENGTHS_AS_WRITTEN
        for kernels, some in ((self.kernels, lengths), ((), as_written)):
            for name in dict.fromkeys((*_OF_ONE, *_OF_SEVERAL)):
                for tokens, batch in some:
                    if not kernels and name == RING:
                        continue
                    if name in (_OF_SEVERAL if batch > 1 else _OF_ONE):
                        self._add(
                            self._long(tokens, batch, kernels) | {"by_hand": name}
                        )
                self._longest(name, kernels)

    def _long(
        self, tokens: int, batch: int, kernels: tuple[str, ...]
    ) -> dict[str, Any]:
        """Begins a row of a long sequence."""
        return {
            "name": f"{tokens} x {batch}",
            "target": long_target(tokens, batch, self.tiny),
            "tokens": tokens,
            "batch": batch,
            "kernels": kernels,
        }

    def _add(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """Makes a row that is not there yet, if there is time."""
        row["kernels"] = list(row["kernels"])
        for known in self.page["rows"]:
            if all(n in known and known[n] == value for n, value in row.items()):
                return known
        left = self.options.seconds - (time.perf_counter() - _STARTED)
        if left < 5:
            print(f"no time for {row}", flush=True)
            return None
        started = time.perf_counter()
        row = {"part": self.mesh.cluster.count, **row}
        try:
            row |= self._hand(row) if "by_hand" in row else self._planned(row)
        except Exception as error:  # One row that fails is a row.
            row["failure"] = f"{type(error).__name__}: {error}"[:600]
        row["seconds"] = round(time.perf_counter() - started, 1)
        self.page["rows"].append(row)
        import jax

        self.page |= {
            "jax": jax.__version__,
            "hardware": str(self.mesh.stand_in.devices.flat[0].device_kind),
            "memory_bytes": self.mesh.memory_bytes,
        }
        self.options.out.write_text(json.dumps(self.page, indent=1) + "\n")
        brief = {k: v for k, v in row.items() if k not in ("programs", "told")}
        spent = time.perf_counter() - _STARTED
        print(f"{spent:6.1f} s {json.dumps(brief)[:900]}", flush=True)
        return row

    def _analysed(self, target: str) -> Any:
        from cfp.passes.pipeline import analyze_step
        from cfp.targets import resolve

        words = target.split()
        found = resolve(words[0], words[1:])
        step = found.flatten()
        return analyze_step(step, self.mesh)

    def _planned(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Makes the plan's choice: raced, or by estimates and compiled."""
        from cfp.context import open_context
        from cfp.passes.pipeline import decide
        from cfp.passes.profile import profile
        from cfp.passes.search import search
        from cfp.settings import ConstraintLevel
        from cfp.solution import prediction_of

        analyzed = self._analysed(row["target"])
        by_estimates = "budget" in row
        settings = DetailedSettings(
            attention=tuple(row["kernels"]),
            cross_entropy=PARTS_OF_VOCABULARY if by_estimates else 0,
            seconds=_PLAN_SECONDS,
            race=not by_estimates,
            plans=1,
            constraint_levels=(ConstraintLevel.EVERYTHING,),
            compiler_options={},
        )
        budget = row.get("budget")
        with open_context(analyzed.mesh, self.folder, budget, settings) as context:
            solution = search(
                context, analyzed.analysis, profile(context, analyzed.analysis)
            )
            plan, outcome = decide(context, analyzed.analysis, solution)
            assert context.predictor is not None
            programs = [
                {
                    "name": one.label,
                    "computation_ms": list(one.local_ms),
                    "predicted_ms": list(one.record.samples_ms),
                    "peak_bytes": one.record.peak_bytes,
                    "failure": "" if one.record.ok else one.record.reason[:300],
                }
                for one in context.predictor.known.values()
            ]
        found = {
            "winner": plan.winner,
            "predicted_ms": plan.predicted_ms,
            "predicted_bytes": plan.predicted_bytes,
            "replaced": [
                [one.op, *one.functions.how] for one in plan.constraints.replaced
            ],
            "rematerialized": len(plan.constraints.rematerialized),
            "programs": programs,
            "told": repr(plan),
        }
        if not by_estimates:
            return found
        # The planner has compiled it; what was estimated before is another figure.
        choice = outcome.winner.choice
        found |= {
            "peak_bytes": plan.predicted_bytes,
            "predicted_bytes": prediction_of(
                analyzed.analysis, solution.problem, choice
            ).peak_bytes,
        }
        if row["tokens"] > _MOST_RUN:
            return found
        return found | self._compiled(row, analyzed, choice)

    def _hand(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A strategy by hand, with a kernel in all segments and the head in parts."""
        from cfp.presets.presets import presets

        analyzed = self._analysed(row["target"])
        frame = analyzed.analysis.frame
        is_ring = row["by_hand"] == RING
        choice = tokens_spread(frame) if is_ring else presets(frame)[row["by_hand"]]
        if row["kernels"]:
            found = self._kernels(analyzed.analysis, choice, is_ring)
            choice = replace(choice, kernels=found)
        return self._compiled(row, analyzed, choice)

    def _kernels(
        self, analysis: Any, choice: Any, is_ring: bool
    ) -> tuple[tuple[int, Any], ...]:
        """The first kernel that each segment can have under a choice, or its ring."""
        from cfp.cost.choice import segment_candidate
        from cfp.search.choices import kernel_variants
        from cfp.settings import Replacing

        platform = self.mesh.stand_in.devices.flat[0].platform
        parts = PARTS_OF_VOCABULARY
        known = Replacing(
            attention=self.kernels, cross_entropy=parts, platform=platform
        )
        found = []
        for segment in analysis.segments:
            candidate = segment_candidate(analysis, segment.index, choice)
            variants = kernel_variants(analysis, segment.kind, candidate, known)
            rings = [one for one in variants if is_ring and one.kernels.spread]
            best = rings or variants
            found += [(segment.index, one.kernels) for one in best[:1]]
        return tuple(found)

    def _compiled(
        self, row: Mapping[str, Any], analyzed: Any, choice: Any
    ) -> dict[str, Any]:
        """Returns a choice's memory, and for short ones the time of its computation."""
        from cfp.devices import described
        from cfp.profiling.builder import BuildEnvironment, Built, build
        from cfp.search.jobs import whole_job

        analysis, here = analyzed.analysis, self.mesh.stand_in
        program = analysis.frame.program
        options = {} if self.tiny else dict(described.OPTIONS)
        job = whole_job(analysis, choice, (), "by hand", options=options)
        started = time.perf_counter()
        environment = BuildEnvironment(wants_local=lambda job, text: True)
        built = build(program, here, job, environment)
        found: dict[str, Any] = {
            "build_seconds": round(time.perf_counter() - started, 1)
        }
        if not isinstance(built, Built):
            return found | {"failure": f"{built.status}: {built.reason}"[:600]}
        found |= {
            "peak_bytes": built.peak_bytes,
            "temp_bytes": built.temp_bytes,
            "fits": built.peak_bytes <= self.mesh.memory_bytes,
            "replaced": [
                [one.op, *one.functions.how] for one in job.constraints.replaced
            ],
        }
        if "by_hand" in row:
            found |= estimated(analyzed, choice, self.mesh.rates)
        is_short = row["tokens"] <= _MOST_RUN and "long" not in row
        if is_short and found["fits"]:
            found |= self._run(built, job, program)
        return found

    def _run(self, built: Any, job: Any, program: Any) -> dict[str, Any]:
        """Times the computation of one device, collectives left out."""
        from statistics import median

        from cfp.profiling.runner import run_local, timing_on

        mesh = self.mesh.stand_in
        timing = timing_on(
            mesh,
            warmup_seconds=0.4,
            min_samples=3,
            max_samples=5,
            budget_seconds=6,
        )
        record = run_local(built, job, program, mesh, timing=timing)
        if not record.ok:
            return {"not_run": f"{record.status}: {record.reason}"[:300]}
        samples = list(record.samples_ms)
        return {"samples_ms": samples, "computation_ms": median(samples)}

    def _longest(self, name: str, kernels: tuple[str, ...]) -> None:
        """The longest sequence that fits, from the two longest that were compiled."""
        by_batch: dict[int, list[tuple[int, int]]] = {}
        for row in self.page["rows"]:
            is_alike = row.get("by_hand") == name and row["kernels"] == list(kernels)
            if is_alike and "peak_bytes" in row and "long" not in row:
                size = row["tokens"], row["peak_bytes"]
                by_batch.setdefault(row["batch"], []).append(size)
        able = [n for n, pairs in by_batch.items() if len(pairs) > 1]
        batch = min(able, default=0)
        pairs = sorted(by_batch.get(batch, ()))
        if len(pairs) < 2:
            return
        (a, bytes_a), (b, bytes_b) = pairs[-2:]
        # Kernels keep what grows with the length, scores grow with its square.
        power, step = (1, 8192) if kernels else (2, 1024)
        each = (bytes_b - bytes_a) / (b**power - a**power)
        room = max(0.0, self.mesh.memory_bytes - bytes_a)
        longest = (a**power + room / each) ** (1 / power)
        step = 64 if self.tiny else step
        tokens = int(longest // step) * step
        if 0 < tokens < 2**23:
            row = self._long(tokens, batch, kernels)
            self._add(
                row | {"name": f"longest, {row['name']}", "by_hand": name, "long": True}
            )


if __name__ == "__main__":
    main()
