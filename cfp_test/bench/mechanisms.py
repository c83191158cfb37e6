"""Switches each mechanism of profiling, search and race off: what gets worse?

    python -m cfp_test.bench.mechanisms --json FILE [--only PATTERN] [--seeds N]

Three experiments, none of which needs a device:

- *recorded*: of all races in docs/results, how much slower the fastest was without the
  candidates that a mechanism adds. Measured on GPUs but for two files of CPUs and one
  of predictions.
- *made up*: models are planned by the rules for GPUs, without a budget and within 80
  and 60 % of what that plan needs, on devices whose every time and size follows from a
  seed: what a choice takes in truth, what fits, and how many programs are tuned, built
  and run. Predictions are as far off as was recorded.
- *walk*: search problems of programs, without a budget and with several: what a
  solution takes.

A mechanism is switched off from outside: by another value of a constant, another
function, or an edit of a function's source. What the file has is not made again.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax

from cfp import settings
from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.context import open_context
from cfp.cost.choice import SegmentChoice, segment_candidate
from cfp.cost.costs import Costs
from cfp.devices.described import cluster_of, mesh_of
from cfp.errors import MemoryBudgetError
from cfp.models import registry
from cfp.passes import profile as profile_pass
from cfp.passes import search as search_pass
from cfp.passes.pipeline import analyze_step
from cfp.planner_settings import DetailedSettings
from cfp.presets.presets import PRESETS, presets
from cfp.profiling import measurer, runner
from cfp.profiling.builder import Built, Job
from cfp.profiling.compiler_options import MEMORY_SHARE
from cfp.profiling.rates import Rates
from cfp.profiling.record import CompiledBytes, ProfileRecord
from cfp.program.step import flatten_step
from cfp.race import compile as race_compile
from cfp.race import programs as race_programs
from cfp.race import race as race_room
from cfp.race import turns
from cfp.race.programs import RaceResult
from cfp.race.turns import Ranking
from cfp.search import jobs, requests, solver, tradeoff
from cfp.search.choices import estimate_kinds
from cfp.search.expected import build_problem, estimate_options
from cfp.search.problem import Problem
from cfp.settings import ConstraintLevel, Replacing
from cfp.solution import Candidate
from cfp.targets import resolve
from cfp_test.bench.mechanisms_list import MECHANISMS, Mechanism, without
from cfp_test.models.tiny import TINY
from cfp_test.programs.registry import PROGRAMS
from cfp_test.race.results import result_of
from cfp_test.results.mechanisms import WITH_ALL
from cfp_test.search.made_up import estimated, rates_of
from cfp_test.support.checking import make_mesh

ROOT = Path(__file__).parents[2]

# -------------------------------------------------------------------------- the devices

MODELS = {
    "gpt": "gpt --layers 2 --hidden 4096 --heads 32 --batch 12 --seq 1024",
    "llama": "llama --layers 2 --hidden 4096 --heads 32 --batch 4 --seq 4096",
    "moe": "moe --layers 2 --batch 32",
}
SHARES = (None, 0.8, 0.6)
_DEVICE_BYTES = 80 * 10**9
_ON_GPUS = settings.defaults_of("gpu")


@dataclass(frozen=True)
class Devices:
    """Devices of which every time and size is made up, and known.

    Of each: a whole program takes 0.94 to 1.06 of its parts, 0.92 to 1.05 of that with
    arguments alone constrained, and with options what was recorded; a segment adds 0.6
    to 1.0 of what it takes alone; what programs need is 0.94 to 1.06 of the prediction,
    or where they rematerialize 0.77 to 1.18 (docs/decisions.md).
    """

    analysis: Analysis
    rates: Rates
    seed: int
    parts: dict[str, Mapping[int, SegmentChoice]] = field(default_factory=dict)
    wholes: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        costs, estimates = Costs(self.analysis, self.rates), None
        estimates = estimate_kinds(self.analysis, self.rates)
        object.__setattr__(self, "costs", costs)
        object.__setattr__(self, "estimates", estimates)
        object.__setattr__(self, "noise", random.Random(self.seed))

    def luck(self, low: float, high: float, *of: Any) -> float:
        """The same number between two for the same words."""
        return random.Random(f"{self.seed} {of!r}").uniform(low, high)

    def segment_ms(self, index: int, candidate: SegmentChoice) -> float:
        """The time that a segment adds to a step."""
        kind = self.analysis.segments[index].kind
        costs, plain = self.costs, candidate.plain
        estimated_ms = self.estimates[kind].total_ms(plain)
        estimated_ms -= costs.saved_by_kernel_ms(kind, plain)
        of = (kind, plain.strategies, plain.storage, plain.kernels)
        time_ms = max(0.01, estimated_ms) * self.luck(0.8, 1.2, "time", *of)
        return time_ms * (self.luck(1.17, 1.44, *of) if candidate.remat else 1.0)

    def alone_ms(self, index: int, candidate: SegmentChoice) -> float:
        """The time of a segment by itself."""
        of = (self.analysis.segments[index].kind, candidate.plain.strategies)
        return self.segment_ms(index, candidate) / self.luck(0.6, 1.0, "alone", *of)

    def moved_ms(self, candidates: Mapping[int, SegmentChoice]) -> float:
        """The time of resharding between segments that follow each other."""
        return sum(
            self.costs.reshard_ms(i, i + 1, one, candidates[i + 1])
            for i, one in candidates.items()
            if i + 1 in candidates
        )

    def part_ms(self, candidates: Mapping[int, SegmentChoice]) -> float:
        """The time of a segment, or of two: one of them hides behind the other."""
        (first, alone), *others = candidates.items()
        time_ms = self.alone_ms(first, alone) + self.moved_ms(candidates)
        return time_ms + sum(self.segment_ms(*one) for one in others)

    def whole_ms(
        self, choice: Choice, level: ConstraintLevel, options: Mapping[str, str]
    ) -> float:
        """The time of a step."""
        picked = self.picked(choice)
        time_ms = sum(self.segment_ms(*one) for one in picked.items())
        time_ms = (time_ms + self.moved_ms(picked)) * self.luck(0.94, 1.06, choice)
        if level is not ConstraintLevel.EVERYTHING:
            time_ms *= self.luck(0.92, 1.05, choice, level)
        for name in options:
            of = (choice, level, name)
            if name == MEMORY_SHARE:
                time_ms *= self.luck(1.05, 1.12, *of)
            elif "latency" in name:
                time_ms *= self.luck(0.997, 1.055, *of)
            elif "all_gather" in name:
                time_ms *= self.luck(0.959, 1.02, *of)
        return time_ms

    def picked(self, choice: Choice) -> dict[int, SegmentChoice]:
        """The parts of a choice, by segment."""
        segments = self.analysis.segments
        return {
            s.index: segment_candidate(self.analysis, s.index, choice) for s in segments
        }

    def size(
        self,
        candidates: Mapping[int, SegmentChoice],
        options: Mapping[str, str],
        *of: Any,
    ) -> CompiledBytes:
        """Memory that some segments need."""
        held = self.costs.fixed_bytes if len(candidates) > 2 else 0
        kept = peak = 0
        for index, one in sorted(candidates.items()):
            kind = self.analysis.segments[index].kind
            least = self.costs.least_bytes(kind, one)
            plain = self.costs.least_bytes(kind, one.plain)
            held += least.state_bytes
            kept += least.residual_bytes
            again = plain.residual_bytes - least.residual_bytes
            peak = max(peak, kept + again + self.costs.temp_bytes(kind, one.plain))
        again = any(one.remat for one in candidates.values())
        low, high = (0.77, 1.18) if again else (0.94, 1.06)
        temp = peak * self.luck(low, high, [*candidates.items()], *of)
        if MEMORY_SHARE in options:
            limit = (_DEVICE_BYTES - held) * int(options[MEMORY_SHARE]) / 100
            limit *= self.luck(0.96, 1.04, [*candidates.items()], options)
            least_share = self.luck(0.6, 0.77, [*candidates.items()], "least")
            temp = max(least_share * temp, min(temp, limit))
        return CompiledBytes(argument_bytes=round(held), temp_bytes=round(temp))

    def built(self, job: Job) -> Built:
        """A job, built."""
        nothing: Any = None  # Nothing here runs it, or reads its text.
        digest = job.key.digest
        if digest in self.wholes:
            choice, level, options = self.wholes[digest]
            size = self.size(self.picked(choice), options, level)
        else:
            size = self.size(self.parts[digest], {})
        memory = {"argument_bytes": size.argument_bytes, "temp_bytes": size.temp_bytes}
        return Built(key=job.key, compiled=nothing, **memory)

    def true_ms(self, job: Job) -> float:
        """The time of a job."""
        digest = job.key.digest
        if digest in self.wholes:
            return self.whole_ms(*self.wholes[digest])
        return self.part_ms(self.parts[digest])

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """In the place of building and running."""
        counts = self.counts

        def part_job(analysis: Analysis, candidates: Any, *rest: Any) -> Job:
            job = _PART_JOB(analysis, candidates, *rest)
            self.parts[job.key.digest] = dict(candidates)
            return job

        def whole_job(
            analysis: Analysis,
            choice: Choice,
            environment: Any,
            label: str,
            level: ConstraintLevel = ConstraintLevel.EVERYTHING,
            options: Any = None,
            truncated: Any = None,
        ) -> Job:
            how = (environment, label, level, options, truncated)
            job = _WHOLE_JOB(analysis, choice, *how)
            self.wholes[job.key.digest] = (choice, level, dict(options or {}))
            return job

        def tuned(
            _: Any, mesh: Any, wanted: Sequence[Job], *__: Any, **___: Any
        ) -> Any:
            every = {job.key.digest: job for job in wanted}
            counts["tuned"] += len(every)
            mine = [*every][:: mesh.devices.size]
            return {digest: self.built(every[digest]) for digest in mine}

        def building(name: str) -> Any:
            def built(_: Any, __: Any, job: Job, ___: Any, known: Any = None) -> Built:
                if known and job.key.digest in known:
                    return known.pop(job.key.digest)
                counts[name] += 1
                return self.built(job)

            return built

        def running(name: str, error: float) -> Any:
            def ran(
                built: Built, job: Job, _: Any, __: Any, *, timing: Any = None
            ) -> ProfileRecord:
                counts[name] += 1
                time_ms = self.true_ms(job) * (1.0 + self.noise.gauss(0.0, error))
                return built.record("ok", samples_ms=[time_ms], run_seconds=0.01)

            return ran

        places = (
            (requests, "part_job", part_job),
            (race_programs, "whole_job", whole_job),
            (profile_pass, "measured_rates", lambda _: self.rates),
            (measurer, "tune_kernels", tuned),
            (runner, "_build", building("segments built")),
            (runner, "run", running("segments run", 0.01)),
            (race_compile, "build", building("wholes built")),
            (turns, "run", running("race runs", 0.004)),
        )
        with ExitStack() as stack:
            for place in places:
                stack.enter_context(mock.patch.object(*place))
            yield


_PART_JOB, _WHOLE_JOB = jobs.part_job, jobs.whole_job


@dataclass(frozen=True)
class Model:
    """A model that is planned by the rules for GPUs, on two made-up devices."""

    name: str
    analysis: Analysis
    rates: Rates

    @classmethod
    def of(cls, name: str) -> Model:
        """A model of the zoo."""
        model, *rest = MODELS[name].split()
        target = resolve(model, rest, donate=(), static=())
        step = flatten_step(target.step, target.args, {}, donate_argnums=target.donate)
        analysis = analyze_step(step, make_mesh((("x", 2),))).analysis
        return cls(name, analysis, mesh_of(cluster_of("2xh100"), None).rates)

    def plan(
        self, seed: int, needs: int | None, asked: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Plans without a budget, and within shares of what is needed."""
        devices = Devices(self.analysis, self.rates, seed)
        rows = []
        with ExitStack() as stack:
            stack.enter_context(mock.patch.dict(settings._PLATFORMS, {"cpu": _ON_GPUS}))
            memory = ("cfp.context.device_memory", lambda _: _DEVICE_BYTES)
            stack.enter_context(mock.patch(*memory))
            stack.enter_context(devices.at_work())
            cache = stack.enter_context(tempfile.TemporaryDirectory())
            for share in SHARES:
                devices.counts.clear()
                budget = None if share is None else round(share * (needs or 0))
                row = {"model": self.name, "seed": seed, "share": share}
                began = time.process_time()
                try:
                    row |= self._planned(devices, cache, budget, asked)
                except MemoryBudgetError as error:
                    row |= {"failure": str(error)[:120]}
                row["seconds"] = round(time.process_time() - began, 1)
                rows.append(row | devices.counts)
                needs = needs or row["needs"]
        return rows

    def _planned(
        self, devices: Devices, cache: str, budget: int | None, asked: Mapping[str, Any]
    ) -> dict[str, Any]:
        how = DetailedSettings(measure=True, **asked)
        mesh = make_mesh((("x", 2),))
        with open_context(mesh, cache, budget, how) as context:
            changed = {**dict(context.environment), "platform": "gpu"}
            context = replace(context, environment=tuple(changed.items()))
            profiles = profile_pass.profile(context, self.analysis)
            solution = search_pass.search(context, self.analysis, profiles)
            won = race_room.race(context, self.analysis, solution)
        one = won.winner
        size = devices.size(devices.picked(one.choice), one.options, one.level)
        return {
            "winner": one.name,
            "true_ms": devices.whole_ms(one.choice, one.level, one.options),
            "needs": size.peak_bytes,
            "raced": len(won.raced),
        }


