"""Factors of an op's rule that may shard its result and its operands."""

from __future__ import annotations

from cfp.program.rules import Rule


def in_result(rule: Rule) -> list[int]:
    """Those of the first result's dims, in their order."""
    return [f for f in map(rule.major, rule.results[0]) if f is not None]


def own_factors(rule: Rule) -> list[set[int | None]]:
    """Returns the factors that may shard the dims of each operand."""
    return [{*map(rule.major, dims)} - {None} for dims in rule.operands]


def shared_factors(rule: Rule) -> list[int]:
    """Factors of the result that both operands have: one matrix for each of them."""
    own = own_factors(rule)[:2]
    return [f for f in in_result(rule) if all(f in factors for factors in own)]
