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
        lines = [f"{len(self.replaced)} parts replaced, {len(self.left)} left"]
        for part in (*self.replaced, *self.left):
            now = f"left, {part.reason}"
            if part.replaced:
                now = f"{part.operators} [{part.policy}]"
            lines.append(f"{part.path or '.'} ({part.kind}): {now}")
        return "\n".join(lines)

    __str__ = text

    def check(self) -> None:
        """Sees that something was replaced, if the injection is strict.

        Raises:
            PolicyError: nothing was.
        """
        if self.strict and not self.replaced:
            raise PolicyError(
                "Nothing was replaced.",
                expected="a part that a policy matches",
                got="; ".join(self.text().splitlines()[:6]),
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
    def gains(self) -> list[str]:
        """Names of what is better by one percent or more, time and memory."""
        pairs = {"time": (self.before_ms, self.after_ms)}
        if self.before_bytes is not None and self.after_bytes is not None:
            pairs["memory"] = (self.before_bytes, self.after_bytes)
        return [
            name
            for name, (before, after) in pairs.items()
            if after <= (1 - _LEAST_SHARE) * before
        ]

    def text(self) -> str:
        """The verdict in a sentence."""
        verdict = "not worth it: neither faster nor smaller by one percent"
        if self.gains:
            verdict = f"worth it for {' and '.join(self.gains)}"
        before, after = (
            "unknown" if size is None else format_bytes(size)
            for size in (self.before_bytes, self.after_bytes)
        )
        return (
            f"{self.before_ms:.3f} ms before, {self.after_ms:.3f} ms after; memory "
            f"besides arguments and results {before} before, {after} after: {verdict}."
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
