"""The schedule of a compiled program: its computation and collectives, in order.

The compiler's text says when a collective starts, what is computed before it has to
end, and the sizes of all of it. Loops are unrolled, so that a collective in the body of
a loop is in the schedule as often as it runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod, sqrt

from cfp.profiling import hlo
from cfp.profiling.hlo_text import Instruction, Module, modules_in

# What only names a part of a value, or is done when memory is assigned.
_FREE = frozenset(
    "parameter constant get-tuple-element tuple bitcast after-all partition-id"
    " replica-id iota".split()
)
_CONTRACTING = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LHS_BATCH = re.compile(r'"lhs_batch_dimensions":\[([^\]]*)\]')
# Of cuDNN's attention: [batch, heads, queries, keys], and what hides the later keys.
_SCORES = re.compile(r'"intermediate_tensor_shape":\{"dimensions":\[([^\]]*)\]')
_CAUSAL = re.compile(r'"mask_type":"[^"]*CAUSAL')
_GRADIENT = '"bmm1_grad'
# Products of a forward kernel, and of a backward one, which computes scores again.
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5
_MATMUL = re.compile(r'"(?:gemm|matmul)_?\w*backend_config"')
# Below, a kernel's time is that of its memory: a bias that is added up, a small table.
_PRODUCT_FLOPS = 1e9
_LONGEST = 500_000  # Steps; in what would be longer a loop is one turn that counts.


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """One kernel, or several between which no collective starts or has to be done.

    Attributes:
        flops: of matrix products.
        moved_bytes: read and written by what multiplies no matrices.
    """

    flops: float
    moved_bytes: float
    kernels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One collective.

    Attributes:
        kind: as in HLO.
        bytes: the larger side's size on one device; see `cfp.profiling.hlo`.
        start: how many of the schedule's `Computed` come before its start.
        done: how many come before what waits for it; `start` if nothing is beside it.
        times: how often it runs there, one after another.
    """

    kind: str
    bytes: int
    group_size: int
    start: int
    done: int
    times: int = 1


@dataclass(frozen=True, slots=True)
class Schedule:
    """Schedule of one run of a program on one device, in order."""

    computed: tuple[Computed, ...]
    sent: tuple[Sent, ...]

    @property
    def flops(self) -> float:
        """Sums the matrix products of one device."""
        return sum(one.flops for one in self.computed)

    @property
    def computation(self) -> Computed:
        """Everything that one device computes, taken together."""
        return _together(self.computed)

    def merged(self) -> Schedule:
        """The same with what no collective separates taken together."""
        cuts = {0, len(self.computed)}
        cuts |= {place for one in self.sent for place in (one.start, one.done)}
        edges = sorted(cuts)
        number = {place: i for i, place in enumerate(edges)}
        return Schedule(
            tuple(_together(self.computed[a:b]) for a, b in pairwise(edges)),
            tuple(
                replace(one, start=number[one.start], done=number[one.done])
                for one in self.sent
            ),
        )


def _together(computed: Sequence[Computed]) -> Computed:
    return Computed(
        flops=sum(one.flops for one in computed),
        moved_bytes=sum(one.moved_bytes for one in computed),
        kernels=sum(one.kernels for one in computed),
    )


def _repeated(one: Computed, times: int) -> Computed:
    return Computed(
        flops=one.flops * times,
        moved_bytes=one.moved_bytes * times,
        kernels=one.kernels * times,
    )


def schedule_of(hlo_text: str) -> Schedule:
    """Reads the schedule of a compiled program.

    Args:
        hlo_text: as `jax.stages.Compiled.as_text` gives it, scheduled.
    """
    found = _Reader(next(module for module in modules_in(hlo_text) if module.entry))
    found.read(found.module.entry)
    return Schedule(tuple(found.computed), tuple(found.sent))


