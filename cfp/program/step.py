"""A step function as a function of flat arrays.

A compiled step's branches and loops may depend on its arguments' values. Measurements
use example scalars and small masks, and make up all others (`cfp.profiling.inputs`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cached_property
from itertools import combinations, compress
from types import NoneType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, Sharding, SingleDeviceSharding
from jax.tree_util import (
    SequenceKey,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_structure,
    tree_unflatten,
)

from cfp.errors import PlanMismatch, StepNotTraceable, place_of, summary_of
from cfp.printable import few
from cfp.program import calling
from cfp.program.jaxprs import check_settings, cudnn_expected, do_the_same
from cfp.program.memory import (
    HOST,
    in_memory,
    is_explicit,
    memory_kind,
    placed_avals,
    result_memory_kinds,
    with_leaves_in,
)
from cfp.program.partitioned import traced_with_callbacks

# Kinds of NumPy's dtypes that hold objects, text and dates.
_NO_NUMBERS = "OSUMm"
# JAX's name of an argument's leaf in errors.
_LEAF = re.compile(r"\bleaves\[(\d+)\]")


@dataclass(frozen=True)
class FlatStep:
    """A step function seen as a function of its flat array arguments.

    Attributes:
        avals: shape, dtype and weak type of each leaf of the dynamic arguments.
        donated: for each leaf, True if the step may overwrite it.
        arg_names: a path for each leaf, such as ``state/params/dense/kernel``.
        in_tree: the structure of ``(dynamic args, kwargs)``. Leaves of modules that are
            no arrays may be part of it; see `fixed` in `cfp.program.calling`.
        static: (position or keyword, value) of static arguments, or of their defaults.
        examples: for each leaf its value if it is a scalar or small mask, else None.
        memory_kinds: for each leaf the kind of its host memory, "" for device memory.
        explicit: for each leaf its sharding on a mesh with explicit axes, or None.
            Tracing may need it; the plan chooses another.
        in_host: (argument leaf, result leaf of its new value) pairs that stay in host
            memory between steps; see `with_state_in_host`.
        precision: of large products, see `PlannerSettings`; "" as they are written.
        shares: False if the step's own jax.jit copies objects at each of their places.
    """

    fn: Callable[..., Any]
    avals: tuple[jax.ShapeDtypeStruct, ...]
    donated: tuple[bool, ...]
    arg_names: tuple[str, ...]
    in_tree: Any
    static: tuple[tuple[int | str, Any], ...]
    examples: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    memory_kinds: tuple[str, ...] = ()
    explicit: tuple[NamedSharding | None, ...] = ()
    in_host: tuple[tuple[int, int], ...] = ()
    precision: str = ""
    shares: bool = True
    programs: dict[Any, Any] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    @cached_property
    def result_memory_kinds(self) -> tuple[str, ...]:
        """For each result leaf the kind of its host memory, "" for device memory."""
        kinds = self.memory_kinds or ("",) * len(self.avals)
        return result_memory_kinds(self.traced.jaxpr.jaxpr, kinds)

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Returns the leaves of a call's dynamic arguments; does not check their types.

        Raises:
            PlanMismatch: a static argument has another value or type, or is left out;
                or the arguments have another structure.
        """
        dynamic, changed = self._split(args, kwargs)
        if changed is not None:
            key, value, got = changed
            raise PlanMismatch(
                f"Static argument {key} was {value!r} when the step was planned, and "
                f"is {got!r} now. Plan again for the new value."
            )
        dynamic = calling.together(dynamic, self.shares)
        leaves, tree = tree_flatten(dynamic)
        if tree != self.in_tree:
            leaves, tree = tree_flatten(calling.fixed(dynamic))
        if tree != self.in_tree:
            changes = self.changes(tree, range(len(leaves)))
            raise PlanMismatch(
                "The arguments' structure changed since the step was planned: "
                f"{changes}. Pass the planned structure, or plan again."
            )
        return leaves

    def leaves_of(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any] | None:
        """Like :meth:`flatten`, but faster; None if `flatten` has to be called.

        Leaves are not checked: each may be any object, even a pytree, but not None.
        """
        dynamic, changed = self._split(args, kwargs)
        if self._has_fixed:
            shares = self.shares and any(self._in_objects)
            dynamic = calling.fixed(calling.together(dynamic, shares))
        try:
            leaves = self.in_tree.flatten_up_to(dynamic)
        except (ValueError, TypeError, RuntimeError):  # Of a text of deleted arrays.
            return None
        own = [*map(id, compress(leaves, self._in_objects))]
        shared = len({*own}) < len(own)  # Two objects may be one now.
        return None if changed or shared or NoneType in map(type, leaves) else leaves

    def _split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Returns dynamic (args, kwargs), and (key, old, new) of a changed static one.

        Keywords are made positional, and static arguments have their defaults.
        """
        static = dict(self.static)
        if kwargs or not static.keys() <= {*range(len(args))}:
            args, kwargs = calling.by_position(self.fn, args, kwargs, static)
        passed = {**dict(enumerate(args)), **kwargs}
        now = ((key, old, passed.get(key)) for key, old in self.static)
        # Lists compare identity first: a NaN differs from itself.
        changed = (x for x in now if type(x[1]) is not type(x[2]) or [x[1]] != [x[2]])
        return calling.dynamic_part(args, kwargs, static), next(changed, None)

    @cached_property
    def _has_fixed(self) -> bool:
        return calling.has_fixed(self._dynamic)

    @cached_property
    def _in_objects(self) -> list[bool]:
        nodes = tree_leaves(self._dynamic, is_leaf=calling.is_object)
        return [calling.is_object(node) for node in nodes for _ in tree_leaves(node)]

    @cached_property
    def _shared(self) -> list[tuple[str, str]]:
        """Names of (first place, later place) of objects at several places."""
        tree = self._dynamic
        parts = [(path, None) for pair in calling.shared_places(tree) for path in pair]
        named = [x[1] for x in _named_leaves(self.fn, tree, dict(self.static), parts)]
        return [*zip(named[::2], named[1::2], strict=True)]

    def parted(self, names: Sequence[str]) -> str:
        """Returns "A and B": one object in the step, two in `names`; "" if none."""
        later = (
            x for x in self._shared if any(n.startswith(f"{x[1]}/") for n in names)
        )
        return " and ".join(next(later, ()))

    @property
    def other_names(self) -> dict[str, int]:
        """{leaf's name at a later place of its object: the leaf's index}."""
        return {
            later + name.removeprefix(first): i
            for first, later in self._shared
            for i, name in enumerate(self.arg_names)
            if name.startswith(f"{first}/")
        }

    def changes(self, in_tree: Any, leaves: Sequence[Any]) -> str:
        """Describes how arguments changed: order, sharing, leaves, else static data."""
        now, before = tree_unflatten(in_tree, leaves), self._dynamic
        static = {key for key, _ in self.static}
        names = [name for _, name, _ in _named_leaves(self.fn, now, static)]
        gone = [name for name in self.arg_names if name not in names]
        new = [name for name in names if name not in self.arg_names]
        changes = (("missing", gone), ("not there before", new))
        copy = "with a copy of one: jax.tree.map(jnp.copy, ...)"
        for pair, _, tree in self._swaps(now):
            if tree == self.in_tree:
                return f"{pair} are swapped"
        if pair := self.parted(names):
            return f"{pair} are two objects, and were one (pass one, or begin {copy})"
        if pair := replace(self, in_tree=in_tree, avals=leaves).parted(self.arg_names):
            return f"{pair} are one object, and were two (call {copy})"
        if words := [f"{what}: {few(x)}" for what, x in changes if x]:
            return "; ".join(words)
        every = calling.static_differences(before, now)
        differ = next((one for one in every if len(one[0]) > 1), None)
        named = _named_leaves(self.fn, now, static, [differ] if differ else [])
        return "".join(named[0][1:] if named else ["another static value"])

    @property
    def _dynamic(self) -> Any:
        """(args, kwargs) without static arguments, with shapes in place of arrays."""
        return tree_unflatten(self.in_tree, self.avals)

    def with_donated(self, donated: Sequence[bool]) -> FlatStep:
        """Returns the step with other donated leaves, and the same trace if traced."""
        other = replace(self, donated=tuple(donated))
        traced = {"flat_fn", "traced"}.intersection(vars(self))
        vars(other).update({name: vars(self)[name] for name in traced})
        return other

    @cached_property
    def weak(self) -> frozenset[int]:
        """Indices of the weakly typed leaves."""
        return frozenset(i for i, one in enumerate(self.avals) if one.weak_type)

    def with_weak_types(self, places: Set[int]) -> FlatStep:
        """Returns the step with exactly these leaves weakly typed."""
        if places == self.weak:
            return self
        avals = (x.update(weak_type=i in places) for i, x in enumerate(self.avals))
        return replace(self, avals=tuple(avals))

    def with_state_in_host(self, pairs: Sequence[tuple[int, int]]) -> FlatStep:
        """Returns the step with state in host memory between its calls.

        The step moves the state to the devices, computes, and moves the new state back.
        `pairs` are (argument leaf, result leaf of its new value).
        """
        if not pairs:
            return self
        kinds = [*(self.memory_kinds or ("",) * len(self.avals))]
        for argument, _ in pairs:
            kinds[argument] = HOST
        return replace(self, in_host=tuple(pairs), memory_kinds=tuple(kinds))

    @cached_property
    def flat_fn(self) -> Callable[..., Any]:
        """`fn` as a function of leaves, static arguments set; returns its pytree."""

        def flat(*leaves: Any) -> Any:
            ins, outs = ({pair[side] for pair in self.in_host} for side in (0, 1))
            leaves_here = with_leaves_in(leaves, ins, jax.memory.Space.Device)
            result, changed = self._run(self.fn, leaves_here)
            self._changed.extend(changed)
            return with_leaves_in(result, outs, jax.memory.Space.Host)

        flat.__name__ = flat.__qualname__ = getattr(self.fn, "__name__", "step")
        # JAX's errors then show the location of the user's function.
        flat.__dict__["__signature__"] = inspect.signature(flat)
        flat.__dict__["__wrapped__"] = calling.written_function(self.fn)
        return flat

    def _run(self, fn: Callable[..., Any], leaves: Any) -> tuple[Any, dict[str, Any]]:
        """Calls a function on leaves; returns (result, result of `calling.changed`)."""
        dynamic, kwargs = calling.released(tree_unflatten(self.in_tree, leaves))
        args = list(dynamic)
        for key, value in self.static:
            if isinstance(key, int):
                args.insert(key, value)
            else:
                kwargs[key] = value
        names = calling.parameter_names(self.fn)
        names += [f"arg{i}" for i in range(len(names), len(args))]
        passed = {**dict(zip(names, args, strict=False)), **kwargs}
        before = dict(calling.leaves_of_modules(passed))
        result = calling.fixed(calling.together(fn(*args, **kwargs)))
        return result, calling.changed(before, passed, result)

    @cached_property
    def _changed(self) -> list[str]:
        """List of paths of arrays that calls of `flat_fn` set and did not return."""
        return []

    def _lost(self) -> list[str]:
        """Returns paths of arrays that are set in place and not returned."""
        fn, passed = self.fn, {"": self._dynamic}
        if isinstance(fn, jax.stages.Wrapped) and any(
            calling.leaves_of_modules(passed)
        ):
            # jax.jit changes copies, so that the function inside is examined.
            fn = getattr(fn, "__wrapped__", fn)
        if not self._changed and fn is self.fn:
            return []
        return calling.lost_changes(lambda *x: self._run(fn, x), self.avals)

    def _trace(self) -> jax.stages.Traced:
        """Traces on Auto axes; if that fails, on explicit axes if there are any.

        A step's own shard_map may need explicit axes. Other steps do not trace with the
        shardings that their arguments happen to have, or trace to other operations.
        """
        here = SingleDeviceSharding(jax.devices()[0])
        around = jax.sharding.get_abstract_mesh()  # Of `jax.set_mesh`.
        auto = around.update_axis_types(dict.fromkeys(around.axis_names, AxisType.Auto))

        def traced(shardings: Sequence[Sharding]) -> jax.stages.Traced:
            avals = placed_avals(self.avals, in_memory(shardings, self.memory_kinds))
            return traced_with_callbacks(self.flat_fn, avals)

        try:
            with jax.sharding.use_abstract_mesh(auto):
                return traced([here] * len(self.avals))
        except Exception:
            if not any(self.explicit) and auto == around:
                raise
        return traced([one or here for one in self.explicit])

    @cached_property
    def traced(self) -> jax.stages.Traced:
        """`flat_fn` as JAX traced it, once; tracing runs the user's code.

        The code may run again: with explicit axes, or to find lost in-place changes.

        Raises:
            StepNotTraceable: JAX cannot trace the function, its changes of arguments
                would be lost, or it overwrites an array of `calling.arrays_around`.
        """
        check_settings()
        name = self.flat_fn.__name__
        around = calling.arrays_around(self.fn, traced=False)
        try:
            with cudnn_expected():
                traced = self._trace()
        except Exception as error:
            # The user's code may raise any type; some texts contain whole modules.
            text = f"{self.with_paths(summary_of(error, 3))}\n{self._advice(error)}"
            said = f"JAX could not trace {name!r}:{place_of(error)}\n{text}".rstrip()
            raise StepNotTraceable(said) from error
        traced_now = calling.arrays_around(self.fn, traced=True)
        if overwritten := [path for path in traced_now if path in around]:
            raise StepNotTraceable(
                f"The step {name!r} assigns to {few(overwritten)}, which is not one of "
                "its arguments: that happens once, while it is traced, and leaves no "
                "array there. Make it an argument, and return its new value "
                "(docs/frameworks.md, 'Modules that are updated in place')."
            )
        if lost := self._lost():
            given = few([path.partition("/")[0] for path in lost], " and ")
            raise StepNotTraceable(
                f"The step {name!r} changes {few(lost)} in place and does not return "
                f"{'them' if len(lost) > 1 else 'it'}, so that each call loses the "
                f"change. Add {given} to the results that it returns, and pass these "
                "to the next call (docs/frameworks.md, 'Modules that are updated in "
                "place')."
            )
        return traced

    def _advice(self, error: Exception) -> str:
        """Returns what to do about an error of tracing; "" if nothing is known."""
        said, kinds = repr(error), (bool, int, float, complex)
        pairs = zip(self.arg_names, self.examples, strict=True)
        numbers = [name for name, one in pairs if isinstance(one, kinds)]
        if any(hasattr(leaf, "dtype") for leaf in tree_flatten(self.fn)[0]):
            return (
                f"The first argument, a {type(self.fn).__name__}, has arrays of its "
                "own. If it is not the step, pass the step before it."
            )
        if "missing" in said and "required" in said and not place_of(error):
            return (
                "The step needs an argument for each parameter: pass it, or its "
                "shapes, as in cfp.plan(step, state, batch)."
            )
        if "trace level" in said:
            return "Pass modules that the step changes or differentiates as arguments."
        if numbers and "tracer" in said.lower():
            return (
                f"A step that needs the value of {few(numbers)} takes "
                "it by cfp's static_argnums or static_argnames, even if jax.jit around "
                "the step has them."
            )
        if isinstance(error, jax.errors.JAXTypeError | jax.errors.JAXIndexError):
            return "The step must be a function that jax.jit accepts."
        return self._swapped()

    def _swapped(self) -> str:
        """Returns advice if JAX traces the step with two arguments swapped; else ""."""
        dynamic = calling.fixed(calling.released(self._dynamic))
        for names, avals, tree in self._swaps(dynamic):
            if (tuple(avals), tree) == (self.avals, self.in_tree):
                continue  # As large a trace, with the same error.
            run = replace(self, avals=tuple(avals), in_tree=tree)._run
            with suppress(Exception):  # The user's code may raise any type.
                jax.eval_shape(lambda *x, run=run: run(self.fn, x)[0], *avals)
                return f"JAX traces it with {names} swapped. Swap them in your call."
        return ""

    def _swaps(self, dynamic: Any) -> Iterator[tuple[str, list[Any], Any]]:
        """Yields names of two arguments, and leaves and tree with the two swapped."""
        args, kwargs = dynamic
        for i, j in combinations(range(len(args)), 2):
            order = [*args]
            order[i], order[j] = args[j], args[i]
            parts = [((SequenceKey(0), SequenceKey(n)), None) for n in (i, j)]
            named = _named_leaves(self.fn, dynamic, dict(self.static), parts)
            names = " and ".join(repr(name) for _, name, _ in named)
            yield names, *tree_flatten((tuple(order), kwargs))

    def with_paths(self, text: str) -> str:
        """Replaces ``leaves[28]`` in JAX's text by the argument's path."""
        paths = dict(enumerate(self.arg_names))
        return _LEAF.sub(lambda found: paths.get(int(found[1]), found[0]), text)

    @property
    def inner_jit_donates(self) -> bool:
        """True if only the step's own jax.jit donates, which has no effect here."""
        wrapped = isinstance(self.fn, jax.stages.Wrapped)
        calls = self.traced.jaxpr.eqns if wrapped and not any(self.donated) else ()
        return any(any(call.params.get("donated_invars", ())) for call in calls)


