"""Injection after a model was made, and while it is made or called.

Into modules of `flax.linen` operators come through interceptors of their calls. A
module keeps its parameters: `init` makes those of the original, and a replacement gets
them mapped when it is called. So checkpoints are the original's.

Of modules of `flax.nnx` parts are taken out, and others put in. A replacement has the
part's own variables where its policy leaves them as they are, so tied weights stay
tied; what a policy maps becomes new parameters.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax import nnx
from jax import Array

from cfp.operators.inject.policy import (
    Choices,
    Parameters,
    Policy,
    PolicyError,
    Refused,
    Replacement,
    check_mapping,
    first_match,
    registered,
)
from cfp.operators.inject.report import Report

Path = tuple[Any, ...]


class Injected(nnx.Module):
    """An operator in a part's place; its attributes are the parameters.

    Args:
        policy: makes of calls what the replacement takes.
        replacement: takes parameters and what was made of the call.
        variables: nested dicts of parameters.
        seen: is called after each call.
    """

    def __init__(
        self,
        part: nnx.Module,
        policy: Policy,
        replacement: Replacement,
        variables: Mapping[str, Any],
        seen: Callable[[], None],
    ):
        self._adapter = nnx.static(_Adapter(part, policy, replacement, seen))
        for name, value in variables.items():
            setattr(self, name, _contained(value))
        self._names = nnx.static(tuple(variables))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the part is called."""
        parameters = {name: _arrays(getattr(self, name)) for name in self._names}
        return self._adapter(parameters, args, kwargs)


class _Adapter:
    """Stand-in for a replaced part: its plain attributes, such as its configuration."""

    def __init__(
        self,
        part: nnx.Module,
        policy: Policy,
        replacement: Replacement,
        seen: Callable[[], None],
    ):
        self._kind = type(part).__name__
        self._policy, self._replacement, self._seen = policy, replacement, seen
        self._part = SimpleNamespace(
            **{
                name: value
                for name, value in vars(part).items()
                if not name.startswith("_")
                and not isinstance(value, nnx.Pytree | nnx.Variable | Array)
            }
        )

    def __call__(self, parameters: Parameters, args: tuple, kwargs: dict) -> Any:
        try:
            adapted = self._policy.adapt(self._part, args, kwargs)
            made = self._replacement(parameters, *adapted)
        except Refused as error:
            raise PolicyError(
                f"A {self._kind} that {self._policy.name} replaced {error}: the "
                "original was taken out of this model, so make the call without, or "
                "leave the policy out of `policies`."
            ) from error
        self._seen()
        return made


def surgery(
    model: nnx.Module, policies: Sequence[Policy], report: Report
) -> dict[Path, Policy]:
    """Replaces parts of a model in place.

    Args:
        model: whose parts are replaced; not it itself.
        policies: in the order in which they are asked.
        report: called with every part.

    Returns:
        The policies of what was replaced, by path.
    """
    owners = Counter(id(value) for _, value in _walk(model, ()))
    replaced: dict[Path, Policy] = {}
    for path, parent, name, part in list(_parts(model)):
        if any(path[: len(done)] == done for done in replaced):
            continue
        where, kind = "/".join(map(str, path)), type(part).__name__
        policy = first_match(policies, part)
        if policy is None:
            report.add_left(where, kind, None, "no policy matches")
            continue
        try:
            # A call says which implementations were taken.
            seen = functools.partial(report.add_replaced, where, kind, policy)
            new = _replacement(part, policy, where, owners, seen)
        except Refused as error:
            report.add_left(where, kind, policy, str(error))
            continue
        _put(parent, name, new)
        replaced[path] = policy
        report.add_replaced(where, kind, policy)
    return replaced


