"""How much the planner measures, and who is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from cfp.errors import CfpError
from cfp.profiling.marks import Limits
from cfp.profiling.runner import Progress
from cfp.search.measure import Told


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """How much to measure, and who is told.

    Attributes:
        per_kind: how many strategies to measure for each kind of segment, at most.
        tolerance: measuring ends when no other plan can be faster by more than this
            share of the step; on GPUs, where memory decides, when none probably is by
            more than 2%.
        patience: or after so many rounds in a row that made no plan faster by that
            share, and one more where memory keeps out a faster one. By default 1 on
            virtual CPU devices, and none on others: what is measured at first is the
            classics' parts and the best by estimate.
        seconds: planning ends about when this much time is over: no round of measuring
            begins then, and no program joins the race or is timed again.
        in_context: whether segments are measured with a neighbour, which predicts
            better and builds twice as many programs.
        plans: how many of the best plans, by each of two ways to predict, take part
            in the race; by default 2, and 1 on virtual CPU devices. Where memory
            decides, one of them is for programs that turn out smaller than predicted.
        extents: how much the compiler is told of the classics; each way takes part.
            By default all ways, and one on virtual CPU devices, where a build takes
            longer than the difference is worth.
        reach: classics that are predicted to take this many times as long as the plan
            are not raced; by default 1.1, or 1.2 where the compiler is told of their
            arguments alone, and 2 on virtual CPU devices.
        compiler_options: options of the compiler by the name that the race is to give
            them; the leaders are raced with each, too. By default a short list for
            the platform.
        race: whether the best plan and the classics are timed on the whole program;
            otherwise the prediction is trusted, and under a budget that was asked for
            the best that fits is found by compiling, which runs nothing.
        repeats: of segments that repeat back to back so many repeats are raced (two at
            least, the first and the last), unless a budget was asked for, and the rest
            follows from the prediction; only what wins is then compiled and timed
            whole. None races whole programs.
        measure: whether what each strategy costs is measured; False takes what is in
            the store already. By default it is, but on virtual CPU devices, whose times
            say nothing about those of GPUs: there choices are made by estimates, and
            the plan and two presets race.
        retry_failures: whether what failed before is tried again; or what failed
            before a moment, which a process that is started again keeps to.
        limits: what counts as hung.
        progress: told of every event, a :class:`Progress` or a line of text.

    Raises:
        CfpError: fewer than two repeats, no strategy to measure, or a tolerance that is
            no share.
    """

    per_kind: int = 16
    tolerance: float = 0.01
    patience: float | None = None
    seconds: float = float("inf")
    in_context: bool = True
    plans: int | None = None
    extents: tuple[Told, ...] | None = None
    reach: float | None = None
    compiler_options: Mapping[str, Mapping[str, str]] | None = None
    race: bool = True
    repeats: int | None = 4
    measure: bool | None = None
    retry_failures: bool | datetime = False
    limits: Limits = field(default_factory=Limits)
    progress: Callable[[Progress | str], None] | None = None

    def __post_init__(self):
        if self.repeats is not None and self.repeats < 2:
            raise CfpError(
                f"Expected two repeats or more to race, got repeats={self.repeats}. "
                "None races whole programs."
            )
        if self.per_kind < 1:
            raise CfpError(
                f"Expected one strategy or more to measure for each kind of segment, "
                f"got per_kind={self.per_kind}."
            )
        if not 0 <= self.tolerance <= 1:
            raise CfpError(
                "Expected a share of the step between 0 and 1, such as 0.01, got "
                f"tolerance={self.tolerance}."
            )