def flatten_step(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    precision: str = "",
) -> FlatStep:
    """Returns a step as a function of the flat array arguments of one of its calls.

    As in ``jax.jit``, arguments are known by position and by name. Static arguments
    have their defaults if they are left out. Weak types follow `typed_as_returned`,
    which may trace the step.

    Args:
        args: arrays, numbers, ``jax.ShapeDtypeStruct`` s, pytrees of them; or static.
        static_argnums, static_argnames: arguments whose values are part of the program.
        donate_argnums, donate_argnames: arguments whose arrays the step may overwrite.
        precision: see `FlatStep`.

    Raises:
        StepNotTraceable: JAX cannot take a leaf, hash a static argument, or trace.
        OptionError: a name or a position is unknown.
    """
    args, kwargs = calling.by_position(fn, args, kwargs or {})
    passed = {**dict(enumerate(args)), **kwargs}
    static_keys = calling.chosen(fn, passed, "static", static_argnums, static_argnames)
    donate = calling.chosen(fn, passed, "donate", donate_argnums, donate_argnames)
    args, kwargs = calling.by_position(fn, args, kwargs, static_keys)
    passed = {**dict(enumerate(args)), **kwargs}
    static = {key: value for key, value in passed.items() if key in static_keys}
    for key, value in static.items():
        calling.check_hashable(key, value)
    dynamic = calling.dynamic_part(args, kwargs, static)
    shares = not isinstance(getattr(fn, "__func__", fn), type(jax.jit(abs)))
    both = calling.together((dynamic, [*static.values()]), shares) if static else ()
    if any(one[0] != other[0] for one, other in calling.shared_places(both)):
        raise StepNotTraceable(
            "A static argument and another one hold one object, whose first values the "
            "step would read in each call. Make neither static."
        )
    dynamic = calling.fixed(calling.together(dynamic, shares))
    leaves = _named_leaves(fn, dynamic, static)
    shardings = [getattr(leaf, "sharding", None) for _, _, leaf in leaves]
    step = FlatStep(
        fn,
        avals=tuple(abstract(leaf, name) for _, name, leaf in leaves),
        donated=tuple(key in donate for key, _, _ in leaves),
        arg_names=tuple(name for _, name, _ in leaves),
        in_tree=tree_structure(dynamic),
        static=tuple(static.items()),
        examples=tuple(x if calling.may_be_given(x) else None for _, _, x in leaves),
        memory_kinds=tuple(memory_kind(leaf) for _, _, leaf in leaves),
        explicit=tuple(x if is_explicit(x) else None for x in shardings),
        precision=precision,
        shares=shares,
    )
    for aval, name in zip(step.avals, step.arg_names, strict=True):
        _check_width(aval.dtype, name)
    return typed_as_returned(step)


