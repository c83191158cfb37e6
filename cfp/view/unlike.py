"""Compares the texts of two strategies of the same blocks."""

from __future__ import annotations

import re

from cfp.plan.parts import Role
from cfp.view.words import REMATERIALIZED, elided, few

# The text of a strategy: groups of blocks, each with what its axes shard; then storage
# and the like.
_ROLE = rf"\S+: (?:{'|'.join(Role)})\b"
_BETWEEN_GROUPS = re.compile(rf"; (?!{_ROLE})")
_GROUP = re.compile(rf"(.+?) (replicated$|{_ROLE}.*)", re.DOTALL)
_STORAGE, _KERNELS = "parameters", "kernels"
_WITHOUT = {
    REMATERIALIZED: f"not {REMATERIALIZED}",
    _KERNELS: "computed as it is written",
}


def unlike_text(words: str, base: str) -> str:
    """Describes in what a strategy differs from another; "nothing" if in nothing.

    Args:
        words: of the strategy, see `cfp.plan.figures.OptionFigures`.
        base: of the other, for the same blocks.
    """
    (blocks, rest), (base_blocks, base_rest) = map(_strategy_parts, (words, base))
    groups: dict[str, list[str]] = {}
    for name, text in blocks.items():
        if base_blocks.get(name) != text:
            groups.setdefault(text, []).append(elided(name))
    texts = [f"{few(names)} {text}" for text, names in groups.items()]
    texts += [text for what, text in rest.items() if base_rest.get(what) != text]
    texts += [
        _WITHOUT[what] for what in _WITHOUT if what in base_rest.keys() - rest.keys()
    ]
    return "; ".join(texts) or "nothing"


def _strategy_parts(words: str) -> tuple[dict[str, str], dict[str, str]]:
    """Reads a strategy's text: what shards each block, and what else there is."""
    blocks: dict[str, str] = {}
    rest: dict[str, str] = {}
    for part in _BETWEEN_GROUPS.split(words):
        if group := _GROUP.fullmatch(part):
            blocks |= dict.fromkeys(group[1].split(", "), group[2])
        elif part.startswith(f"{_STORAGE} "):
            rest[_STORAGE] = part
        else:
            rest[REMATERIALIZED if part == REMATERIALIZED else _KERNELS] = part
    return blocks, rest
