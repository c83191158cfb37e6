"""Recognizes exponentials and labels' words: the parts of a softmax with labels."""

from __future__ import annotations

from collections.abc import Sequence

from cfp.patterns.expression import (
    COMPARE,
    CONVERT,
    INDEX,
    LOGITS,
    SELECT,
    TOKEN,
    Expr,
    is_constant,
    stripped,
)


def at_label(expr: Expr) -> tuple[Expr, Expr] | None:
    """The label, and what stands there, of what is zero at all other words."""
    kind, args = expr.kind, expr.args
    if kind == COMPARE and expr.detail == "EQ":
        label = _label(args)
        return (label, Expr("constant", "i1", detail="true")) if label else None
    if kind == SELECT and is_constant(args[2], 0.0) and args[0].kind == COMPARE:
        found = at_label(args[0])
        return (found[0], args[1]) if found else None
    if kind in (CONVERT, "negate"):
        found = at_label(args[0])
        if found is None:
            return None
        return found[0], Expr(kind, expr.dtype, (found[1],), expr.detail)
    if kind in ("multiply", "divide"):
        for place in (0, 1) if kind == "multiply" else (0,):
            if (found := at_label(args[place])) is not None:
                parts = list(args)
                parts[place] = found[1]
                return found[0], Expr(kind, expr.dtype, tuple(parts))
    return None


def _label(args: Sequence[Expr]) -> Expr | None:
    one, other = (stripped(arg) for arg in args)
    if one.kind == TOKEN:
        one, other = other, one
    return other if one.kind == INDEX and other.kind == TOKEN else None


def is_exponential(expr: Expr, base: Expr) -> bool:
    """True if it grows by exp(d) where the base grows by d."""
    kind, args = expr.kind, expr.args
    if kind in (CONVERT, "negate"):
        return is_exponential(args[0], base)
    if kind == "multiply":
        return any(
            is_exponential(args[i], base) and not args[1 - i].has(LOGITS, INDEX)
            for i in (0, 1)
        )
    if kind == "divide":
        return is_exponential(args[0], base) and not args[1].has(LOGITS, INDEX)
    return kind == "exponential" and _is_shifted(args[0], base)


def _is_shifted(expr: Expr, base: Expr) -> bool:
    """True if it is the base plus something of the token."""
    if stripped(expr) == base or expr == base:
        return True
    kind, args = expr.kind, expr.args
    if kind == CONVERT:
        return _is_shifted(args[0], base)
    per_token = [not arg.has(LOGITS, INDEX, "vocabulary") for arg in args]
    if kind == "subtract":
        return _is_shifted(args[0], base) and per_token[1]
    if kind == "add":
        return any(_is_shifted(args[i], base) and per_token[1 - i] for i in (0, 1))
    return False
