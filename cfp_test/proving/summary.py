"""Counts of a proof by op, as JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from cfp_test.proving.catalogue import ABSENT, ENTRIES, WITHOUT
from cfp_test.proving.faults import SHOWN, faults

# Kinds of which XLA gathers some variants along factors that their rules allow:
# reshapes of which two axes shard factors of one dim, and gradients of grouped
# convolutions with gaps. Of all others it may move nothing.
MOVING = frozenset({"reshape", "convolution"})


def summary(
    found: Sequence[Mapping[str, Any]], seconds: float, names: Collection[str]
) -> dict[str, Any]:
    """Counts the outcomes by op, and names those that are wrong or move data.

    Args:
        found: outcomes, as the engine has them.
        seconds: of one processor that finding them took.
        names: of the entries that were tried.
    """
    once = {
        (one["op"], *map(str, (one["mesh"], one["axes"]))): one for one in found
    }.values()
    by_kind: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for one in once:
        by_kind[one["kind"]].append(one)
    tried = [ENTRIES[name] for name in names]
    wanted = {kind.split(".")[1] for entry in tried for kind in entry.kinds}
    absent = wanted - set(by_kind)
    return {
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "processor_seconds": round(seconds),
        "checks": len(once),
        "ops": [
            {
                "op": kind,
                "variants": len({one["op"] for one in every}),
                "factors": sum({one["op"]: one["factors"] for one in every}.values()),
                "checks": len(every),
                "padded": sum(one["padded"] for one in every),
                "wrong": sum(_is_wrong(one) for one in every),
                "moved": sum(bool(one["moved"]) for one in every),
            }
            for kind, every in sorted(by_kind.items())
        ],
        "wrong": [one for one in once if _is_wrong(one)],
        "moved": _each_moved(list(once)),
        "unkept": _each_moved(
            [one for one in once if one["larger"] or one["kind"] not in MOVING]
        ),
        "faults": [
            {
                "name": name,
                **asdict(SHOWN[name]),
            }
            for name in faults()
        ],
        "missing": sorted(absent - set(ABSENT)),
        "left": sorted(set(ENTRIES) - set(names)),
        "absent": {kind: ABSENT[kind] for kind in sorted(absent & set(ABSENT))},
        "without": WITHOUT,
    }


def _is_wrong(one: Mapping[str, Any]) -> bool:
    return not one["difference"] <= one["allowed"]


def _each_moved(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The ops that move data, with the collectives of one of their shardings."""
    first: dict[str, dict[str, Any]] = {}
    for one in found:
        if one["moved"] or one["larger"]:
            entry = {"op": one["op"], "axes": one["axes"], "moved": one["moved"]}
            first.setdefault(one["op"], entry)
    return list(first.values())
