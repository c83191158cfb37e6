"""A cross-entropy that never holds all logits: they are made for some words at a time.

In the forward pass each part of the vocabulary gives its largest logit and its sum of
exponentials, and a label's logit is the product of the token with the label's column.
In the backward pass the logits of each part are made again, and contracted at once.
Tokens and words may be spread over devices: each computes its own, and sums follow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from cfp.patterns.local import Local
from cfp.patterns.steps import COLUMNS, KERNEL, ONE, Array, Sheet, Step, row_axes

Function = Callable[..., Sequence[jax.Array]]


@dataclass(frozen=True, slots=True)
class ChunkedCrossEntropy:
    """The stages of a cross-entropy over parts of the vocabulary.

    Attributes:
        steps: what each stage does; the tokens' vectors and the kernel come first in
            what those take that make logits.
        sheet: what they have in common.
        how: as plans record it.
        version: of this code.
    """

    steps: tuple[Step, ...]
    sheet: Sheet
    how: tuple[str, ...] = ()
    version: int = 1

    def stages(self, mesh: Mesh) -> Sequence[Function]:
        """A function for each stage; see `cfp.program.replace`."""
        if not self.sheet.word_axes and not any(self.sheet.token_axes):
            return self.plain()
        local = Local(self.sheet, dict(mesh.shape))
        return [
            self._spread(mesh, functools.partial(local.run, step), place)
            for place, step in enumerate(self.steps)
        ]

    def plain(self) -> Sequence[Function]:
        """The same for one device, whatever the axes."""
        local = Local(self.sheet.alone(), {})
        return [functools.partial(local.run, step) for step in self.steps]

    def _spread(self, mesh: Mesh, function: Function, place: int) -> Function:
        kinds = [step.kind for step in self.steps]
        first, step = kinds.index("largest"), self.steps[place]
        axes = tuple(axis for axes in self.sheet.token_axes for axis in axes)
        rows = [PartitionSpec(axes, None)] * 2
        takes = [self._spec(one) for one in step.takes]
        makes = [self._spec(one) for one in step.makes]

        def whole(*args: jax.Array) -> Any:
            return jax.shard_map(
                function,
                mesh=mesh,
                in_specs=tuple([*takes, *(rows if place > first else [])]),
                out_specs=[*makes, *(rows if place >= first else [])],
                check_vma=False,
            )(*args)

        return whole

    def _spec(self, one: Array) -> PartitionSpec:
        if one.form == ONE:
            return PartitionSpec()
        if one.form in (KERNEL, COLUMNS):
            dims: list[Any] = [()] * len(one.shape)
            dims[one.words_dim] = self.sheet.word_axes
            return PartitionSpec(*dims)
        tokens, axes = self.sheet.tokens, self.sheet.token_axes
        return PartitionSpec(*row_axes(one.shape, tokens, axes))
