"""Finds scores, softmax, mix, their gradients, masks and biases in a program.

From an exponential back to the contraction that made the scores, and from there to all
that is computed of them, up to the contractions that read it: the mix, and the
gradients of queries, keys and values. Which is which follows from what they sum over,
and from whether the gradient of the weights is in it. Nothing is said here about what
is computed between: `cfp.attention.matching.infer` proves that it is attention.

Masks and biases enter an attention from the sides. A mask is best known by the smallest
values that it is made of: which keys are padding, and which segment a token is in.
Kernels compute those without a mask as large as the scores. So each value that enters
is followed back through the ops that only combine, compare, or shape; what is made of
an argument in another way is taken as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from cfp.attention.matching.found import (
    Dims,
    Found,
    Lettering,
    Letters,
    Pass,
    Side,
    Tensor,
    View,
    aligned,
    is_by_key,
    majors_of,
)
from cfp.program.evaluate import KNOWN, is_float
from cfp.program.graph import Op
from cfp.program.replace import Different, LeftAlone, Use

_SHAPES = frozenset(
    {"broadcast_in_dim", "transpose", "reshape", "optimization_barrier"}
)
_JOINS = frozenset({"and", "or", "select", "add", "multiply", "minimum", "maximum"})
_MOST_VALUES = 400
_ID_DTYPES = frozenset({"i8", "i16", "i32", "ui8", "ui16", "i1"})

Path = tuple[Tensor, ...]  # from what enters to what it is made of
Term = Sequence[Path]  # one path, or one for queries' ids and one for keys'


class Sides:
    """Masks and biases that enter one attention."""

    def __init__(
        self,
        view: View,
        letters: Lettering,
        inside: Collection[int],
        region: Collection[int],
    ) -> None:
        """Takes the dims' letters, the ops between contractions, and their values."""
        self.view, self.program, self.letters = view, view.program, letters
        self.inside, self.region = inside, region
        self._values = 0
        self._readable: dict[int, dict[int, list[Use]]] = {}

    def options(self, passes: Sequence[Pass]) -> tuple[tuple[Side, ...], ...]:
        """All ways to see what enters, the best one first.

        First by the smallest values; then by what enters as a whole; then with masks
        and biases that are the same in every step, too.

        Raises:
            Different: what enters has other dims than the scores, or is not read where
                a pass is computed.
        """
        entries = self._entries(leaves=False)
        whole = [((one,),) for one in entries]
        terms = [term for one in entries for term in self._terms(one, ())]
        fixed = [((one,),) for one in self._entries(leaves=True)]
        found: list[tuple[Side, ...]] = []
        errors: list[Different] = []
        for option in (terms, whole, [*terms, *fixed], [*whole, *fixed]):
            try:
                sides = self._sides(option, passes)
            except Different as error:
                errors.append(error)
                continue
            if sides not in found:
                found.append(sides)
        if not found:
            raise errors[0]
        return tuple(found)

    def _where(self, one: Tensor) -> str:
        op = self.program.ops[one.use[0]] if one.use else None
        return f"what enters at {op.source or op.scope or 'no line'}" if op else "it"

    def _entries(self, leaves: bool) -> list[Tensor]:
        """The values that ops of the attention read besides its own.

        Args:
            leaves: those that are the same in every step, as large as rows of scores,
                and not all one number; or else those that are not the same.
        """
        found: dict[int, Tensor] = {}
        for op_id in self.inside:
            op = self.program.ops[op_id]
            for index, v in enumerate(op.operands):
                number = self.view.numbers.of[v]
                if number in self.region or self.view.is_leaf(v) != leaves:
                    continue
                names = self.letters.of_operand(op, index)
                if leaves and ("k" not in names or self._is_uniform(v)):
                    continue
                if "?" in names:
                    raise Different("a mask or bias has other dims than the scores")
                found.setdefault(number, Tensor(v, (op_id, index), names))
        return list(found.values())

    def _is_uniform(self, v: int) -> bool:
        """Tell whether a value is one number all over."""
        while True:
            op = self.view.producer(v)
            if op is None:
                return False
            if all(n == 1 for n in self.program.shape(op.results[0])):
                return True
            if op.kind == "constant":
                text = op.attributes
                return text.startswith("dense<") and text[6:7] not in ("[", '"')
            if op.kind not in (*_SHAPES, "convert", "negate"):
                return False
            v = op.operands[0]

    # -- what it is made of ------------------------------------------------------------

    def _terms(self, one: Tensor, before: Path) -> list[Term]:
        """Returns a value's terms, each by its path from what enters."""
        self._values += 1
        if self._values > _MOST_VALUES:
            raise Different("its mask is made of too many values")
        path = (*before, one)
        stop: list[Term] = [(path,)]
        op = self.view.producer(one.value)
        if op is None or op.rule is None or op.kind not in KNOWN:
            return stop
        if op.kind in ("reduce", "dot_general"):
            return stop
        reads = self._operands(op, one)
        if not reads:
            return stop
        if op.kind == "compare" and len(reads) == 2:
            return self._compared(op, reads, path) or stop
        deeper = [term for read in reads for term in self._terms(read, path)]
        if len(reads) == 1:
            only_shaped = op.kind in _SHAPES or self._keeps_kind(op, reads[0])
            return deeper if only_shaped or self._are_masks(deeper) else stop
        joins = op.kind in _JOINS and self._are_masks(deeper)
        return deeper if joins and not any(map(_is_dense, deeper)) else stop

    def _operands(self, op: Op, one: Tensor) -> list[Tensor]:
        """Returns an op's operands that vary between steps; [] if dims merge."""
        [result] = op.results[:1]
        names = aligned(one.letters, self.program.shape(result))
        of: dict[int, str] = {}
        for factors, name in zip(op.known_rule.results[0], names, strict=True):
            large = [f for f in factors if op.known_rule.sizes[f] > 1]
            if len(large) > 1:
                return []
            of.update((f, name) for f in large)
        found: dict[tuple[int, Letters], Tensor] = {}
        for index, v in enumerate(op.operands):
            if self.view.is_leaf(v):
                continue
            dims = op.known_rule.operands[index]
            if any(sum(op.known_rule.sizes[f] > 1 for f in dim) > 1 for dim in dims):
                return []
            majors = majors_of(op.known_rule, dims)
            letters = tuple("" if f is None else of.get(f, "?") for f in majors)
            if "?" in letters:
                return []
            key = self.view.numbers.of[v], tuple(x for x in letters if x)
            found.setdefault(key, Tensor(v, (op.id, index), letters))
        return list(found.values())

    def _keeps_kind(self, op: Op, read: Tensor) -> bool:
        """Tell whether a bias stays one that is added."""
        dtypes = [self.program.values[v].dtype for v in (op.results[0], read.value)]
        if not all(map(is_float, dtypes)):
            return False
        first = self.view.numbers.of[op.operands[0]] == self.view.numbers.of[read.value]
        return op.kind in ("add", "convert", "select") or (
            op.kind == "subtract" and first
        )

    def _are_masks(self, terms: Sequence[Term]) -> bool:
        return all(
            len(term) > 1 or self.view.dtype(term[0][-1]) == "i1" for term in terms
        )

    def _compared(self, op: Op, reads: list[Tensor], path: Path) -> list[Term]:
        """Ids of queries and of keys, if that is what is compared."""
        if " EQ" not in op.attributes and " NE" not in op.attributes:
            return []
        sides = sorted(reads, key=lambda one: "k" in one.letters)
        queries, keys = (self._unshaped(one, path) for one in sides)
        of = queries[-1].letters
        is_by_query = "k" not in of and any(x[:1] == "q" for x in of)
        if not is_by_query or not is_by_key(keys[-1].letters):
            return []
        dtypes = {self.view.dtype(x[-1]) for x in (queries, keys)}
        return [(queries, keys)] if dtypes <= _ID_DTYPES else []

    def _unshaped(self, one: Tensor, path: Path) -> Path:
        """The path to a value that others only repeat or turn."""
        path = (*path, one)
        op = self.view.producer(one.value)
        while op is not None and op.rule is not None and op.kind in _SHAPES:
            reads = self._operands(op, path[-1])
            if len(reads) != 1:
                break
            path = (*path, reads[0])
            op = self.view.producer(reads[0].value)
        return path

    # -- where it is read --------------------------------------------------------------

    def _sides(self, terms: Sequence[Term], passes: Sequence[Pass]) -> tuple[Side, ...]:
        found: dict[tuple, Side] = {}
        for term in terms:
            side = self._read(term, passes)
            key = tuple((self.view.numbers.of[p.value], p.letters) for p in side.parts)
            same = found.setdefault(key, side)
            found[key] = replace(same, entries=same.entries | side.entries)
        return tuple(found.values())

    def _read(self, term: Term, passes: Sequence[Pass]) -> Side:
        """A term with the smallest values by which every pass can read it."""
        entries = frozenset(self.view.numbers.of[path[0].value] for path in term)
        if len(term) > 1:
            ends = tuple(path[-1] for path in term)
            if uses := self._uses(ends, passes):
                return Side(parts=ends, reads=ends, uses=uses, entries=entries)
            # A mask as large as the scores is all that enters a loop, say.
            shared = [a for a, b in zip(*term, strict=False) if a == b]
            term = (tuple(shared),)
        [path] = term
        for one in reversed(path):
            if uses := self._uses((one,), passes):
                parts = (path[-1],)
                return Side(parts=parts, reads=(one,), uses=uses, entries=entries)
        raise Different(
            f"{self._where(path[0])} is not read in the loop that computes its "
            "gradients, as it would be with jax.checkpoint around the loop's body"
        )

    def _uses(
        self, ends: Sequence[Tensor], passes: Sequence[Pass]
    ) -> tuple[tuple[Use, ...], ...]:
        """Returns where each pass can read some values; () if one cannot read one."""
        found = [[self._use(one, near) for one in ends] for near in passes]
        known = tuple(tuple(use for use in own if use) for own in found)
        return known if all(all(own) for own in found) else ()

    def _use(self, one: Tensor, near: Pass) -> Use | None:
        """Finds where a pass can read a value: in its loop, before its results."""
        made = [self.program.values[t.value].producer for t in near.makes.values()]
        parent = self.program.ops[made[0]].parent
        if parent not in self._readable:
            self._readable[parent] = self._uses_in(parent)
        number = self.view.numbers.of[one.value]
        for op, index in self._readable[parent].get(number, ()):
            operand = self.program.ops[op].operands[index]
            if self.program.values[operand].producer < min(made):
                return op, index
        return None

    def _uses_in(self, parent: int) -> dict[int, list[Use]]:
        """Returns the values that a loop's body may read, and where, by number.

        That is what the attention's ops read, and what ops read that are there for
        these alone. What others read, too, may be in another part of the program.
        """
        ops, users = self.program.ops, self.program.users
        own = {i for i in self.inside if ops[i].parent == parent}
        outputs = {*self.program.outputs}
        found: dict[int, list[Use]] = {}
        stack = sorted(own)
        while stack:
            op = ops[stack.pop()]
            for index, v in enumerate(op.operands):
                found.setdefault(self.view.numbers.of[v], []).append((op.id, index))
                maker = self.program.maker(v)
                if maker is None or maker.id in own or v in outputs:
                    continue
                if maker.kind not in KNOWN or maker.kind in ("reduce", "dot_general"):
                    continue
                if maker.parent != parent or len(own) > _MOST_VALUES:
                    continue
                if all(user in own for r in maker.results for user, _ in users[r]):
                    own.add(maker.id)
                    stack.append(maker.id)
        return {number: sorted(uses, reverse=True) for number, uses in found.items()}


