"""Whether an exported module is the program that the plan is, and as fast.

    python -m cfp_test.scripts.export_times --play 4 --hidden 4096 --layers 4
    python -m cfp_test.scripts.export_times --cpu 4 --hidden 64 --layers 2 --seq 32 \
        --batch 8 --vocab 128

With ``--play N`` one GPU plays one of N: times are of the computation alone. With
``--cpu N`` there are N virtual devices, of which times say little. For each model the
collectives of both programs are compared, and the medians of runs in turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--play", type=int, metavar="N")
    where.add_argument("--cpu", type=int, metavar="N")
    parser.add_argument("--preset", default="fully_sharded")
    parser.add_argument("--models", nargs="+", default=["gpt", "bert", "llama", "moe"])
    parser.add_argument("--runs", type=int, default=20)
    for name, size in (("layers", 4), ("hidden", 4096), ("seq", 1024), ("batch", 24)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--vocab", type=int, default=51200)
    given = parser.parse_args()
    count = given.play or given.cpu
    if given.cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
        flag = f"--xla_force_host_platform_device_count={count}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    else:
        from cfp.devices.mock import play_one_of

        play_one_of(count)
    import jax

    from cfp.devices.mock import mocked_mesh

    if given.cpu:
        mesh = jax.make_mesh((count,), ("x",))
    else:
        mesh = mocked_mesh((("x", count),))
    for model in given.models:
        compare(model, mesh, given)


def compare(model: str, mesh: Any, given: argparse.Namespace) -> None:
    """Prints a line: whether collectives are the same, and both times in ms."""
    import cfp
    from cfp.models.registry import build
    from cfp.profiling.hlo import collectives_in

    sizes = {n: getattr(given, n) for n in ("layers", "hidden", "seq", "batch")}
    more = {"experts": 4, "expert_group_size": given.seq} if model == "moe" else {}
    heads = {"heads": 4} if given.cpu else {}
    step, args = build(model, vocab=given.vocab, **sizes, **more, **heads)
    with tempfile.TemporaryDirectory() as folder:
        made = cfp.plan(
            step,
            *args,
            mesh=mesh,
            donate_argnums=0,
            preset=given.preset,
            cache_dir=folder,
            settings=cfp.PlannerSettings(race=False),
        )
        made.save(Path(folder) / "plan.json")
        plan = cfp.Plan.load(Path(folder) / "plan.json", mesh=mesh)
        plan.export_python(Path(folder) / "exported.py")
        text = (Path(folder) / "exported.py").read_text()
    found: dict[str, Any] = {"__name__": "exported"}
    exec(compile(text, "exported", "exec"), found)
    ours = plan.compile(step, *args)
    theirs = found["shard"](step, *args, mesh=mesh)
    same = collectives_in(ours.as_text()) == collectives_in(theirs.compiled.as_text())
    shardings = plan.bind(step, *args).in_shardings
    runs: dict[str, list[float]] = {"plan": [], "exported": []}
    states = {name: zeros(args[0], shardings[0]) for name in runs}
    batch = zeros(args[1], shardings[1])
    for turn in range(given.runs + 3):
        for name, run in (("plan", ours), ("exported", theirs)):
            started = time.perf_counter()
            states[name], metrics = run(states[name], batch)
            wait(states[name], metrics)
            if turn >= 3:
                runs[name].append(1000 * (time.perf_counter() - started))
    a, b = (statistics.median(times) for times in runs.values())
    print(
        f"{model}: collectives {'the same' if same else 'DIFFER'}; plan {a:.3f} ms, "
        f"exported {b:.3f} ms ({b / a - 1:+.2%})",
        flush=True,
    )


def zeros(tree: Any, shardings: Any) -> Any:
    """Arrays of zeros in some shardings, made where they are."""
    import jax
    import jax.numpy as jnp

    def make() -> Any:
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), tree)

    return jax.jit(make, out_shardings=shardings)()


def wait(*trees: Any) -> None:
    """Until everything is computed."""
    import jax

    jax.block_until_ready(trees)


if __name__ == "__main__":
    main()
