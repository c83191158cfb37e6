"""Disjoint sets."""

from __future__ import annotations

from collections.abc import Hashable


class UnionFind:
    """Disjoint sets of hashable things."""

    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}

    def find(self, item: Hashable) -> Hashable:
        """The representative of an item's set."""
        parent = self._parent
        root = item
        while (above := parent.get(root, root)) != root:
            root = above
        while item != root:
            parent[item], item = root, parent.get(item, item)
        return root

    def union(self, a: Hashable, b: Hashable) -> None:
        """Joins the sets of two items; the second's representative stands for both."""
        a, b = self.find(a), self.find(b)
        if a != b:
            self._parent[a] = b
