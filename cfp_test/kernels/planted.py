"""Faults in the proof of attentions, which tests and random programs must catch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np

from cfp.kernels import core, proof, region

Planted = Callable[[], AbstractContextManager[Any]]


def _any_float() -> AbstractContextManager[Any]:
    """Takes converts to FP8 for converts that round little."""
    narrow = dict.fromkeys(("f8E4M3FN", "f8E5M2"), 0.1)
    stack = ExitStack()
    for room in (region, core):
        stack.enter_context(patch.object(room, "FLOATS", room.FLOATS | {*narrow}))
    stack.enter_context(patch.object(proof, "_ROUNDED", proof._ROUNDED | narrow))
    return stack


def _sampled() -> AbstractContextManager[Any]:
    """Reads a mask at one of eight positions."""
    whole = proof.Reader._window_of

    def window(self: Any, seen: np.ndarray) -> Any:
        if seen.ndim != 2 or seen.shape[0] != seen.shape[1]:
            return whole(self, seen)
        some = np.ix_(*[np.arange(0, len(seen), 8)] * 2)
        is_causal = np.array_equal(seen[some], np.tri(len(seen), dtype=bool)[some])
        return (True, None) if is_causal else whole(self, seen)

    return patch.object(proof.Reader, "_window_of", window)


def _one_index() -> AbstractContextManager[Any]:
    """Takes a slice for any other one of the same stack."""

    def index(self: Any, number: int, count: int) -> int:
        return self._table.setdefault(("index", count), len(self._table))

    return patch.object(region.Values, "_index", index)


def _rows_without_keys() -> AbstractContextManager[Any]:
    """Takes it that each query sees a key."""
    return patch.object(proof.Reader, "_empty", lambda self: "")


def _not_compared() -> AbstractContextManager[Any]:
    """Compares no outputs."""
    return patch.object(proof, "_compare", lambda *args, **more: None)


def _any_function() -> AbstractContextManager[Any]:
    """Takes any function of scores and masks for a scale."""
    own = proof._sum

    def any_sum(step: Any, reads: Any) -> Any:
        found = own(step, reads)
        return reads[0] if found is None and step.op.kind == "multiply" else found

    return patch.object(proof, "_sum", any_sum)


def _any_operands() -> AbstractContextManager[Any]:
    """Takes it that a kernel's scores are those of the step, whatever it reads."""
    own = proof._reference

    def reference(one: Any, known: Any, table: Any) -> Any:
        q, k = (known[one.roots[name]] for name in ("q", "k"))
        scores = one.run(known)[one.scores]

        def contracted(x: Any, y: Any, kept: Any) -> Any:
            return scores if x is q and y is k else core.contracted(x, y, kept)

        with patch.object(proof, "contracted", contracted):
            return own(one, known, table)

    return patch.object(proof, "_reference", reference)


FAULTS: dict[str, Planted] = {
    "any float": _any_float,
    "sampled positions": _sampled,
    "one index": _one_index,
    "rows without keys": _rows_without_keys,
    "any operands": _any_operands,
    "not compared": _not_compared,
    "any function": _any_function,
}
