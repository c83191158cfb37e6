"""Operators on one GPU: what loads, whether it is right, what it takes; and injection.

    python cfp_test/scripts/operators_gpu.py OUT.json --seconds 240 [--known OLD.json]
        [--only-run a,b] [--shapes ...] [--small] [--no-injection]

The first case of seed 002 is measured with all operators, then models with injected
operators, then the other two cases: attention at each first, whose memory the seed is
about, then all else. What is in OUT.json already, or in OLD.json if that
is of the same device and versions, is not measured again: a second run goes on where
the first one's time was over. The exit code is 1 if an implementation computes
something else than the oracle, or a model with operators something else than without.

`--small` is for trying it without a GPU. The page is made by `python -m
cfp_test.results` from docs/results/operators_*.json.
"""

import argparse
import json
import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from cfp.operators import OPERATORS, matching
from cfp.operators import benchmark as b
from cfp.operators.cases import Shape
from cfp.operators.command import CPU_SHAPES, SHAPES, read, to_json
from cfp.operators.inject import inject, worth
from cfp.operators.probe import environment
from cfp_test.operators import models_linen, models_nnx

# Of the outputs, and of all gradients together: the models' own softmax is in bfloat16.
LIMIT = 0.05
AS_GPT2_MEDIUM = {
    "vocab": 50257,
    "seq": 1024,
    "hidden": 1024,
    "layers": 4,
    "num_attention_heads": 16,
    "n_head": 16,
}
MODELS = ("GPT2 linen", "Bert linen", "GPT2 nnx", "Bert nnx")


def availability() -> list[dict]:
    """Lists each operator's implementations here, and why the rest is not."""
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
    """Time and memory of a model's step without operators and with them.

    Each of the two takes the parameters of both, so that both can be timed in turn.
    """
    shape = (batch, config.seq)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, config.vocab)
    calls, parameters, back, report = steps(name, config, tokens)

    def step(place):
        def loss(state, tokens):
            logits = calls[place](state, tokens).astype(jnp.float32)
            return jnp.mean(jnp.square(logits)), logits[:, -1]

        def run(both, tokens):
            return jax.value_and_grad(loss, has_aux=True)(both[place], tokens)

        return run

    args = tuple(parameters), tokens
    before, after = (b.compile_program(step(place), *args)[0] for place in (0, 1))
    (_, right), gradients = before(*args)
    (_, found), new = after(*args)
    plain = gradients if name.endswith("linen") else nnx.to_pure_dict(gradients)
    errors = {"output": off(found, right), "gradients": off(back(new), plain)}
    del gradients, new, plain
    verdict = worth(before, after, *args, rounds=10, seconds=2.0)
    right = all(error <= LIMIT for error in errors.values())
    return {
        "model": name,
        "config": f"{config.layers} layers of {config.hidden}, batch {batch} x "
        f"{config.seq}, vocabulary {config.vocab}, bfloat16",
        "replaced": [part.operators for part in report.replaced],
        "left": [f"{part.path} ({part.kind}): {part.reason}" for part in report.left],
        "errors": errors,
        "right": right,
        "before_ms": verdict.before_ms,
        "after_ms": verdict.after_ms,
        "before_bytes": verdict.before_bytes,
        "after_bytes": verdict.after_bytes,
        "verdict": verdict.text() if right else "wrong: not to be used",
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


@dataclass
class Run:
    """Rows that are known, and the file that has them.

    Attributes:
        out: the file.
        found: the environment.
        rows, injected: what is known.
        end: when nothing begins any more, as `time.monotonic` has it.
    """

    out: Path
    found: dict
    rows: list[b.Row]
    injected: list[dict]
    end: float

    @property
    def left(self) -> float:
        """Seconds, at least none."""
        return max(self.end - time.monotonic(), 0.0)

    def write(self, available: list[dict]) -> None:
        """Writes the file, whole or not at all."""
        made = to_json(self.found, self.rows) | {
            "available": available,
            "injection": self.injected,
        }
        part = self.out.with_suffix(".part")
        part.write_text(json.dumps(made, indent=1) + "\n")
        part.replace(self.out)

    def read(self, file: Path) -> None:
        """Takes over what another run on the same device and versions has measured."""
        before, rows = read(file)
        # A library that is not here has rows of its own there.
        here = {n: v for n, v in self.found["packages"].items() if v is not None}
        there = {n: before["packages"].get(n) for n in here}
        if before["device"] != self.found["device"] or here != there:
            print(f"{file}: of another device or other versions; nothing is taken over")
            return
        self.rows += [row for row in rows if row.state not in (b.NO_TIME, b.ABSENT)]
        found = json.loads(file.read_text())["injection"]
        self.injected += [one for one in found if one.get("right")]

    def measure(self, operators, shapes, available) -> None:
        """Measures operators at some shapes."""
        settings = b.Settings(seconds=self.left, sample_seconds=0.12)
        for row in b.run(operators, shapes, ["bfloat16"], settings, list(self.rows)):
            self.rows = [one for one in self.rows if one.key != row.key] + [row]
            self.write(available)
            times = {n: round(p.median_ms, 3) for n, p in row.passes.items()}
            print(f"{self.left:.0f} s left", *row.key, row.state, row.reason, times)

    def inject(self, config: models_linen.Config, batch: int, available) -> None:
        """Compares models with operators and without."""
        wanted = [n for n in MODELS if n not in {one["model"] for one in self.injected}]
        for name in wanted:
            if not self.left:
                self.injected.append({"model": name, "reason": "not reached in time"})
                continue
            try:
                one = compared(name, config, batch)
            except Exception as error:
                traceback.print_exc()
                reason = f"{type(error).__name__}: {str(error)[:300]}"
                one = {"model": name, "reason": reason, "right": False}
            self.injected.append(one)
            print(f"{self.left:.0f} s left", one, flush=True)
            self.write(available)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--known", type=Path)
    parser.add_argument("--only-run", default="")
    parser.add_argument("--shapes", nargs="+")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--no-injection", action="store_true")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    found = environment()
    found["date"] = time.strftime("%Y-%m-%d")
    run = Run(options.out, found, [], [], end)
    for file in (options.out, options.known):
        if file is not None and file.exists():
            run.read(file)
            break
    available = availability()
    run.write(available)
    shapes = options.shapes or (CPU_SHAPES if options.small else SHAPES)
    shapes = [Shape.parse(text) for text in shapes]
    operators = matching(options.only_run)
    run.measure(operators, shapes[:1], available)
    if not options.no_injection:
        config, batch = models_linen.Config(dtype=jnp.bfloat16), 2
        if not options.small:
            config, batch = replace(config, **AS_GPT2_MEDIUM), 8
        run.inject(config, batch, available)
    first = [one for one in operators if one.name.endswith("attention")]
    run.measure(first, shapes[1:], available)
    run.measure(operators, shapes[1:], available)
    run.write(available)
    wrong = [row for row in run.rows if row.state == b.WRONG]
    wrong += [one for one in run.injected if not one.get("right", True)]
    print(f"{len(run.rows)} rows, {len(wrong)} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
