"""Decides whether two runs of a step differ by more than rounding does.

What rounding does is measured for each step: one device runs it again from arguments
that differ in their last bit. A step on which that changes much is of no use, since
something wrong might hide in it, and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cfp.checking.check import CHANGE_MARGIN, ROUNDING_MARGIN
from cfp_test.support.checking import NOISE, difference, to_host

TOLERANCE = 1e-5
# No leaf may be off by more, whatever rounding does to it.
MOST_ALLOWED = 0.03
NUDGES, MORE_NUDGES = 3, 16
# By how much arguments are moved where a step computes in bfloat16.
_NARROW_BIT = float(jnp.finfo(jnp.bfloat16).eps) / 4


@dataclass(frozen=True)
class Wrong:
    """A leaf that is off.

    Attributes:
        name: of the result.
        distance: relative L2 distance from one device's.
        allowed: the largest that would pass.
    """

    name: str
    distance: float
    allowed: float


def nudged(leaves: Sequence[Any], seed: int, narrow: bool) -> list[Any]:
    """Leaves with every float moved by its last bit, up or down at random."""
    rng = np.random.default_rng(seed)
    found = []
    for leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            found.append(leaf)
            continue
        host = np.asarray(leaf)
        bit = _NARROW_BIT if narrow else float(jnp.finfo(host.dtype).eps)
        signs = rng.integers(0, 2, host.shape) * 2 - 1
        moved = (host * (1 + signs * bit)).astype(host.dtype)
        is_spread = len(leaf.sharding.device_set) > 1
        found.append(jax.device_put(moved, leaf.sharding) if is_spread else moved)
    return found


def rounding_of(
    expected: Sequence[np.ndarray], others: Sequence[Sequence[np.ndarray]]
) -> list[float]:
    """Measures how far the last bits of arguments move each leaf."""
    found = []
    for i, leaf in enumerate(expected):
        found.append(max(_distance(other[i], leaf) for other in others))
    return found


def _distance(got: np.ndarray, expected: np.ndarray) -> float:
    """As `difference`, but integers that differ count as far and not as infinite."""
    distance = difference(got, expected)
    return 1.0 if np.isinf(distance) else distance


def allowed_of(
    expected: Sequence[np.ndarray],
    rounding: Sequence[float],
    before: Sequence[np.ndarray | None],
) -> list[float]:
    """The distance of each leaf that passes.

    Args:
        expected: what one device computes.
        rounding: of `rounding_of`.
        before: the state that a leaf takes the place of, if any. Where a step hardly
            changes it, less passes.
    """
    found = []
    for leaf, noise, old in zip(expected, rounding, before, strict=True):
        share = 1.0
        if old is not None and old.dtype == leaf.dtype and old.dtype.kind == "f":
            change = difference(old, leaf)
            share = min(1.0, CHANGE_MARGIN * change) or 1.0
        found.append(max(TOLERANCE * share, ROUNDING_MARGIN * noise))
    return found


def is_steady(allowed: Sequence[float], expected: Sequence[np.ndarray]) -> bool:
    """Returns True if no error could hide in what rounding does to a step."""
    finite = all(
        np.isfinite(leaf).all() for leaf in expected if leaf.dtype.kind in "fc"
    )
    return finite and all(a <= MOST_ALLOWED for a in allowed)


def wrong_leaves(
    names: Sequence[str],
    found: Sequence[Any],
    expected: Sequence[np.ndarray],
    allowed: Sequence[float],
) -> list[Wrong]:
    """The leaves that are further off than they may be."""
    wrong = []
    for name, got, want, most in zip(names, found, expected, allowed, strict=True):
        distance = difference(to_host(got), want)
        if not distance <= most:
            wrong.append(Wrong(name, distance, most))
    return wrong


__all__ = [
    "MORE_NUDGES",
    "NOISE",
    "NUDGES",
    "Wrong",
    "allowed_of",
    "is_steady",
    "nudged",
    "rounding_of",
    "wrong_leaves",
]
