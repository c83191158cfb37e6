"""Makes a wrong step small: fewer blocks, smaller shapes and meshes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import jax

from cfp_test.random_steps.check import WRONG, Subject, check
from cfp_test.random_steps.program import NO_OPTIMIZER, Spec, draw_spec
from cfp_test.random_steps.run import ways_of
from cfp_test.random_steps.ways import Way

# Another program has other blocks, so that the same seed draws something else for it.
TRIES = 12


@dataclass(frozen=True)
class Shrunk:
    """The smallest that is still wrong.

    Attributes:
        spec, way: the step, and how it is sharded.
        why: what is wrong.
    """

    spec: Spec
    way: Way
    why: str

    def __str__(self) -> str:
        step = Subject.of(self.spec).step
        lines = [
            f"{self.why}",
            "from cfp_test.random_steps.check import check",
            "from cfp_test.random_steps.program import Block, Spec",
            "from cfp_test.random_steps.ways import Way",
            f"check({self.spec!r}, [{self.way!r}])",
        ]
        jaxpr = jax.make_jaxpr(step.flat_fn)(*step.avals)
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
    return Shrunk(spec, way, why)


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
        if len(shape) <= len(spec.shape) and prod(shape) < prod(spec.shape):
            yield replace(spec, shape=shape)
