"""Finds the equations of a step's jaxpr that a program's ops come from.

Constraints name ops of the lowered program. Whoever reads a plan, and JAX without cfp,
knows equations: a primitive at a line of the user's code. Here every equation gets a
mark in its name stack, the step is lowered once more, and the marks are read back from
the locations of the ops. The program must come out as it did without marks.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cfp.errors import is_installed
from cfp.program import shardy
from cfp.program.constrain import Constraints
from cfp.program.graph import Op, Program, Spec
from cfp.program.jaxprs import inner_jaxprs, with_equations, with_inner
from cfp.program.signature import aval
from cfp.program.step import FlatStep
from cfp.program.trace import lower_step, read_lowering

_SUMMARY = re.compile(r"(.*\.py):(\d+)")  # path:line:column (function)
_CALLER = str(Path(__file__).with_name("step.py"))  # It calls the step.
# This room, and Python's own library.
_NOT_OWN = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), "<")
_MARK = re.compile(r"cfp-eqn-(\d+)-")


@dataclass(frozen=True, slots=True, kw_only=True)
class EqnValue:
    """A value at an equation.

    Attributes:
        equation: its number: depth first, the equations inside of one before it.
        value: "in" for what it reads, "out" for what it makes; "entry" for what a scan
            gives its body, "yield" for what it takes of that.
        index: which operand or result, of the equation or of the body.
    """

    equation: int
    value: str
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EqnConstraints:
    """Places of constraints in a jaxpr.

    Attributes:
        places: the sharding at each place, in the order of the equations.
        lost: numbers of ops with a constraint that no equation shows: they stand
            inside of what one equation is lowered to.
        sources: for each equation the user's ``path:line``, or "".
    """

    places: Mapping[EqnValue, Spec]
    lost: tuple[int, ...]
    sources: tuple[str, ...] = field(repr=False)


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All equations, those inside of others before them; by call, not by jaxpr."""
    for eqn in jaxpr.eqns:
        for inner in inner_jaxprs(eqn):
            yield from equations(inner)
        yield eqn


def place(
    step: FlatStep, mesh: Mesh, fingerprint: str, constraints: Constraints
) -> EqnConstraints | None:
    """Finds the equations of constraints; None if the marks changed the program.

    Args:
        fingerprint: of the program that the constraints were made for.
    """
    closed = step.traced.jaxpr
    every = list(equations(closed.jaxpr))
    sources = tuple(_source(eqn) for eqn in every)
    if not constraints.values and not constraints.uses:
        return EqnConstraints(places={}, lost=(), sources=sources)
    marked = closed.replace(jaxpr=_marked(closed.jaxpr, count()))
    replicated = NamedSharding(mesh, PartitionSpec())
    lowering = lower_step(step, [replicated] * len(step.avals), replicated, marked)
    program = read_lowering(step, lowering)
    if program.fingerprint != fingerprint:
        return None
    ops = shardy.program_ops(shardy.main_function(lowering.module))
    # Of the equations that a location names, those inside of one have smaller numbers.
    marks = (map(int, _MARK.findall(str(op.location))) for op in ops)
    finder = _Finder(program, every, [min(numbers, default=-1) for numbers in marks])
    finder.enter(closed.jaxpr, program.args)
    places: dict[EqnValue, Spec] = {}
    lost = []
    for value, spec in constraints.values.items():
        where = finder.makers.get(value)
        if where is None:
            lost.append(program.values[value].producer)
        else:
            places[where] = spec
    for (op, index), spec in constraints.uses.items():
        readers = finder.readers.get((op, index), ())
        if not readers:
            lost.append(op)
        for where in readers:
            places[where] = spec
    ranked = sorted(
        places.items(), key=lambda p: (p[0].equation, p[0].value, p[0].index)
    )
    return EqnConstraints(
        places=dict(ranked),
        lost=tuple(lost),
        sources=sources,
    )


def _marked(jaxpr: Jaxpr, numbers: Iterator[int]) -> Jaxpr:
    """A program with each equation's number in its name stack."""

    def mark(eqn: JaxprEqn) -> JaxprEqn:
        eqn = with_inner(eqn, lambda inner: _marked(inner, numbers))
        stack = eqn.source_info.name_stack.extend(f"cfp-eqn-{next(numbers)}-")
        return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))

    return with_equations(jaxpr, mark)


