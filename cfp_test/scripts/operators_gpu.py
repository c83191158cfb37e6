"""Operators on one GPU: what loads, whether it is right, what it takes; and injection.

    python cfp_test/scripts/operators_gpu.py OUT.json --seconds 150
        [--only-run a,b] [--shapes ...] [--small] [--no-injection]

The three cases of seed 002 are measured, attention first. What is in OUT.json already
is not measured again, so a second run goes on where the first one's time was over. The
exit code is 1 if an implementation computes something else than the oracle, or a model
with operators something else than without.

`--small` is for trying it without a GPU. The page is made by `python -m
cfp_test.results` from docs/results/operators_*.json.
"""

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from cfp.operators import benchmark as b
from cfp.operators.cases import Shape
from cfp.operators.command import CPU_SHAPES, SHAPES
from cfp.operators.document import read, to_json
from cfp.operators.environment import environment
from cfp.operators.inject import inject, worth
from cfp.operators.inventory import OPERATORS, matching
from cfp_test.operators import models_linen, models_nnx

# Of the outputs, and of all gradients together: the models' own softmax is in bfloat16.
LIMIT = 0.05
MODELS = ("GPT2 linen", "Bert linen", "GPT2 nnx", "Bert nnx")


def availability() -> list[dict]:
    """What there is of each operator here, and why the rest is not."""
    return [
        {
            "operator": operator.name,
            "implementation": one.name,
            "library": one.library,
            "reason": one.probe(),
        }
        for operator in OPERATORS.values()
        for one in operator.implementations
    ]


def halved(tree):
    """Floats in bfloat16."""
    return jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, tree
    )


def steps(name: str, config: models_linen.Config, tokens):
    """A model's loss and gradient without operators and with them.

    Returns:
        Both steps, their parameters, what brings the gradients of the second into the
        form of the first's, and the report.
    """
    model, kind = name.split()
    if kind == "linen":
        made = getattr(models_linen, model)(config)
        variables = halved(jax.jit(made.init)(jax.random.key(0), tokens))
        injected = inject(made, tokens, strict=True)
        found = [one.apply for one in (made, injected.model)]
        return found, [variables, variables], lambda tree: tree, injected.report
    make = getattr(models_nnx, model)
    model = nnx.jit(lambda: make(config, rngs=nnx.Rngs(0)))()
    pair = [nnx.split(model)]
    injected = inject(model, strict=True)
    pair.append(nnx.split(model))
    calls = [lambda s, t, g=graph: nnx.merge(g, s)(t) for graph, _ in pair]

    def back(state):
        return injected.to_original(nnx.to_pure_dict(state))

    return calls, [halved(state) for _, state in pair], back, injected.report


def compared(name: str, config: models_linen.Config, batch: int) -> dict:
    """Time and memory of a model's step without operators and with them."""
    shape = (batch, config.seq)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, config.vocab)
    calls, parameters, back, report = steps(name, config, tokens)

    def step(call):
        def loss(state, tokens):
            logits = call(state, tokens).astype(jnp.float32)
            return jnp.mean(jnp.square(logits)), logits[:, -1]

        return jax.jit(jax.value_and_grad(loss, has_aux=True))

    before, after = (step(call) for call in calls)
    (_, right), gradients = before(parameters[0], tokens)
    (_, found), new = after(parameters[1], tokens)
    plain = gradients if name.endswith("linen") else nnx.to_pure_dict(gradients)
    errors = {"output": off(found, right), "gradients": off(back(new), plain)}
    del gradients, new, plain

    # One of the two takes what the other does, so that both can be timed in turn.
    def old(both, tokens):
        return before(both[0], tokens)

    def newer(both, tokens):
        return after(both[1], tokens)

    verdict = worth(old, newer, tuple(parameters), tokens, rounds=10, seconds=4.0)
    return {
        "model": name,
        "config": f"{config.layers} layers of {config.hidden}, batch {batch} x "
        f"{config.seq}, vocabulary {config.vocab}, bfloat16",
        "replaced": [part.operators for part in report.replaced],
        "left": [f"{part.path} ({part.kind}): {part.reason}" for part in report.left],
        "errors": errors,
        "right": all(error <= LIMIT for error in errors.values()),
        "before_ms": verdict.before_ms,
        "after_ms": verdict.after_ms,
        "before_bytes": verdict.before_bytes,
        "after_bytes": verdict.after_bytes,
        "verdict": verdict.text(),
    }


def off(found, right) -> float:
    """The relative difference of norms of two trees."""

    @jax.jit
    def norms(found, right):
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True)
        pairs = [(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in pairs]
        return (
            jnp.sqrt(sum(jnp.sum(jnp.square(x - y)) for x, y in pairs)),
            jnp.sqrt(sum(jnp.sum(jnp.square(y)) for _, y in pairs)),
        )

    difference, size = norms(found, right)
    return float(difference / size)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--only-run", default="")
    parser.add_argument("--shapes", nargs="+")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--no-injection", action="store_true")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    rows, injected = [], []
    if options.out.exists():
        rows = [row for row in read(options.out)[1] if row.state != b.NO_TIME]
        injected = json.loads(options.out.read_text())["injection"]
    found = environment()
    found["date"] = time.strftime("%Y-%m-%d")
    available = availability()

    def write() -> None:
        made = to_json(found, rows) | {
            "available": available,
            "injection": injected,
        }
        part = options.out.with_suffix(".part")
        part.write_text(json.dumps(made, indent=1) + "\n")
        part.replace(options.out)

    def measure(operators) -> None:
        left = max(end - time.monotonic(), 0.0)
        settings = b.Settings(seconds=left, sample_seconds=0.25)
        shapes = options.shapes or (CPU_SHAPES if options.small else SHAPES)
        shapes = [Shape.parse(text) for text in shapes]
        for row in b.run(operators, shapes, ["bfloat16"], settings, list(rows)):
            rows.append(row)
            write()
            times = {n: round(p.median_ms, 3) for n, p in row.passes.items()}
            print(*row.key, row.state, row.reason, times, flush=True)

    write()
    chosen = matching(options.only_run)
    first = [one for one in chosen if one.name == "gpt_attention"]
    measure(first)
    config = models_linen.Config(
        vocab=50257,
        seq=1024,
        hidden=1024,
        layers=4,
        num_attention_heads=16,
        n_head=16,
        dtype=jnp.bfloat16,
    )
    batch = 8
    if options.small:
        config, batch = models_linen.Config(dtype=jnp.bfloat16), 2
    for name in () if options.no_injection else MODELS:
        if any(one["model"] == name and "verdict" in one for one in injected):
            continue
        injected = [one for one in injected if one["model"] != name]
        if time.monotonic() > end:
            injected.append({"model": name, "reason": "not reached in time"})
        else:
            try:
                injected.append(compared(name, config, batch))
            except Exception as error:
                traceback.print_exc()
                reason = f"{type(error).__name__}: {str(error)[:300]}"
                injected.append({"model": name, "reason": reason, "right": False})
        print(injected[-1], flush=True)
        write()
    measure([one for one in chosen if one not in first])
    write()
    wrong = [row for row in rows if row.state == b.WRONG]
    wrong += [one for one in injected if not one.get("right", True)]
    print(f"{len(rows)} rows, {len(wrong)} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
