"""Compares what runs on the devices with what one device computes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cfp
from cfp.analysis.layout import Choice, lay_out
from cfp.analysis.presets import presets
from cfp.context import DetailedSettings
from cfp.errors import CfpError
from cfp.kernels.registry import KERNELS
from cfp.models import build, initialise
from cfp.plan.execute import CompiledStep
from cfp.plan.plan import Plan
from cfp.search.requests import constraints_of
from cfp.settings import ConstraintLevel
from cfp_test.gpu.place import Failed, Place, note
from cfp_test.kernels.matrix import ALLOWED, STRATEGIES, packed
from cfp_test.programs.kernels import differentiable, kernel
from cfp_test.random_steps.check import Subject
from cfp_test.random_steps.compare import MOST_ALLOWED
from cfp_test.random_steps.program import Built

_MOST_THREADS = 8
# Relative L2 distance of what follows from a kernel in bfloat16.
_NARROW = 1e-2
# Small leaves that no axis divides stay whole.
_HELD_MARGIN = 0.1


def subject_of(name: str, options: Any, place: Place) -> Subject:
    """Makes a model of the zoo, with its first state and a batch."""
    step, _ = build(name, **options)
    init, make_batch = initialise(name, **options)
    args = init(jax.random.key(0)), make_batch(jax.random.key(1))
    return Subject.of_built(Built(step, args, (0,), ()), place.mesh)


def presets_and_plan(place: Place, name: str) -> str:
    """Compares a model under its presets, and under its plan, with one device.

    Loss, parameters and moments after a step are compared; the first moments after
    the first step are the gradients.
    """
    options = place.sizes.models[name]
    with jax.default_matmul_precision("highest"):
        note(f"{name}: one device")
        subject = subject_of(name, options, place)
        ways, allowed = presets(subject.analysis.frame), subject.allowed()
        note(f"{name}: presets")
        for way, compiled in _compiled(subject, ways, place):
            _compare(f"{name}, {way}", subject, compiled, allowed)
            check_held(name, way, subject, compiled)
        note(f"{name}: planning")
        plan = _plan(subject.built, place)
        note(f"{name}: its plan")
        _compare(f"{name}, the plan", subject, plan.compile_bound(), allowed)
    few = sum(one > MOST_ALLOWED for one in allowed)
    noise = f", {few} of which rounding decides" if few else ""
    return f"{len(allowed)} results{noise}, under {', '.join(ways)}, a plan"


def _compare(
    what: str, subject: Subject, compiled: CompiledStep, allowed: Sequence[float]
) -> None:
    """Compares a step with one device.

    Raises:
        Failed: a result is further off than is allowed.
    """
    if wrong := subject.differs(compiled, allowed):
        worst = max(wrong, key=lambda one: one.distance)
        raise Failed(
            f"{what}: {worst.name} is off by {worst.distance:.1e}, allowed are "
            f"{worst.allowed:.1e}; so are {len(wrong)} of {len(allowed)} results"
        )


def _compiled(
    subject: Subject, ways: Mapping[str, Choice], place: Place
) -> Iterator[tuple[str, CompiledStep]]:
    """Compiles a step in several ways, some at once."""
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        built = [
            pool.submit(compile_choice, subject, choice) for choice in ways.values()
        ]
        for name, one in zip(ways, built, strict=True):
            yield name, one.result()


def _plan(built: Built, place: Place) -> Plan:
    return cfp.plan(
        built.fn,
        *built.args,
        donate_argnums=built.donated,
        mesh=place.mesh,
        settings=DetailedSettings(in_context=False, **place.sizes.settings),
        cache_dir=place.store,
        quiet=True,
    )


def compile_choice(
    subject: Subject,
    choice: Choice,
    level: ConstraintLevel = ConstraintLevel.EVERYTHING,
    options: Mapping[str, str] | None = None,
) -> CompiledStep:
    """Compiles a step under a choice, with options of the compiler."""
    layout = lay_out(subject.analysis.frame, choice)
    ins = [layout.arg_spec(i) for i in range(len(subject.step.avals))]
    constraints = constraints_of(subject.analysis, choice, level)
    outs = layout.output_specs()
    return subject.quickly_compiled(ins, outs, constraints, options)


def check_held(name: str, way: str, subject: Subject, compiled: CompiledStep) -> None:
    """Checks the share of the state that each device has under a preset.

    Values do not show a sharding that is wrong: a program computes the same, and takes
    more memory or time.

    Raises:
        Failed: it is another share than the preset is for.
    """
    devices = subject.mesh.size
    # A parameter and its two moments.
    shares = {
        "data_parallel": 1.0,
        "zero1": (1 + 2 / devices) / 3,
        "fully_sharded": 1 / devices,
    }
    wanted = shares.get(way)
    if wanted is None:
        return
    state = len(jax.tree.leaves(subject.built.args[0]))
    held = whole = 0
    for aval, sharding in list(
        zip(subject.step.avals, compiled.in_shardings, strict=True)
    )[:state]:
        held += int(np.prod(sharding.shard_shape(aval.shape)))
        whole += int(np.prod(aval.shape))
    if abs(held / whole - wanted) > _HELD_MARGIN:
        raise Failed(
            f"{name}, {way}: each device has {held / whole:.2f} of the state, and "
            f"{wanted:.2f} were expected"
        )


# -- kernels of attention ----------------------------------------------------------


def kernels(place: Place) -> str:
    """Compares each kernel of attention that loads with a float32 oracle.

    Output and gradients, under each mask that it can; then over all devices.
    """
    said = []
    for name in KERNELS:
        said.append(f"{name}: {_kernel(name, place)}")
    return "; ".join(said)


MASKS = ("causal", "full", "window", "packed")


def _kernel(name: str, place: Place) -> str:
    """Returns the worst distance of a kernel, and what it cannot; or why it cannot."""
    ran, refused = list[tuple[float, str]](), dict[str, str]()
    ways = [(mask, "") for mask in MASKS]
    if len(place.devices) > 1:
        of_one_axis = [way for way, axes in STRATEGIES.items() if len(axes) == 1]
        ways += [("causal", way) for way in of_one_axis]
    for mask, way in ways:
        what = f"{mask}{f', {way}' if way else ''}"
        try:
            distance = _distance(name, mask, way, place)
        except CfpError as error:
            reason = str(error).partition(f"{name}: ")[2].partition("\n")[0]
            refused[what] = reason or str(error)
            continue
        ran.append((distance, what))
        if not distance <= ALLOWED[place.sizes.dtype]:
            raise Failed(
                f"{name}, {what}: off by {distance:.1e}, allowed are "
                f"{ALLOWED[place.sizes.dtype]:.0e}"
            )
    if not ran:
        return f"not here: {refused['causal']}"
    worst, what = max(ran)
    left = f", {len(refused)} refused" if refused else ""
    return f"{len(ran)} ways{left}, off by {worst:.1e} at most ({what})"


def _distance(name: str, mask: str, way: str, place: Place) -> float:
    """Returns the relative L2 distance of the output or a gradient, the furthest."""
    arrays, given = _arrays(mask, place)
    where = {"mesh": place.mesh, "strategy": STRATEGIES[way]} if way else {}

    def run(*arrays: jax.Array) -> Any:
        *qkv, dout = arrays
        out, pull = jax.vjp(
            lambda q, k, v: cfp.attention(
                q, k, v, **given, **where, implementation=name
            ),
            *qkv,
        )
        return out, *pull(dout)

    found = [np.asarray(x, np.float32) for x in jax.jit(run)(*arrays)]
    return max(
        float(np.linalg.norm(mine - wanted) / np.linalg.norm(wanted))
        for mine, wanted in zip(found, _oracle(mask, place), strict=True)
    )


def _arrays(mask: str, place: Place) -> tuple[list[jax.Array], dict[str, Any]]:
    """Draws q, k, v and a gradient, with what `cfp.attention` is given for a mask."""
    batch, tokens, heads, kv_heads, head_dim = place.sizes.attention
    devices = len(place.devices)
    batch, heads = _up(batch, devices), _up(heads, devices)
    keys = jax.random.split(jax.random.key(7), 4)
    counts = (heads, kv_heads, kv_heads, heads)
    arrays = [
        jax.random.normal(key, (batch, tokens, n, head_dim)).astype(place.sizes.dtype)
        for key, n in zip(keys, counts, strict=True)
    ]
    given: dict[str, Any] = {"causal": mask != "full"}
    if mask == "window":
        given["window"] = tokens // 4
    if mask == "packed":
        given["segment_ids"] = packed(tokens, batch)
    return arrays, given


@cache
def _oracle(mask: str, place: Place) -> list[np.ndarray]:
    """Computes output and gradients in float32, with all scores in memory."""
    arrays, given = _arrays(mask, place)
    # Written down here once more: a mask that kernels have in common may be wrong.
    batch, tokens = arrays[0].shape[:2]
    positions = np.arange(tokens)
    behind = positions[:, None] - positions[None]
    seen = np.ones((batch, tokens, tokens), bool)
    if given["causal"]:
        seen &= behind >= 0
    if "window" in given:
        seen &= behind <= given["window"]
    if "segment_ids" in given:
        ids = np.asarray(given["segment_ids"])
        seen &= ids[:, :, None] == ids[:, None]

    def right(*arrays: jax.Array) -> Any:
        *qkv, dout = (x.astype(jnp.float32) for x in arrays)
        out, pull = jax.vjp(lambda q, k, v: _attention(q, k, v, seen), *qkv)
        return out, *pull(dout)

    with jax.default_matmul_precision("highest"):
        return [np.asarray(x) for x in jax.jit(right)(*arrays)]


def _attention(q: Any, k: Any, v: Any, seen: np.ndarray) -> jax.Array:
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def _up(count: int, devices: int) -> int:
    """Returns the least multiple of the devices that is no less than a count."""
    return -(-count // devices) * devices


def kernel_in_step(place: Place) -> str:
    """Plans a step that calls a kernel itself, and compares it with one device.

    On GPUs it is cuDNN's, by `jax.nn.dot_product_attention`; elsewhere an op that is
    sharded in the same way, by `custom_partitioning`.
    """
    batch, tokens, heads, _, depth = place.sizes.attention
    batch, width = _up(batch, len(place.devices)), heads * depth
    own = differentiable(kernel("strict"))

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if not place.is_gpu:
            return own(q, k, v)
        q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
        found = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation="cudnn"
        )
        return found.astype(jnp.float32)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        y = x
        for w in params:
            q, k, v = ((y @ w[c]).reshape(batch, tokens, heads, depth) for c in "qkv")
            y = y + attention(q, k, v).reshape(x.shape) @ w["o"]
            y = y + jnp.tanh(y @ w["up"]) @ w["down"]
        return jnp.mean((y - x) ** 2)

    def train_step(params: Any, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        return new, gradients, value

    sizes = {c: (width, width) for c in "qkvo"}
    sizes |= {"up": (width, 2 * width), "down": (2 * width, width)}
    drawn = iter(jax.random.split(jax.random.key(3), 2 * len(sizes) + 1))
    params = [
        {n: jax.random.normal(next(drawn), s) / s[0] ** 0.5 for n, s in sizes.items()}
        for _ in range(2)
    ]
    x = jax.random.normal(next(drawn), (batch, tokens, width))
    kinds = ("narrow_values",) if place.is_gpu else ()
    subject = Subject.of_built(Built(train_step, (params, x), (0,), kinds), place.mesh)
    with jax.default_matmul_precision("highest"):
        allowed = subject.allowed()
        if place.is_gpu:  # One device rounds to bfloat16 in the same kernel.
            allowed = [_NARROW] * len(allowed)
        if not max(allowed) <= MOST_ALLOWED:
            raise Failed(f"rounding decides what the step computes: {max(allowed):.1e}")
        plan = _plan(subject.built, place)
        compiled = plan.compile_bound()
        _compare("the plan", subject, compiled, allowed)
    if plan.replicated_ops:
        raise Failed(f"every device runs in full: {', '.join(plan.replicated_ops)}")
    calls = compiled.as_text().count("__cudnn$fmha")
    if place.is_gpu and not calls:
        raise Failed("cuDNN's kernel is not in the compiled program")
    ran = f"cuDNN's kernel {calls} times in the program" if place.is_gpu else "an op"
    return f"{ran}, sharded; {plan.winner}: {len(allowed)} results are one device's"
