"""Compares an exported module with the plan: the same program, and as fast.

    python -m cfp_test.scripts.export_times OUT.json --play 4 --limit 110
    python -m cfp_test.scripts.export_times OUT.json --cpu 4 --hidden 64 --layers 2 \
        --seq 32 --batch 8 --vocab 128 --runs 5

With ``--play N`` one GPU plays one of N: times are of the computation alone. With
``--cpu N`` there are N virtual devices, of which times say little. For each preset and
model the collectives of both programs are compared, and runs are timed in turns.
OUT.json is written after each row; a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from cfp_test.results.pages import Figures, fixed, table

MODELS = ("gpt", "llama", "moe", "bert")
PRESETS = ("fully_sharded", "tensor_sequence_parallel")
WARM_UPS = 3


def main() -> None:
    given = _parser().parse_args()
    until = time.monotonic() + given.limit
    count = given.play or given.cpu
    if given.cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
        flag = f"--xla_force_host_platform_device_count={count}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    else:
        from cfp.devices.described import play_one_of

        play_one_of(count)
    import jax

    from cfp.devices.described import mocked_mesh
    from cfp_test.scripts.rows import Rows

    mesh = (
        jax.make_mesh((count,), ("x",)) if given.cpu else mocked_mesh((("x", count),))
    )
    head = {
        "device": jax.devices()[0].device_kind,
        "devices": count,
        "mode": "virtual" if given.cpu else "played",
        **sizes_of(given),
        "vocab": given.vocab,
    }
    rows = Rows(given.out, head, {"date": datetime.now(UTC).date().isoformat()})
    for preset in given.presets:
        for model in given.models:
            if rows.find(model=model, preset=preset) is not None:
                continue
            if time.monotonic() > until:
                print(f"{model}, {preset}: left for lack of time", flush=True)
                continue
            row = compare(model, preset, mesh, given)
            rows.add(row)
            print(line(row), flush=True)
            jax.clear_caches()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--play", type=int, metavar="N")
    where.add_argument("--cpu", type=int, metavar="N")
    parser.add_argument("--limit", type=float, default=110.0, metavar="SECONDS")
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--runs", type=int, default=30)
    for name, size in (("layers", 2), ("hidden", 4096), ("seq", 1024), ("batch", 24)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--vocab", type=int, default=51200)
    return parser


def sizes_of(given: argparse.Namespace) -> dict[str, int]:
    """Options that all models have in common."""
    return {name: getattr(given, name) for name in ("layers", "hidden", "seq", "batch")}


def compare(
    model: str, preset: str, mesh: Any, given: argparse.Namespace
) -> dict[str, Any]:
    """A row: the collectives of both programs, and the samples of both in ms."""
    import cfp
    from cfp.models.registry import build
    from cfp.profiling.hlo import collectives_in

    more = {"experts": 4, "expert_group_size": given.seq} if model == "moe" else {}
    heads = {"heads": 4} if given.cpu else {}
    step, args = build(model, vocab=given.vocab, **sizes_of(given), **more, **heads)
    with tempfile.TemporaryDirectory() as folder:
        made = cfp.plan(
            step,
            *args,
            mesh=mesh,
            donate_argnums=0,
            preset=preset,
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
    collectives = {
        name: [str(one) for one in collectives_in(program.as_text())]
        for name, program in (("plan", ours), ("exported", theirs.compiled))
    }
    shardings = plan.bind(step, *args).in_shardings
    runs: dict[str, list[float]] = {"plan": [], "exported": []}
    states = {name: zeros(args[0], shardings[0]) for name in runs}
    batch = zeros(args[1], shardings[1])
    programs = (("plan", ours), ("exported", theirs))
    for turn in range(given.runs + WARM_UPS):
        # Whichever is first in a turn finds the device as the other left it.
        for name, run in programs if turn % 2 else reversed(programs):
            started = time.perf_counter()
            states[name], metrics = run(states[name], batch)
            wait(states[name], metrics)
            if turn >= WARM_UPS:
                runs[name].append(round(1000 * (time.perf_counter() - started), 4))
    return {
        "model": model,
        "preset": preset,
        "collectives": len(collectives["plan"]),
        "is_same": collectives["plan"] == collectives["exported"],
        "plan_ms": runs["plan"],
        "exported_ms": runs["exported"],
    }


def slower(row: Mapping[str, Any]) -> float:
    """By which part the exported program's median is above the plan's."""
    return median(row["exported_ms"]) / median(row["plan_ms"]) - 1.0


def line(row: Mapping[str, Any]) -> str:
    """A row as it is printed."""
    return (
        f"{row['model']}, {row['preset']}: {row['collectives']} collectives, "
        f"{'the same' if row['is_same'] else 'DIFFERENT'}; plan "
        f"{median(row['plan_ms']):.3f} ms, exported {median(row['exported_ms']):.3f} "
        f"ms ({slower(row):+.2%})"
    )


def figures(data: Mapping[str, Any]) -> Figures:
    """The page of one run."""
    rows = [
        [
            row["model"],
            row["preset"].replace("_", " "),
            row["collectives"],
            "yes" if row["is_same"] else "NO",
            fixed(median(row["plan_ms"]), 3),
            fixed(median(row["exported_ms"]), 3),
            f"{slower(row):+.2%}",
        ]
        for row in data["rows"]
    ]
    head = "model | preset | collectives | the same | plan, ms | exported, ms | slower"
    worst = max((slower(row) for row in data["rows"]), key=abs)
    lines = [
        f"# Exported Python against the plan, on one {data['device']} that plays "
        f"{data['devices']}",
        "",
        f"{data['date']}, jax {data['jax']}, commit {data['rows'][-1]['commit']}; "
        f"models of {data['layers']} layers, width {data['hidden']}, batch "
        f"{data['batch']} × {data['seq']}, vocabulary {data['vocab']}. Medians of "
        f"{len(data['rows'][0]['plan_ms'])} runs each, in turns, of the computation "
        f"alone: collectives do nothing there. The largest difference is {worst:+.2%}.",
        "",
        table(head, rows),
        "",
        "Made by `python -m cfp_test.scripts.export_times FILE --play "
        f"{data['devices']}`, and this page by `python -m cfp_test.results`; all "
        "samples are in the JSON beside it.",
    ]
    return {"page": "\n".join(lines) + "\n"}


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
