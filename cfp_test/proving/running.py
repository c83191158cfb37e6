"""Proves entries of the catalogue, each process some of them, and sums up.

XLA ends a process on some programs. Each entry is announced before it runs, so that the
one at fault is known, and the others go on in another process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cfp.program import read, shardy
from cfp.program.graph import Program
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.checking import make_mesh
from cfp_test.proving.catalogue import Entry, entries
from cfp_test.proving.engine import Outcome, backward, prove, singles

MESHES = ((("x", 4),), (("x", 2), ("y", 2)), (("x", 4), ("y", 2)))
Seen = set[tuple[Any, ...]]


@dataclass(kw_only=True)
class Proof:
    """Counts and findings of one kind of op in one entry.

    Attributes:
        entry: the entry's name.
        op: the kind of the op.
        ops: how many different ops of this kind there were.
        factors: how many factors of them were split.
        checks: how many shardings ran.
        padded: how many of those split something unevenly.
        wrong: those that were wrong or did not compile.
        moved: those in which data moved that should not.
    """

    entry: str
    op: str
    ops: int = 0
    factors: int = 0
    checks: int = 0
    padded: int = 0
    wrong: list[dict[str, Any]]
    moved: list[dict[str, Any]]


def programs(entry: Entry, mesh: Mesh) -> Iterator[tuple[Program, Sequence[Any]]]:
    """The programs of an entry, with what they are applied to."""
    if entry.fn is None:
        module = shardy.parsed(entry.text.encode())
        module.operation.attributes["sym_name"] = _symbol(module, "main")
        count = len(entry.inputs)
        outputs = len(
            list(shardy.main_function(module).regions[0].blocks[0].operations)[
                -1
            ].operands
        )
        names = [""] * count, [""] * outputs, [None] * count
        yield (
            read.read_program(
                module, arg_names=names[0], output_names=names[1], alias=names[2]
            ),
            entry.inputs,
        )
        return
    step = flatten_step(entry.fn, entry.inputs)
    yield trace(step, mesh)[0], entry.inputs
    if entry.grad:
        made = jax.eval_shape(entry.fn, *entry.inputs)
        rng = np.random.default_rng(0)

        def cotangent(x: jax.ShapeDtypeStruct) -> Any:
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                return np.zeros(x.shape, jax.dtypes.float0)
            return jnp.asarray(rng.normal(size=x.shape), x.dtype)

        leaves, tree = jax.tree.flatten(made)
        cotangents = [cotangent(x) for x in leaves]
        real = [c for c in cotangents if c.dtype != jax.dtypes.float0]

        def gradients(real: Any, *values: Any) -> Any:
            left = iter(real)
            every = [
                c if c.dtype == jax.dtypes.float0 else next(left) for c in cotangents
            ]
            return backward(entry.fn, entry.inputs)(jax.tree.unflatten(tree, every), *values)

        step = flatten_step(gradients, (real, *entry.inputs))
        yield trace(step, mesh)[0], [*real, *entry.inputs]


def _symbol(module: Any, name: str) -> Any:
    from jax.extend.mlir import ir

    with module.context:
        return ir.StringAttr.get(name)


def prove_entry(
    entry: Entry, meshes: Sequence[Mesh], seen: Seen
) -> dict[str, Proof]:
    """Proves all ops of an entry that were not seen before."""
    found: dict[str, Proof] = {}
    for program, arguments in programs(entry, meshes[0]):
        for single in singles(program, arguments):
            integers = tuple(
                x.tobytes() for x in single.inputs if x.dtype.kind in "iu"
            )
            key = (single.digest, integers)
            if key in seen:
                continue
            seen.add(key)
            rule = single.op.rule
            assert rule is not None
            kind = single.op.name
            proof = found.setdefault(
                kind, Proof(entry=entry.name, op=kind, wrong=[], moved=[])
            )
            proof.ops += 1
            split: set[int] = set()
            for mesh in meshes:
                for outcome in prove(single, mesh):
                    proof.checks += 1
                    proof.padded += outcome.padded
                    split.update(f for f, names in enumerate(outcome.axes) if names)
                    if outcome.is_wrong:
                        proof.wrong.append(_said(outcome))
                    elif outcome.moved:
                        proof.moved.append(_said(outcome))
            proof.factors += len(split)
    return found


def _said(outcome: Outcome) -> dict[str, Any]:
    found = asdict(outcome)
    found["difference"] = str(found["difference"])
    return found


def without_corrections() -> None:
    """Has programs read with the rules that Shardy gives, in this process."""
    read.correct_rule = lambda rule, op, shapes: rule
    shardy.relayout = lambda op: None


def work(names: Sequence[str], *, corrected: bool) -> None:
    """Proves entries, and prints a line of JSON before and after each."""
    if not corrected:
        without_corrections()
    known = {entry.name: entry for entry in entries()}
    meshes = [make_mesh(sizes) for sizes in MESHES]
    seen: Seen = set()
    for name in names:
        print(json.dumps({"starts": name}), flush=True)
        try:
            proofs = prove_entry(known[name], meshes, seen)
            said: dict[str, Any] = {"proofs": [asdict(p) for p in proofs.values()]}
        except Exception as error:  # named in the table: the entry was not proved
            said = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        print(json.dumps({"ends": name, **said}), flush=True)


def run(names: Sequence[str], *, jobs: int, corrected: bool = True) -> dict[str, Any]:
    """Proves entries in processes of their own.

    Returns:
        What came of each, and the seconds it took, ready for JSON.
    """
    began = time.monotonic()
    results: list[dict[str, Any]] = []
    size = max(1, min(80, -(-len(names) // jobs)))
    chunks = [names[i : i + size] for i in range(0, len(names), size)]
    with ThreadPoolExecutor(jobs) as pool:
        for part in pool.map(lambda c: _attempt(c, corrected), chunks):
            results += part
    return {
        "jax": jax.__version__,
        "corrected": corrected,
        "seconds": round(time.monotonic() - began),
        "entries": results,
    }


def _attempt(names: Sequence[str], corrected: bool) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    left = list(names)
    while left:
        command = [sys.executable, "-m", "cfp_test.proving", "--worker"]
        command += [] if corrected else ["--raw"]
        done = subprocess.run(
            command, input="\n".join(left), capture_output=True, text=True
        )
        lines = [json.loads(s) for s in done.stdout.splitlines() if s.startswith("{")]
        finished = [line for line in lines if "ends" in line]
        results += finished
        print(f"{finished[-1]['ends'] if finished else left[0]}", file=sys.stderr)
        started = [line["starts"] for line in lines if "starts" in line]
        if len(started) > len(finished):
            why = [s for s in done.stderr.splitlines() if "Check failed" in s]
            said = (why or done.stderr.splitlines()[-1:] or ["no reason"])[0]
            results.append({"ends": started[-1], "aborted": said[-300:]})
        elif not started:
            raise RuntimeError(done.stderr[-2000:])
        left = left[len(started) :]
    return results
