"""Steps whose attentions a kernel computes, beside the steps as they are written."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax.sharding import Mesh

from cfp.analysis.analyze import build_frame
from cfp.analysis.layout import Frame, constraints, lay_out
from cfp.analysis.presets import DATA_PARALLEL, plainest, presets
from cfp.checking.check import Check, Leaf, Reference, compile_alone
from cfp.kernels.functions import Way
from cfp.kernels.matches import (
    Match,
    find,
    propose,
    refusal_of,
)
from cfp.plan.execute import CompiledStep, load_or_lower
from cfp.program.replace import Replacement, Sites
from cfp.program.step import FlatStep, flatten_step
from cfp.program.trace import trace


@dataclass(frozen=True)
class Step:
    """A step on a mesh.

    Attributes:
        fn: the step.
        args: its arguments, the state first.
        mesh: the devices.
    """

    fn: Any
    args: Sequence[Any]
    mesh: Mesh

    @cached_property
    def flat(self) -> FlatStep:
        return flatten_step(self.fn, self.args)

    @cached_property
    def frame(self) -> Frame:
        return build_frame(
            trace(self.flat, self.mesh)[0], tuple(self.mesh.shape.items())
        )

    @property
    def attentions(self) -> Sites[Match]:
        return find(self.frame.program)

    def refusal(self, kernel: str) -> str | None:
        """Returns why a kernel cannot compute the attentions on CPUs, if it cannot."""
        for match in self.attentions.found.values():
            problem, sizes = match.problem, dict(self.mesh.shape)
            if (why := refusal_of(problem, Way(kernel), sizes, "cpu")) is not None:
                return why
        return None

    @cached_property
    def alone(self) -> CompiledStep:
        """The step as it is written, on one device."""
        return compile_alone(self.flat, self.mesh.local_devices[0])

    def with_kernel(
        self, kernel: str, preset: str = "data_parallel", wide: bool = True
    ) -> tuple[CompiledStep, tuple[Replacement, ...]]:
        """The step under a preset, with a kernel in the place of all attentions.

        Args:
            wide: compute in float32 what the step computes in less.

        Raises:
            AssertionError: one that was found cannot be replaced.
        """
        frame = self.frame
        named = presets(frame)
        choice = plainest(named) if preset == DATA_PARALLEL else named[preset]
        layout = lay_out(frame, choice)
        found = []
        for match in self.attentions.found.values():
            one = propose(frame.program, match, kernel, layout.axes)
            assert not isinstance(one, str), one
            found += one.replacements(frame.program)
        constrained = dataclasses.replace(constraints(layout), replaced=tuple(found))
        compiled = load_or_lower(
            self.flat,
            self.mesh,
            None,
            [layout.arg_spec(i) for i in range(len(frame.program.args))],
            layout.output_specs(),
            constrained,
            wide=wide,
        ).compile()
        return compiled, constrained.replaced

    def far(
        self, planned: CompiledStep, alone: CompiledStep | None = None
    ) -> list[Leaf]:
        """Checks a step as `cfp run --check` does: its state is the first result.

        Args:
            planned: with kernels.
            alone: of the step as it is written, if a step that computes the same has
                been compiled already.
        """
        check = Check(planned, Reference(alone or self.alone), {0: 0})
        check.start(self.args)
        return check.step().failures
