"""Plans chosen on one GPU for two, beside those that two choose, timed in turn on two.

    python -m cfp_test.bench.chosen_on_one --out FOLDER [--models gpt,moe]
        [--seconds 50] [--rounds 12] [--end 270] [--work FOLDER] [--known FOLDER]
        [--tiny]

On a machine with two GPUs. First each model is planned by a process that plays both
with one GPU, all models at once, each on a GPU of its own. Then one process plans each
on both GPUs, compiles both plans and times them in turn. GPT calls cuDNN's attention;
the MoE is the zoo's, whose attention a plan may compute by that kernel. Kernels are
tuned once, and kept in ``--work``.

Plans stand in ``--out``, and each turn's samples are appended to ``samples.jsonl``
there as they come; ``chosen_on_one.jsonl`` has a row for each model. After ``--end``
seconds no turn is begun. Begun again with the same folder, what is there is not made
again; nor are plans of ``--known``, the ``--out`` of another run.

With ``--tiny`` on CPUs virtual devices run small models, to try it out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

import cfp
from cfp import platform
from cfp.cost.step_time import computation_of
from cfp.devices.device_kind import kind, kinds
from cfp.profiling.topology import ask_driver
from cfp.targets import resolve
from cfp_test.bench.by_hand import make_state
from cfp_test.bench.decoder import MODELS, make_step
from cfp_test.bench.planned_on_one import stand_in
from cfp_test.bench.recorded import MOE_OF_TWO, TINY
from cfp_test.scripts.rows import commit

AXES = (("x", 2),)
_WARM_UP = 5  # Steps, in which the clock sinks to what the power allows.
_STEPS = 5  # In a row, for one sample.


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A step, its arguments as shapes, and what makes them under shardings."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    make: Callable[[tuple[Any, ...]], Sequence[Any]]


def model_of(name: str, tiny: bool) -> Model:
    """A model by its name: "moe", or one of `cfp_test.bench.decoder`."""
    if name == "moe":
        words = (TINY["moe"] if tiny else MOE_OF_TWO).split()
        target = resolve(words[0], words[1:])
        return Model(
            step=target.step,
            args=target.args,
            make=lambda shardings: target.make_args(shardings, 0),
        )
    sizes = MODELS["tiny"] if tiny else replace(MODELS[name], attention="cudnn")
    step, args = make_step(sizes)

    def train_step(state: Any, tokens: jax.Array) -> Any:
        return step(state, tokens)

    return Model(
        step=train_step,
        args=args,
        make=lambda shardings: make_state(sizes, (shardings[0], shardings[1])),
    )


def cluster() -> str:
    """The description of two GPUs of this machine's kind."""
    names = ask_driver("--query-gpu=name", "--format=csv,noheader").splitlines()
    here = names[0].strip() if names else "none"
    known = [name for name in kinds() if kind(name).device_kind == here]
    if not known:
        raise SystemExit(f"expected GPUs that are described, got {here}")
    return f"2x{known[0]}"


def planned(model: Model, mesh: Any, name: str, given: argparse.Namespace) -> cfp.Plan:
    """A plan, made in at most about the seconds that are given."""

    def tell(event: Any) -> None:
        if isinstance(event, str):
            say(f"{given.role} {name}: {event}")

    return cfp.plan(
        model.step,
        *model.args,
        mesh=mesh,
        donate_argnums=0,
        cache_dir=given.work / name,
        settings=cfp.PlannerSettings(seconds=given.seconds, progress=tell),
    )


def plan_on_one(name: str, given: argparse.Namespace) -> None:
    """Plans a model for two GPUs on one, and writes the plan."""
    if given.tiny:
        platform.select("cpu", AXES)
        mesh = stand_in(cfp.described("2xh200"))
    else:
        mesh = cfp.described(cluster()).on_one_device()
    _save(model_of(name, given.tiny), mesh, name, given)


def _save(model: Model, mesh: Any, name: str, given: argparse.Namespace) -> cfp.Plan:
    """A plan, kept with what is known of it; of an earlier run, if there is one."""
    started = time.perf_counter()
    file, about_file = f"{name}_{given.role}.json", f"{name}_{given.role}_about.json"
    for folder in (given.out, given.known):
        if folder and (folder / file).exists():
            plan = cfp.Plan.load(folder / file)
            plan.save(given.out / file)
            break
    else:
        plan = planned(model, mesh, name, given)
        plan.save(given.out / file)
    if not (given.out / about_file).exists():
        about = {
            "planning_s": round(time.perf_counter() - started, 2),
            "seconds": given.seconds,
            "winner": plan.winner,
            "options": dict(plan.options),
            "predicted_ms": plan.predicted_ms,
            "measured_ms": plan.measured_ms,
            "rung": plan.rung,
            "search": dict(plan.search),
            "race": [
                {"name": row.name, "ms": row.time_ms or row.predicted_ms}
                for row in plan.race
                if not row.note
            ],
            "text": repr(plan),
        }
        say(f"{given.role} {name}: {about}")
        (given.out / about_file).write_text(json.dumps(about))
    return plan


