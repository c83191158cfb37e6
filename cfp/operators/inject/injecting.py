"""Injection after a model was made, and while it is made or called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
from flax import nnx

from cfp.operators.inject import on_functions, on_linen, on_nnx
from cfp.operators.inject.policy import Choices, Policy, PolicyError, registered
from cfp.operators.inject.report import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """A model with operators in the places of some of its parts.

    Attributes:
        model: of linen, what has `init` and `apply`; of NNX, the module that was given;
            of a function, one like it.
        report: what was replaced and what was not. Of linen and of functions it is
            filled when the model is called, or at once where inputs were given.
        replaced: policies by path, of NNX.
    """

    model: Any
    report: Report
    replaced: Mapping[on_nnx.Path, Policy] = field(default_factory=dict)

    def to_injected(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters of the injected model from those of the original.

        Args:
            state: nested dicts, as of `flax.nnx.to_pure_dict`. Of linen and of
                functions they are the same.
        """
        return on_nnx.mapped_state(state, self.replaced, back=False)

    def to_original(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters of the original from those of the injected model."""
        return on_nnx.mapped_state(state, self.replaced, back=True)


def inject(
    model: Any,
    *inputs: Any,
    policies: Sequence[type[Policy]] | None = None,
    implementations: Mapping[str, str] | None = None,
    right_padded: bool = False,
    strict: bool = False,
) -> Injection:
    """Puts operators in the places of a model's parts.

    Args:
        model: a module of linen or NNX (which is changed), or a function.
        inputs: of a module of linen or a function, what it is called with, or shapes
            and types of that: fills the report at once.
        policies: in place of the registered ones.
        implementations: names by operator; the first that takes the arguments for the
            others.
        right_padded: says that masks given to attention are those of padding at the
            ends of sequences.
        strict: whether it is an error if nothing is replaced.

    Raises:
        PolicyError: a policy drops a parameter, or nothing was replaced and `strict`.
        OperatorError: there is no operator or implementation of a name.
    """
    made = _policies(policies, implementations, right_padded)
    report = Report(strict=strict)
    if isinstance(model, nnx.Module):
        replaced = on_nnx.surgery(model, made, report)
        report.check()
        return Injection(model=model, report=report, replaced=replaced)
    if isinstance(model, nn.Module):
        injected = on_linen.InjectedLinen(model, made, report)
        if inputs:
            injected.see(*inputs)
        return Injection(model=injected, report=report)
    if not callable(model):
        raise PolicyError(
            "inject takes a module of flax.linen or flax.nnx, or a function, got "
            f"{type(model).__name__}."
        )
    function = on_functions.injected(model, made, report)
    if inputs:
        on_linen.abstractly(function, *inputs)
    return Injection(model=function, report=report)


class Inside:
    """The context of `injection`.

    Attributes:
        report: what was replaced so far, and what was not.
    """

    def __init__(self, policies: Sequence[Policy], strict: bool):
        self.report = Report(strict=strict)
        self._policies = policies

    def build(self, make: Callable[[], nnx.Module]) -> nnx.Module:
        """Makes a module of NNX with its parts replaced while it is made.

        In one compiled program, so what is replaced never takes memory.

        Args:
            make: makes the module.
        """

        @nnx.jit
        def made() -> nnx.Module:
            model = make()
            on_nnx.surgery(model, self._policies, self.report)
            return model

        return made()


@contextmanager
def injection(
    *,
    policies: Sequence[type[Policy]] | None = None,
    implementations: Mapping[str, str] | None = None,
    right_padded: bool = False,
    strict: bool = False,
) -> Iterator[Inside]:
    """Puts operators in the places of parts of all modules of linen that are called.

    Modules of NNX are made with `build` of what this gives. Arguments are those of
    `inject`.

    Raises:
        PolicyError: as `inject`, when the block ends.
    """
    made = _policies(policies, implementations, right_padded)
    inside = Inside(made, strict)
    with nn.intercept_methods(on_linen.interceptor(made, inside.report)):
        yield inside
    inside.report.check()


def _policies(
    given: Sequence[type[Policy]] | None,
    implementations: Mapping[str, str] | None,
    right_padded: bool,
) -> list[Policy]:
    choices = Choices(
        implementations=dict(implementations or {}), right_padded=right_padded
    )
    return [policy(choices) for policy in (registered() if given is None else given)]