class _Finder:
    """Matches an equation's variables with the program's values.

    Attributes:
        makers: by value, the equation that makes it.
        readers: by op and operand index, the equation that reads a value there.
    """

    def __init__(
        self, program: Program, every: Sequence[JaxprEqn], marks: Sequence[int]
    ) -> None:
        self.program = program
        self.marks = marks
        self.ops: list[list[Op]] = [[] for _ in every]
        for op, mark in zip(program.ops, marks, strict=True):
            if mark >= 0:
                self.ops[mark].append(op)
        self.values: dict[Var, int] = {}
        self.makers: dict[int, EqnValue] = {}
        self.readers: dict[tuple[int, int], list[EqnValue]] = {}
        self.number = 0

    def enter(self, jaxpr: Jaxpr, inputs: Sequence[int | None]) -> None:
        """Goes through a jaxpr whose inputs stand for some values."""
        for var, value in zip(jaxpr.invars, inputs, strict=True):
            if value is not None:
                self.values[var] = value
        for eqn in jaxpr.eqns:
            inner = inner_jaxprs(eqn)
            if eqn.primitive.name == "scan":
                self._slices(eqn, inner[0])
            for one in inner:
                # A call's inputs are its operands; a loop's are its own.
                same = len(inner) == 1 and len(one.invars) == len(eqn.invars)
                calls = same and eqn.primitive.name not in ("scan", "while")
                given = [self._value(v) if calls else None for v in eqn.invars]
                self.enter(one, given if calls else [None] * len(one.invars))
                if calls:
                    for var, out in zip(eqn.outvars, one.outvars, strict=False):
                        value = self._value(out)
                        if value is not None and isinstance(var, Var):
                            self.values[var] = value
            self._equation(eqn, self.number)
            self.number += 1

    def _value(self, var: Var | Literal) -> int | None:
        return None if isinstance(var, Literal) else self.values.get(var)

    def _equation(self, eqn: JaxprEqn, number: int) -> None:
        ops = self.ops[number]
        if not ops:
            return
        for index, value in self._results(eqn, ops):
            self.values[eqn.outvars[index]] = value
            self.makers[value] = EqnValue(equation=number, value="out", index=index)
        # What a body gives is read by the ops that put it into the loop's results.
        loops = eqn.primitive.name == "scan"
        given = inner_jaxprs(eqn)[0].outvars if loops else []
        for op in ops:
            alone = len(ops) == 1 and len(op.operands) == len(eqn.invars)
            for index, value in enumerate(op.operands):
                known = [i for i, v in enumerate(eqn.invars) if self._value(v) == value]
                places = [
                    EqnValue(equation=number, value="in", index=i)
                    for i in known or ([index] if alone else [])
                ]
                places += [
                    EqnValue(equation=number, value="yield", index=i)
                    for i, var in enumerate(given)
                    if self._value(var) == value
                ]
                if places:
                    self.readers[op.id, index] = places

    def _slices(self, eqn: JaxprEqn, body: Jaxpr) -> None:
        """Matches what each turn of a scan slices out of the arrays that it scans."""
        number = self.number + sum(1 for _ in equations(body))
        cuts = (
            op
            for op in self.ops[number]
            if op.kind == "reshape"
            and self.program.ops[op.id - 1].kind == "dynamic_slice"
        )
        # What it goes along has a dim more outside; releases of JAX name it otherwise.
        first = sum(
            getattr(outside.aval, "shape", None) == getattr(inside.aval, "shape", None)
            for outside, inside in zip(eqn.invars, body.invars, strict=True)
        )
        for index, var in enumerate(body.invars[first:], first):
            cut = next(cuts, None)
            shape: Any = var.aval
            if cut is None or aval(self.program, cut.results[0]).shape != shape.shape:
                return
            [value] = cut.results
            self.values[var] = value
            self.makers[value] = EqnValue(equation=number, value="entry", index=index)

    def _results(self, eqn: JaxprEqn, ops: Sequence[Op]) -> list[tuple[int, int]]:
        """An equation's results as (index, value); none if no op gives just these."""
        avals: list[Any] = [var.aval for var in eqn.outvars]
        wanted = [(one.shape, one.dtype) for one in avals]
        for op in reversed(ops):
            # A loop carries more than it gives, and gives the last of it.
            results = op.results[-len(wanted) :]
            have = [aval(self.program, v) for v in results]
            if [(a.shape, a.dtype) for a in have] == wanted:
                return list(enumerate(results))
        return []


def _source(eqn: JaxprEqn) -> str:
    """``path:line`` of the innermost call in the user's own files, if there is one."""
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback else ()
    for frame in takewhile(lambda frame: frame.file_name != _CALLER, frames):
        name = frame.file_name
        if not name.startswith(_NOT_OWN) and not is_installed(name):
            return f"{frame.file_name}:{frame.line_num}"
    found = _SUMMARY.match(source_info_util.summarize(eqn.source_info))
    return f"{found[1]}:{found[2]}" if found else ""
