"""Report of an injection: parts replaced, parts left, and its benefit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from cfp.operators.benchmark import repeater, temp_bytes
from cfp.operators.inject.policy import Policy, PolicyError
from cfp.profiling.timing import interleave
from cfp.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a model.

    Attributes:
        path: where it is; empty for the model itself.
        kind: its class.
        policy: that matched; empty if none did.
        operators: what it was replaced by, in words; empty if it was not.
        reason: why it was not replaced.
    """

    path: str
    kind: str
    policy: str = ""
    operators: str = ""
    reason: str = ""

    @property
    def replaced(self) -> bool:
        """True if the part was replaced."""
        return bool(self.operators)


@dataclass(slots=True)
class Report:
    """The parts of a model, as far as they were seen.

    Parts of modules of linen are seen when the model is called.
    """

    strict: bool = False
    parts: dict[str, Part] = field(default_factory=dict)

    def add_replaced(self, path: str, kind: str, policy: Policy) -> None:
        """Notes a part that was replaced."""
        self.parts[path] = Part(
            path=path,
            kind=kind,
            policy=policy.name,
            operators=policy.implementations_text(),
        )

    def add_left(self, path: str, kind: str, policy: Policy | None, why: str) -> None:
        """Notes a part that was not replaced."""
        known = self.parts.get(path)
        if known is None or not known.replaced:
            name = policy.name if policy else ""
            self.parts[path] = Part(path=path, kind=kind, policy=name, reason=why)

    @property
    def replaced(self) -> list[Part]:
        """Parts that were replaced."""
        return [part for part in self.parts.values() if part.replaced]

    @property
    def left(self) -> list[Part]:
        """Parts that were not."""
        return [part for part in self.parts.values() if not part.replaced]

    def text(self) -> str:
        """A line for each part."""
        lines = [
            f"{part.path or '.'} ({part.kind}): {part.operators} [{part.policy}]"
            for part in self.replaced
        ]
        lines += [
            f"{part.path or '.'} ({part.kind}): left, {part.reason}"
            for part in self.left
        ]
        head = f"{len(self.replaced)} parts replaced, {len(self.left)} left"
        return "\n".join([head, *lines])

    __str__ = text

    def check(self) -> None:
        """Sees that something was replaced, if the injection is strict.

        Raises:
            PolicyError: nothing was.
        """
        if self.strict and not self.replaced:
            seen = ", ".join(
                f"{part.path or '.'} ({part.kind}): {part.reason}"
                for part in list(self.left)[:5]
            )
            raise PolicyError(
                "Nothing was replaced.",
                expected="a part that a policy matches",
                got=seen or "no part at all",
                attempt="@register_policy for this model, or strict=False",
            )


# A difference below this share is none.
_LEAST_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """Time and memory of a step, before and after.

    Attributes:
        before_ms, after_ms: medians.
        before_bytes, after_bytes: the most that the programs hold besides arguments and
            results; None where the compiler does not say.
    """

    before_ms: float
    after_ms: float
    before_bytes: int | None
    after_bytes: int | None

    @property
    def faster(self) -> bool:
        """True if the step is faster by one percent or more."""
        return self.after_ms <= (1 - _LEAST_SHARE) * self.before_ms

    @property
    def smaller(self) -> bool:
        """True if it needs less memory by one percent or more."""
        if self.before_bytes is None or self.after_bytes is None:
            return False
        return self.after_bytes <= (1 - _LEAST_SHARE) * self.before_bytes

    @property
    def is_worth_it(self) -> bool:
        """True if time or memory is better."""
        return self.faster or self.smaller

    def text(self) -> str:
        """The verdict in a sentence."""
        if self.is_worth_it:
            gains = [
                name
                for name, better in (("time", self.faster), ("memory", self.smaller))
                if better
            ]
            verdict = f"worth it for {' and '.join(gains)}"
        else:
            verdict = "not worth it: neither faster nor smaller by one percent"
        sizes = [
            "unknown" if size is None else format_bytes(size)
            for size in (self.before_bytes, self.after_bytes)
        ]
        return (
            f"{self.before_ms:.3f} ms before, {self.after_ms:.3f} ms after; memory "
            f"besides arguments and results {sizes[0]} before, {sizes[1]} after: "
            f"{verdict}."
        )

    __str__ = text


def worth(
    before: Callable[..., Any] | jax.stages.Compiled,
    after: Callable[..., Any] | jax.stages.Compiled,
    *args: Any,
    rounds: int = 10,
    seconds: float = 20.0,
) -> Worth:
    """Times a step with and without injection, in turn.

    Args:
        before, after: the step with the original model, and with the injected one;
            functions, or programs compiled for `args` already.
        args: of both.
        rounds: how many samples each gets, at most.
        seconds: that timing may take.
    """
    compiled = {
        name: step
        if isinstance(step, jax.stages.Compiled)
        else jax.jit(step).lower(*args).compile()
        for name, step in (("before", before), ("after", after))
    }

    timings = interleave(
        {name: repeater(one, *args) for name, one in compiled.items()},
        rounds,
        warmup_seconds=0.2,
        budget_seconds=seconds,
    )
    return Worth(
        before_ms=timings["before"].median_ms,
        after_ms=timings["after"].median_ms,
        before_bytes=temp_bytes(compiled["before"]),
        after_bytes=temp_bytes(compiled["after"]),
    )