def _replacement(
    part: nnx.Module,
    policy: Policy,
    where: str,
    owners: Counter[int],
    seen: Callable[[], None],
) -> Injected:
    """The module that takes a part's place.

    Raises:
        Refused: by the policy, or as parameters would no longer be shared.
    """
    variables = parameters_of(part)
    values = jax.tree.map(
        lambda one: one[...], variables, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    replacement = policy.build(part)
    check_mapping(policy, values, where)
    mapped = policy.to_injected(values)
    own = {
        id(value): variable
        for value, variable in zip(
            jax.tree.leaves(values),
            jax.tree.leaves(variables, is_leaf=lambda x: isinstance(x, nnx.Variable)),
            strict=True,
        )
    }
    inside = Counter(id(value) for _, value in _walk(part, ()))
    stays = {id(own[id(x)]) for x in jax.tree.leaves(mapped) if id(x) in own}
    for variable in own.values():
        if id(variable) not in stays and owners[id(variable)] > inside[id(variable)]:
            raise Refused("shares a parameter that its policy would change")
    new = jax.tree.map(lambda x: own.get(id(x), None) or nnx.Param(x), mapped)
    return Injected(part, policy, replacement, new, seen)


def parameters_of(part: nnx.Module) -> dict[str, Any]:
    """A part's parameters as nested dicts of variables."""
    found: dict[str, Any] = {}
    for path, value in _walk(part, ()):
        if isinstance(value, nnx.Param):
            inner = found
            for name in path[:-1]:
                inner = inner.setdefault(str(name), {})
            inner[str(path[-1])] = value
    return found


def _children(node: nnx.Module) -> list[tuple[Any, Any]]:
    """Modules and variables that are attributes of a module, or members of a list."""
    is_list = isinstance(node, nnx.List)
    return [
        (int(name) if is_list else name, value)
        for name, value in vars(node).items()
        if isinstance(value, nnx.Module | nnx.Variable)
    ]


def _walk(node: nnx.Module, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yields all variables below a module with their paths, shared ones each time."""
    for name, value in _children(node):
        if isinstance(value, nnx.Module):
            yield from _walk(value, (*path, name))
        else:
            yield (*path, name), value


def _parts(
    node: nnx.Module, path: Path = ()
) -> Iterator[tuple[Path, nnx.Module, Any, nnx.Module]]:
    """Yields (path, parent, name, module) of all modules below, outer ones first."""
    for name, value in _children(node):
        if isinstance(value, nnx.Module):
            if not isinstance(value, nnx.List | nnx.Dict):
                yield (*path, name), node, name, value
            yield from _parts(value, (*path, name))


def _put(parent: Any, name: Any, new: nnx.Module) -> None:
    if isinstance(parent, nnx.List):
        parent[int(name)] = new
    else:
        setattr(parent, name, new)


def _contained(value: Any) -> Any:
    if isinstance(value, Mapping):
        return nnx.Dict({name: _contained(one) for name, one in value.items()})
    return value


def _arrays(value: Any) -> Any:
    if isinstance(value, nnx.Variable):
        return value[...]
    return {name: _arrays(one) for name, one in value.items()}


def mapped_state(
    state: Mapping[str, Any], replaced: Mapping[Path, Policy], *, back: bool
) -> dict[str, Any]:
    """A whole model's parameters with those of replaced parts mapped.

    Args:
        state: nested dicts, as of `flax.nnx.to_pure_dict`.
        replaced: policies by path.
        back: from the injected model's to the original's; else the other way.
    """

    def visit(node: Any, path: Path) -> Any:
        if not isinstance(node, Mapping):
            return node
        if path in replaced:
            policy = replaced[path]
            return (policy.to_original if back else policy.to_injected)(dict(node))
        return {name: visit(child, (*path, name)) for name, child in node.items()}

    return visit(state, ())


_ARRAYS = (Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)


def interceptor(
    policies: Sequence[Policy], report: Report
) -> Callable[[Callable[..., Any], tuple, dict, Any], Any]:
    """Intercepts calls of `flax.linen`; policies are asked in their order."""

    def intercept(
        next_function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: nn.module.InterceptorContext,
    ) -> Any:
        module = context.module
        if context.method_name != "__call__" or module.is_initializing():
            return next_function(*args, **kwargs)
        path, kind = "/".join(map(str, module.path)), type(module).__name__
        policy = first_match(policies, module)
        if policy is None:
            report.add_left(path, kind, None, "no policy matches")
            return next_function(*args, **kwargs)
        try:
            replacement = policy.build(module)
            adapted = policy.adapt(module, args, kwargs)
            parameters = nn.meta.unbox(dict(module.variables.get("params", {})))
            check_mapping(policy, parameters, path or kind)
            with jax.named_scope(policy.name):
                made = replacement(policy.to_injected(parameters), *adapted)
        except Refused as error:
            report.add_left(path, kind, policy, str(error))
            return next_function(*args, **kwargs)
        report.add_replaced(path, kind, policy)
        return made

    return intercept


class InjectedLinen:
    """A module of linen with operators in the places of some of its parts.

    It has the module's `init` and `apply`, with the original's variables.
    """

    def __init__(self, module: nn.Module, policies: Sequence[Policy], report: Report):
        self.module = module
        self._intercept = interceptor(policies, report)
        self._report = report

    def init(self, *args: Any, **kwargs: Any) -> Any:
        """As of the module: the original's variables."""
        return self.module.init(*args, **kwargs)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """As of the module, with its parts replaced.

        Raises:
            PolicyError: the injection is strict, and nothing was replaced.
        """
        with nn.intercept_methods(self._intercept):
            made = self.module.apply(*args, **kwargs)
        self._report.check()
        return made

    def see(self, *args: Any) -> None:
        """Fills the report for some inputs; computes nothing."""

        def both(*inputs: Any) -> Any:
            variables = self.module.init(jax.random.key(0), *inputs)
            return self.apply(variables, *inputs, rngs={"dropout": jax.random.key(0)})

        abstractly(both, *args)


def abstractly(function: Callable[..., Any], *args: Any) -> None:
    """Traces a function; what is no array, such as a flag, is given as it is."""
    leaves, tree = jax.tree.flatten(args)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS)]

    def of_arrays(*arrays: Any) -> Any:
        every = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            every[place] = array
        return function(*jax.tree.unflatten(tree, every))

    jax.eval_shape(of_arrays, *(leaves[i] for i in places))


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """A model with operators in the places of some of its parts.

    Attributes:
        model: of linen, what has `init` and `apply`; of NNX, the module that was given.
        report: what was replaced and what was not. Of linen it is filled when the model
            is called, or at once where inputs were given.
        replaced: policies by path, of NNX.
    """

    model: Any
    report: Report
    replaced: Mapping[Path, Policy] = field(default_factory=dict)

    def to_injected(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters, as nested dicts, of the injected model from the original's."""
        return mapped_state(state, self.replaced, back=False)

    def to_original(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters of the original from those of the injected model."""
        return mapped_state(state, self.replaced, back=True)


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
        model: a module of linen or NNX (which is changed).
        inputs: of a module of linen, what it is called with, or shapes and types of
            that: fills the report at once.
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
        replaced = surgery(model, made, report)
        report.check()
        return Injection(model=model, report=report, replaced=replaced)
    if isinstance(model, nn.Module):
        linen = InjectedLinen(model, made, report)
        if inputs:
            linen.see(*inputs)
        return Injection(model=linen, report=report)
    raise PolicyError(
        f"inject takes a module of flax.linen or flax.nnx, got {type(model).__name__}."
    )


class Inside:
    """The context of `injection`, with the report so far."""

    def __init__(self, policies: Sequence[Policy], strict: bool):
        self.report = Report(strict=strict)
        self._policies = policies

    def build(self, make: Callable[[], nnx.Module]) -> nnx.Module:
        """Makes a module of NNX with its parts replaced while it is made.

        In one compiled program, so what is replaced never takes memory.
        """

        @nnx.jit
        def made() -> nnx.Module:
            model = make()
            surgery(model, self._policies, self.report)
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
    with nn.intercept_methods(interceptor(made, inside.report)):
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