def _is_dense(term: Term) -> bool:
    """Tell whether a term is for pairs of queries and keys, not for keys alone."""
    return len(term) == 1 and not is_by_key(term[0][-1].letters)


_LOOKED_THROUGH = frozenset({"convert", "transpose", "reshape", "negate"})
_MOST_OPS = 400


def candidates(view: View) -> Iterator[Found | LeftAlone]:
    """All that may be attention, one for each contraction that makes scores."""
    seen: set[int] = set()
    for op in view.program.ops:
        if op.kind != "exponential" or op.rule is None:
            continue
        dot = _scores_of(view, op)
        if dot is None or view.numbers.of[dot.results[0]] in seen:
            continue
        if not _is_batched(dot):
            continue  # such as logits, of which a loss takes the softmax
        seen.add(view.numbers.of[dot.results[0]])
        finder = _Finder(view, dot, op)
        try:
            yield finder.found()
        except Different as error:
            reason = dropout(view, finder.inside) or str(error)
            yield LeftAlone(dot.id, dot.source or op.source, reason)


def _is_batched(dot: Op) -> bool:
    """True if a contraction does the same for each sequence or head."""
    left, right, out = (
        {dot.known_rule.major(f) for f in dims} - {None}
        for dims in (*dot.known_rule.operands[:2], dot.known_rule.results[0])
    )
    return bool(left & right & out)


