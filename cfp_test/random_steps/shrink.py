"""Makes what is wrong small: fewer blocks, smaller shapes, fewer constraints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from cfp.program.constrain import Constraints
from cfp_test.random_steps.check import WRONG, Subject, check
from cfp_test.random_steps.program import NO_OPTIMIZER, Block, Spec, draw_spec
from cfp_test.random_steps.run import ways_of
from cfp_test.random_steps.ways import Way

# Another program has other blocks, so that the same seed draws something else for it.
TRIES = 12
# Seeds of a block that are tried for fewer ops in it.
OTHER_SEEDS = 4


@dataclass(frozen=True)
class Shrunk:
    """The smallest that is still wrong.

    Attributes:
        spec, way: the step, and how it is sharded.
        decided: shardings of arguments and results, and the constraints that are left.
        why: what is wrong.
    """

    spec: Spec
    way: Way
    decided: tuple[Any, ...]
    why: str

    def __str__(self) -> str:
        subject = Subject.of(self.spec)
        program = subject.analysis.frame.program
        ins, outs, constraints = self.decided
        lines = [
            f"{self.why}",
            "from cfp_test.random_steps.check import check",
            "from cfp_test.random_steps.program import Block, Spec",
            "from cfp_test.random_steps.ways import Way",
            f"check({self.spec!r}, [{self.way!r}])",
            "",
            f"arguments: {dict(zip(program.arg_names, ins, strict=True))}",
            f"results: {dict(zip(program.output_names, outs, strict=True))}",
        ]
        for value, spec in constraints.values.items():
            producer = program.values[value].producer
            kind = program.ops[producer].kind if producer >= 0 else "argument"
            shape = program.values[value].shape
            lines.append(f"value {value}, of {kind}, {shape}: {spec}")
        for (op, index), spec in constraints.uses.items():
            lines.append(f"operand {index} of op {op}, {program.ops[op].kind}: {spec}")
        jaxpr = jax.make_jaxpr(subject.step.flat_fn)(*subject.step.avals)
        return "\n".join([*lines, "", str(jaxpr)])


def shrink(spec: Spec, way: Way, most: int = 200) -> Shrunk:
    """Makes a step that is wrong under a way smaller, while it still is.

    Args:
        spec, way: what is wrong.
        most: the most steps that are tried.

    Raises:
        ValueError: it is not wrong.
    """
    left = [most]
    why = _why(spec, way)
    if why is None:
        raise ValueError(f"{spec} is right under {way}")

    def still_wrong(smaller: Spec) -> tuple[Way, str] | None:
        for number in range(TRIES):
            if left[0] <= 0:
                return None
            left[0] -= 1
            other = way if number == 0 else replace(way, seed=number)
            found = _why(smaller, other)
            if found is not None:
                return other, found
        return None

    found = True
    while found:
        found = False
        for smaller in _smaller(spec):
            wrong = still_wrong(smaller)
            if wrong is not None:
                (way, why), spec, found = wrong, smaller, True
                break
    return Shrunk(spec, way, _fewer_constraints(spec, way), why)


def shrink_seed(seed: int, strategies: int) -> str:
    """The smallest of what is wrong with a seed's program, as text."""
    spec, ways = draw_spec(seed), ways_of(seed, strategies)
    for one in check(spec, ways, most=strategies).tried:
        if one.outcome == WRONG:
            return str(shrink(spec, one.way))
    return f"nothing is wrong with seed {seed}"


def _why(spec: Spec, way: Way) -> str | None:
    """The reason why a step is wrong under a way; None if it is right, or no step."""
    try:
        [tried] = check(spec, [way]).tried or [None]
    except Exception:  # A smaller spec need not make a step at all.
        return None
    return tried.why if tried is not None and tried.outcome == WRONG else None


def _smaller(spec: Spec) -> Iterator[Spec]:
    """Smaller specs, the smallest first."""
    blocks = spec.blocks
    for i in range(len(blocks)):
        if len(blocks) > 1:
            yield replace(spec, blocks=(*blocks[:i], *blocks[i + 1 :]))
    for name, plain in (
        ("optimizer", NO_OPTIMIZER),
        ("optimizer", "sgd"),
        ("microbatches", 1),
        ("remat", False),
        ("host", False),
        ("echoes", False),
        ("donated", False),
    ):
        if getattr(spec, name) != plain and spec.optimizer != NO_OPTIMIZER:
            changed = replace(spec, **{name: plain})
            if plain == NO_OPTIMIZER:
                changed = replace(changed, microbatches=1, host=False)
            yield changed
    for i in range(len(spec.mesh)):
        if len(spec.mesh) > 1:
            yield replace(spec, mesh=(*spec.mesh[:i], *spec.mesh[i + 1 :]))
        name, size = spec.mesh[i]
        if size > 2:
            smaller = (*spec.mesh[:i], (name, 2), *spec.mesh[i + 1 :])
            yield replace(spec, mesh=smaller)
    for shape in ((4,), (4, 4), (8, 4), (4, 4, 4)):
        if len(shape) <= len(spec.shape) and _size(shape) < _size(spec.shape):
            yield replace(spec, shape=shape)
    yield from _other_seeds(spec)


def _size(shape: Sequence[int]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def _other_seeds(spec: Spec) -> Iterator[Spec]:
    """Specs with blocks of other seeds that make fewer ops."""

    def count(one: Spec) -> int:
        return len(Subject.of(one).analysis.frame.program.ops)

    own = count(spec)
    for i, block in enumerate(spec.blocks):
        for seed in range(OTHER_SEEDS):
            other = (*spec.blocks[:i], Block(block.kind, seed), *spec.blocks[i + 1 :])
            changed = replace(spec, blocks=other)
            if seed < block.seed and count(changed) < own:
                yield changed


def _fewer_constraints(spec: Spec, way: Way) -> tuple[Any, ...]:
    """The shardings of a way, with those constraints alone that make it wrong."""
    subject = Subject.of(spec)
    ins, outs, constraints = subject.decided(way)
    allowed = subject.allowed()

    def wrong(values: dict, uses: dict) -> bool:
        fewer = replace(constraints, values=values, uses=uses)
        try:
            return bool(
                subject.differs(subject.quickly_compiled(ins, outs, fewer), allowed)
            )
        except Exception:  # Whatever it raises, it is what is looked for.
            return True

    values, uses = dict(constraints.values), dict(constraints.uses)
    values = _fewest(values, lambda kept: wrong(kept, uses))
    uses = _fewest(uses, lambda kept: wrong(values, kept))
    return ins, outs, Constraints(values, uses)


def _fewest(items: dict, wrong: Callable[[dict], bool]) -> dict:
    """Drops items while it stays wrong, in halves, quarters and so on."""
    size = len(items)
    while size:
        for start in range(0, len(items), size):
            keys = list(items)
            dropped = set(keys[start : start + size])
            kept = {k: v for k, v in items.items() if k not in dropped}
            if dropped and wrong(kept):
                items = kept
                break
        else:
            size //= 2
    return items
