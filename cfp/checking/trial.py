"""The command ``cfp run``: runs a target's steps under a plan, and may check them.

A target is a step function with its arguments.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import tree_flatten_with_path

from cfp.checking.check import (
    FULL_TOLERANCE,
    Check,
    Differences,
    Leaf,
    both_sides,
    feed_back,
    reference_text,
)
from cfp.errors import CfpError
from cfp.plan.parts import by_argument
from cfp.plan.plan import Plan
from cfp.profiling.builder import is_out_of_memory
from cfp.profiling.coordination import coordinated
from cfp.program.calling import fixed
from cfp.program.step import FlatStep, arguments_of, successors
from cfp.targets import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of one step.

    Attributes:
        time_ms: time from the call until all results are computed.
        metrics: returned scalars, such as ``loss`` of ``1/loss``, without state.
        comparison: comparison with the reference; empty if not checked.
    """

    time_ms: float
    metrics: Mapping[str, float]
    comparison: Differences = field(default_factory=Differences)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Results of some steps under a plan.

    Attributes:
        tolerance: relative L2 distance that passes in a leaf that changes enough.
        checked: True if the steps were compared with a reference.
        preset: the reference's preset, as in :class:`Reference`; "" on one device.
        narrow: True if checked, and kernels compute in less than float32.
        state: {text of a result's index: name of the argument that it replaces}; text
            "" is the whole result.
        drawn: names of the arguments with random numbers.
    """

    steps: tuple[StepResult, ...]
    tolerance: float = FULL_TOLERANCE
    checked: bool
    preset: str = ""
    narrow: bool = False
    state: Mapping[str, str] = field(default_factory=dict)
    drawn: tuple[str, ...] = ()

    def named(self, path: str) -> str:
        """Names a result: ``result[1]/loss``; new state as its argument: ``w/up``."""
        if "" in self.state:
            return f"{self.state['']}/{path}".rstrip("/")
        place, slash, rest = path.partition("/")
        return f"{self.state.get(place) or _result_name(place)}{slash}{rest}"

    @property
    def median_ms(self) -> float:
        """Median step time, ms; of several steps the first (warm-up) is left out."""
        times = [s.time_ms for s in self.steps]
        return statistics.median(times[1:] or times)

    @property
    def every(self) -> Differences:
        """Comparisons of the leaves of all steps; empty if not checked."""
        return Differences(leaf for step in self.steps for leaf in step.comparison)

    @property
    def failures(self) -> list[tuple[int, Leaf]]:
        """(step number from 0, leaf) of each step's `Differences.failures`."""
        steps = enumerate(self.steps)
        return [(number, x) for number, s in steps for x in s.comparison.failures]

    @property
    def undecided(self) -> set[str]:
        """Paths of leaves that are undecided in some step: see `Leaf.is_undecided`."""
        return {leaf.path for leaf in self.every if leaf.is_undecided}


def _result_name(place: str) -> str:
    return f"result[{place}]" if place.isdigit() else place or "result"


def run_trial(
    plan: Plan,
    target: Target,
    *,
    steps: int,
    check: bool = False,
    tolerance: float | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Trial:
    """Runs a target's steps under a plan, times them, and may check them.

    A result with an argument's structure and types is state: it replaces the argument
    in the next step; a single array only if it is donated. Other arguments stay.

    Args:
        steps: number of steps.
        check: True runs the same steps in float32 or float64 under the plan and as a
            reference, and compares all results.
        tolerance: relative L2 distance that passes; less in state that changes little.
            By default 1e-5, 1e-12 in float64, 1e-2 if kernels compute in less than
            float32. A larger distance passes only if rounding explains it.
        progress: called with a text about each phase.

    Raises:
        PlanMismatch: the plan is for another target.
        CfpError: the step fails, cannot run `steps` times, or the check lacks memory.
        ProcessError: another process has failed or ended.
    """
    tell = progress or (lambda _: None)
    meshes = [] if plan.mesh is None else [plan.mesh]
    with coordinated(meshes) as talk, _explained(check):
        step = target.flatten()
        # A loaded plan has no step, and needs it to find static arguments.
        bound = replace(plan, step=step).bind(
            target.step, *target.args, donate_argnums=target.donate
        )
        feedback, state = _feedback(target, step, plan, steps)
        tell("compiling")
        compiled = bound.compile_bound(tell)
        tell("making the arguments, by programs that are compiled for their shapes")
        args = list(target.make_args(bound.in_shardings, seed))
        checking = None
        if check:
            tell("preparing the check: compiling steps that are not compiled yet")
            agree = bool if talk is None else lambda here: all(talk.gather(here))
            sides = both_sides(bound, compiled, tell, agree)
            checking = Check(*sides, feedback, agree, tolerance)
            which = reference_text(checking.reference.preset)
            tell(f"copying the arguments, for the check against {which}")
            checking.start(args)
        results = list[StepResult]()
        for number in range(1, steps + 1):
            tell(f"step {number} of {steps}")
            started = time.perf_counter()
            result = jax.block_until_ready(compiled(*args))
            time_ms = (time.perf_counter() - started) * 1000
            metrics = _metrics(result, feedback)
            feed_back(args, result, feedback)
            del result
            results.append(StepResult(time_ms=time_ms, metrics=metrics))
        # The check has its own arguments. It comes last, since its transfers would
        # slow down timed steps.
        args.clear()
        about = dict[str, Any]()
        if checking is not None:
            for number, one in enumerate(results):
                at = f"checking step {number + 1} of {steps}"
                found = checking.step(lambda what, at=at: tell(f"{at}: {what}"))
                results[number] = replace(one, comparison=found)
            about["tolerance"] = checking.tolerance
            about["preset"] = checking.reference.preset
            about["narrow"] = bool(checking.planned.narrow)
    leaves = zip(step.arg_names, step.flatten(target.args, {}), strict=True)
    shapes = [name for name, one in leaves if isinstance(one, jax.ShapeDtypeStruct)]
    about |= {"checked": check, "state": state, "drawn": tuple(by_argument(shapes))}
    return Trial(steps=tuple(results), **about)


@contextmanager
def _explained(check: bool) -> Iterator[None]:
    """Context manager: turns a device's failure into a CfpError, with a remedy."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        said = str(error).strip().splitlines()[0]
        remedy = "Run the step in jax.jit, without cfp, to see whether it fails there."
        if is_out_of_memory(error):
            remedy = "Plan with a memory budget, a smaller batch, or more devices."
            remedy += " --check needs more memory: leave it out." * check
        raise CfpError(f"The step failed on the devices: {said}. {remedy}") from error


def _feedback(
    target: Target, step: FlatStep, plan: Plan, steps: int
) -> tuple[dict[int, int | None], dict[str, str]]:
    """Returns `Check.feedback` and `Trial.state`; CfpError if `steps` cannot run."""
    positions = (i for i in range(len(target.args)) if i not in target.static)
    every = dict(zip(positions, arguments_of(step.in_tree), strict=True))
    donated = {
        i for i, (at, _) in every.items() if any(plan.donated[at.start : at.stop])
    }
    # A single array is state only if donated: others may share its shape by chance.
    state = {
        i: (places, tree)
        for i, (places, tree) in every.items()
        if i in donated or tree.num_nodes > len(places)
    }
    found = {i: place for i, place, _ in successors(step, state)}
    starts = {i: places.start for i, (places, _) in state.items() if places}
    names = {i: step.arg_names[at].partition("/")[0] for i, at in starts.items()}
    if steps > 1 and (lost := donated - found.keys()):
        raise CfpError(
            f"Argument {min(lost)} ({names[min(lost)]}) is donated, and no result of "
            "the step has the argument's structure, shapes and types. So the step can "
            "run only once: use --steps 1, or plan without donating the argument."
        )
    by_place = {
        "" if p is None else str(p): names[i] for i, p in found.items() if i in names
    }
    return found, by_place


def _metrics(result: Any, feedback: Mapping[int, int | None]) -> dict[str, float]:
    if None in feedback.values():
        return {}
    found = {}
    for path, leaf in tree_flatten_with_path(fixed(result))[0]:
        if path and getattr(path[0], "idx", None) in feedback.values():
            continue
        is_real = jnp.issubdtype(leaf.dtype, jnp.number) and not jnp.iscomplexobj(leaf)
        if leaf.shape == () and is_real:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            found[name.partition("/")[2] or _result_name(name)] = leaf.item()
    return found
