"""Estimates of memory, of all strategies of which is recorded what they need.

    python -m cfp_test.bench.memory_estimated --out FILE.json [--only WORD]

No GPU is used: programs of ``docs/results`` that were compiled for GPUs, presets and
strategies by hand, are estimated as plans are that are chosen without measuring. With
``--only`` the rows of some pages or targets take the place of those in FILE.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.cost.choice import segment_candidate
from cfp.devices.described import described
from cfp.passes.pipeline import analyze_step
from cfp.presets.presets import presets
from cfp.search.choices import kernel_variants
from cfp.settings import Replacing
from cfp.targets import resolve
from cfp_test.bench.attention_planned import (
    PARTS_OF_VOCABULARY,
    RING,
    estimated,
    tokens_spread,
)

_RESULTS = Path(__file__).parents[2] / "docs" / "results"


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A program that was compiled for GPUs.

    Attributes:
        page: its JSON's name.
        target, devices: what was compiled for how many.
        strategy: by which preset, or `RING`.
        kernels: what computes its attentions, and ``parts`` its cross-entropy in.
        peak_bytes: what it needs.
    """

    page: str
    target: str
    devices: int
    strategy: str
    kernels: tuple[str, ...] = ()
    parts: int = 0
    peak_bytes: int


def recorded() -> Iterator[Recorded]:
    """All that pages have, each once."""
    yield from dict.fromkeys(_all())


def _all() -> Iterator[Recorded]:
    def rows(page: str, key: str = "rows") -> list[dict[str, Any]]:
        return json.loads((_RESULTS / f"{page}.json").read_text())[key]

    page = "one_as_four_h200_202611"
    for row in rows(page, "programs"):
        name = row["name"]
        size = {"target": row["target"], "peak_bytes": row["peak_bytes"]}
        yield Recorded(page=page, devices=row["devices"], strategy=name, **size)
    page = "attention_steps_h100_202611"
    for row in rows(page):
        kernels = tuple(filter(None, (row["kernel"],)))
        yield from _one(page, row, row["devices"], row["preset"], kernels)
    page = "attention_pair_h100x2_202611"
    for row in rows(page):
        kernels = tuple(filter(None, (row["kernel"],)))
        yield from _one(page, row, 2, row["preset"], kernels)
    page = "operator_plans_h200_202611"
    for row in rows(page):
        if row["row"]["what"] == "step":
            kernel, _, parts = row["row"]["kernel"].partition("+")
            if kernel.startswith("vocabulary"):
                kernel, parts = "", kernel
            kernels = tuple(filter(None, (kernel,)))
            yield from _one(page, row, 4, "fully_sharded", kernels, 8 if parts else 0)
    page = "attention_planned_h200_202611"
    for row in rows(page):
        if "by_hand" in row:
            kernels = tuple(row["kernels"])
            parts = PARTS_OF_VOCABULARY if kernels else 0
            yield from _one(page, row, row["part"], row["by_hand"], kernels, parts)


def _one(
    page: str,
    row: dict[str, Any],
    devices: int,
    strategy: str,
    kernels: tuple[str, ...],
    parts: int = 0,
) -> Iterator[Recorded]:
    if "peak_bytes" in row and "target" in row and strategy:
        yield Recorded(
            page=page,
            target=row["target"],
            devices=devices,
            strategy=strategy,
            kernels=kernels,
            parts=parts,
            peak_bytes=row["peak_bytes"],
        )


def choice_of(analysis: Analysis, one: Recorded) -> Choice | None:
    """The choice of a recorded program; None if its strategy has another name now."""
    known = presets(analysis.frame)
    if one.strategy != RING and one.strategy not in known:
        return None
    is_ring = one.strategy == RING
    choice = tokens_spread(analysis.frame) if is_ring else known[one.strategy]
    kernels = Replacing(attention=one.kernels, cross_entropy=one.parts, platform="gpu")
    found = []
    for segment in analysis.segments:
        candidate = segment_candidate(analysis, segment.index, choice)
        variants = kernel_variants(analysis, segment.kind, candidate, kernels)
        every = [c.kernels for c in variants]
        # With both the last has both; of kernels alone the second is a ring.
        both = [one for one in every if one.attention and one.vocabulary_parts]
        plain = both or [n for n in every if not is_ring or n.spread] or every
        found += [(segment.index, one) for one in plain[:1]]
    return replace(choice, kernels=tuple(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="of a page or target")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    known = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    analyses: dict[tuple[str, int], Any] = {}
    made = [r for r in known if options.only not in f"{r['page']} {r['target']}"]
    for one in recorded():
        if options.only not in f"{one.page} {one.target}":
            continue
        key = one.target, one.devices
        mesh = described(f"{one.devices}xh200", x=one.devices)
        if key not in analyses:
            words = one.target.split()
            analyses[key] = analyze_step(resolve(words[0], words[1:]).flatten(), mesh)
        choice = choice_of(analyses[key].analysis, one)
        if choice is None:
            continue
        needs = estimated(analyses[key], choice, mesh.rates)["estimated_bytes"]
        made.append({**asdict(one), "estimated_bytes": needs})
        print(
            f"{needs / one.peak_bytes:5.0%} of {one.peak_bytes / 1e9:6.1f} GB "
            f"{one.strategy:24} {','.join(one.kernels) or '-':13} {one.target[:70]}",
            flush=True,
        )
    page = {"date": time.strftime("%Y-%m-%d"), "rows": made}
    options.out.write_text(json.dumps(page, indent=1) + "\n")


if __name__ == "__main__":
    main()