def typed_as_returned(step: FlatStep) -> FlatStep:
    """Returns the step with the weak types that its state has after its first calls.

    ``jnp.full(shape, 0.1)`` is weakly typed, and an optimizer's result is not:
    ``jax.jit`` compiles again for the second call. A counter that begins as ``0`` stays
    weakly typed until a checkpoint restores it. It is strongly typed here if the
    program is the same. State: arguments with a donated part and a new value in the
    results (`successors`).
    """
    every = enumerate(arguments_of(step.in_tree))
    state = {n: one for n, one in every if any(step.donated[i] for i in one[0])}
    while any(i in step.weak for places, _ in state.values() for i in places):
        news = ((state[n][0], new) for n, _, new in successors(step, state))
        returned = [pair for one in news for pair in zip(*one, strict=True)]
        strong = {argument for argument, result in returned if not result.weak_type}
        if strong.isdisjoint(step.weak):
            restored = step.with_weak_types(step.weak - {i for i, _ in returned})
            with suppress(StepNotTraceable):
                traces = [one.traced.jaxpr.jaxpr for one in (step, restored)]
                return restored if do_the_same(*traces) else step
            return step
        step = step.with_weak_types(step.weak - strong)
    return step


def arguments_of(in_tree: Any) -> Iterator[tuple[range, Any]]:
    """Yields (indices of its leaves, structure) for each argument; not static ones."""
    start = 0
    for tree in (one for part in in_tree.children() for one in part.children()):
        yield range(start, start + tree.num_leaves), tree
        start += tree.num_leaves