def _scores_of(view: View, exponential: Op) -> Op | None:
    """The contraction whose result a softmax may be of."""
    size = prod(view.program.shape(exponential.results[0]))
    stack, steps = [exponential.operands[0]], 0
    while stack and steps < 64:
        steps += 1
        v = stack.pop()
        op = view.producer(v)
        if op is None or view.is_leaf(v):
            continue
        if prod(view.program.shape(op.results[0])) != size:
            continue
        if op.kind == "dot_general":
            return op
        if op.kind in KNOWN and op.kind not in ("broadcast_in_dim", "reduce"):
            stack += reversed(op.operands)
    return None


class _Finder:
    def __init__(self, view: View, scores: Op, exponential: Op) -> None:
        self.view, self.program = view, view.program
        self.scores, self.exponential = scores, exponential
        self.dims = Dims(view)
        self.inside: dict[int, None] = {}
        self.region: set[int] = {self._number(scores.results[0])}
        self.late: set[int] = set()  # numbers that depend on the weights' gradient
        self.sinks: dict[int, list[tuple[Op, int]]] = {}
        self.gradient: list[Op] = []

    def _number(self, v: int) -> int:
        return self.view.numbers.of[v]

    def found(self) -> Found:
        """Everything about the attention."""
        self._grow(self.scores.results[0])
        self._add_gradients_of_weights()
        letters = self._name_dims()
        sinks = self._classified(letters)
        argument = self._argument(letters)
        forward = [
            self._forward(op, index, letters) for op, index in sinks.get("mix", ())
        ]
        if not forward:
            raise Different("no contraction mixes values by the weights")
        backward = self._backward(sinks, letters)
        sizes: dict[str, int] = {}
        tensors = [t for p in forward for t in (*p.reads.values(), *p.makes.values())]
        for t in tensors:
            shape = self.program.shape(t.value)
            sizes.update((x, n) for x, n in zip(t.letters, shape, strict=True) if x)
        sides = Sides(self.view, letters, self.inside, self.region)
        return Found(
            op=self.scores.id,
            source=self.scores.source or self.exponential.source,
            sizes=sizes,
            scores=Tensor(self.scores.results[0], None, letters.of_result(self.scores)),
            argument=argument,
            inside=frozenset(self.inside),
            between=frozenset(self.view.all_of(self.region)),
            options=sides.options([*forward, *([backward] if backward else [])]),
            forward=tuple(forward),
            backward=backward,
            dots={name: ops[0][0].id for name, ops in sinks.items()},
        )

    # -- what is computed of the scores ------------------------------------------------

    def _grow(self, start: int, late: bool = False) -> None:
        """Adds all that is computed of a value, up to the contractions that read it."""
        stack = [start]
        while stack:
            v = stack.pop()
            number = self._number(v)
            for op, index in self.view.readers(v):
                if op.kind == "dot_general":
                    self.sinks.setdefault(op.id, [])
                    if (op, index) not in self.sinks[op.id]:
                        self.sinks[op.id].append((op, index))
                    continue
                if op.kind not in KNOWN or op.rule is None:
                    raise Different(
                        f"{op.kind} at {op.source or op.scope or 'no line'} reads the "
                        "scores or the weights, too"
                    )
                made = {*map(self._number, op.results)}
                added = made - self.region
                self.region |= made
                if late or number in self.late:
                    added |= made - self.late
                    self.late |= made
                if op.id not in self.inside:
                    self.inside[op.id] = None
                    self.dims.join(op)
                stack += [r for r in op.results if self._number(r) in added]
            if len(self.inside) > _MOST_OPS:
                raise Different("much is computed of the scores besides a softmax")
            if number in self.view.outputs:
                raise Different(
                    "the step returns the scores, the weights, or what is "
                    "computed of them"
                )

    def _add_gradients_of_weights(self) -> None:
        """Adds contractions whose results enter: the weights' gradients."""
        size = prod(self.program.shape(self.scores.results[0]))
        while True:
            added = False
            for op_id in [*self.inside]:
                for v in self.program.ops[op_id].operands:
                    if self._number(v) in self.region or self.view.is_leaf(v):
                        continue
                    chain = self._to_contraction(v, size)
                    if chain is None:
                        continue
                    *between, dot = chain
                    self.gradient.append(dot)
                    self.region.add(self._number(dot.results[0]))
                    self.late.add(self._number(dot.results[0]))
                    for op in between:
                        self.dims.join(op)
                        self.inside[op.id] = None
                    self._grow(dot.results[0], late=True)
                    added = True
            if not added:
                return

    def _to_contraction(self, v: int, size: int) -> list[Op] | None:
        found: list[Op] = []
        while True:
            op = self.view.producer(v)
            if op is None or prod(self.program.shape(v)) != size:
                return None
            found.append(op)
            if op.kind == "dot_general":
                return found
            if op.kind not in _LOOKED_THROUGH or op.rule is None:
                return None
            v = op.operands[0]

    # -- what dims run over ------------------------------------------------------------

    def _name_dims(self) -> Lettering:
        rule = self.scores.known_rule
        left, right = rule.operands[:2]
        of = [{rule.major(f) for f in dims} - {None} for dims in (left, right)]
        names: dict[Hashable, str] = {}
        result = self.scores.results[0]
        counts = {"b": 0, "q": 0}
        softmaxed = self._softmaxed()
        query_sides: set[int] = set()
        for d, factors in enumerate(rule.results[0]):
            major = rule.major(factors)
            if major is None:
                continue
            node = self.dims.of(result, d)
            name = "k"
            if major in of[0] and major in of[1]:
                name = f"b{counts['b']}"
            elif node != softmaxed:
                name = f"q{counts['q']}"
                query_sides.add(0 if major in of[0] else 1)
            if name != "k":
                counts[name[0]] += 1
            if node in names:
                raise Different(
                    "later ops merge two dims of the scores (a reshape), which is not "
                    "supported"
                )
            names[node] = name
        if "k" not in names.values():
            raise Different("the softmax is not over keys alone")
        if len(query_sides) != 1:
            raise Different("no dim of the scores runs over queries alone")
        [self.query_side] = query_sides
        return Lettering(self.dims, names)

    def _softmaxed(self) -> Hashable:
        """The dim along which exponentials are summed."""
        found = set()
        for op, _ in self.view.readers(self.exponential.results[0]):
            if op.kind != "reduce" or op.rule is None or op.id not in self.inside:
                continue
            [value] = op.operands[:1]
            kept = {f for dims in op.rule.results[0] for f in dims}
            for d, factors in enumerate(op.rule.operands[0]):
                major = op.rule.major(factors)
                if major is not None and major not in kept:
                    found.add(self.dims.of(value, d))
        if len(found) != 1:
            raise Different("nothing sums its exponentials along one dim")
        return found.pop()

    # -- which contraction is which ----------------------------------------------------

    def _classified(self, letters: Lettering) -> dict[str, list[tuple[Op, int]]]:
        found: dict[str, list[tuple[Op, int]]] = {}
        for uses in self.sinks.values():
            if len(uses) != 1:
                raise Different("a contraction reads two tensors of the attention")
            [(op, index)] = uses
            weights = op.operands[index]
            own = letters.of_value(weights)
            out = set(letters.of_result(op, index))
            names = (
                ("dq", "dk") if self._number(weights) in self.late else ("mix", "dv")
            )
            if "k" in own and "k" not in out:
                name = names[0]
            elif any(x[:1] == "q" for x in own) and not any(x[:1] == "q" for x in out):
                name = names[1]
            else:
                raise Different(f"{op.source or op.scope} sums weights in another way")
            found.setdefault(name, []).append((op, index))
        return found

    def _argument(self, letters: Lettering) -> Tensor:
        """Returns the softmax's operand: scores without the row's maximum."""
        v = self.exponential.operands[0]
        op = self.view.producer(v)
        while op is not None and op.kind == "convert":
            op = self.view.producer(op.operands[0])
        if op is not None and op.kind == "subtract":
            v = op.operands[0]
        if self._number(v) not in self.region:
            raise Different("the exponential is not of scores less a maximum")
        return Tensor(v, None, letters.of_value(v))

    def _forward(self, mix: Op, index: int, letters: Lettering) -> Pass:
        scores = self._near(self.scores, mix)
        q, k = self.query_side, 1 - self.query_side
        reads = {
            "q": letters.operand(scores, q, "d"),
            "k": letters.operand(scores, k, "d"),
            "v": letters.operand(mix, 1 - index, "e", index),
        }
        out = Tensor(mix.results[0], None, letters.of_result(mix, index, "e"))
        return Pass(reads, {"out": out})

    def _near(self, op: Op, reader: Op) -> Op:
        """The instance of an op that stands in a reader's body, last before it."""
        best = None
        for v in self.view.values[self._number(op.results[0])]:
            one = self.program.maker(v)
            if one is None or one.id >= reader.id:
                continue
            if one.kind == op.kind and one.parent == reader.parent:
                best = one
        if best is None:
            raise Different("scores and mix are computed in different loops")
        return best

    def _backward(
        self, sinks: Mapping[str, list[tuple[Op, int]]], letters: Lettering
    ) -> Pass | None:
        derived = [name for name in ("dq", "dk", "dv") if name in sinks]
        if not derived and not self.gradient:
            return None
        if len(derived) < 3 or len(self.gradient) != 1:
            raise Different("not all gradients of queries, keys and values are there")
        if any(len(sinks[name]) != 1 for name in derived):
            raise Different("gradients are computed more than once")
        [(dq, of_dq)], [(dk, of_dk)], [(dv, of_dv)] = (sinks[n] for n in derived)
        [weights] = self.gradient
        given = self._given(weights, letters)
        reads = {
            "q": letters.operand(dk, 1 - of_dk, "d", of_dk),
            "k": letters.operand(dq, 1 - of_dq, "d", of_dq),
            "v": letters.operand(weights, 1 - given, "e"),
            "dout": letters.operand(weights, given, "e"),
        }
        makes = {
            "dq": Tensor(dq.results[0], None, letters.of_result(dq, of_dq, "d")),
            "dk": Tensor(dk.results[0], None, letters.of_result(dk, of_dk, "d")),
            "dv": Tensor(dv.results[0], None, letters.of_result(dv, of_dv, "e")),
        }
        return Pass(reads, makes)

    def _given(self, weights: Op, letters: Lettering) -> int:
        """Returns which operand of the weights' gradient is the output's gradient."""
        for index in (0, 1):
            if any(x[:1] == "q" for x in letters.operand(weights, index, "e").letters):
                return index
        raise Different("the gradient of the weights has no queries")


