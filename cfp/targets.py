"""Targets of commands: a model of cfp.models, or the user's function.

A target is a model's name followed by its options, or ``file.py:function`` or
``package.module:function``. A user's function returns ``(train_step, args)``; the
arguments are arrays or ``jax.ShapeDtypeStruct`` s. The function's parameters are
options: ``--batch 18`` calls it with ``batch=18``.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import tree_leaves, tree_unflatten

from cfp import models
from cfp.errors import CfpError, NoSuchFile, known_names, place_of
from cfp.models.model import ModelOption, Scalar
from cfp.profiling.inputs import counts, random_values
from cfp.program.calling import released, together
from cfp.program.memory import put
from cfp.program.part import key_name, whole
from cfp.program.step import FlatStep, flatten_step
from cfp.program.trace import planning_mesh, trace

_EXAMPLE = """\
def tiny():
    def train_step(w, x):
        return w - 0.1 * jax.grad(lambda w: (x @ w).sum())(w)
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    return train_step, (shape, shape)"""

_TYPES = {kind.__name__: kind for kind in (bool, int, float, str)}

MakeArgs = Callable[[Sequence[Any], int], tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A step and its arguments.

    Attributes:
        donate: positions of arguments that the step may overwrite.
        static: positions of arguments that are not arrays.
        make_args: function of (a pytree of shardings for each argument that is not
            static, a seed). Returns all arguments: arrays moved, shapes drawn.
    """

    name: str
    step: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    static: tuple[int, ...] = ()
    make_args: MakeArgs

    def flatten(self) -> FlatStep:
        """Returns the step as a function of flat arrays; see `flatten_step`."""
        return flatten_step(
            self.step, self.args, static_argnums=self.static, donate_argnums=self.donate
        )


