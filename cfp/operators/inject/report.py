"""Report of an injection: parts replaced, parts left, and reasons."""

from __future__ import annotations

from dataclasses import dataclass, field

from cfp.errors import compose
from cfp.operators.inject.policy import Policy, PolicyError


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a model.

    Attributes:
        path: where it is; empty for the model itself.
        kind: its class, or "function".
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

    Of modules of linen and of functions, parts are seen when the model is called.
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
                compose(
                    "Nothing was replaced.",
                    expected="a part that a policy matches",
                    got=seen or "no part at all",
                    attempt="@register_policy for this model, or strict=False",
                )
            )
