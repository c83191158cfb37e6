"""The outcomes of a proof by op: as JSON, and as a page of docs/results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from cfp.program.corrections import FAULTS, faults
from cfp_test.proving.catalogue import ABSENT, ENTRIES, WITHOUT
from cfp_test.proving.faults import SHOWN
from cfp_test.results.pages import Figures, table

_PARTS = ("checks", "padded", "wrong", "moved")
_SHOWN = {
    "wrong": "wrong numbers",
    "error": "an error",
    "abort": "the end of the process",
}


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
        "faults": [
            {
                "name": fault.name,
                "correction": fault.correction,
                **asdict(SHOWN[fault.name]),
            }
            for fault in faults()
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
        if one["moved"]:
            entry = {"op": one["op"], "axes": one["axes"], "moved": one["moved"]}
            first.setdefault(one["op"], entry)
    return list(first.values())


def figures(*data: Mapping[str, Any]) -> Figures:
    """The page of one or several releases of jaxlib."""
    lines = ["# Sharding rules, proved by running", "", *_INTRODUCTION]
    for one in data:
        total = {name: sum(op[name] for op in one["ops"]) for name in _PARTS}
        lines += [
            "",
            f"## jaxlib {one['jaxlib']}",
            "",
            f"{one['checks']} different shardings of {len(one['ops'])} ops, "
            f"{total['padded']} of them with sizes that do not divide: "
            f"**{total['wrong']} wrong**. That took {one['processor_seconds']} seconds "
            f"of a processor: {one['processor_seconds'] // 2} s on two cores.",
            "",
            table(
                "op | variants | factors | shardings | padded | wrong | moves data",
                [
                    [
                        f"`{op['op']}`",
                        *(op[n] for n in ("variants", "factors", *_PARTS)),
                    ]
                    for op in one["ops"]
                ],
            ),
        ]
        if one["wrong"]:
            lines += ["", "Wrong:", ""]
            lines += [
                f"- `{w['op']}` on {w['mesh']} as {w['axes']}: "
                f"{w['trouble'] or w['difference']}"
                for w in one["wrong"]
            ]
        if one["left"]:
            left = ", ".join(f"`{name}`" for name in one["left"])
            lines += ["", f"Entries of the catalogue that were not run: {left}."]
        if one["absent"]:
            lines += ["", "Not in programs of this release, or without a rule:", ""]
            lines += [f"- `{op}`: {why}" for op, why in one["absent"].items()]
        if one["moved"]:
            lines += [
                "",
                "Move data, with right numbers (one sharding of each op):",
                "",
            ]
            lines += [
                f"- `{m['op']}` as {m['axes']}: {', '.join(m['moved'])}"
                for m in one["moved"][:40]
            ]
            if len(one["moved"]) > 40:
                lines.append(f"- and {len(one['moved']) - 40} more, in the JSON")
    lines += _faults(data)
    reasons: dict[str, list[str]] = defaultdict(list)
    for op, reason in data[0]["without"].items():
        reasons[reason].append(f"`{op}`")
    lines += ["", "## Ops that are not in the catalogue", ""]
    lines += [f"- {reason}: {', '.join(ops)}." for reason, ops in reasons.items()]
    return {"page": "\n".join(lines) + "\n"}


def _faults(data: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every fault once, with the releases that have it and its program."""
    each = {fault["name"]: fault for one in data for fault in one["faults"]}
    lines = ["", "## Faults of XLA that cfp keeps programs from", "", *_OF_FAULTS]
    today = {fault.name: fault.correction for fault in FAULTS}
    for name, fault in each.items():
        has = [f["jaxlib"] for f in data if name in {x["name"] for x in f["faults"]}]
        sizes = " x ".join(map(str, fault["mesh"]))
        # A record keeps the name that a correction had when it was made.
        recorded = fault["correction"]
        correction = f"`{recorded}`"
        if (now := today.get(name, recorded)) != recorded:
            correction += f", which is `{now}` now"
        lines += [
            "",
            f"### {name[0].upper()}{name[1:]}",
            "",
            f"jaxlib {' and '.join(has)}; corrected by {correction}. "
            f"On a mesh of {sizes} this comes to {_SHOWN[fault['shows']]}:",
            "",
            "```python",
            fault["program"].strip(),
            "```",
        ]
    return lines


_OF_FAULTS = (
    "Plain JAX shows each of them on a `jax.sharding.Mesh`, whose axes are automatic,",
    "with the shardings that `specs` gives to arguments of `shapes`; `place` is a",
    "sharding constraint, and the axes are x, y and z. `python -m",
    "cfp_test.proving.shown N` runs one by its place in `FAULTS`, in",
    "`cfp/program/corrections.py`. Tests run them all: a release that has not a fault",
    "any more, or has one more, fails them. A release that was not tried is taken to",
    "have those of the one before. `cfp doctor` names those of the jaxlib that is",
    "installed.",
)
_INTRODUCTION = (
    "Each op of StableHLO and CHLO that JAX lowers to runs by itself, sharded along",
    "each factor of its rule on virtual devices, on meshes of one axis of four and of",
    "two axes of two, and is compared with one device; so are ops of its gradients.",
    "Where a rule says that every device has what it needs, what is compiled must not",
    "communicate; what does is counted as moving data. `make prove` writes the JSON",
    "of the installed jaxlib and this page. Tests of every commit run the first",
    "variants of products, convolutions, movements and scatters, and all programs of",
    "faults.",
)