def resolve(
    text: str,
    options: Sequence[str] = (),
    *,
    donate: Sequence[int] = (),
    static: Sequence[int] = (),
) -> Target:
    """Finds a target by its text on the command line.

    Args:
        options: words of the command line that the command itself does not know.
        donate: positions of donated arguments of a user's step; a model takes none.
        static: the same of arguments that are not arrays.

    Raises:
        CfpError: the target, an option or a position is wrong, or the user's code
            fails or does not return a step with arguments.
    """
    if ":" in text:
        return _function_target(text, options, tuple(donate), tuple(static))
    if text.startswith("-"):
        raise CfpError(
            f"Expected TARGET, got {text}. Put options behind TARGET; see --help."
        )
    if text.endswith(".py") and Path(text).is_file():
        return _function_target(f"{text}:", options, tuple(donate), tuple(static))
    if text not in models.MODELS:
        close = difflib.get_close_matches(text, models.MODELS, 1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise CfpError(
            f"There is no target {text!r}.{hint} Targets are "
            f"models ({', '.join(models.MODELS)}), file.py:function and "
            "package.module:function."
        )
    if donate or static:
        raise CfpError(
            "--donate and --static are for functions of your own: a model donates its "
            "state and has no static arguments. Leave them out."
        )
    return model_target(text, parse_options(text, models.find(text).options, options))


# --------------------------------------------------------------------------- models


def model_target(name: str, options: dict[str, Scalar]) -> Target:
    """Makes a target of a model; its state is donated. Errors are `models.build`'s."""
    step, args = models.build(name, **options)
    init_fn, make_batch = models.initialise(name, **options)

    def make_args(shardings: Sequence[Any], seed: int) -> tuple[Any, ...]:
        state_key, batch_key = jax.random.split(jax.random.key(seed))
        state = jax.jit(init_fn, out_shardings=shardings[0])(state_key)
        batch = jax.jit(make_batch, out_shardings=shardings[1])(batch_key)
        return state, batch

    return Target(name=name, step=step, args=args, donate=(0,), make_args=make_args)


def parse_options(
    target: str, options: Sequence[ModelOption], words: Sequence[str]
) -> dict[str, Scalar]:
    """Reads the given options of a target from ``--layers 4 --hidden=1024 --tied``.

    Raises:
        CfpError: an option is unknown, lacks its value, or has one of another type.
    """
    known = {option.flag: option for option in options}
    found: dict[str, Scalar] = {}
    rest = list(words)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        flag = flag.replace("_", "-")
        positive = known.get("--" + flag.removeprefix("--no-"))
        if flag.startswith("--no-") and positive and positive.type is bool:
            found[positive.name] = False
            continue
        option = known.get(flag)
        if option is None:
            how = " Parameters of the function are its options." * (":" in target)
            if flag.isdigit():
                how = " Several values of an option are joined by commas, as in 0,1."
            raise CfpError(
                f"{target} has no option {flag}, and neither has the command (--help). "
                f"{known_names(flag, known)}{how}"
            )
        if not equals:
            if option.type is bool and (not rest or rest[0].startswith("--")):
                value = "true"
            elif not rest:
                raise CfpError(f"{flag} needs a value: {option.doc}.")
            else:
                value = rest.pop(0)
        found[option.name] = _parse(option, flag, value)
    return found


def _parse(option: ModelOption, flag: str, text: str) -> Scalar:
    try:
        if option.type is bool:
            return {"true": True, "false": False}[text.lower()]
        return option.type(text)
    except (KeyError, ValueError) as error:
        raise CfpError(
            f"{flag} cannot be {text!r}. Give a value of type "
            f"{option.type.__name__}: {option.doc}."
        ) from error


# ------------------------------------------------------------------------ functions


def _function_target(
    text: str, words: Sequence[str], donate: tuple[int, ...], static: tuple[int, ...]
) -> Target:
    where, _, name = text.rpartition(":")
    is_file = where.endswith(".py")
    module = _load_file(where, name) if is_file else _load_module(where, text)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        functions = _callable_as_they_are(module)
        there = known_names(name, functions) if functions else f"Write:\n{_EXAMPLE}"
        lacks = f"{where} has no target {name!r}"
        said = lacks if name else f"Name a function, as in {where}:NAME"
        raise CfpError(f"{said}. {there}")
    parameters = _parameters(found)
    options = [_option(parameter) for parameter in parameters.values()]
    given = parse_options(text, options, words)
    required = [
        n for n, p in parameters.items() if p.default is p.empty and n not in given
    ]
    if required:
        raise CfpError(
            f"{text} needs arguments: {', '.join(required)}. Give options (--"
            f"{required[0]} 1) or defaults, or wrap the function:\n{_EXAMPLE}"
        )
    made = _guarded(lambda: found(**given), f"{text} raised")
    is_pair = isinstance(made, tuple) and len(made) == 2 and callable(made[0])
    if not (is_pair and isinstance(made[1], list | tuple)):
        raise CfpError(
            f"{text} returns {_type_text(made)}, not a step and a tuple of its "
            f"arguments. Write:\n{_EXAMPLE}"
        )
    step, args = made[0], tuple(made[1])
    for option, positions in (("--donate", donate), ("--static", static)):
        wrong = [p for p in positions if not 0 <= p < len(args)]
        if wrong:
            raise CfpError(
                f"{option} {wrong[0]} is no argument's position: the step's "
                f"{len(args)} arguments are numbered from 0."
            )

    make = partial(_made_args, step, args, static)
    return Target(
        name=text, step=step, args=args, donate=donate, static=static, make_args=make
    )


def _option(parameter: inspect.Parameter) -> ModelOption:
    """Makes an option of a parameter; type: its default's, its annotation's, or int."""
    kind = _TYPES.get(type(parameter.default).__name__)
    annotation = getattr(parameter.annotation, "__name__", parameter.annotation)
    kind, doc = kind or _TYPES.get(str(annotation), int), "a parameter of the function"
    name, default = parameter.name, parameter.default
    return ModelOption(name=name, type=kind, default=default, doc=doc)


def _callable_as_they_are(module: ModuleType) -> list[str]:
    """Lists names of functions defined in a module, callable without arguments."""
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and all(p.default is not p.empty for p in _parameters(value).values())
    ]