# ---------------------------------------------------------------------- random numbers

# Random bits: of a generator, or made into numbers by what a float is in memory.
_RANDOM = frozenset({"bitcast_convert", "rng", "rng_bit_generator"})
_THROUGH = (KNOWN - {"dot_general", "reduce"}) | {"concatenate", "slice"}
_MOST_STEPS = 64


def dropout(view: View, inside: Iterable[int]) -> str:
    """Returns a message if random numbers enter ops, by id, or ""."""
    numbers, ops = view.numbers.of, [view.program.ops[op] for op in inside]
    own = {numbers[v] for op in ops for v in op.results}
    entering = (v for op in ops for v in op.operands if numbers[v] not in own)
    if any(_is_random(view, v, own) for v in entering):
        return "dropout: random numbers enter its scores or weights"
    return ""


def _is_random(view: View, v: int, own: set[int]) -> bool:
    """True if elementwise ops make a value of random numbers."""
    stack, seen = [v], set[int]()
    while stack and len(seen) < _MOST_STEPS:
        number = view.numbers.of[v := stack.pop()]
        op = view.producer(v)
        if op is None or number in seen or number in own or view.is_leaf(v):
            continue
        seen.add(number)
        if op.kind in _RANDOM:
            return True
        if op.kind in _THROUGH:
            stack += op.operands
    return False