def successors(
    step: FlatStep, state: Mapping[int, tuple[range, Any]]
) -> Iterator[tuple[int, int | None, Sequence[Any]]]:
    """Yields (argument, position of its new value, the new value's types).

    A new value is the whole result (position None), or the first unused element of a
    result tuple or list, of equal structure, shapes and dtypes. Arguments without a new
    value are left out. `state` is {argument: (its leaves, its structure)}.
    """
    results = step.traced.jaxpr.out_avals
    out, start = tree_structure(step.traced.out_info), 0
    found: list[tuple[int | None, Sequence[Any], Any]] = [(None, results, out)]
    if (node := out.node_data()) is not None and issubclass(node[0], tuple | list):
        for place, tree in enumerate(out.children()):
            found.append((place, results[start : start + tree.num_leaves], tree))
            start += tree.num_leaves
    for argument, (places, tree) in state.items():
        kinds = [(step.avals[i].shape, step.avals[i].dtype) for i in places]
        for one in found:
            if one[2] == tree and [(r.shape, r.dtype) for r in one[1]] == kinds:
                yield argument, *one[:2]
                found.remove(one)
                break


def _named_leaves(
    fn: Callable[..., Any],
    dynamic: Any,
    static: Collection[int | str],
    parts: Sequence[tuple[Any, Any]] | None = None,
) -> list[tuple[int | str, str, Any]]:
    """Returns (position or keyword, path, value) of each leaf of a call's arguments.

    `parts` are (JAX key path, value) of other parts, in place of the leaves.
    """
    parameters = calling.parameter_names(fn)
    total = len(dynamic[0]) + len(static)
    positions = [i for i in range(total) if i not in static]
    found = []
    for path, leaf in tree_flatten_with_path(dynamic)[0] if parts is None else parts:
        if path[0].idx == 0:
            key = positions[path[1].idx]
            root = parameters[key] if key < len(parameters) else f"arg{key}"
        else:
            root = key = str(path[1].key)
        rest = jax.tree_util.keystr(path[2:], simple=True, separator="/")
        found.append((key, f"{root}/{rest}" if rest else root, leaf))
    return found