def _load_file(where: str, function: str) -> ModuleType:
    path = Path(where)
    if not path.is_file():
        there = sorted(p.name for p in path.parent.glob("*.py"))
        raise NoSuchFile(f"There is no file {where}. {known_names(path.name, there)}")
    # As for a script, modules in the same folder can be imported.
    sys.path.insert(0, str(path.resolve().parent))
    name = f"cfp_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dataclasses look their module up.
    loader = spec.loader
    _guarded(lambda: loader.exec_module(module), f"{where} cannot be imported:")
    return module


def _load_module(where: str, text: str) -> ModuleType:
    # A console script has its own folder here, and `python -m` the current folder.
    sys.path.insert(0, str(Path.cwd()))
    top = where.split(".")[0]
    try:
        missing = importlib.util.find_spec(top) is None
    except (ImportError, ValueError):
        missing = True
    if missing:
        raise CfpError(
            f"There is no target {text!r}: no module {top!r} in the current folder "
            "or among the installed. Did you mean "
            f"{where.replace('.', '/')}.py:{text.rpartition(':')[2]}?"
        )
    return _guarded(
        lambda: importlib.import_module(where), f"{where} cannot be imported:"
    )


def _guarded(call: Callable[[], Any], what: str) -> Any:
    """Calls the user's code; its errors become CfpErrors that name its line, if any."""
    try:
        return call()
    except CfpError:
        raise
    except Exception as error:
        said = f"{what} {type(error).__name__}: {error}"
        raise CfpError(f"{said}{place_of(error)}") from error


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns a function's named parameters; empty if it has no signature."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: p for name, p in parameters.items() if p.kind not in variadic}


def _type_text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(v).__name__ for v in value) or 'nothing'}"
    return f"something of type {type(value).__name__}"


def _rows(
    step: FlatStep, places: Sequence[Any], which: Collection[int]
) -> dict[int, int]:
    """Returns {index: fewest rows} of those leaves of `which` that pick rows."""
    place = places[0]
    if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh):
        mesh = planning_mesh(place.mesh)
    else:
        mesh = Mesh(np.array([*place.device_set]), ("all",))
    program, _ = trace(step, mesh)
    found = counts(program, whole(program).ops)
    values = ((i, program.args[i]) for i in which)
    return {i: found[value] for i, value in values if value in found}


def _made_args(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    static: tuple[int, ...],
    shardings: Sequence[Any],
    seed: int,
) -> tuple[Any, ...]:
    """Puts arrays on devices, and draws numbers for shapes; see `Target.make_args`."""
    flat = flatten_step(step, args, static_argnums=static)
    leaves, places = flat.flatten(args, {}), tree_leaves(together(list(shardings)))
    shapes = (i for i, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct))
    drawn = {i: flat.avals[i] for i in shapes}
    # Integers with dims may be indices of rows.
    integers = {i for i, x in drawn.items() if jnp.issubdtype(x.dtype, jnp.integer)}
    picking = {i for i in integers if drawn[i].shape}
    rows = _rows(flat, places, picking) if picking else {}

    def draw() -> dict[int, jax.Array]:
        return {
            i: _random((seed, i), x.shape, x.dtype, rows.get(i, 2))
            for i, x in drawn.items()
        }

    made = jax.jit(draw, out_shardings={i: places[i] for i in drawn})()
    arrays = (
        made[i] if i in drawn else put(jnp.asarray(x), place)
        for i, (x, place) in enumerate(zip(leaves, places, strict=True))
    )
    dynamic = iter(released(tree_unflatten(flat.in_tree, arrays))[0])
    return tuple(a if i in static else next(dynamic) for i, a in enumerate(args))


def _random(
    seeds: tuple[int, int], shape: tuple[int, ...], dtype: Any, rows: int
) -> jax.Array:
    """Draws random keys, positive floats, or integers below `rows` (a scalar: 1)."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        first = jax.random.key(seeds[1], impl=key_name(dtype))
        return jax.random.split(jax.random.fold_in(first, seeds[0]), shape)
    [salt] = map(int, np.random.SeedSequence(seeds).generate_state(1))
    return random_values(shape, jnp.dtype(dtype), count=rows, salt=salt)
