"""Plans beside the best other ways to shard the same models, timed in turn on two GPUs.

    python -m cfp_test.bench side_by_side --out FOLDER [--seconds 560] [--pieces ...]
        [--work FOLDER] [--rounds 8] [--tiny]
    python -m cfp_test.bench side_by_side --out FOLDER --rows

A piece is a model of the zoo, four layers at full width: ``gpt`` over NVLink,
``gpt:off`` with NCCL_P2P_DISABLE=1, ``gpt:budgets`` and ``gpt:off_budgets`` under
budgets of 100, 75, 60 and 45 % of what data parallelism needs. ``--rows`` prints the
rows of a folder's pieces for docs/results/suite_gpux2.json. Ways to shard it:

planned     cfp at its defaults, from an empty store
preset      the two presets that were fastest in the plan's race, with its kernels
cost model  the choice of Alpa's cost model for the step as written, and the same with
            the plan's kernels
by hand     rule tables, and each parameter on its largest dim; cuDNN's attention
PyTorch     FSDP2, kept gathered, compiled, flash attention; a process of its own

Each piece is a process, and a file ``FOLDER/PIECE.json`` that is written whenever
something is known. Ways are compiled in four threads before anything is timed. After
two rounds the two best of each kind go on, unless the second is more than 3 % behind.
Begun again with the same folder, it does what is missing: of budgets those of
`--shares`, and what data parallelism needs is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from alpa_test.handwritten.step import ShardedStep, shard_largest, shard_step
from alpa_test.handwritten.tables import TABLES
from cfp import platform
from cfp.analysis.presets import DATA_PARALLEL, presets
from cfp.cli.session import Session
from cfp.context import PlannerSettings, open_context
from cfp.errors import MemoryBudgetError
from cfp.models import initialise
from cfp.models.layers import attending_by
from cfp.models.model import Scalar
from cfp.passes import profile, search, search_further
from cfp.profiling.builder import BuildEnvironment
from cfp.profiling.record import environment_parts
from cfp.profiling.store import store_path
from cfp.program.constrain import partition_spec
from cfp.program.trace import planning_mesh
from cfp.race.admission import no_winner
from cfp.race.programs import TOO_LARGE, RaceOutcome
from cfp.race.race import race
from cfp.search.guided import Candidate, Solution
from cfp.search.requests import Profiles
from cfp.settings import ConstraintLevel
from cfp.view.evidence import worth
from cfp_test.bench.case import Flat, Ready, make_choice, ready, session_of
from cfp_test.bench.commit import commit
from cfp_test.bench.configs import LAYERS, small
from cfp_test.support.waiting import end_group

AXES = (("x", 2),)
MODELS: Mapping[str, tuple[str, Mapping[str, Scalar]]] = {
    **{model: (model, {}) for model in LAYERS},
    "llama4k": ("llama", {"batch": 4, "seq": 4096}),
}
KINDS = ("", "off", "budgets", "off_budgets")
PIECES = tuple(
    f"{model}:{kind}".removesuffix(":")
    for kind in KINDS
    for model in ("gpt", "llama", "moe", "bert")
)
SHARES = (1.0, 0.75, 0.6, 0.45)
TABLES_OF: Mapping[str, Sequence[str]] = {
    "moe": ("data_parallel", "expert_parallel", "expert_parallel_fsdp"),
}
USUAL_TABLES = ("data_parallel", "fsdp", "megatron_tp")
WARM_UP, STEPS = 3, 5  # Steps before, and in, a sample.
LOOKS, STAYS = 2, 1.03  # Rounds before ways are left out, and how far behind.
MOST_OF_A_KIND = 2
THREADS = 4
AT_ONCE = 4  # Presets compiled until one of them fits.
SOLVER_SECONDS = 15.0
LEAST_SECONDS = 30.0  # With less left nothing begins.


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One comparison, by its name.

    Attributes:
        name: such as ``gpt:off``.
        model: a key of `MODELS`.
        kind: one of `KINDS`.
    """

    name: str
    model: str
    kind: str

    @classmethod
    def of(cls, name: str) -> Piece:
        """Reads a name.

        Raises:
            ValueError: there is no such model or kind.
        """
        model, _, kind = name.partition(":")
        if model not in MODELS or kind not in KINDS:
            kinds = ", ".join(f":{kind}" for kind in KINDS if kind)
            raise ValueError(
                f"expected a model of {', '.join(MODELS)}, and {kinds} or nothing, "
                f"got {name!r}"
            )
        return cls(name=name, model=model, kind=kind)

    @property
    def slow(self) -> bool:
        """True without peer-to-peer access."""
        return self.kind.startswith("off")

    @property
    def under_budgets(self) -> bool:
        """True if it is compared under budgets."""
        return self.kind.endswith("budgets")

    @property
    def zoo_model(self) -> str:
        """The model's name in the zoo."""
        return MODELS[self.model][0]

    def options(self, tiny: bool) -> dict[str, Scalar]:
        """The model's options."""
        zoo, given = MODELS[self.model]
        if tiny:
            return {**small(zoo, 2, 2), "learning_rate": 1e-3}
        return {"dtype": "bfloat16", **LAYERS[zoo], **given}

    @property
    def file(self) -> str:
        """Name of its file."""
        return f"{self.name.replace(':', '_')}.json"


