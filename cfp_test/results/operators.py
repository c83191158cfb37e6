"""Times of operators on one device: each implementation at each shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cfp_test.results.pages import Figures, fixed, table

# Of seed 002, a V100: MB besides inputs and outputs, all scores and flash attention.
SEED_MB = {
    "8,1024,1024,16,50257": (1091.0, 178.502),
    "16,512,8192,64,50264": (2688.27, 1284.02),
    "4,2048,8192,64,50264": (8836.02, 1284.02),
}
_STORES_SCORES = "xla"
_ABSENT, _NOT_REACHED = "absent", "not reached"
_FUSED = ("cudnn", "tokamax_mosaic_gpu", "tokamax_triton", "pallas")


def operators(data: Mapping[str, Any]) -> Figures:
    """The whole page."""
    return {"page": page(data)}


def page(data: Mapping[str, Any]) -> str:
    """The page of one file that `cfp_test/scripts/operators_gpu.py` wrote."""
    found = data["environment"]
    packages = ", ".join(f"{n} {v}" for n, v in found["packages"].items() if v)
    lines = [
        f"# Operators on {found['device']}",
        "",
        f"{found.get('date', '')}, Python {found['python']}, {packages}, commit "
        f"{found['commit'] or 'unknown'}. bfloat16; outputs and gradients are first "
        "compared with a float32 oracle with random cotangents; the largest relative "
        "difference of norms is shown. A shape is batch, tokens, hidden, heads, "
        "vocabulary. MB are those of temporaries, besides inputs and outputs. Percent "
        "are those of the roofline that the datasheet allows; the times are medians. "
        "Programs are compiled in threads, as many as there are cores: seconds to "
        "compile are those of a busy machine.",
        "",
        "Made by `python cfp_test/scripts/operators_gpu.py FILE`, and this page by "
        "`python -m cfp_test.results`.",
        "",
        *(line for note in data.get("notes", ()) for line in (note, "")),
        "## What loads",
        "",
        _available(data["available"]),
        "",
        "## Attention: memory",
        "",
        _memory(data["rows"]),
        "",
        "## Injection",
        "",
        _injection(data["injection"]),
    ]
    for name in dict.fromkeys(row["operator"] for row in data["rows"]):
        own = [row for row in data["rows"] if row["operator"] == name]
        if run := [row for row in own if row["state"] not in (_ABSENT, _NOT_REACHED)]:
            lines += ["", f"## {name}", "", _rows(run)]
    if missed := [row for row in data["rows"] if row["state"] == _NOT_REACHED]:
        lines += ["", _missed(missed)]
    return "\n".join(lines) + "\n"


def _available(found: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [one["operator"], one["implementation"], one["library"], one["reason"] or "yes"]
        for one in found
    ]
    return table("operator | implementation | library | loads", rows)


def _missed(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for what the run's time did not reach."""
    operators: dict[str, dict[str, None]] = {}
    for row in rows:
        found = operators.setdefault(row["shape"].replace(",", ", "), {})
        found[row["operator"]] = None
    slower = "; ".join(f"at {shape}: {', '.join(n)}" for shape, n in operators.items())
    return (
        f"Not reached in the time of the run, {len(rows)} rows of these operators: "
        f"{slower}."
    )


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = []
    for row in rows:
        passes = [row["passes"].get(name) for name in ("forward", "both")]
        errors = [error for error in row["errors"].values() if error is not None]
        cells.append(
            [
                row["shape"].replace(",", ", "),
                row["implementation"],
                *(_of(one, "median_ms", 1, 3) for one in passes),
                *(_of(one, "temp_bytes", 1e6, 1) for one in passes),
                *(_of(one, "roofline_percent", 1, 0) for one in passes),
                _of(passes[1] or passes[0], "compile_seconds", 1, 2),
                f"{max(errors):.1e}" if errors else None,
                _state(row),
            ]
        )
    return table(
        "shape | implementation | forward ms | with backward ms | forward MB | "
        "with backward MB | forward % | with backward % | compile s | off by | note",
        cells,
    )


def _of(one: Mapping[str, Any] | None, name: str, unit: float, digits: int) -> Any:
    if one is None or one[name] is None:
        return None
    return fixed(one[name] / unit, digits)


def _state(row: Mapping[str, Any]) -> str:
    if row["state"] == "measured":
        return row["reason"]
    return f"{row['state']}: {row['reason']}".replace("|", "/")


def _memory(rows: Sequence[Mapping[str, Any]]) -> str:
    """All scores against what stores none, beside the seed's."""

    def temp(shape: str, name: str) -> float | None:
        for row in rows:
            if (row["operator"], row["shape"], row["implementation"]) == (
                "gpt_attention",
                shape,
                name,
            ):
                both = row["passes"].get("both")
                return both["temp_bytes"] / 1e6 if both else None
        return None

    shapes = dict.fromkeys(
        row["shape"] for row in rows if row["operator"] == "gpt_attention"
    )
    cells = []
    for shape in shapes:
        scores = temp(shape, _STORES_SCORES)
        for name in _FUSED:
            fused = temp(shape, name)
            if scores is None or fused is None:
                continue
            seed = SEED_MB.get(shape)
            cells.append(
                [
                    shape.replace(",", ", "),
                    name,
                    fixed(scores, 1),
                    fixed(fused, 1),
                    fixed(scores / fused, 1) if fused else None,
                    fixed(seed[0] / seed[1], 1) if seed else None,
                ]
            )
    return table(
        "shape | against | all scores MB | MB | times less | times less in the seed "
        "(V100)",
        cells,
    )


def _injection(found: Sequence[Mapping[str, Any]]) -> str:
    cells = []
    for one in found:
        if "verdict" not in one:
            cells.append([one["model"], *[None] * 6, one["reason"].replace("|", "/")])
            continue
        sizes = [one["before_bytes"], one["after_bytes"]]
        cells.append(
            [
                f"{one['model']}, {one['config']}",
                len(one["replaced"]),
                fixed(one["before_ms"], 3),
                fixed(one["after_ms"], 3),
                *(None if size is None else fixed(size / 1e6, 1) for size in sizes),
                ", ".join(f"{n} {e:.1e}" for n, e in one["errors"].items()),
                one["verdict"].rpartition(": ")[2]
                if one.get("right", True)
                else "wrong: it computes something else",
            ]
        )
    return table(
        "model | replaced | before ms | after ms | before MB | after MB | off by | "
        "verdict",
        cells,
    )