def _earlier(name: str, given: argparse.Namespace) -> dict[str, list[float]]:
    """Samples of a model that an earlier run took, by who chose the plan."""
    file, found = given.out / "samples.jsonl", {"one": [], "two": []}
    for line in file.read_text().splitlines() if file.exists() else ():
        turn = json.loads(line)
        if turn["model"] == name:
            for how, samples_ms in found.items():
                samples_ms.append(turn["ms"][how])
    return found


def compare(name: str, mesh: Mesh, given: argparse.Namespace) -> dict[str, Any]:
    """Plans a model on two GPUs, and times both plans in turn."""
    model = model_of(name, given.tiny)
    plans = {"two": _save(model, mesh, name, given)}
    if plans["two"].mesh is None:
        plans["two"] = plans["two"].on(mesh)
    other = given.out / f"{name}_one.json"
    if not other.exists():
        raise SystemExit(f"expected a plan in {other}: see what went wrong above")
    plans["one"] = cfp.Plan.load(other, mesh=mesh)
    compiled, states, programs = {}, {}, {}
    for how, plan in plans.items():
        bound = plan.bind(model.step, *model.args, donate_argnums=0)
        compiled[how] = bound.compile_bound()
        programs[how] = computation_of(compiled[how].as_text())
        # Once: to make numbers is a program of its own, which takes long to compile.
        states[how] = model.make(bound.in_shardings)
        say(f"{name}: compiled the plan of {how}, and made its state")
    samples = _earlier(name, given)
    order = list(compiled)
    for turn in range(len(samples["two"]), given.rounds):
        if time.time() > given.until:
            break
        times = {}
        for how in order if turn % 2 else order[::-1]:
            run, (state, batch) = compiled[how], states.pop(how)
            for _ in range(_WARM_UP):
                state, _ = run(state, batch)
            jax.block_until_ready(state)
            started = time.perf_counter()
            for _ in range(_STEPS):
                state, _ = run(state, batch)
            jax.block_until_ready(state)
            times[how] = round((time.perf_counter() - started) / _STEPS * 1e3, 4)
            states[how] = state, batch
        for how, ms in times.items():
            samples[how].append(ms)
        _append(given.out / "samples.jsonl", {"model": name, "ms": times})
        say(f"{name}: turn {turn + 1}: {times}")
    del states
    medians = {how: statistics.median(ms) for how, ms in samples.items() if ms}
    row = {
        "model": name,
        "device_kind": mesh.devices.flat[0].device_kind,
        "jax": jax.__version__,
        "commit": commit(),
        "p2p_disabled": os.environ.get("NCCL_P2P_DISABLE") == "1",
        "same_program": programs["one"] == programs["two"],
        "plans": {
            how: {
                **json.loads((given.out / f"{name}_{how}_about.json").read_text()),
                "samples_ms": samples[how],
            }
            for how in order
        },
        "medians_ms": medians,
        "ratio": medians["one"] / medians["two"] if len(medians) == 2 else None,
    }
    winners = {how: plan.winner for how, plan in plans.items()}
    same = ", one program" if row["same_program"] else ""
    say(f"{name}: {winners}{same}, {medians}, one over two: {row['ratio']}")
    return row


def _append(file: Path, row: dict[str, Any]) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(row) + "\n")


def say(text: str) -> None:
    """Prints a line at once."""
    print(f"{time.strftime('%X')} {text}", flush=True)


def _run(given: argparse.Namespace) -> None:
    given.out.mkdir(parents=True, exist_ok=True)
    given.work.mkdir(parents=True, exist_ok=True)
    base = [sys.executable, "-m", "cfp_test.bench.chosen_on_one", *sys.argv[1:]]
    base += ["--until", str(given.until)]
    models, players = given.models.split(","), []
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    for number, name in enumerate(models):
        if (given.out / f"{name}_one.json").exists():
            continue
        visible = {} if given.tiny else {"CUDA_VISIBLE_DEVICES": gpus[number]}
        words = [*base, "--role", "one", "--models", name]
        players.append(subprocess.Popen(words, env={**os.environ, **visible}))
    for one in players:
        one.wait()
    done = {model for model in models if len(_earlier(model, given)["two"])}
    # First what has no sample yet.
    order = ",".join(sorted(models, key=lambda model: model in done))
    subprocess.run([*base, "--role", "two", "--models", order], check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default="gpt,moe")
    parser.add_argument("--seconds", type=float, default=50)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--end", type=float, default=270, help="seconds of it all")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "cfp_chosen"
    )
    parser.add_argument("--known", type=Path, help="where another run put plans")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--role", choices=("one", "two"), help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.until = given.until or time.time() + given.end
    if given.role == "one":
        plan_on_one(given.models, given)
    elif given.role == "two":
        if given.tiny:
            platform.select("cpu", AXES)
            mesh = platform.make_mesh(AXES)
        else:
            mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
        for name in given.models.split(","):
            row = compare(name, mesh, given)
            _append(given.out / "chosen_on_one.jsonl", row)
    else:
        _run(given)


if __name__ == "__main__":
    main()
