"""Masks and biases that enter an attention, and the values that they are made of.

A mask is best known by the smallest values that it is made of: which keys are padding,
and which segment a token is in. Kernels compute those without a mask as large as the
scores. So each value that enters is followed back through the ops that only combine,
compare, or shape; what is made of an argument in another way is taken as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cfp.attention.matching.found import (
    Different,
    Lettering,
    Letters,
    Pass,
    Side,
    Tensor,
    Use,
    aligned,
    majors_of,
)
from cfp.attention.matching.view import View
from cfp.program.evaluate import KNOWN
from cfp.program.graph import Op

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
        """Takes where the attention is.

        Args:
            view: of the program.
            letters: of the attention's dims.
            inside: ids of the ops between its contractions.
            region: numbers of the values that these make.
        """
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
            if all(n == 1 for n in self.program.values[op.results[0]].shape):
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
        assert op.rule is not None
        [result] = op.results[:1]
        names = aligned(one.letters, self.program.values[result].shape)
        of: dict[int, str] = {}
        for factors, name in zip(op.rule.results[0], names, strict=True):
            large = [f for f in factors if op.rule.sizes[f] > 1]
            if len(large) > 1:
                return []
            of.update((f, name) for f in large)
        found: dict[tuple[int, Letters], Tensor] = {}
        for index, v in enumerate(op.operands):
            if self.view.is_leaf(v):
                continue
            dims = op.rule.operands[index]
            if any(sum(op.rule.sizes[f] > 1 for f in dim) > 1 for dim in dims):
                return []
            majors = majors_of(op.rule, dims)
            letters = tuple("" if f is None else of.get(f, "?") for f in majors)
            if "?" in letters:
                return []
            key = self.view.numbers.of[v], tuple(x for x in letters if x)
            found.setdefault(key, Tensor(v, (op.id, index), letters))
        return list(found.values())

    def _keeps_kind(self, op: Op, read: Tensor) -> bool:
        """Tell whether a bias stays one that is added."""
        dtypes = [self.program.values[v].dtype for v in (op.results[0], read.value)]
        if not all(d.startswith(("f", "bf")) for d in dtypes):
            return False
        first = self.view.numbers.of[op.operands[0]] == self.view.numbers.of[read.value]
        return op.kind in ("add", "convert", "select") or (
            op.kind == "subtract" and first
        )

    def _are_masks(self, terms: Sequence[Term]) -> bool:
        return all(len(term) > 1 or self._dtype(term[0][-1]) == "i1" for term in terms)

    def _dtype(self, one: Tensor) -> str:
        """The dtype of a value before it was cast."""
        return self.program.values[self.view.made(one.value)].dtype

    def _compared(self, op: Op, reads: list[Tensor], path: Path) -> list[Term]:
        """Ids of queries and of keys, if that is what is compared."""
        if " EQ" not in op.attributes and " NE" not in op.attributes:
            return []
        sides = sorted(reads, key=lambda one: "k" in one.letters)
        queries, keys = (self._unshaped(one, path) for one in sides)
        if not _is_by_query(queries[-1].letters) or not _is_by_key(keys[-1].letters):
            return []
        dtypes = {self._dtype(x[-1]) for x in (queries, keys)}
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
            found.setdefault(key, side)
        return tuple(found.values())

    def _read(self, term: Term, passes: Sequence[Pass]) -> Side:
        """A term with the values by which each pass reads it, the smallest there are.

        Raises:
            Different: some pass has none of them.
        """
        if len(term) > 1:
            ends = tuple(path[-1] for path in term)
            uses = [tuple(self._use(end, one) for end in ends) for one in passes]
            if all(use is not None for both in uses for use in both):
                known = tuple(tuple(u for u in both if u) for both in uses)
                return Side(parts=ends, reads=ends, uses=known)
            # A mask as large as the scores is all that enters a loop, say.
            shared = [a for a, b in zip(*term, strict=False) if a == b]
            term = (tuple(shared),)
        [path] = term
        for one in reversed(path):
            found = [self._use(one, p) for p in passes]
            if all(found):
                known = tuple((use,) for use in found if use is not None)
                return Side(parts=(path[-1],), reads=(one,), uses=known)
        raise Different(
            f"{self._where(path[0])} is not read in the loop that computes its "
            "gradients, as it would be with jax.checkpoint around the loop's body"
        )

    def _use(self, one: Tensor, near: Pass) -> Use | None:
        """Finds where a pass can read a value: in its loop, before its results."""
        made = [self.program.values[t.value].producer for t in near.makes.values()]
        parent = self.program.ops[made[0]].parent
        if parent not in self._readable:
            self._readable[parent] = self._uses_in(parent)
        for op, index in self._readable[parent].get(
            self.view.numbers.of[one.value], ()
        ):
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
                producer = self.program.values[v].producer
                if producer < 0 or producer in own or v in outputs:
                    continue
                maker = ops[producer]
                if maker.kind not in KNOWN or maker.kind in ("reduce", "dot_general"):
                    continue
                if maker.parent != parent or len(own) > _MOST_VALUES:
                    continue
                if all(user in own for r in maker.results for user, _ in users[r]):
                    own.add(producer)
                    stack.append(producer)
        return {number: sorted(uses, reverse=True) for number, uses in found.items()}


def _is_by_key(letters: Letters) -> bool:
    return "k" in letters and not any(x[:1] == "q" for x in letters)


def _is_by_query(letters: Letters) -> bool:
    return "k" not in letters and any(x[:1] == "q" for x in letters)


def _is_dense(term: Term) -> bool:
    """Tell whether a term is for pairs of queries and keys, not for keys alone."""
    return len(term) == 1 and not _is_by_key(term[0][-1].letters)