class Record:
    """Record of a piece, in a file that is rewritten whenever it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = {"ways": {}, "done": False}
        if path.exists():
            self.data = json.loads(path.read_text())

    def write(self, **more: Any) -> None:
        """Adds to it, and writes it."""
        self.data |= more
        unfinished = self.path.with_suffix(".new")
        unfinished.write_text(json.dumps(self.data))
        unfinished.replace(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A way, compiled.

    Attributes:
        step: its step.
        start: makes the model's first state and a batch, under its shardings.
    """

    step: Ready
    start: Callable[[], list[jax.Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to shard.

    Attributes:
        group: planned, preset, cost_model or hand.
        make: compiles it.
        about: what is known of it before that.
    """

    group: str
    make: Callable[[], Made]
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A step, planned.

    Attributes:
        session: the step, analysed.
        profiles, solution, outcome: what the passes came to.
        seconds: of planning, tracing included.
    """

    session: Session
    profiles: Profiles
    solution: Solution
    outcome: RaceOutcome
    seconds: float

    def presets(self, count: int, limited: bool) -> list[tuple[Candidate, float]]:
        """The presets that were fastest, without compiler options.

        Args:
            limited: True under a budget: options that limit memory stay, and the plan
                is left out.
        """
        raced: dict[Any, tuple[Candidate, float]] = {}
        for one, ms in sorted(self.outcome.raced, key=lambda pair: pair[1]):
            name, whole = one.name.split(", ")[0], ConstraintLevel.EVERYTHING
            name += f", {one.level} constrained" * (one.level is not whole)
            kept = one if limited else one.without(one.options, name)
            is_plan = limited and one.key == self.outcome.winner.key
            if one.is_preset and not is_plan:
                raced.setdefault(kept.key, (kept, ms))
        return [*raced.values()][:count]

    def presets_not_compiled(self) -> list[Candidate]:
        """Presets that may fit and were not compiled, the fastest predicted first."""
        notes = {row.name: row.note for row in self.outcome.rows if not row.peak_bytes}
        rest = [
            one
            for one in self.solution.candidates
            if one.is_preset and notes.get(one.name, TOO_LARGE) != TOO_LARGE
        ]
        return sorted(rest, key=lambda one: one.predicted_ms or float("inf"))

    def about(self) -> dict[str, Any]:
        """Returns the part that a record keeps."""
        counts, problem = self.outcome.counts, self.solution.problem
        gains = worth(self.session.analysis, problem, self.outcome.raced)
        return {
            "planning_s": self.seconds,
            "worth": [asdict(one) for one in gains],
            "winner": self.outcome.winner.name,
            "predicted_ms": self.outcome.winner.predicted_ms,
            "kernels": sorted({str(k) for _, k in self.outcome.winner.choice.kernels}),
            "counts": {name: float(count) for name, count in counts.items()},
            "race": [
                {
                    "name": row.name,
                    "predicted_ms": row.predicted_ms,
                    "samples_ms": list(row.samples_ms),
                    "peak_bytes": row.peak_bytes,
                    "note": row.note,
                }
                for row in self.outcome.rows
            ],
        }


_STARTED = time.monotonic()


def say(text: str) -> None:
    """Prints a line at once, with the seconds since this process began."""
    print(f"{time.monotonic() - _STARTED:7.1f} {text}", flush=True)


# ------------------------------------------------------------------------- planning


def planned(session: Session, work: Path, budget: int | None = None) -> Found:
    """Plans a step, as `cfp.plan` does.

    Raises:
        CfpError: there is no plan.
    """
    started = time.perf_counter()
    analysis = session.analysis
    with open_context(session.mesh, work, budget, PlannerSettings()) as context:
        profiles = profile(context, analysis)
        solution = search(context, analysis, profiles)
        outcome = race(context, analysis, solution)
        while (again := search_further(context, analysis, outcome)) is not None:
            outcome = race(context, analysis, again).after(outcome)
    if outcome.winner is None:
        raise no_winner(analysis, outcome.results, budget)
    seconds = session.seconds + time.perf_counter() - started
    return Found(
        session=session,
        profiles=profiles,
        solution=outcome.solution,
        outcome=outcome,
        seconds=seconds,
    )


def modelled(found: Found, off: bool) -> Iterator[tuple[str, Candidate]]:
    """Returns the cost model's choices for the step as written, and with kernels."""
    # Its solver is not everywhere where plans are made.
    from alpa_test.cost_model import LINKS, AlphaBeta, choose, fit

    analysis, winner = found.session.analysis, found.outcome.winner
    kernels = winner.choice.kernels
    link = LINKS["pcie" if off else "nvlink"]
    prices = {
        "data sheet": AlphaBeta.uniform(analysis.frame.mesh, link),
        "fitted": fit(found.profiles.costs.rates),
    }
    seen = []
    for title, price in prices.items():
        choice = choose(analysis, price, time_limit_s=SOLVER_SECONDS).choice
        if choice in seen:
            continue
        seen.append(choice)
        name = f"cost model, {title}"
        yield name, Candidate(name, choice)
        if not kernels:
            continue
        with_kernels = Candidate(f"{name}, kernels", replace(choice, kernels=kernels))
        yield with_kernels.name, with_kernels
        level = winner.level
        if level is not ConstraintLevel.EVERYTHING:
            name = f"{with_kernels.name}, {level} constrained"
            yield name, replace(with_kernels, name=name, level=level)


def cudnn_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, causal: bool
) -> jax.Array:
    """Attention by cuDNN's kernel; on CPUs by XLA."""
    on_gpu = jax.devices()[0].platform == "gpu"
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        is_causal=causal,
        implementation="cudnn" if on_gpu else "xla",
    )