class _Reader:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.devices = hlo.devices_of(module)
        self.computed: list[Computed] = []
        self.sent: list[Sent] = []
        self._flops: dict[str, float] = {}

    def read(self, computation: str) -> None:
        """Adds what a computation does; those that it calls are a part of it."""
        instructions = self.module.computations[computation]
        shapes = {one.name: one.shape for one in instructions}
        started: dict[str, int] = {}
        for one in instructions:
            if one.opcode in _FREE:
                continue
            collective = self._collective(one)
            if collective is not None:
                kind, size, group = collective
                place = len(self.computed)
                if one.opcode.endswith("-start"):
                    started[one.name] = len(self.sent)
                where = {"start": place, "done": place}
                self.sent.append(Sent(kind=kind, bytes=size, group_size=group, **where))
            elif one.opcode.endswith("-done"):
                for name in one.operands:
                    if name in started:
                        self._end(started[name])
            elif one.opcode in ("while", "call", "conditional"):
                self._inside(one)
            elif not one.opcode.endswith(("-start", "-update")):
                self.computed.append(self._one(one, shapes))

    def _collective(self, one: Instruction) -> tuple[str, int, int] | None:
        """Its kind, bytes and group, also if it is wrapped into an asynchronous op."""
        if one.opcode == "async-start":
            for called in _called(one, self.module):
                for inner in self.module.computations[called]:
                    found = self._collective(inner)
                    if found is not None:
                        return found
            return None
        return hlo.sent_by(one, self.devices)

    def _end(self, number: int) -> None:
        self.sent[number] = replace(self.sent[number], done=len(self.computed))

    def _inside(self, one: Instruction) -> None:
        before = len(self.computed), len(self.sent)
        for called in _called(one, self.module):
            self.read(called)
        computed, sent = self.computed[before[0] :], self.sent[before[1] :]
        if (len(computed) + len(sent)) * one.trips > _LONGEST:
            self.computed[before[0] :] = [_repeated(c, one.trips) for c in computed]
            self.sent[before[1] :] = [
                replace(s, times=s.times * one.trips) for s in sent
            ]
            return
        for turn in range(1, one.trips):
            shift = turn * len(computed)
            self.computed += computed
            self.sent += [
                replace(s, start=s.start + shift, done=s.done + shift) for s in sent
            ]

    def _one(self, one: Instruction, shapes: Mapping[str, str]) -> Computed:
        if one.opcode == "custom-call":
            flops = _matmul_flops(one, shapes) or _attention_flops(one, shapes)
        else:
            flops = self._flops_within(one, shapes)
        if flops >= _PRODUCT_FLOPS:
            return Computed(flops=flops, moved_bytes=0.0, kernels=0)
        own = hlo.shape_bytes(one.shape)
        sizes = (hlo.shape_bytes(shapes.get(name, "")) for name in one.operands)
        # What is much larger than the result is mostly read in part.
        moved = own + sum(min(size, 4 * own + 1024) for size in sizes)
        return Computed(flops=0.0, moved_bytes=float(moved), kernels=1)

    def _flops_within(self, one: Instruction, shapes: Mapping[str, str]) -> float:
        if one.opcode in ("dot", "convolution"):
            return _dot_flops(one, shapes)
        total = 0.0
        for called in _called(one, self.module):
            if called not in self._flops:
                inner = self.module.computations[called]
                known = {i.name: i.shape for i in inner}
                self._flops[called] = 0.0
                self._flops[called] = sum(self._flops_within(i, known) for i in inner)
            total += self._flops[called]
        return total


def _called(one: Instruction, module: Module) -> Iterator[str]:
    for name in hlo.called_by(one):
        if name in module.computations:
            yield name


def _dot_flops(one: Instruction, shapes: Mapping[str, str]) -> float:
    found = _CONTRACTING.search(one.attributes)
    left = hlo.dims_of(shapes.get(one.operands[0], ""))
    if found is None or not left:
        return _by_sizes(one, shapes, 1)
    contracted = prod(left[int(d)] for d in found[1].split(",") if d)
    return 2.0 * prod(hlo.dims_of(one.shape)) * contracted


def _matmul_flops(one: Instruction, shapes: Mapping[str, str]) -> float:
    if not _MATMUL.search(one.config) or len(one.operands) < 2:
        return 0.0
    batch = 1
    listed = _LHS_BATCH.search(one.config)
    if listed:
        left = hlo.dims_of(shapes.get(one.operands[0], ""))
        places = [int(d.strip('" ')) for d in listed[1].split(",") if d.strip('" ')]
        batch = prod(left[place] for place in places if place < len(left))
    return _by_sizes(one, shapes, batch)


def _attention_flops(one: Instruction, shapes: Mapping[str, str]) -> float:
    """Counts the FLOPs of a kernel of cuDNN's attention; half of them if causal."""
    found = _SCORES.search(one.config)
    if found is None:
        return 0.0
    keys = int(found[1].split(",")[-1].strip('" '))
    queries = prod(hlo.dims_of(shapes.get(one.operands[0], "")))
    is_backward = _GRADIENT in one.config
    products = _BACKWARD_PRODUCTS if is_backward else _FORWARD_PRODUCTS
    causal = 0.5 if _CAUSAL.search(one.config) else 1.0
    return 2.0 * products * causal * queries * keys


def _by_sizes(one: Instruction, shapes: Mapping[str, str], batch: int) -> float:
    """Counts the FLOPs of [b, m, k] times [b, k, n], from the tensors' sizes.

    The product of the three sizes is b times (m k n b) squared.
    """
    left, right = (prod(hlo.dims_of(shapes.get(n, ""))) for n in one.operands[:2])
    return 2.0 * sqrt(left * right * prod(hlo.dims_of(one.shape)) / batch)
