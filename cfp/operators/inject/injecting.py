"""Injection after a model was made, and while it is made or called.

Into modules of `flax.linen` operators come through interceptors of their calls. A
module keeps its parameters: `init` makes those of the original, and a replacement gets
them mapped when it is called. So checkpoints are the original's.

Of modules of `flax.nnx` parts are taken out, and others put in. A replacement has the
part's own variables where its policy leaves them as they are, so tied weights stay
tied; what a policy maps becomes new parameters.
"""

from __future__ import annotations

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
    Policy,
    PolicyError,
    Refused,
    check_mapping,
    first_match,
    policies_of,
)
from cfp.operators.inject.report import Report

Path = tuple[Any, ...]
Call = Callable[[dict[str, Any], tuple[Any, ...], dict[str, Any]], Any]
_ARRAYS = (Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)


class Injected(nnx.Module):
    """An operator in a part's place; its attributes are the parameters.

    Args:
        variables: nested dicts of parameters.
        call: takes arrays of the parameters, and the arguments of a call.
    """

    def __init__(self, variables: Mapping[str, Any], call: Call):
        self._call = nnx.static(call)
        self._names = nnx.static(tuple(variables))
        for name, value in variables.items():
            setattr(self, name, _contained(value))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the part is called."""
        parameters = {name: _arrays(getattr(self, name)) for name in self._names}
        return self._call(parameters, args, kwargs)


def _contained(value: Any) -> Any:
    if isinstance(value, Mapping):
        return nnx.Dict({name: _contained(one) for name, one in value.items()})
    return value


def _arrays(value: Any) -> Any:
    if isinstance(value, nnx.Variable):
        return value[...]
    return {name: _arrays(one) for name, one in value.items()}


def _replace(
    model: nnx.Module, policies: Sequence[Policy], report: Report
) -> dict[Path, Policy]:
    """Replaces parts of a model, but not the model itself, in place.

    Returns:
        The policies of replaced parts, by path.
    """
    owners = Counter(id(one) for _, one in _walk(model) if _is_variable(one))
    replaced: dict[Path, Policy] = {}
    for path, part in list(_walk(model)):
        if _is_variable(part) or isinstance(part, nnx.List | nnx.Dict):
            continue
        if any(path[: len(done)] == done for done in replaced):
            continue
        where, kind = "/".join(map(str, path)), type(part).__name__
        policy = first_match(policies, part)
        if policy is None:
            report.add_left(where, kind, None, "no policy matches")
            continue
        try:
            new = _replacement(part, policy, where, owners, report)
        except Refused as error:
            report.add_left(where, kind, policy, str(error))
            continue
        parent: Any = model
        for name in path[:-1]:
            parent = (
                parent[name] if isinstance(parent, nnx.List) else vars(parent)[name]
            )
        if isinstance(parent, nnx.List):
            parent[path[-1]] = new
        else:
            setattr(parent, path[-1], new)
        replaced[path] = policy
        report.add_replaced(where, kind, policy)
    return replaced


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _walk(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields modules and variables below a module, outer ones first, and shared ones
    each time.
    """
    is_list = isinstance(node, nnx.List)
    for name, value in vars(node).items():
        if isinstance(value, nnx.Module | nnx.Variable):
            inner = (*path, int(name) if is_list else name)
            yield inner, value
            if not _is_variable(value):
                yield from _walk(value, inner)