# ------------------------------------------------------------------------------ ways


class Maker:
    """Makes ways of one model."""

    def __init__(self, piece: Piece, session: Session, work: Path, tiny: bool) -> None:
        self._piece, self.session = piece, session
        self._sizes = piece.options(tiny)
        where = session.mesh.devices.flat[0].platform
        environment = BuildEnvironment.beside(store_path(work))
        self.options = environment.options(where)
        untuned = {"xla_gpu_autotune_level": "0"}
        self._start_options = {} if where == "cpu" else untuned
        init_fn, make_batch = initialise(piece.zoo_model, **self._sizes)

        def start(state_key: jax.Array, batch_key: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves((init_fn(state_key), make_batch(batch_key)))

        self._start = start

    def by_cfp(self, candidate: Candidate) -> Made:
        """A choice, compiled as plans are."""
        return self._made(make_choice(self.session, candidate, self.options))

    def by_hand(self, name: str, kernel: bool) -> Made:
        """A step of `sharded`, compiled."""
        sharded = self.sharded(name, kernel)
        tree = jax.tree.structure(sharded.args)

        def compiled(chosen: Mapping[str, str]) -> Flat:
            return Flat(sharded.lowered.compile(dict(chosen) or None), tree)

        shardings = jax.tree.leaves(sharded.shardings)
        made = ready(name, compiled, sharded.args, shardings, self.options)
        return self._made(made)

    def sharded(self, name: str, kernel: bool) -> ShardedStep:
        """A rule table, or each parameter on its "largest" dim."""
        attention = attending_by(cudnn_attention) if kernel else nullcontext()
        model, mesh = self._piece.zoo_model, self.session.mesh
        with attention:
            if name == "largest":
                return shard_largest(model, self._sizes, mesh)
            [table] = [one for one in TABLES[model] if one.name == name]
            return shard_step(model, self._sizes, table, mesh)

    def _made(self, step: Ready) -> Made:
        """Adds what makes a step's first state: the same numbers for all."""
        mesh, keys = self.session.mesh, (jax.random.key(0), jax.random.key(1))
        shardings = [
            NamedSharding(mesh, partition_spec(kind.spec, len(kind.shape)))
            for kind in step.kinds
        ]
        lowered = jax.jit(self._start, out_shardings=shardings).lower(*keys)
        made = lowered.compile(dict(self._start_options))
        return Made(step=step, start=partial(made, *keys))


def cfp_way(maker: Maker, group: str, one: Candidate, **about: Any) -> Way:
    """A choice of cfp's, or of a cost model for cfp's blocks."""
    about = {"predicted_ms": one.predicted_ms, "candidate": one.name, **about}
    return Way(group=group, make=partial(maker.by_cfp, one), about=about)


def plan_and_presets(
    found: Found, maker: Maker, count: int, limited: bool = False
) -> Iterator[tuple[str, Way]]:
    """The plan, and the presets that were fastest in its race."""
    winner = found.outcome.winner
    yield "planned", cfp_way(maker, "planned", winner)
    for one, ms in found.presets(count, limited):
        same = one.key == winner.key
        way = cfp_way(maker, "preset", one, raced_ms=ms, is_the_plan=same)
        yield f"preset {one.name}", way


def ways_of(
    piece: Piece, found: Found, maker: Maker, record: Record, cost_model: bool
) -> Iterator[tuple[str, Way]]:
    """The ways to compare for a piece that was planned."""
    yield from plan_and_presets(found, maker, 2)
    winner = found.outcome.winner
    kernel = any("cudnn" in str(k) for _, k in winner.choice.kernels)
    # cuDNN has none for the MoE's heads: by hand its attention stays as written, too.
    kernel = kernel or piece.model != "moe"
    for name in ("largest", *TABLES_OF.get(piece.model, USUAL_TABLES)):
        make = partial(maker.by_hand, name, kernel)
        yield (
            f"by hand, {name}",
            Way(group="hand", make=make, about={"kernel": kernel}),
        )
    if not cost_model:
        return
    try:
        for name, one in modelled(found, piece.slow):
            yield name, cfp_way(maker, "cost_model", one)
    except Exception as error:  # Its solver may be missing; the rest goes on.
        record.write(cost_model_failed=f"{type(error).__name__}: {error}")
        say(f"the cost model failed: {error}")


def compiled(
    ways: Iterable[tuple[str, Way]], record: Record, prefix: str = ""
) -> dict[str, Made]:
    """Compiles ways in some threads; what fails is a row with its reason."""
    rows = record.data["ways"]
    made: dict[str, Made] = {}

    def make(way: Way) -> Made | Exception:
        try:
            return way.make()
        except Exception as error:  # Compilers' errors have no type in common.
            return error

    with ThreadPoolExecutor(THREADS) as pool:
        # The first are compiled while the last are yet to be found.
        futures = {name: (way, pool.submit(make, way)) for name, way in ways}
        say(f"compiling {len(futures)} ways")
        for name, (way, future) in futures.items():
            one, row = future.result(), {}
            if isinstance(one, Made):
                made[name] = one
                row = {
                    "status": "ok",
                    "peak_bytes": one.step.built.peak_bytes,
                    "compile_s": one.step.built.build_seconds,
                }
            else:
                reason = f"{type(one).__name__}: {one}"[:400]
                row = {"status": "failed", "reason": reason}
                say(f"  {name}: {reason}")
            about = {**way.about, "group": way.group, "samples_ms": [], **row}
            rows[prefix + name] = about
            record.write()
    return made


# ---------------------------------------------------------------------------- timing


def sample(one: Made, loss_at: int, warm_up: int) -> tuple[float, list[float]]:
    """Milliseconds of a step, as the mean of some in a row; and the steps' losses."""
    inputs = one.start()
    losses = []

    def step() -> Sequence[jax.Array]:
        results = one.step.built.compiled(*inputs)
        for put, got in one.step.feedback:
            inputs[put] = results[got]
        losses.append(results[loss_at])
        return results

    for _ in range(warm_up):
        results = step()
    jax.block_until_ready(results)
    started = time.perf_counter()
    for _ in range(STEPS):
        results = step()
    jax.block_until_ready(results)
    ms = (time.perf_counter() - started) / STEPS * 1e3
    return ms, [float(np.asarray(loss)) for loss in losses]


def time_in_turn(
    made: Mapping[str, Made],
    loss_at: int,
    record: Record,
    *,
    rounds: int,
    end: float,
    prefix: str = "",
) -> bool:
    """A sample of each way a round; False if time was over before all had theirs."""
    rows = {name: record.data["ways"][prefix + name] for name in made}
    names = list(made)
    for turn in range(rounds):
        shift = turn % max(1, len(names))
        for name in [*names[shift:], *names[:shift]]:
            if time.monotonic() > end:
                record.write()
                return False
            try:
                # The first run of a program sets up its communication, too.
                warm_up = WARM_UP + 2 if turn == 0 else WARM_UP
                ms, losses = sample(made[name], loss_at, warm_up)
            except jax.errors.JaxRuntimeError as error:
                rows[name] |= {"status": "failed", "reason": str(error)[:400]}
                names.remove(name)
                continue
            rows[name]["samples_ms"].append(round(ms, 4))
            rows[name].setdefault("losses", losses)
        record.write()
        if turn + 1 == LOOKS:
            kept = _still_in(rows)
            for name in [one for one in names if one not in kept]:
                names.remove(name)
                rows[name]["note"] = f"out after {LOOKS} rounds"
    medians = {n: statistics.median(rows[n]["samples_ms"]) for n in names}
    say(", ".join(f"{prefix}{name} {ms:.2f} ms" for name, ms in medians.items()))
    return True


def _still_in(rows: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """The ways that are not far behind the best of their kind, two of each."""
    kinds: dict[tuple[str, bool], list[tuple[float, str]]] = {}
    for name, row in rows.items():
        if row["samples_ms"] and row["status"] == "ok":
            # The cost model is compared as written, and with the plan's kernels.
            kind = row["group"], "kernels" in name
            kinds.setdefault(kind, []).append((min(row["samples_ms"]), name))
    best = {kind: min(found)[0] for kind, found in kinds.items()}
    return {
        name
        for kind, found in kinds.items()
        for ms, name in sorted(found)[:MOST_OF_A_KIND]
        if ms <= STAYS * best[kind]
    }


# ---------------------------------------------------------------------------- pieces


def run_piece(piece: Piece, given: argparse.Namespace) -> None:
    """Plans and compares; in a process of its own."""
    platform.select("cpu" if given.tiny else None, AXES)
    mesh = planning_mesh(platform.make_mesh(AXES))
    sizes = piece.options(given.tiny)
    record = Record(given.out / piece.file)
    if not piece.under_budgets:  # One that was cut off begins anew.
        record.data = {"ways": {}, "done": False}
    record.write(
        piece=piece.name,
        model=piece.model,
        kind=piece.kind,
        options=dict(sizes),
        p2p_disabled=os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0"),
        environment=dict(environment_parts(list(mesh.devices.flat))),
        date=time.strftime("%Y-%m-%d"),
        commit=commit(),
        steps_in_a_sample=STEPS,
        trained_from="the model's first state",
    )
    session = session_of(piece.zoo_model, sizes, mesh)
    say(f"{piece.name}: traced in {session.seconds:.1f} s; planning")
    numbers = jax.tree.unflatten(
        session.lowering.out_tree, range(session.lowering.out_tree.num_leaves)
    )
    loss_at = numbers[1]["loss"]
    work = given.work / piece.file.removesuffix(".json")
    work.mkdir(parents=True, exist_ok=True)
    maker = Maker(piece, session, work, given.tiny)
    turns = partial(time_in_turn, loss_at=loss_at, record=record, rounds=given.rounds)
    if piece.under_budgets:
        done = _under_budgets(piece, work, maker, record, turns, given)
        record.write(done=done)
        return
    found = planned(session, work)
    say(f"{piece.name}: planned in {found.seconds:.1f} s, {found.outcome.winner.name}")
    record.write(planning=found.about())
    made = compiled(ways_of(piece, found, maker, record, given.cost_model), record)
    say(f"{piece.name}: compiled; timing")
    record.write(done=turns(made, end=given.until))


def _data_parallel_bytes(piece: Piece, maker: Maker, out: Path) -> int:
    """Memory that data parallelism needs on a device, as compiled.

    The race of the same model without a budget has it, if that ran in this folder.
    """
    free = Record(out / f"{piece.model}{'_off' if piece.slow else ''}.json").data
    needs = [
        row["peak_bytes"]
        for row in free.get("planning", {}).get("race", ())
        if row["name"].startswith(DATA_PARALLEL) and row["peak_bytes"]
    ]
    if needs:
        return min(needs)
    choice = presets(maker.session.analysis.frame)[DATA_PARALLEL]
    return maker.by_cfp(Candidate(DATA_PARALLEL, choice)).step.built.peak_bytes


def _presets_that_fit(
    found: Found, maker: Maker, budget: int, record: Record, prefix: str
) -> dict[str, Made]:
    """The fastest presets by prediction that fit in a budget, as compiled.

    A race compiles presets only while they may win; here the best of them is asked for.
    """
    waiting = [
        (f"preset {one.name}", cfp_way(maker, "preset", one))
        for one in found.presets_not_compiled()
    ]
    made: dict[str, Made] = {}
    while waiting and not made:
        some, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
        made, rows = compiled(some, record, prefix), record.data["ways"]
        large = [n for n, one in made.items() if one.step.built.peak_bytes > budget]
        for name in large:
            del made[name]
            # As races say it, so that pages count both alike.
            reason = {"status": "failed", "reason": "over the memory budget"}
            rows[prefix + name] |= reason
    return dict(list(made.items())[:MOST_OF_A_KIND])


def _under_budgets(
    piece: Piece,
    work: Path,
    maker: Maker,
    record: Record,
    turns: Callable[..., bool],
    given: argparse.Namespace,
) -> bool:
    """The plan and the best preset under each budget; True if all were reached."""
    if "data_parallel_bytes" not in record.data:
        known = _data_parallel_bytes(piece, maker, given.out)
        record.write(data_parallel_bytes=known)
    whole_bytes = record.data["data_parallel_bytes"]
    record.data.setdefault("budgets", {})
    for share in given.shares:
        title, budget = f"{share:.0%}", int(share * whole_bytes)
        known = record.data["ways"].get(f"{title}: planned", {}).get("samples_ms", ())
        if len(known) >= given.rounds:
            continue
        if time.monotonic() > given.until - 20:
            return False
        say(f"budget {title}, {budget / 2**30:.2f} GiB")
        try:
            found = planned(maker.session, work / title, budget)
        except MemoryBudgetError as error:
            row = {"bytes": budget, "least_bytes": error.smallest_feasible_bytes}
            record.data["budgets"][title] = row
            record.write()
            continue
        record.data["budgets"][title] = {"bytes": budget, **found.about()}
        made = compiled(plan_and_presets(found, maker, 2, True), record, f"{title}: ")
        # The one that raced may be slow with its arguments alone constrained.
        if len(found.presets(2, limited=True)) < 2:
            made |= _presets_that_fit(found, maker, budget, record, f"{title}: ")
        if not turns(made, end=given.until, prefix=f"{title}: "):
            return False
    return True


# ------------------------------------------------------------------------ the whole


def torch_command(piece: Piece, file: Path, rounds: int, tiny: bool) -> list[str]:
    """The command that times PyTorch on a piece's model."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node", "2", "alpa_test/pytorch/run.py"]
    words += ["--model", piece.zoo_model, "--compile", "yes", "--json", str(file)]
    words += ["--strategies", "FSDP2, kept gathered", "--rounds", str(rounds)]
    words += ["--steps", str(STEPS), "--warmup", "1.5"]
    words += ["--backend", "gloo"] if tiny else []
    known = "hidden heads ffn seq vocab batch layers experts expert_group_size dtype"
    for name, value in piece.options(tiny).items():
        if name in known.split():
            words += [f"--{name}", str(value)]
    return words


def run_all(given: argparse.Namespace) -> None:
    """Runs what is missing, a piece after the other, until time is over."""
    for folder in (given.out, given.work):
        folder.mkdir(parents=True, exist_ok=True)
    end = _STARTED + given.seconds
    for piece in map(Piece.of, given.pieces):
        environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
        if piece.slow:
            environment["NCCL_P2P_DISABLE"] = "1"
        words = [sys.executable, "-m", "cfp_test.bench.side_by_side"]
        words += ["--out", str(given.out), "--work", str(given.work)]
        words += ["--rounds", str(given.rounds), "--role", piece.name]
        words += ["--until", f"{end - 8:.1f}", "--shares", *map(str, given.shares)]
        words += ["--tiny"] if given.tiny else []
        words += [] if given.cost_model else ["--no-cost-model"]
        torch_file = given.out / f"torch_{piece.file}l"
        in_torch = torch_command(piece, torch_file, given.rounds, given.tiny)
        todo = [] if Record(given.out / piece.file).data["done"] else [words]
        if given.torch and piece.kind in ("", "off") and not torch_file.exists():
            todo.append(in_torch)
        for command in todo:
            left = end - time.monotonic()
            if left > LEAST_SECONDS:
                say(f"=== {piece.name}, for at most {left:.0f} s")
                run_command(command, environment, left, given.out / f"{piece.file}.log")
    say("over")


def run_command(
    words: Sequence[str], environment: Mapping[str, str], seconds: float, log: Path
) -> None:
    """Runs a command for so long at most; what it prints goes to a file."""
    with (
        log.open("a") as out,
        # With all that it starts in a group, so that none of it outlives it.
        subprocess.Popen(
            words,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            say(f"  exit status {process.wait(seconds)}")
        except subprocess.TimeoutExpired:
            say("  cut off, since time is over")
        finally:
            end_group(process)


def joined(folder: Path) -> list[dict[str, Any]]:
    """All pieces of a folder, each with PyTorch's rows."""
    pieces = []
    for piece in map(Piece.of, PIECES):
        if not (file := folder / piece.file).exists():
            continue
        data = json.loads(file.read_text())
        torch_file = folder / f"torch_{piece.file}l"
        if torch_file.exists():
            lines = torch_file.read_text().splitlines()
            data["pytorch"] = [json.loads(line) for line in lines]
        pieces.append(data)
    return pieces


GROUPS = {
    "planned": "plan",
    "preset": "best preset",
    "hand": "by hand",
    "cost_model": "cost model",
    "kernels": "cost model, plan's kernels",
    "pytorch": "PyTorch FSDP2",
}


def rows_of(piece: Mapping[str, Any]) -> Iterator[list[Any]]:
    """The rows of a piece, as docs/results/suite_gpux2.json has them."""
    links = "P2P off" if piece["p2p_disabled"] else "NVLink"
    gpus = piece["environment"]["device_kind"].split()[1:2] or ["CPU"]
    told = [*gpus, piece["commit"], piece["date"]]
    torch = {
        one["name"]: {**one, "group": "pytorch"} for one in piece.get("pytorch", ())
    }
    for share in [*piece.get("budgets", ())] or [None] * ("planning" in piece):
        prefix = f"{share}: " if share else ""
        about = piece["budgets"][share] if share else piece["planning"]
        best: dict[str, tuple[float, str, Mapping[str, Any]]] = {}
        for name, way in {**piece["ways"], **torch}.items():
            if not name.startswith(prefix) or way["status"] != "ok" or way.get("note"):
                continue
            if way["samples_ms"]:
                modelled = way["group"] == "cost_model" and "kernels" in name
                group = "kernels" if modelled else way["group"]
                title = way.get("candidate", name.removeprefix(prefix))
                one = statistics.median(way["samples_ms"]), title, way
                best[group] = min(best.get(group, one), one, key=lambda each: each[0])
        for group, title in GROUPS.items():
            if group not in best:
                continue
            (ms, name, way), is_plan = best[group], group == "planned"
            low, high = np.percentile(way["samples_ms"], (25, 75))
            size, seconds = way.get("peak_bytes"), about.get("planning_s")
            yield [
                *(piece["model"], links, share, title, name, f"{ms:.2f}"),
                *(f"{low:.2f} to {high:.2f}", len(way["samples_ms"])),
                None if is_plan else f"{best['planned'][0] / ms:.3f}",
                f"{size / 2**30:.1f}" if size else None,
                f"{seconds:.0f}" if is_plan else None,
                *told,
            ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--pieces", nargs="+", default=PIECES)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES)
    temporary = Path(tempfile.gettempdir()) / "cfp_side_by_side"
    parser.add_argument("--work", type=Path, default=temporary)
    parser.add_argument("--no-torch", dest="torch", action="store_false")
    parser.add_argument("--no-cost-model", dest="cost_model", action="store_false")
    parser.add_argument("--tiny", action="store_true", help="virtual CPU devices")
    parser.add_argument("--rows", action="store_true", help="print those of --out")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    # As `time.monotonic` counts, which is the same in all processes of a machine.
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rows:
        for row in (row for piece in joined(given.out) for row in rows_of(piece)):
            print(json.dumps(row) + ",")
    elif given.role:
        run_piece(Piece.of(given.role), given)
    else:
        run_all(given)


if __name__ == "__main__":
    main()