# --------------------------------------------------------------------- the experiments


def made_up(
    one: Mechanism, models: Sequence[Model], seeds: int, base: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Rows of models planned without a mechanism; budgets are those with it."""
    needs = {(r["model"], r["seed"]): r.get("needs") for r in base if not r["share"]}
    rows = []
    with without(one.off), mock.patch(f"{__name__}._ON_GPUS", one.rules(_ON_GPUS)):
        for model in models:
            for seed in range(seeds):
                rows += model.plan(seed, needs.get((model.name, seed)), one.asked)
    return rows


def walk(problems: Mapping[str, Problem]) -> list[dict[str, Any]]:
    """Solves search problems within several budgets."""
    rows = []
    for name, problem in problems.items():
        free = solver.solve(problem)
        assert free is not None, "without a budget everything fits"
        least = solver.leanest(problem).memory_bytes
        for share in (None, 0.9, 0.6, 0.3, 0.1):
            room = free.memory_bytes - least
            budget = None if share is None else round(least + share * room)
            looked_at = [0]

            def grow(*given: Any, looked_at: list[int] = looked_at) -> Any:
                found = _GROW(*given)
                looked_at[0] += len(found.cost_ms)
                return found

            with mock.patch.object(solver, "_grow", grow):
                began = time.process_time()
                best = solver.solve(replace(problem, budget_bytes=budget))
                seconds = time.process_time() - began
            rows.append(
                {
                    "problem": name,
                    "share": share,
                    "cost_ms": best and best.cost_ms,
                    "partial choices": looked_at[0],
                    "seconds": round(seconds, 3),
                }
            )
        if name == "gpt, tied":
            continue  # It takes seconds.
        solves = [0]

        def solved(*given: Any, solves: list[int] = solves, **how: Any) -> Any:
            solves[0] += 1
            return _SOLVE(*given, **how)

        with mock.patch.object(tradeoff, "solve_within", solved):
            found = tradeoff.trade_off(problem, 20)
        rows.append({"problem": name, "points": len(found.points), "solves": solves[0]})
    return rows


_GROW, _SOLVE = solver._grow, solver.solve_within


def search_problems() -> dict[str, Problem]:
    """By estimates: a deep model, one with a tied embedding, and skips."""
    gpt = {**TINY["gpt"], "hidden": 1024, "heads": 16, "seq": 256, "vocab": 8192}
    made = {
        "gpt, 24 layers": registry.build("gpt", **{**gpt, "layers": 24}),
        "gpt, tied": registry.build("gpt", **{**gpt, "layers": 24}, tied=True),
        "u_net": PROGRAMS["u_net"]()[:2],
        "encoder, decoders": PROGRAMS["cross_stack"]()[:2],
    }
    found = {}
    for name, (step, args) in made.items():
        sizes = (("x", 2), ("y", 2)) if name == "gpt, tied" else (("x", 4),)
        analysis, estimates = estimated(step, args, sizes)
        costs = Costs(analysis, rates_of(sizes))
        options = estimate_options(
            estimates,
            presets(analysis.frame),
            costs,
            per_kind=8,
            budget_bytes=1,
            replacing=Replacing(),
        ).estimated
        found[name] = build_problem(costs, options, None)
    return found


def races() -> Iterator[tuple[str, dict[str, list[float]]]]:
    """All recorded races: the file, and samples of what ran, by name, each once."""
    seen = set()

    def among(data: Any) -> Iterator[list[dict[str, Any]]]:
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            is_race = key in ("race", "candidates") and isinstance(value, list)
            if is_race and value and isinstance(value[0], dict):
                yield value
            if isinstance(value, dict | list):
                yield from among(value)

    for file in sorted((ROOT / "docs/results").glob("*.json")):
        if re.search("operator|random|mechanisms", file.name):
            continue
        for rows in among(json.loads(file.read_text())):
            times = {row["name"]: ms for row in rows if (ms := _samples_ms(row))}
            if len(times) > 1 and (key := repr(sorted(times.items()))) not in seen:
                seen.add(key)
                yield file.name, times


def _samples_ms(row: Mapping[str, Any]) -> list[float]:
    """A row's times: measured, or one predicted from one device's computation."""
    if row.get("note") or "name" not in row:
        return []
    known = row.get("predicted_ms") if row.get("rung") == "one device" else None
    one = known or row.get("time_ms")
    return row.get("samples_ms") or ([one] if one else [])


def recorded(pattern: str) -> dict[str, Any]:
    """Races in which candidates of a name ran, and what these were worth."""
    found = []
    for file, rows in races():
        times = {name: median(ms) for name, ms in rows.items()}
        rest = [ms for name, ms in times.items() if not re.search(pattern, name)]
        if len(rest) < len(times):
            loss = min(rest, default=math.inf) / min(times.values())
            found.append((loss, file))
    worst = max(found, default=(1.0, ""))
    return {
        "races": len(found),
        "slower": sum(loss > 1.02 for loss, _ in found),
        "worst": None if math.isinf(worst[0]) else round(worst[0], 4),
        "in": worst[1],
    }


def told(one: Mechanism) -> dict[str, Any]:
    """Facts about a mechanism that is not switched off yet."""
    return {
        "room": one.room,
        "lines": one.lines,
        "test_lines": test_lines(one.tests) if one.tests else 0,
        "cited": one.cited,
        **({"recorded": recorded(one.candidates)} if one.candidates else {}),
    }


_VARIANT = re.compile(", (no latency hiding|large collectives)$")


# Presets with all values constrained, with other compiler options and without.
_BARE = re.compile(f"({'|'.join(PRESETS)})(, (no latency hiding|large collectives))?$")


def replayed() -> dict[str, Any]:
    """Recorded races decided otherwise.

    The least wins; one leader has options; the first turn has the leader; presets have
    arguments alone constrained.
    """
    ties, leaders, varied, looks, bare = [], [], 0, [], []
    for _, rows in races():
        plain = {name: ms for name, ms in rows.items() if not _VARIANT.search(name)}
        plain = {name: ms for name, ms in plain.items() if len(ms) > 1}
        if len(plain) > 1:
            first = min(plain, key=lambda name: plain[name][0])
            looks.append(median(plain[first]) / min(map(median, plain.values())))
        ran = [_result(name, ms) for name, ms in rows.items() if len(ms) > 1]
        if len(ran) > 1:
            best = Ranking((), ran).best
            assert best is not None, "all of them ran"
            ties.append(best.time_ms / min(one.time_ms for one in ran))
        times = {name: median(ms) for name, ms in rows.items()}
        rest = [ms for name, ms in times.items() if not _BARE.match(name)]
        if any("arguments" in name for name in times) and len(rest) < len(times):
            bare.append(min(rest) / min(times.values()))
        bases = {_VARIANT.sub("", name) for name in times if _VARIANT.search(name)}
        varied += bool(bases)
        if len(bases & times.keys()) > 1:
            leader = min(bases & times.keys(), key=lambda name: times[name])
            kept = [
                ms
                for name, ms in times.items()
                if not _VARIANT.search(name) or _VARIANT.sub("", name) == leader
            ]
            leaders.append(min(kept) / min(times.values()))
    return {
        "ties": {
            "races": len(ties),
            "changed": sum(ratio > 1.0 for ratio in ties),
            "worst": max(ties),
        },
        "leader": {
            "varied": varied,
            "races": len(leaders),
            "mean": mean(leaders),
            "worst": max(leaders),
        },
        "first turn": _slower(looks),
        "arguments alone": _slower(bare),
    }


def _slower(ratios: Sequence[float]) -> dict[str, Any]:
    return {
        "races": len(ratios),
        "slower": sum(ratio > 1.02 for ratio in ratios),
        "worst": max(ratios),
    }


def _result(name: str, samples_ms: Sequence[float]) -> RaceResult:
    """A row of a recorded race, as one that was run."""
    level = next((one for one in ConstraintLevel if f"{one} con" in name), None)
    told = ConstraintLevel.ARGUMENTS if "arguments told" in name else None
    one = Candidate(
        name,
        Choice((), ()),
        level=level or told or ConstraintLevel.EVERYTHING,
        options=dict.fromkeys(_VARIANT.findall(name), ""),
        is_preset=not name.startswith(("planned", "propagated")),
    )
    record = ProfileRecord(
        key=name, parts=(), status="ok", samples_ms=tuple(samples_ms)
    )
    return result_of(one, record)


def test_lines(pattern: str) -> int:
    """Lines of the tests that name something."""
    count = 0
    for room in ("search", "race", "profiling"):
        for file in (ROOT / "cfp_test" / room).glob("test_*.py"):
            text = file.read_text()
            lines = text.splitlines()
            for node in ast.parse(text).body:
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    own = lines[node.lineno - 1 : node.end_lineno]
                    if re.search(pattern, "\n".join(own)):
                        count += len(own)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where rows are kept")
    parser.add_argument("--only", default="", help="of the names, a pattern")
    parser.add_argument("--models", default="gpt,moe")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    data = {"mechanisms": {}}
    if options.json.exists():
        data = json.loads(options.json.read_text())
    data |= {"jax": jax.__version__, "replayed": replayed()}

    def keep(name: str, found: Mapping[str, Any]) -> None:
        data["mechanisms"][name] = data["mechanisms"].get(name, {}) | found
        options.json.write_text(json.dumps(data, indent=1) + "\n")

    models = [*map(Model.of, options.models.split(","))]
    problems = search_problems()
    nothing = Mechanism(WITH_ALL, "", 0, experiment="both")
    for one in (nothing, *MECHANISMS):
        if one is not nothing and not re.search(options.only, one.name):
            continue
        if one is not nothing:
            keep(one.name, told(one))
        done = data["mechanisms"].get(one.name, {})
        if one.experiment in ("made up", "both") and "rows" not in done:
            base = data["mechanisms"].get(nothing.name, {}).get("rows", ())
            keep(one.name, {"rows": made_up(one, models, options.seeds, base)})
        if one.experiment in ("walk", "both") and "walked" not in done:
            with without(one.off):
                keep(one.name, {"walked": walk(problems)})
        print(one.name, flush=True)


if __name__ == "__main__":
    main()