def _replacement(
    part: nnx.Module,
    policy: Policy,
    where: str,
    owners: Counter[int],
    report: Report,
) -> Injected:
    """The module that takes a part's place.

    Raises:
        Refused: by the policy, or as parameters would no longer be shared.
    """
    values: dict[str, Any] = {}
    own: dict[int, nnx.Variable] = {}  # By the array that it holds.
    for path, variable in _walk(part):
        if isinstance(variable, nnx.Param):
            inner = values
            for name in path[:-1]:
                inner = inner.setdefault(str(name), {})
            inner[str(path[-1])] = array = variable[...]
            own[id(array)] = variable
    build = policy.build(part)
    check_mapping(policy, values, where)
    mapped = policy.to_injected(values)
    inside = Counter(id(one) for _, one in _walk(part) if _is_variable(one))
    stays = {id(x) for x in jax.tree.leaves(mapped)}
    for array, variable in own.items():
        if array not in stays and owners[id(variable)] > inside[id(variable)]:
            raise Refused("shares a parameter that its policy would change")
    kind = type(part).__name__
    plain = {
        name: value
        for name, value in vars(part).items()
        if not name.startswith("_")
        and not isinstance(value, nnx.Pytree | nnx.Variable | Array)
    }

    def call(parameters: dict[str, Any], args: tuple, kwargs: dict) -> Any:
        try:
            made = build(
                parameters, *policy.adapt(SimpleNamespace(**plain), args, kwargs)
            )
        except Refused as error:
            raise PolicyError(
                f"A {kind} that {policy.name} replaced {error}: the original was "
                "taken out of this model, so make the call without, or leave the "
                "policy out of `policies`."
            ) from error
        report.add_replaced(where, kind, policy)  # By what was taken.
        return made

    return Injected(
        jax.tree.map(lambda x: own[id(x)] if id(x) in own else nnx.Param(x), mapped),
        call,
    )


def _interceptor(policies: Sequence[Policy], report: Report) -> Any:
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
        self.module, self.init = module, module.init
        self._intercept, self._report = _interceptor(policies, report), report

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
        """Fills the report for some inputs; computes nothing.

        Inputs that are no arrays, such as a flag, are given as they are.
        """
        leaves, tree = jax.tree.flatten(args)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS)]

        def both(*arrays: Any) -> Any:
            every = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                every[place] = array
            inputs = jax.tree.unflatten(tree, every)
            variables = self.init(jax.random.key(0), *inputs)
            return self.apply(variables, *inputs, rngs={"dropout": jax.random.key(0)})

        jax.eval_shape(both, *(leaves[i] for i in places))


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """A model with operators in the places of some of its parts.

    Attributes:
        model: of linen, an object with `init` and `apply`; of NNX, the given module.
        report: what was replaced and what was not. Of linen it is filled when the model
            is called, or at once where inputs were given.
        replaced: policies by path, of NNX.
    """

    model: Any
    report: Report
    replaced: Mapping[Path, Policy] = field(default_factory=dict)

    def to_injected(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters, as nested dicts, of the injected model from the original's."""
        return self._mapped(state, (), back=False)

    def to_original(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters of the original from those of the injected model."""
        return self._mapped(state, (), back=True)

    def _mapped(self, node: Any, path: Path, *, back: bool) -> Any:
        if not isinstance(node, Mapping):
            return node
        if path in self.replaced:
            policy = self.replaced[path]
            return (policy.to_original if back else policy.to_injected)(dict(node))
        return {n: self._mapped(x, (*path, n), back=back) for n, x in node.items()}


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
        inputs: of a module of linen, the arguments of its calls, or their shapes and
            types: fills the report at once.
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
    made = policies_of(policies, implementations, right_padded)
    report = Report(strict=strict)
    if isinstance(model, nnx.Module):
        replaced = _replace(model, made, report)
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

    def __init__(self, policies: Sequence[Policy], report: Report):
        self.report, self._policies = report, policies

    def build(self, make: Callable[[], nnx.Module]) -> nnx.Module:
        """Makes a module of NNX with its parts replaced while it is made.

        In one compiled program, so what is replaced never takes memory.
        """

        @nnx.jit
        def made() -> nnx.Module:
            model = make()
            _replace(model, self._policies, self.report)
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

    Modules of NNX are made with `build` of the context. Arguments are those of
    `inject`.

    Raises:
        PolicyError: as `inject`, when the block ends.
    """
    made = policies_of(policies, implementations, right_padded)
    inside = Inside(made, Report(strict=strict))
    with nn.intercept_methods(_interceptor(made, inside.report)):
        yield inside
    inside.report.check()
