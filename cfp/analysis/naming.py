"""Names of blocks: their place in the user's model, as far as the program tells.

Scopes tell it best: modules of some libraries, and ``jax.named_scope``, leave their
names on every op. Where there are none, a block is named by the path of the parameter
that its contraction reads, or else by the line that it comes from.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence, Set
from pathlib import Path

from cfp.analysis.flow import Flow
from cfp.program.graph import Op

_MADE_BY_JAX = re.compile(
    "while|body|cond|closed_call|eval_jaxpr|checkpoint|rematted_computation"
    "|branch_\\d+_fun"
)
# The scope of jax.numpy.einsum is what it computes, which is no place in a model.
_EINSUM = re.compile(r"[A-Za-z.,]*->[A-Za-z.]*")

# Ops whose result is their first operand, seen otherwise.
_SAME = (
    "broadcast_in_dim",
    "convert",
    "copy",
    "dynamic_slice",
    "reshape",
    "slice",
    "transpose",
)


def block_names(
    flow: Flow, anchors: Sequence[int], parameters: Set[int]
) -> tuple[str, ...]:
    """A name for each block.

    Args:
        flow: the program's data flow.
        anchors: op ids of the blocks' anchors.
        parameters: positions of the arguments that are parameters.
    """
    ops = [flow.program.ops[anchor] for anchor in anchors]
    scopes = [_scope_of_user(op.scope) for op in ops]
    paths = _shortened([_parameter(flow, op, parameters) for op in ops])
    names = [
        scope or path or _line(op)
        for scope, path, op in zip(scopes, paths, ops, strict=True)
    ]
    # Dims that an einsum does not name tell nothing: ...qhd,...khd->...hqk.
    names = [name.replace("...", "") if "->" in name else name for name in names]
    for name, count in Counter(names).items():
        # One scope around several contractions: their parameters tell them apart.
        alike = [i for i, other in enumerate(names) if other == name and paths[i]]
        if count > 1 and scopes[names.index(name)]:
            if len({paths[i] for i in alike}) == len(alike):
                for i in alike:
                    names[i] = f"{name}/{paths[i]}"
    return tuple(names)


def scope_path(scope: str) -> str:
    """The user's part of a name stack: ``jit(f)/jvp(Net)/a/b/dot`` gives ``a/b``."""
    return "/".join(_user_parts(scope)) or _split_scope(scope)[-1]


def op_path(scope: str) -> str:
    """The same with the op: ``jit(f)/jvp(Net)/a/b/dot`` gives ``Net/a/b/dot``."""
    return "/".join([*_user_parts(scope), _split_scope(scope)[-1]])


def _scope_of_user(scope: str) -> str:
    parts = _user_parts(scope)
    return "" if all(map(_EINSUM.fullmatch, parts)) else "/".join(parts)


def _user_parts(scope: str) -> list[str]:
    parts = []
    for part in _split_scope(scope)[:-1]:
        inner, is_jit = part, False
        while "(" in inner and inner.endswith(")"):
            is_jit = is_jit or inner.startswith(("jit(", "pjit("))
            inner = inner[inner.index("(") + 1 : -1]
        if inner and not is_jit and not _MADE_BY_JAX.fullmatch(inner):
            parts.append(inner)
    return parts


def _split_scope(scope: str) -> list[str]:
    parts, depth, current = [], 0, ""
    for char in scope:
        depth += (char == "(") - (char == ")")
        if char == "/" and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += char
    return [*parts, current]


def _line(op: Op) -> str:
    """``file.py:12 dot_general``, or an einsum's own text."""
    what = scope_path(op.scope) if op.scope else op.kind
    return f"{Path(op.source).name} {what}" if op.source else what


def _parameter(flow: Flow, op: Op, parameters: Set[int]) -> str:
    """The path of the parameter that an op reads, or ""."""
    positions = {value: i for i, value in enumerate(flow.program.args)}
    found = [
        positions[v] for v in (_origin(flow, v) for v in op.operands) if v in positions
    ]
    known = [i for i in found if i in parameters]
    # In a step that updates nothing weights lie deeper than data, or stand last: x @ w.
    names = [flow.program.arg_names[i] for i in known or found]
    return max(reversed(names), key=lambda name: name.count("/"), default="")


def weight_place(flow: Flow, op: Op, parameters: Set[int]) -> int:
    """The place of the one operand that is a parameter; -1 if there is not one."""
    weights = {flow.program.args[position] for position in parameters}
    places = [i for i, v in enumerate(op.operands) if _origin(flow, v) in weights]
    return places[0] if len(places) == 1 else -1


def _origin(flow: Flow, value: int) -> int:
    """The value that another one is a view, or a part, of."""
    while True:
        if sources := flow.sources(value):
            value = sources[0]
            continue
        producer = flow.program.values[value].producer
        if producer < 0 or flow.program.ops[producer].kind not in _SAME:
            return value
        value = flow.program.ops[producer].operands[0]


def _shortened(paths: Sequence[str]) -> list[str]:
    """Paths without the argument's name, and without what all of them end in.

    ``state/0/layers/0/up/kernel`` gives ``layers/0/up``, if all end in ``kernel``.
    """
    split = [path.split("/") for path in paths if path]
    if not split:
        return list(paths)
    start = 1 if len({parts[0] for parts in split}) == 1 else 0
    shortest = min(map(len, split))
    while start and start < shortest - 1 and _same(split, start, str.isdecimal):
        start += 1
    start = min(start, shortest - 1)
    end = 0
    while len(split) > 1 and end < shortest - start - 1 and _same(split, -1 - end):
        end += 1
    return [
        "/".join(path.split("/")[start : len(path.split("/")) - end]) for path in paths
    ]


def _same(
    split: Sequence[Sequence[str]], place: int, kind: Callable[[str], bool] = bool
) -> bool:
    """True if all paths have the same component of a kind at a place."""
    components = {parts[place] for parts in split}
    return len(components) == 1 and all(map(kind, components))
