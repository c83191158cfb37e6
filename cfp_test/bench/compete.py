"""One configuration's competitors: checked, compiled, timed in turn, traced.

What fails, or ends the process, is a row with the reason; the others go on. What is
kept in the journal is not done again, but for compiling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from cfp.planner_settings import PlannerSettings
from cfp.profiling.builder import BuildEnvironment
from cfp.profiling.in_flight import Doing
from cfp.profiling.key import Parts, ProfileKey, environment_parts
from cfp.profiling.runner import execute
from cfp.profiling.store import store_path
from cfp.profiling.timing import TimingOptions
from cfp_test.bench import clock, gate
from cfp_test.bench.case import Ready
from cfp_test.bench.competitors import GROUPS, Competitor, mesh_text
from cfp_test.bench.configs import Config, small
from cfp_test.bench.journal import Journal
from cfp_test.bench.rows import Row, best
from cfp_test.bench.watch import Died, Watch, status_and_reason

# At a small size a compile takes far longer than a run.
_FAST_ON_CPU = {"xla_backend_optimization_level": "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteOptions:
    """Settings of a comparison.

    Attributes:
      workdir: where measurements are kept; planning is as quick as it knows.
      settings: of the planner.
      rounds: how many turns each competitor gets.
      timing: one turn; by default `clock.turn_on` the mesh.
      groups: what is compared.
      only: of the hand-written strategies, those named; all if empty.
      budget_bytes: memory of one device.
      pytorch: rows that PyTorch's own runs wrote.
      trace: whether the plan and its best rival are traced.
      tell: called with what is being done.
      journal: what an earlier process of the same command came to.
    """

    workdir: Path
    settings: PlannerSettings
    rounds: int = 5
    timing: TimingOptions | None = None
    groups: Sequence[str] = GROUPS
    only: Sequence[str] = ()
    budget_bytes: int | None = None
    pytorch: Sequence[Mapping[str, Any]] = ()
    trace: bool = True
    tell: Callable[[str], None] = lambda _: None
    journal: Journal = field(default_factory=Journal)

    @property
    def watch(self) -> Watch:
        """Marks as the planner's, beside the same store."""
        return Watch(
            store_path=store_path(self.workdir),
            limits=self.settings.limits,
            retry_failures=self.settings.retry_failures,
        )


def compete(
    config: Config, competitors: Sequence[Competitor], options: SuiteOptions
) -> list[Row]:
    """The rows of a configuration's competitors, in their order."""
    if not competitors:
        return []
    return _Trials(config, competitors, options).rows()


def what_is_done_with(config: Config, mesh: Mesh, name: str, identity: str) -> Parts:
    """A competitor of a configuration, as parts of keys.

    Args:
      config: the configuration.
      mesh: its devices.
      name: the competitor's.
      identity: what it is, where others could have the same name.
    """
    return (
        ("what", "benchmark"),
        ("model", config.model),
        ("sizes", repr(sorted(config.options.items()))),
        ("competitor", name),
        ("identity", identity),
        ("mesh", mesh_text(mesh)),
        *environment_parts(list(mesh.devices.flat)),
    )


