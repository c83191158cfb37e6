"""Preferences of roles, and those that an axis of a size allows.

Of a walk through a program that is all that depends on the axis's size. So what an axis
of one size does in its blocks, one of another size does, too, if it may do first of
every wish what that one did: with thousands of devices a walk is for several axes.
"""

from __future__ import annotations

from collections.abc import Sequence

from cfp.analysis.strategies import AxisChoice, axis_choices
from cfp.program.rules import Rule

Wish = tuple[AxisChoice, ...]


class Wishes:
    """Every wish of a walk, and what was chosen of it.

    Args:
        size: of the axis.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        # Rules are alike in alike layers, and few; to compare them takes long.
        self._known: dict[tuple[int, Wish], tuple[Rule, Wish, AxisChoice]] = {}

    def choose(self, rule: Rule, wish: Sequence[AxisChoice]) -> AxisChoice:
        """The first of some choices that the axis may make; none of them if it may not.

        Args:
            rule: of a block's anchor.
            wish: choices, best first.
        """
        key = id(rule), tuple(wish)
        if key not in self._known:
            self._known[key] = (rule, key[1], _first(rule, key[1], self._size))
        return self._known[key][2]

    def come_true(self, size: int) -> bool:
        """Returns True if an axis of another size does the same everywhere."""
        return all(
            _first(rule, wish, size) == choice
            for rule, wish, choice in self._known.values()
        )


def _first(rule: Rule, wish: Wish, size: int) -> AxisChoice:
    allowed = axis_choices(rule, size)
    return next((choice for choice in wish if choice in allowed), AxisChoice())
