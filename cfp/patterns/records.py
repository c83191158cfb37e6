"""Records of cross-entropies that were found in a program, or left alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cfp.patterns.dims import NO_DIMS, OTHER, Cut, Dims, Split
from cfp.patterns.expression import Expr
from cfp.patterns.reading import Indexed, Read

LARGEST, SUM, TOTAL, PICK, ARGMAX = "largest", "sum", "total", "pick", "argmax"


@dataclass(frozen=True, slots=True)
class Product:
    """A contraction with something wide, or its sum over tokens.

    Attributes:
        made: the value.
        wide: what is contracted, or summed.
        over: "words" or "tokens".
        first: whether the wide operand is the first of the two.
        other: the other operand; None of a sum.
        dims: of what a contraction over words makes.
        words_dim: of a contraction over words, the dim of the other operand that words
            have; otherwise that of the result.
    """

    made: int
    wide: Expr
    over: str
    first: bool
    other: Read | None
    dims: Dims = NO_DIMS
    words_dim: int = 0


@dataclass(frozen=True, slots=True)
class Reduction:
    """Something of each token, or its sum over some of the tokens' dims.

    Attributes:
        made: the value.
        kind: LARGEST, SUM of exponentials, TOTAL of anything, PICK, or ARGMAX.
        wide: what is reduced.
        dims: of the value.
        label: of a PICK, the token's word.
        clamped: whether a word out of range is the nearest; otherwise it has nothing.
    """

    made: int
    kind: str
    wide: Expr
    dims: Dims
    label: Expr | None = None
    clamped: bool = False


@dataclass(frozen=True, slots=True)
class Head:
    """A contraction to a vocabulary.

    Attributes:
        op: the id of the op that makes the logits.
        logits: the value.
        kernel: which of its operands has a vector for each word.
        kernel_dim: the dim of that operand that words have.
        words_dim: the dim of the logits that words have.
        groups: for each other dim of the logits its size; its factors, if a reshape
            splits it; () if the size is one.
        precision: of the product, as the program has it; "" if it is the default.
    """

    op: int
    logits: int
    kernel: int
    kernel_dim: int
    words_dim: int
    groups: tuple[tuple[int, ...], ...]
    precision: str = ""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Sizes of the tokens' dims, as `Dims` count them."""
        return tuple(size for one in self.groups for size in one)

    def dims(self, place: int) -> Dims:
        """The dims of an array that has all tokens, in their order.

        Args:
            place: the dim that is none of the tokens'.
        """
        numbers = iter(range(len(self.tokens)))
        of = [tuple(next(numbers) for _ in one) for one in self.groups]
        return Dims((*of[:place], (OTHER,), *of[place:]))

    def split(self, split: Split) -> Head:
        """The same with two tokens' dims in the place of one."""
        groups, number = [], 0
        for one in self.groups:
            own: list[int] = []
            for size in one:
                own += split.sizes if number == split.dim else (size,)
                number += 1
            groups.append(tuple(own))
        return replace(self, groups=tuple(groups))


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """A contraction to a vocabulary whose result need not be held.

    Attributes:
        head: the contraction.
        vectors: the dims of its operand that has a vector for each token.
        base: what is normalized: the logits, or what is computed of them; None if no
            largest is taken.
        reductions, products: what is made of it, in the program's order.
        reads: where leaves of expressions are read.
        indexed: gathers and scatters of words, by op.
        dims: of all values that have all tokens and words.
        cuts: the tokens that a slice kept, by number.
        ops: all that goes, the contraction and what reads it included.
    """

    head: Head
    vectors: Dims
    base: Expr | None
    reductions: tuple[Reduction, ...]
    products: tuple[Product, ...]
    reads: tuple[tuple[Expr, Read], ...]
    indexed: tuple[tuple[int, Indexed], ...]
    dims: tuple[tuple[int, Dims], ...]
    cuts: tuple[Cut, ...]
    ops: tuple[int, ...]

    @property
    def contraction(self) -> int:
        """The id of the op that makes the logits."""
        return self.head.op


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """A contraction that a softmax follows, and why it stays.

    Attributes:
        contraction: the op's id.
        reason: why.
        op: the op that it is for, or -1.
        is_loss: whether it takes a label's word out of logits, as losses do and the
            softmaxes of routers do not.
    """

    contraction: int
    reason: str
    op: int = -1
    is_loss: bool = False
