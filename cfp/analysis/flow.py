"""Data flow through loops, branches and barriers, and names of blocks.

A loop's initial value, body argument, yielded value and result count as one tensor at
four points. A barrier passes many tensors, which may be unrelated.

A block (a contraction, and the ops that are sharded with it) is named by its place in
the user's model: the scopes that modules or ``jax.named_scope`` leave on ops. Without
scopes the name is the path of the contraction's parameter. Without a parameter it is
the source line with the op.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from cfp.printable import numbered
from cfp.program.graph import Op, Program, reached

_BARRIERS = frozenset({"optimization_barrier"})


def passes(op: Op) -> bool:
    """True for a loop, a branch or a barrier, which compute nothing themselves."""
    return op.has_regions or op.kind in _BARRIERS


@dataclass(frozen=True)
class Flow:
    """A program's data flow, with loops, branches and barriers seen through."""

    program: Program

    @cached_property
    def entry_place(self) -> dict[int, tuple[int, int]]:
        """{argument of a loop's body or condition: (id of the loop, operand index)}."""
        found = {}
        for op in self.program.ops:
            for index, entry in enumerate(op.entries):
                found[entry] = (op.id, index % len(op.operands))
        return found

    @cached_property
    def entered(self) -> dict[int, tuple[int, ...]]:
        """{initial value: arguments of loops' bodies and conditions that it enters}."""
        found: dict[int, tuple[int, ...]] = {}
        for op in self.program.ops:
            for index, operand in enumerate(op.operands if op.entries else ()):
                found[operand] = (*found.get(operand, ()), *op.entered(index))
        return found

    def sources(self, value: int) -> tuple[int, ...]:
        """Returns the values that a loop, branch or barrier passes on as this, or ().

        A loop's result and its regions' arguments are an initial or a yielded value. A
        branch's result is one case's value. A barrier's result is its operand.
        """
        if value in self.entry_place:
            loop_id, place = self.entry_place[value]
            loop = self.program.ops[loop_id]
            return loop.operands[place], loop.yields[place]
        op = self.program.maker(value)
        if op is None or not passes(op):
            return ()
        place = op.results.index(value)
        if op.kind in _BARRIERS:
            return (op.operands[place],)
        if op.kind == "while":
            return op.yields[place], op.operands[place]
        return op.yielded(place)

    def makers(self, value: int) -> Iterator[Op]:
        """Yields each op that may compute a value, in any iteration or branch case."""
        for v in reached([value], self.sources):
            op = self.program.maker(v)
            if op is not None and not passes(op):
                yield op

    def becomes(self, user: int, index: int) -> tuple[int, ...]:
        """Returns the values that a loop, branch or barrier hands an input on as.

        A loop hands operands to its body and condition; yielded values to its result,
        too. A branch hands on yielded values only. `index` is a place in `Op.reads`.
        """
        op = self.program.ops[user]
        count = len(op.operands)
        if op.kind in _BARRIERS:
            return (op.results[index],)
        if index < count:
            return op.entered(index) if op.kind == "while" else ()
        place = (index - count) % max(1, len(op.results))
        if op.kind == "while":
            return op.results[place], *op.entered(place)
        return (op.results[place],)

    def readers(self, *values: int) -> Iterator[tuple[Op, int]]:
        """Yields (reader, operand index); sees through loops, branches and barriers."""
        for v in self.made_of(values, lambda _: False):
            for user, index in self.program.users[v]:
                if not passes(op := self.program.ops[user]):
                    yield op, index

    def made_of(
        self, values: Iterable[int], follows: Callable[[Op], bool]
    ) -> Iterator[int]:
        """Yields values, and transitively results of readers that `follows` accepts.

        Loops, branches and barriers are always followed.
        """

        def further(v: int) -> Iterator[int]:
            for user, index in self.program.users[v]:
                if passes(op := self.program.ops[user]):
                    yield from self.becomes(user, index)
                elif follows(op):
                    yield from op.results

        return reached(values, further)

    @cached_property
    def canonical(self) -> dict[int, int]:
        """{value: representative of its tensor}; a value without a key is its own."""
        parent: dict[int, int] = {}

        def find(v: int) -> int:
            while parent.get(v, v) != v:
                v = parent[v]
            return v

        program = self.program
        for op in program.ops:
            for result in op.results if passes(op) else ():
                for source in self.sources(result):
                    # Unrelated loops share constants such as initial zeros.
                    if not program.is_leaf(source):
                        parent[find(source)] = find(result)
        for entry, (loop, place) in self.entry_place.items():
            parent[find(entry)] = find(program.ops[loop].results[place])
        return {v: find(v) for v in parent}

    def inside(self, loop: int, op: int) -> bool:
        """True if an op is in the regions of a loop or branch, at any depth."""
        body = self.program.ops[loop].body
        return bool(body) and body[0] <= op < loop


