"""Summarizes how much of a program can be sharded, and what stands in the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from cfp.analysis.analyze import Analysis
from cfp.analysis.contractions import is_contraction
from cfp.analysis.flops import op_flops
from cfp.analysis.specs import extend_spec, spec_ways
from cfp.analysis.strategies import block_strategies
from cfp.program.graph import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A contraction, or a parameter with its optimizer state.

    Attributes:
        name: the place in the user's model, or the argument's path.
        what: its shapes.
        amount: FLOPs of a step, or bytes.
        ways: into how many pieces it can be split at most.
        source: ``file:line`` in the user's code, or "".
    """

    name: str
    what: str
    amount: int
    ways: int
    source: str = ""

    def __str__(self) -> str:
        place = f" ({self.source})" if self.source else ""
        ways = f"at most {self.ways} ways" if self.ways > 1 else "not at all"
        return f"{self.name}: {self.what}, {ways}{place}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Parts of a program that can be sharded over all devices, and parts that cannot.

    Attributes:
        devices: how many devices the mesh has.
        contractions: each with its FLOPs.
        state: each parameter with what is kept along with it, and its bytes.
    """

    devices: int
    contractions: tuple[Share, ...]
    state: tuple[Share, ...]

    def split_share(self, shares: tuple[Share, ...]) -> float:
        """The part that can be split over all devices, from 0 to 1."""
        total = sum(s.amount for s in shares)
        split = sum(s.amount for s in shares if s.ways == self.devices)
        return split / total if total else 1.0

    def whole(self, shares: tuple[Share, ...]) -> list[Share]:
        """Returns shares that cannot be split over all devices, largest first."""
        found = [s for s in shares if s.ways < self.devices and s.amount]
        return sorted(found, key=lambda s: -s.amount)


def summarize(analysis: Analysis) -> Summary:
    """Finds out what of a program can be sharded."""
    return Summary(
        devices=prod(size for _, size in analysis.frame.mesh),
        contractions=tuple(_contractions(analysis)),
        state=tuple(_state(analysis)),
    )


def _contractions(analysis: Analysis) -> Iterator[Share]:
    """All contractions; what is true of one segment is true of all of its kind."""
    frame, program = analysis.frame, analysis.frame.program
    known: dict[tuple[int, int], list[int]] = {}
    for segment in analysis.segments:
        for place, b in enumerate(segment.blocks):
            members = [program.ops[m.op] for m in frame.blocks[b].members]
            ops = [op for op in members if is_contraction(op)]
            key = segment.kind, place
            if key not in known:
                known[key] = _most_ways(analysis, b, ops)
            for op, ways in zip(ops, known[key], strict=True):
                operands = " x ".join(str(program.values[v]) for v in op.operands)
                yield Share(
                    name=frame.blocks[b].name,
                    what=f"{op.kind} {operands}",
                    amount=op_flops(program, op),
                    ways=ways,
                    source=op.source,
                )


def _most_ways(analysis: Analysis, block: int, ops: list[Op]) -> list[int]:
    """For each of a block's contractions the most devices that share its work."""
    frame = analysis.frame
    sizes = dict(frame.mesh)
    most = [1] * len(ops)
    for strategy in block_strategies(frame.program, frame.blocks[block], frame.mesh):
        axes = frame.shardings[block].factor_axes(strategy)
        for place, op in enumerate(ops):
            ways = prod(sizes[name] for names in axes[op.id] for name in names)
            most[place] = max(most[place], ways)
    return most


def _state(analysis: Analysis) -> Iterator[Share]:
    frame, program = analysis.frame, analysis.frame.program
    for group in frame.groups:
        values = [program.values[program.args[a]] for a in group.args]
        spec = extend_spec(
            ((),) * len(group.shape), group.shape, frame.mesh, group.whole_dims
        )
        yield Share(
            name=program.arg_names[group.args[0]],
            what=str(values[0]),
            amount=sum(value.size_bytes for value in values),
            ways=spec_ways(spec, frame.mesh),
        )