class _Trials:
    def __init__(
        self, config: Config, competitors: Sequence[Competitor], options: SuiteOptions
    ) -> None:
        self._config = config
        self._options = options
        self._journal = options.journal
        self._competitors = {one.name: one for one in competitors}
        self._what = {
            one.name: what_is_done_with(config, one.mesh, one.name, one.identity)
            for one in competitors
        }
        self._environment = BuildEnvironment(autotune_dir=options.workdir / "autotune")
        self._platform = competitors[0].mesh.devices.flat[0].platform
        self._environment.prepare(self._platform)
        # Of tables by hand nothing is predicted: they are given as long as others.
        self._expected_ms = max(one.predicted_ms or 0.0 for one in competitors)
        self._rows: dict[str, Row] = {}
        self._ready: dict[str, Ready] = {}

    def rows(self) -> list[Row]:
        tell, rounds = self._options.tell, self._options.rounds
        for name in self._competitors:
            tell(f"checking {name}")
            self._check(name)
        for name in self._competitors:
            if self._rows[name].status == "ok":
                tell(f"compiling {name}")
                self._build(name)
        for turn, name in clock.in_turn(list(self._ready), rounds):
            if self._rows[name].status == "ok" and self._turns(name) <= turn:
                tell(f"timing {name}, turn {turn + 1} of {rounds}")
                self._time(name, turn)
        if self._options.trace:
            for name in _worth_tracing(list(self._rows.values())):
                tell(f"tracing {name}")
                self._trace(name)
        return list(self._rows.values())

    # -- stages: each leaves a row -------------------------------------------

    def _check(self, name: str) -> None:
        one = self._competitors[name]
        kept, _ = self._journal.row(self._key(name))
        self._rows[name] = kept or _empty_row(one)
        if kept is not None:
            return
        stage = "at the small size"
        options = self._small_options
        try:
            with jax.default_matmul_precision("highest"):
                reference = self._reference
                with self._doing(name, f"compiled {stage}", "build"):
                    made = one.make(True, options)
                with self._doing(name, f"checked {stage}", "run"):
                    losses = gate.losses_of(made, one.mesh, reference)
        except Exception as error:  # Compilers' errors have no type in common.
            self._fail(name, error, f"{stage}: ")
            return
        gap = gate.largest_gap(losses, reference)
        row = replace(self._rows[name], loss_gap=gap)
        if not gap <= gate.TOLERANCE:
            reason = (
                f"its losses are off by {gap:.2g} from one device's, more than "
                f"{gate.TOLERANCE:g}: not timed"
            )
            row = replace(row, status="wrong", reason=reason)
        self._keep(name, row)

    def _build(self, name: str) -> None:
        options = self._environment.options(self._platform)
        try:
            with self._doing(name, "compiled", "build"):
                made = self._competitors[name].make(False, options)
        except Exception as error:  # As above.
            self._fail(name, error)
            return
        sent: dict[str, int] = {}
        for found in made.built.collectives:
            sent[found.kind] = sent.get(found.kind, 0) + found.bytes * found.count
        row = replace(
            self._rows[name],
            peak_bytes=made.built.peak_bytes,
            build_seconds=made.built.build_seconds,
            collectives=sent,
        )
        self._ready[name] = made
        self._keep(name, row)

    def _time(self, name: str, turn: int) -> None:
        one, made = self._competitors[name], self._ready[name]
        try:
            with self._doing(name, "timed", "run", self._expected_ms):
                record = execute(
                    made.built,
                    made.kinds,
                    one.mesh,
                    feedback=made.feedback,
                    timing=self._options.timing or clock.turn_on(one.mesh),
                )
        except Died as death:
            self._fail(name, death)
            return
        row = self._rows[name]
        samples = row.samples_ms + record.samples_ms if record.ok else ()
        row = replace(
            row, status=record.status, reason=record.reason, samples_ms=samples
        )
        self._keep(name, row, turn + 1)

    def _trace(self, name: str) -> None:
        mesh = self._competitors[name].mesh
        try:
            with self._doing(name, "traced", "run", self._expected_ms):
                found = clock.traced(self._ready[name], mesh)
        except Died as death:
            note = f"could not be traced: {death}"
            self._keep(name, replace(self._rows[name], note=note))
            return
        trace = asdict(found) if found else None
        self._keep(name, replace(self._rows[name], trace=trace))

    # -- what they share -----------------------------------------------------

    @property
    def _small_options(self) -> Mapping[str, str]:
        if self._platform == "cpu":
            return _FAST_ON_CPU
        return self._environment.options(self._platform)

    @cached_property
    def _reference(self) -> gate.Reference:
        mesh = next(iter(self._competitors.values())).mesh
        what = what_is_done_with(self._config, mesh, "one device", "")
        with self._options.watch.doing(
            what, "checked", "the model on one device", "build"
        ):
            return gate.on_one_device(
                self._config.model,
                small(self._config.model, self._config.options, mesh.size),
                self._small_options,
            )

    def _doing(self, name: str, stage: str, doing: Doing, expected_ms: float = 0.0):
        label = f"{self._config.model}: {name}, {stage}"
        what = self._what[name]
        return self._options.watch.doing(what, stage, label, doing, expected_ms)

    def _key(self, name: str) -> str:
        return ProfileKey(self._what[name]).digest

    def _turns(self, name: str) -> int:
        return self._journal.row(self._key(name))[1]

    def _keep(self, name: str, row: Row, turns: int | None = None) -> None:
        self._rows[name] = row
        turns = self._turns(name) if turns is None else turns
        self._journal.keep(self._key(name), row, turns)

    def _fail(self, name: str, error: Exception, where: str = "") -> None:
        status, reason = status_and_reason(error)
        failed = {"status": status, "reason": where + reason, "samples_ms": ()}
        self._keep(name, replace(self._rows[name], **failed))


def _empty_row(one: Competitor) -> Row:
    return Row(
        name=one.name,
        group=one.group,
        mesh=mesh_text(one.mesh),
        status="ok",
        predicted_ms=one.predicted_ms,
    )


def _worth_tracing(rows: Sequence[Row]) -> list[str]:
    """The plan, and the best of each group that ran here."""
    found = [best(rows, group) for group in GROUPS]
    return [row.name for row in found if row is not None]