Key = tuple[int, int]
NEVER: Key = (2**62, -1)


def first_downstream(
    flow: Flow, targets: Set[int], ends: Set[int] = frozenset()
) -> tuple[list[Key], list[Key]]:
    """Finds for each op and value the first target op that its data reaches.

    A target of the next iteration of a loop comes after all targets of the same
    iteration, and before all targets behind the loop.

    Args:
        targets: ids of ops; each reaches itself.
        ends: ids of values whose readers do not count.

    Returns:
        Keys by op id, and by value id. A key is (id of the target, or of the loop whose
        next iteration has it; id of the target), or `NEVER` without a target.
    """
    program = flow.program
    of_op = [NEVER] * len(program.ops)
    of_value = [NEVER] * len(program.values)

    def look(value: int) -> Key:
        if value in ends:
            return NEVER
        key = of_value[value]
        for entry in flow.entered.get(value, ()):
            key = min(key, look(entry))
        return key

    while True:  # once more for each loop that data goes around in
        before = list(of_value)
        for op in reversed(program.ops):
            if op.has_regions:
                for index, value in enumerate(op.yields):
                    key = _around(flow, op, index, before, ends)
                    result = op.results[index % len(op.results)]
                    of_value[value] = min(of_value[value], key, look(result))
                continue
            if passes(op):
                for value, result in zip(op.operands, op.results, strict=True):
                    of_value[value] = min(of_value[value], look(result))
                continue
            key = min([look(r) for r in op.results], default=NEVER)
            if op.id in targets:
                key = (op.id, op.id)
            of_op[op.id] = key
            for value in op.operands:
                of_value[value] = min(of_value[value], key)
        if of_value == before or not flow.entry_place:
            break
    for op in program.ops:
        if passes(op):
            of_op[op.id] = min([look(r) for r in op.results], default=NEVER)
    return of_op, [look(v) for v in range(len(of_value))]


def _around(flow: Flow, loop: Op, place: int, before: list[Key], ends: Set[int]) -> Key:
    if loop.kind != "while":
        return NEVER
    entries = loop.entered(place)
    reached = min(NEVER if e in ends else before[e] for e in entries)
    if reached == NEVER or not flow.inside(loop.id, reached[1]):
        return NEVER
    return loop.id, reached[1]


# Scopes of JAX, and classes of libraries, such as lib.nn.Linear: one for all layers.
_NO_PLACE = re.compile(
    "while|body|cond|closed_call|eval_jaxpr|checkpoint|rematted_computation"
    r"|branch_\d+_fun|([A-Za-z_]\w*\.)+[A-Z]\w*"
)
# jax.numpy.einsum uses its subscripts as a scope, which is no place in a model.
_EINSUM = re.compile(r"[A-Za-z.,]*->[A-Za-z.]*")