def _check_width(dtype: Any, name: str) -> None:
    """Raises StepNotTraceable for types of less than 8 bits if JAX is below 0.11."""
    key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    narrow = not key and jax.dtypes.itemsize_bits(dtype) < 8
    if narrow and jax.__version_info__ < (0, 11):
        raise StepNotTraceable(
            f"JAX {jax.__version__} cannot pass argument {name!r} of type {dtype} to a "
            "sharded program. Use JAX 0.11 or newer, or pass 8 bits or more."
        )


def abstract(leaf: Any, name: str) -> jax.ShapeDtypeStruct:
    """Returns shape, JAX's dtype and weak type of an array, number or shape.

    Raises:
        StepNotTraceable: the leaf is a tracer, a jax.Ref, an array of text, or another
            object.
    """
    if isinstance(leaf, Tracer):
        raise StepNotTraceable(
            "A step is planned and compiled as a whole, and cannot be called inside "
            "jax.jit, jax.grad or the like. Plan the outer function instead."
        )
    if isinstance(leaf, jax.Ref):
        raise StepNotTraceable(
            f"Argument {name!r} is a jax.Ref. Pass the array in it (ref[...]), make "
            "the Ref inside the step, and return its last value (jax.freeze)."
        )
    weak = getattr(leaf, "weak_type", False)
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)
    is_typed = isinstance(leaf, np.ndarray | np.generic | jax.ShapeDtypeStruct)
    if is_typed and getattr(leaf.dtype, "kind", "V") not in _NO_NUMBERS:
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
        return jax.ShapeDtypeStruct(leaf.shape, dtype, weak_type=weak)
    if isinstance(leaf, bool | int | float | complex):
        dtype = jax.dtypes.canonicalize_dtype(jax.dtypes.result_type(leaf))
        # Bools are not weakly typed.
        return jax.ShapeDtypeStruct((), dtype, weak_type=not isinstance(leaf, bool))
    kind = getattr(leaf, "dtype", type(leaf).__name__)
    way_out = "name the argument in static_argnums or static_argnames"
    remedy = "Pass an array or a jax.ShapeDtypeStruct"
    if isinstance(getattr(leaf, "shape", None), Mapping):
        remedy = "Pass the mesh of the devices by keyword, mesh="
    elif is_dataclass(leaf):
        way_out = f"register its class (jax.tree_util.register_dataclass), or {way_out}"
    elif "/" in name:
        way_out = f"pass only the arrays in {name.partition('/')[0]!r}"
    raise StepNotTraceable(
        f"Argument {name!r} is a {kind}, which is not an array that JAX takes. "
        f"{remedy}, or {way_out}."
    )
