"""Faults that are planted in cfp, to show that a check fails of each.

Each is some attributes that are set to something else, in the process of one check.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

GIGABYTE = 10**9

# `setattr`, or what can undo it.
Set = Callable[[Any, str, Any], None]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that may be planted.

    Attributes:
        what: the fault.
        plant: puts it in place.
        check: name of the check that has to fail.
        says: a part of what that says.
    """

    what: str
    plant: Callable[[Set], None] = field(repr=False)
    check: str
    says: str


def _plant_spec(put: Set) -> None:
    from cfp.analysis.layout import Layout

    arg_spec = Layout.arg_spec

    def whole(layout: Any, index: int) -> Any:
        spec = arg_spec(layout, index)
        return ((),) * len(spec) if len(spec) == 2 else spec

    put(Layout, "arg_spec", whole)


def _plant_mask(put: Set) -> None:
    from cfp.kernels.registry import KERNELS

    def unmasked(found: Any) -> Any:
        def whole(q: Any, k: Any, v: Any, scores: Any, mask: Any, bias: Any) -> Any:
            return found(q, k, v, scores, replace(mask, causal=False), bias)

        return whole

    for kernel in KERNELS.values():
        put(kernel.module, "whole", unmasked(kernel.module.whole))


def _plant_budget(put: Set) -> None:
    from cfp import passes

    parse = passes.parse_bytes

    def parse_more(given: Any) -> int | None:
        found = parse(given)
        return None if found is None else found + GIGABYTE

    put(passes, "parse_bytes", parse_more)


def _plant_store(put: Set) -> None:
    from cfp.profiling.record import ProfileKey

    digest = ProfileKey.digest.fget
    assert digest is not None

    def of_any_device(key: ProfileKey) -> str:
        parts = tuple(part for part in key.parts if part[0] != "device_kind")
        return digest(ProfileKey(parts))

    put(ProfileKey, "digest", property(of_any_device))


FAULTS = {
    "spec": Fault(
        what="matrices that a plan shards between steps are whole on each device",
        plant=_plant_spec,
        check="gpt under presets",
        says="of the state",
    ),
    "mask": Fault(
        what="kernels of attention leave the causal mask out",
        plant=_plant_mask,
        check="attention kernels",
        says="causal",
    ),
    "budget": Fault(
        what="the planner takes a budget for a gigabyte more",
        plant=_plant_budget,
        check="memory budget",
        says="over the budget",
    ),
    "store": Fault(
        what="the store answers for another kind of device",
        plant=_plant_store,
        check="another device's store",
        says="answered in their place",
    ),
}