# Ops whose result is a view, a part or a cast of their first operand.
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
    """Names each anchor by its scope, else its parameter's path, else its source line.

    In one scope, unlike paths follow the scope. Names that are equal are `numbered`.
    """
    ops = [flow.program.ops[anchor] for anchor in anchors]
    users = [_user_parts(op.scope) for op in ops]
    scopes = ["" if all(map(_EINSUM.fullmatch, x)) else "/".join(x) for x in users]
    paths = _shortened([_deepest_path(flow, op, parameters) for op in ops])
    names = [
        scope or path or _line(op)
        for scope, path, op in zip(scopes, paths, ops, strict=True)
    ]
    # An einsum's ellipses carry no information: ...qhd,...khd->...hqk.
    names = [name.replace("...", "") if "->" in name else name for name in names]
    for name, count in Counter(names).items():
        alike = [i for i, other in enumerate(names) if other == name and paths[i]]
        is_scope = bool(scopes[names.index(name)])
        if count > 1 and is_scope and len({paths[i] for i in alike}) > 1:
            for i in alike:
                names[i] = f"{name}/{paths[i]}"
    return tuple(numbered(names))


def scope_path(scope: str) -> str:
    """A name stack's user part, else op: ``jit(f)/jvp(Net)/a/dot`` gives ``Net/a``."""
    return "/".join(_user_parts(scope)) or _split_scope(scope)[-1]


def _user_parts(scope: str) -> list[str]:
    parts = []
    for part in _split_scope(scope)[:-1]:
        inner, is_jit = part, False
        while "(" in inner and inner.endswith(")"):
            is_jit = is_jit or inner.startswith(("jit(", "pjit("))
            inner = inner[inner.index("(") + 1 : -1]
        if inner and not is_jit and not _NO_PLACE.fullmatch(inner):
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
    """Returns ``model.py:12 NAME``, or NAME without a line; NAME is scope or kind."""
    what = scope_path(op.scope) if op.scope else op.kind
    return f"{op.source} {what}" if op.source else what


def _deepest_path(flow: Flow, op: Op, parameters: Set[int]) -> str:
    positions = {value: i for i, value in enumerate(flow.program.args)}
    origins = (origin_of(flow, v) for v in op.operands)
    found = [positions[v] for v in origins if v in positions]
    # Without an update any argument may be a parameter: the deepest, then the last.
    known = [i for i in found if i in parameters or not parameters]
    names = [flow.program.arg_names[i] for i in known]
    return max(reversed(names), key=lambda name: name.count("/"), default="")


def weight_place(flow: Flow, op: Op, parameters: Set[int]) -> int:
    """Returns the index of the one operand from a parameter; -1 if none or several."""
    weights = {flow.program.args[position] for position in parameters}
    places = [i for i, v in enumerate(op.operands) if origin_of(flow, v) in weights]
    return places[0] if len(places) == 1 else -1


def origin_of(flow: Flow, value: int) -> int:
    """Returns the value before views, slices, casts, scaling, loops and branches."""
    while True:
        if sources := flow.sources(value):
            value = sources[0]
            continue
        op = flow.program.maker(value)
        if op is None or not (op.kind in _SAME or _is_scaled(flow, op)):
            return value
        value = op.operands[0]


def _is_scaled(flow: Flow, op: Op) -> bool:
    """True if an op multiplies its first operand by a broadcast scalar."""
    spread = flow.program.maker(op.operands[1]) if op.kind == "multiply" else None
    if spread is None or spread.kind != "broadcast_in_dim":
        return False
    return not flow.program.shape(spread.operands[0])


def _shortened(paths: Sequence[str]) -> list[str]:
    """Removes a common first component, common numbers after it, common last ones.

    ``state/0/layers/0/up/kernel`` gives ``layers/0/up`` if others share both ends.
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
    return ["/".join(path.split("/")[start : -end or None]) for path in paths]


def _same(
    split: Sequence[Sequence[str]], place: int, kind: Callable[[str], bool] = bool
) -> bool:
    components = {parts[place] for parts in split}
    return len(components) == 1 and all(map(kind, components))
