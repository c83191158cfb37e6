"""Plans for one GPU beside the same step under `jax.jit`, timed in turn.

    python -m cfp_test.bench one_gpu --out FILE.json [--models gpt llama bert moe]
        [--shares 0.6 0.4] [--seconds 560] [--rounds 8] [--tiny]

On one device nothing is sharded: a plan chooses kernels, what is rematerialized and
what the memory of the host holds between steps. Models are those of
`side_by_side`, four layers at full width. Ways to run a step:

jit             as it is written
kernel, jit     the model calls cuDNN's attention itself
remat, jit      each layer in `jax.checkpoint`, with cuDNN's attention
planned         at cfp's defaults, from an empty store
planned, FP8    the same, with FP8 products
planned, SHARE  as planned, within SHARE of the memory that *jit* needs

All take and return the same state, which goes from one to the next; a sample is the
mean of five steps in a row after two. The file is written after each model.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

import cfp
from cfp.models.layers import attending_by
from cfp.models.model import Scalar
from cfp.targets import Target, resolve
from cfp_test.bench.configs import small
from cfp_test.bench.side_by_side import Piece, cudnn_attention

MODELS = ("gpt", "llama", "bert", "moe")
SHARES = (0.6, 0.4)
WARM_UP, STEPS = 2, 5
# cuDNN has no kernel for the heads of this one.
WITHOUT_KERNEL = ("moe",)

Step = Callable[..., Any]


def target_of(model: str, sizes: Mapping[str, Scalar], **more: Scalar) -> Target:
    """A model of the zoo as a step with arguments."""
    options = {**sizes, **more}
    options.pop("learning_rate", None)
    words = [f"--{name}={size}" for name, size in options.items() if size is not True]
    flags = [f"--{name}" for name, size in options.items() if size is True]
    return resolve(model, [*words, *flags])


def compiled_by_jit(target: Target) -> jax.stages.Compiled:
    """The step as it is written, compiled."""
    step = jax.jit(target.step, donate_argnums=target.donate)
    return step.lower(*target.args).compile()


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """Memory that a compiled step needs, as plans count it."""
    found = compiled.memory_analysis()
    assert found is not None
    return (
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        - found.alias_size_in_bytes
        + found.temp_size_in_bytes
        + found.generated_code_size_in_bytes
    )


def made_by_hand(
    model: str, sizes: Mapping[str, Scalar]
) -> Iterator[tuple[str, Callable[[], jax.stages.Compiled]]]:
    """Ways without cfp, by name."""
    kernel = (
        contextlib.nullcontext
        if model in WITHOUT_KERNEL
        else lambda: attending_by(cudnn_attention)
    )

    def with_kernel(**more: Scalar) -> jax.stages.Compiled:
        with kernel():
            return compiled_by_jit(target_of(model, sizes, **more))

    yield "jit", lambda: compiled_by_jit(target_of(model, sizes))
    if model not in WITHOUT_KERNEL:
        yield "kernel, jit", with_kernel
    yield "remat, jit", lambda: with_kernel(remat=True)


def planned(
    target: Target, budget: int | None, work: str, precision: str | None = None
) -> tuple[Step, dict[str, Any]]:
    """A plan's step, compiled, and what is known of the plan.

    Raises:
        CfpError: it cannot be planned.
    """
    mesh = jax.make_mesh((1,), ("x",))
    started = time.perf_counter()
    plan = cfp.plan(
        target.step,
        *target.args,
        mesh=mesh,
        donate_argnums=target.donate,
        memory_budget=budget,
        precision=precision,
        cache_dir=work,
    )
    row: dict[str, Any] = {
        "planning_s": time.perf_counter() - started,
        "plan": plan.winner,
        "predicted_ms": plan.predicted_ms,
        "measured_ms": plan.measured_ms,
        "peak_bytes": plan.peak_bytes,
        "options": dict(plan.options),
        "text": str(plan),
        "raced": [dataclasses.asdict(row) for row in plan.race],
    }
    bound = plan.bind(target.step, *target.args, donate_argnums=target.donate)
    return bound.compile(target.step, *target.args), row


def timed(
    ways: Mapping[str, Step], target: Target, rounds: int, until: float
) -> dict[str, list[float]]:
    """Samples of each way in milliseconds, taken in turn.

    Args:
        until: no round begins after this, but the first (`time.monotonic`).
    """
    mesh = jax.make_mesh((1,), ("x",))
    one = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    places = tuple(jax.tree.map(lambda _: one, args) for args in target.args)
    state, *rest = target.make_args(places, 0)
    samples: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds):
        if number and time.monotonic() > until:
            break
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            for count in (WARM_UP, STEPS):
                started = time.perf_counter()
                for _ in range(count):
                    state, metrics = ways[name](state, *rest)
                jax.block_until_ready((state, metrics))
                seconds = time.perf_counter() - started
            samples[name].append(seconds / STEPS * 1e3)
    losses = jax.tree.leaves(metrics)
    assert all(bool(jax.numpy.isfinite(one).all()) for one in losses), "not finite"
    return samples


def compare(
    model: str, sizes: Mapping[str, Scalar], given: argparse.Namespace, until: float
) -> dict[str, Any]:
    """All ways of a model, and what they take."""
    target = target_of(model, sizes)
    rows: dict[str, dict[str, Any]] = {}
    ways: dict[str, Step] = {}
    for name, make in made_by_hand(model, sizes):
        try:
            compiled = make()
        except jax.errors.JaxRuntimeError as error:
            rows[name] = {"failed": str(error)[:300]}
            continue
        rows[name], ways[name] = {"peak_bytes": peak_bytes(compiled)}, compiled
    whole = rows["jit"].get("peak_bytes")
    with tempfile.TemporaryDirectory() as work:
        for share in (None, "FP8", *(given.shares if whole else ())):
            name, budget, precision = "planned", None, None
            if share == "FP8":
                name, precision = "planned, FP8", "fp8"
            elif share is not None:
                name, budget = f"planned, {share:.0%}", int(share * whole)
            if share is not None and time.monotonic() > until - 60:
                rows[name] = {"failed": "no time was left"}
                continue
            try:
                ways[name], rows[name] = planned(target, budget, work, precision)
            except cfp.CfpError as error:
                rows[name] = {"failed": str(error)}
            rows[name]["budget_bytes"] = budget
            print(model, name, rows[name], flush=True)
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    for name in list(ways):
        if limit and (rows[name]["peak_bytes"] or 0) > limit:
            rows[name]["failed"] = "too large for the device"
            del ways[name]
    for name, samples_ms in timed(ways, target, given.rounds, until).items():
        rows[name]["samples_ms"] = samples_ms
        print(model, name, statistics.median(samples_ms), flush=True)
    return {"model": model, "sizes": dict(sizes), "ways": rows}


def main() -> None:
    """Compares models one after another, and writes the file after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES)
    parser.add_argument("--seconds", type=float, default=560.0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="on a CPU")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    device = jax.devices()[0].device_kind
    data: dict[str, Any] = {
        "device": device,
        "jax": jax.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "flags": os.environ.get("XLA_FLAGS", ""),
        "models": [],
    }
    for left, model in zip(range(len(given.models), 0, -1), given.models, strict=True):
        sizes = Piece.of(model).options(tiny=False)
        if given.tiny:
            sizes = small(model, 2, 2)
        until = time.monotonic() + (end - time.monotonic()) / left
        data["models"].append(compare(model, sizes, given, until))
        given.out.write_text(json.dumps(data, indent=1))
        jax.clear_caches()


if __name__ == "__main__":
    main()
