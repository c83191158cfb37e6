"""Measures kernels of attention on one GPU.

    python -m cfp_test.bench attention OUT.json [--seconds 180]

First the rate of a large matrix product; then each kernel, forward and backward,
causal, at 1k to 64k tokens, as a share of that rate. Rings and Ulysses on several GPUs
are benchmarks of the seeds.

OUT.json is written after each row. A run that was stopped goes on where it was; what
was begun and not finished is a row that says so. Without a GPU `--tiny` tries it on the
CPU.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

import cfp
from cfp.profiling.builder import reason_of

HEADS, HEAD_DIM = 16, 128
TOKENS = tuple(1024 * 2**i for i in range(7))
# A call is timed so often, after it has run twice; the median counts.
SAMPLES, WARM_UPS = 7, 2
# Beyond so many bytes of scores a kernel that keeps them is not tried.
MOST_SCORES_BYTES = 10 * 2**30
SCORES_PER_KERNEL = 3  # Forward's, and two in the backward pass; float32.
MATMUL_WIDTH = 8192
BACKWARD_FLOPS = 2.5  # Five matrix products, where forward has two.


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    rows: list[dict[str, Any]] = []
    if options.out.exists():
        rows = json.loads(options.out.read_text())["rows"]
    for row in rows:
        if row.get("status") == "begun":
            row["status"] = "the process ended while it ran"
    known = {_key(row) for row in rows}
    left = 0
    for row, measure in _plan(options.tiny):
        if _key(row) in known:
            continue
        if time.monotonic() > until:
            left += 1
            continue
        rows.append({**row, "status": "begun"})
        _save(options.out, rows, options.tiny)
        rows[-1] = {**row, **_outcome(measure, rows)}
        _save(options.out, rows, options.tiny)
        print(json.dumps(rows[-1]), flush=True)
        jax.clear_caches()
    _save(options.out, rows, options.tiny)
    print(f"{len(rows)} rows, {left} left for lack of time", flush=True)
    return 0


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["what"], row.get("kernel"), row.get("tokens")


Measure = Callable[[list[dict[str, Any]]], dict[str, Any]]


def _plan(tiny: bool) -> Iterator[tuple[dict[str, Any], Measure]]:
    """All rows, the most wanted first, each with what measures it."""
    yield {"what": "matmul"}, lambda rows: _matmul(256 if tiny else MATMUL_WIDTH)
    tokens = (256, 512) if tiny else TOKENS
    for kernel in ("xla", "chunked") if tiny else ("cudnn", "chunked", "xla"):
        yield from _kernels(kernel, tokens)


def _kernels(kernel: str, tokens: tuple[int, ...]) -> Iterator[Any]:
    for count in tokens:
        row = {"what": "kernel", "kernel": kernel, "tokens": count}
        yield row, lambda rows, count=count: _kernel(kernel, count, rows)


def _outcome(measure: Measure, rows: list[dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"status": "measured", **measure(rows)}
    except (cfp.CfpError, jax.errors.JaxRuntimeError, NotImplementedError) as no:
        return {"status": reason_of(no)}
    except (
        ValueError,
        RuntimeError,
        TypeError,
    ) as no:  # As kernels refuse, each its way.
        return {"status": f"{type(no).__name__}: {no}"[:300]}


def _times_ms(fn: Callable[..., Any], *args: Any) -> list[float]:
    compiled = jax.jit(fn).lower(*args).compile()
    for _ in range(WARM_UPS):
        jax.block_until_ready(compiled(*args))
    times = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(1e3 * (time.perf_counter() - start))
    return times


def _timed(fn: Callable[..., Any], flops: float, *args: Any) -> dict[str, Any]:
    samples = _times_ms(fn, *args)
    took = median(samples)
    return {"ms": took, "samples_ms": samples, "tflops_per_s": flops / took / 1e9}


def _matmul(width: int) -> dict[str, Any]:
    x = jnp.ones((width, width), jnp.bfloat16)

    def products(x: jax.Array) -> jax.Array:
        for _ in range(8):
            x = (x @ x) * (1 / width)
        return x

    return _timed(products, 8 * 2 * width**3, x)


def _arrays(tokens: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (1, tokens, HEADS, HEAD_DIM)
    return [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]


def _forward_flops(queries: int, keys: int) -> float:
    return 4.0 * queries * keys * HEADS * HEAD_DIM


def _kernel(kernel: str, tokens: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    scores = 4 * SCORES_PER_KERNEL * HEADS * tokens**2
    if kernel == "xla" and scores > MOST_SCORES_BYTES:
        return {"status": f"its scores would take {scores / 2**30:.0f} GiB"}

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(
            lambda q, k, v: cfp.attention(q, k, v, causal=True, implementation=kernel),
            q,
            k,
            v,
        )
        return out, pull(dout)

    flops = (1 + BACKWARD_FLOPS) * _forward_flops(tokens, tokens) / 2
    found = _timed(both, flops, *_arrays(tokens))
    rate = next(row["tflops_per_s"] for row in rows if row["what"] == "matmul")
    return {**found, "percent_of_matmul": 100 * found["tflops_per_s"] / rate}


def _save(path: Path, rows: list[dict[str, Any]], tiny: bool) -> None:
    device = jax.devices()[0]
    data = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "dtype": "bfloat16",
        "tiny": tiny,
        "rows": rows,
    }
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data, indent=1) + "\n")
    part.replace(path)


if __name__ == "__main__":
    raise SystemExit(main())
