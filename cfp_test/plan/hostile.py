"""Damaged and hostile plans and exports: made of sound ones, and tried.

Each mutation changes one thing of a file that cfp wrote. What comes of it is either a
refusal with its reason, or a plan under which the step computes what it did.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cfp
from cfp.profiling.record import ProfileKey, ProfileRecord
from cfp.profiling.store import ProfileStore
from cfp.program.constrain import rematerializable
from cfp.program.step import flatten_step
from cfp.program.trace import planning_mesh, trace
from cfp.race.programs import RaceRow

# Where hostile options would have XLA write.
BAIT = "bait"


def step(state, batch, key):
    """Two layers with a loop between them, noise, and momentum."""

    def loss_of(weights):
        hidden = jnp.tanh(batch["x"] @ weights["up"])
        hidden = jax.lax.fori_loop(0, 2, lambda _, h: jnp.sin(h) + h, hidden)
        noise = jax.random.uniform(key, (8,))
        return jnp.mean((hidden @ weights["down"] + noise - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["weights"])
    speed = jax.tree.map(lambda s, g: 0.9 * s + g, state["speed"], gradients)
    weights = jax.tree.map(lambda w, s: w - 0.1 * s, state["weights"], speed)
    return {"weights": weights, "speed": speed}, loss


def arguments() -> tuple[Any, ...]:
    """Fresh arrays, since the step overwrites its state."""
    keys = jax.random.split(jax.random.key(3), 4)
    weights = {
        "up": jax.random.normal(keys[0], (8, 16)),
        "down": jax.random.normal(keys[1], (16, 8)),
    }
    batch = {
        "x": jax.random.normal(keys[2], (16, 8)),
        "y": jax.random.normal(keys[3], (16, 8)),
    }
    state = {"weights": weights, "speed": jax.tree.map(jnp.zeros_like, weights)}
    return state, batch, jax.random.key(1)


@dataclass(frozen=True)
class Sound:
    """A sound plan and a sound export, which mutations begin with.

    Attributes:
        mesh: the devices.
        plan: the plan as parsed JSON.
        record: of an export, its one line as parsed JSON.
        expected: what the step returns on one device.
        loop: number of an op that may not be rematerialized.
        values, ops: how many the program has.
    """

    mesh: Any
    plan: dict[str, Any]
    record: dict[str, Any]
    expected: Any
    loop: int
    values: int
    ops: int


def sound(cache: Path) -> Sound:
    """Plans the step without measuring anything, and gives the plan all it may have."""
    devices = jax.devices()[:4]
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=devices)
    plan = cfp.plan(
        step,
        *arguments(),
        mesh=mesh,
        donate_argnums=0,
        preset="fully_sharded",
        cache_dir=cache,
        settings=cfp.PlannerSettings(race=False),
    )
    program, _ = trace(flatten_step(step, arguments()), planning_mesh(mesh))
    top = [op.id for op in program.ops if op.parent < 0]
    back = next(op.id for op in program.ops if "transpose(" in op.scope)
    again = rematerializable(program, top, back)
    assert again is not None
    full = replace(
        plan,
        constraints=replace(plan.constraints, rematerialized=(again,)),
        options={"xla_backend_optimization_level": "0"},
        measured_ms=1.5,
        race=(
            RaceRow(
                name="fully_sharded",
                predicted_ms=None,
                samples_ms=(1.0, 2.0),
                time_ms=1.5,
                peak_bytes=4096,
            ),
        ),
    )
    nothing = {"blocks": [], "storage": [], "remat": [], "kernels": []}
    choice = {"choice": nothing, "level": "everything", "options": {}}
    parts = (("segment", "s"), ("mesh", "x=2,y=2"))
    record = ProfileRecord(
        key=ProfileKey(parts).digest,
        parts=parts,
        status="ok",
        samples_ms=(1.0, 2.0),
        choice=json.dumps(choice),
    )
    return Sound(
        mesh=mesh,
        plan=json.loads(full.to_json()),
        record=asdict(record),
        expected=jax.jit(step)(*arguments()),
        loop=next(op.id for op in program.ops if op.kind == "while"),
        values=len(program.values),
        ops=len(program.ops),
    )


@dataclass(frozen=True)
class Mutation:
    """One change to a file.

    Attributes:
        name: what is changed.
        change: changes parsed JSON in place, or returns what to write in its stead.
        harmless: whether the file is taken, and does what it did.
    """

    name: str
    change: Callable[[Sound, Any], Any]
    harmless: bool = False

    def text(self, made: Sound, data: Any) -> bytes:
        """Text of the file."""
        data = copy.deepcopy(data)
        found = self.change(made, data)
        if isinstance(found, bytes):
            return found
        return json.dumps(data if found is None else found).encode()


def _at(*path: Any) -> Callable[[Any], tuple[Any, Any]]:
    def find(data: Any) -> tuple[Any, Any]:
        for name in path[:-1]:
            data = data[name]
        return data, path[-1]

    return find


def _put(value: Any, *path: Any) -> Callable[[Sound, Any], None]:
    """A change that puts a value somewhere."""

    def change(made: Sound, data: Any) -> None:
        where, last = _at(*path)(data)
        where[last] = value(made) if callable(value) else value

    return change


def _drop(*path: Any) -> Callable[[Sound, Any], None]:
    def change(made: Sound, data: Any) -> None:
        where, last = _at(*path)(data)
        del where[last]

    return change


def _option(name: str, value: Any) -> Callable[[Sound, Any], None]:
    return _put(lambda made: {name: value}, "options")


def _swap(one: tuple[Any, ...], other: tuple[Any, ...]) -> Callable[[Sound, Any], None]:
    def change(made: Sound, data: Any) -> None:
        (a, i), (b, j) = _at(*one)(data), _at(*other)(data)
        a[i], b[j] = b[j], a[i]

    return change


def _deep(made: Sound, data: Any) -> bytes:
    return b'{"format": 2, "rows": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def _raw(old: str, new: str) -> Callable[[Sound, Any], bytes]:
    """A change to the text."""

    def change(made: Sound, data: Any) -> bytes:
        text = json.dumps(data)
        assert old in text
        return text.replace(old, new, 1).encode("utf-8", "surrogatepass")

    return change


def _one_more_value(made: Sound, data: Any) -> None:
    groups = data["constraints"]["shardings"]
    taken = {v for group in groups for v in group["values"]}
    spare = next(v for v in range(made.values) if v not in taken)
    wrong = [[]] * (len(groups[0]["spec"]) + 1)
    groups.append({"spec": wrong, "values": [spare], "uses": []})


def _twice(made: Sound, data: Any) -> None:
    groups = data["constraints"]["shardings"]
    groups.append(copy.deepcopy(groups[0]))


def _backwards(made: Sound, data: Any) -> None:
    [one] = data["constraints"]["rematerialized"]
    one["forward"], one["backward"] = one["backward"], one["forward"]


def _loop_again(made: Sound, data: Any) -> None:
    data["constraints"]["rematerialized"][0]["forward"] = [made.loop]


def _whole(made: Sound, data: Any) -> None:
    for name in ("arg_specs", "output_specs"):
        data[name] = [[[] for _ in spec] for spec in data[name]]


_EVIL_NAME = "\x1b]0;owned\x07\x1b[2J[bold red][/nope] :warning: \u202e<script>"

PLANS = (
    # What is asked of the compiler.
    Mutation("option xla_dump_to", _option("xla_dump_to", BAIT)),
    Mutation(
        "option xla_gpu_dump_llvmir, beside a known one",
        _put(
            lambda made: {
                "xla_backend_optimization_level": "0",
                "xla_gpu_dump_llvmir": "true",
            },
            "options",
        ),
    ),
    Mutation("option for fast math", _option("xla_cpu_enable_fast_math", "true")),
    Mutation(
        "option that turns checks of the compiler off",
        _option("xla_disable_hlo_passes", "spmd-partitioning,rematerialization"),
    ),
    Mutation(
        "known option, value with a flag behind it",
        _option("xla_backend_optimization_level", f"0 --xla_dump_to={BAIT}"),
    ),
    Mutation(
        "known option, value of another type",
        _option("xla_gpu_enable_latency_hiding_scheduler", False),
    ),
    Mutation(
        "memory limit of 100000 percent",
        _option("xla_gpu_memory_limit_slop_factor", "100000"),
    ),
    Mutation("options as a list", _put([["xla_dump_to", BAIT]], "options")),
    # Of which program it is.
    Mutation("no fingerprint", _drop("fingerprint")),
    Mutation("fingerprint null", _put(None, "fingerprint")),
    Mutation("fingerprint empty", _put("", "fingerprint")),
    Mutation("fingerprint of another program", _put("0" * 64, "fingerprint")),
    Mutation("another format", _put(999, "format")),
    Mutation("format true", _put(True, "format")),
    # Meshes.
    Mutation("no axes", _put([], "mesh_axes")),
    Mutation("axis of another size", _put(4, "mesh_axes", 0, 1)),
    Mutation("axis of size -2", _put(-2, "mesh_axes", 0, 1)),
    Mutation("axis of size 2.0", _put(2.0, "mesh_axes", 0, 1)),
    Mutation("a billion devices", _put([["x", 2**20], ["y", 2**10]], "mesh_axes")),
    Mutation("axis twice", _put("y", "mesh_axes", 0, 0)),
    Mutation(
        "axis name that ends a string of the program",
        _put('x"=2]> // ', "mesh_axes", 0, 0),
    ),
    Mutation("axes in another order", _swap(("mesh_axes", 0), ("mesh_axes", 1))),
    # Arguments and results.
    Mutation("argument dropped", _drop("arg_names", 0)),
    Mutation("argument without its sharding", _drop("arg_specs", 0)),
    Mutation("unknown axis", _put([["z"], []], "arg_specs", 0)),
    Mutation("axis twice in a spec", _put([["x"], ["x"]], "arg_specs", 0)),
    Mutation("spec of too few dims", _put([["x"]], "arg_specs", 0)),
    Mutation("spec of too many dims", _put([["x"], [], []], "arg_specs", 0)),
    Mutation("spec as text", _put("x", "arg_specs", 0)),
    Mutation("axis as a number", _put([[0], []], "arg_specs", 0)),
    Mutation("another type", _put("int8[8,16]", "arg_types", 0)),
    Mutation("type that is code", _put("__import__('os')", "arg_types", 0)),
    Mutation("another path", _put("state/other", "arg_names", 0)),
    Mutation("path with a command to terminals", _put("\x1b[2J", "arg_names", 0)),
    Mutation("donated 1", _put(1, "donated", 0)),
    Mutation("result dropped", _drop("output_specs", 0)),
    Mutation(
        "result with an axis that does not divide it",
        _put([["x", "y"]], "output_specs", -1),
    ),
    # Numbers of values and ops.
    Mutation(
        "value out of range",
        _put(lambda made: [made.values], "constraints", "shardings", 0, "values"),
    ),
    Mutation("value -1", _put([-1], "constraints", "shardings", 0, "values")),
    Mutation("value 1e3", _put([1e3], "constraints", "shardings", 0, "values")),
    Mutation("value with a sharding of another rank", _one_more_value),
    Mutation("value twice", _twice),
    Mutation(
        "op out of range",
        _put(lambda made: [[made.ops, 0]], "constraints", "shardings", 0, "uses"),
    ),
    Mutation(
        "operand out of range", _put([[0, 99]], "constraints", "shardings", 0, "uses")
    ),
    Mutation("rematerialized after it is read", _backwards),
    Mutation("a loop rematerialized", _loop_again),
    Mutation(
        "rematerialized ops out of range",
        _put(
            lambda made: [made.ops + 5], "constraints", "rematerialized", 0, "backward"
        ),
    ),
    # The rest of it.
    Mutation("time NaN", _raw('"measured_ms": 1.5', '"measured_ms": NaN')),
    Mutation("time 1e999", _raw('"measured_ms": 1.5', '"measured_ms": 1e999')),
    Mutation("time -1", _put(-1.0, "measured_ms")),
    Mutation("memory as text", _put("4 GiB", "peak_bytes")),
    Mutation(
        "number of 5000 digits",
        _raw('"peak_bytes": 4096', f'"peak_bytes": {"9" * 5000}'),
    ),
    Mutation("dim of 5000 digits", _put(f"f32[{'9' * 5000}]", "sites", 0, "type")),
    Mutation("name of 20000 characters", _put("a" * 20_000, "winner")),
    Mutation("unknown field", _put("os.system", "hook")),
    Mutation("unknown field of a part", _put("os.system", "rows", 0, "hook")),
    Mutation("field of a process", _put([1], "out_tree")),
    Mutation("field missing", _drop("segments")),
    Mutation("field twice", _raw('"options":', '"options": {}, "options":')),
    Mutation("nested 100000 deep", _deep),
    Mutation("cut off", lambda made, data: json.dumps(data).encode()[:-40]),
    Mutation("empty", lambda made, data: b""),
    Mutation("bytes that are no text", lambda made, data: b"\xff\xfe\x00"),
    Mutation("pickle", lambda made, data: b"\x80\x04cos\nsystem\n."),
    Mutation("a list", lambda made, data: [data]),
    Mutation("static argument -1", _put([-1], "static")),
    Mutation("static argument 700", _put([700], "static")),
    # Harmless: the step computes what it did.
    Mutation(
        "specs of two arguments exchanged",
        _swap(("arg_specs", 4), ("arg_specs", 5)),
        harmless=True,
    ),
    Mutation("nothing sharded", _whole, harmless=True),
    Mutation(
        "constraints dropped", _put([], "constraints", "shardings"), harmless=True
    ),
    Mutation(
        "rematerialization dropped",
        _put([], "constraints", "rematerialized"),
        harmless=True,
    ),
    Mutation("batch given away, too", _put(True, "donated", 4), harmless=True),
    Mutation("times invented", _put(1e-9, "measured_ms"), harmless=True),
    Mutation(
        "names with commands and markup", _put(_EVIL_NAME, "winner"), harmless=True
    ),
    Mutation("half a surrogate pair", _put("\ud800", "winner"), harmless=True),
)


def _key_of(parts: list[list[str]]) -> str:
    return ProfileKey(tuple((a, b) for a, b in parts)).digest


def _chosen(value: Any) -> Callable[[Sound, Any], None]:
    return _put(json.dumps(value), "choice")


def _other_parts(parts: list[list[str]]) -> Callable[[Sound, Any], None]:
    def change(made: Sound, data: Any) -> None:
        data["parts"], data["key"] = parts, _key_of(parts)

    return change


_DUMPING = {"options": {"xla_dump_to": BAIT}}

RECORDS = (
    Mutation("choice with xla_dump_to", _chosen(_DUMPING)),
    Mutation("choice with xla_dump_to, in a list", _chosen([json.dumps(_DUMPING)])),
    Mutation("choice of numbers", _chosen([1, 2])),
    Mutation("choice nested deeply", _put("[" * 100_000, "choice")),
    Mutation("key of another record", _put("0" * 64, "key")),
    Mutation("parts changed", _put([["segment", "t"]], "parts")),
    Mutation("part twice", _put([["a", "1"], ["a", "2"]], "parts")),
    Mutation(
        "part with a command to terminals", _other_parts([["segment", "\x1b[2J"]])
    ),
    Mutation("unknown field", _put("x", "hook")),
    Mutation("no status", _drop("status")),
    Mutation("unknown status", _put("fine", "status")),
    Mutation("ok without samples", _put([], "samples_ms")),
    Mutation("time -1", _put([-1.0], "samples_ms")),
    Mutation("time of 400 digits", _raw("[1.0, 2.0]", f"[{'9' * 400}]")),
    Mutation("time NaN", _raw("[1.0, 2.0]", "[NaN]")),
    Mutation("memory as text", _put("4 GiB", "temp_bytes")),
    Mutation("no time zone", _put("2026-01-01T00:00:00", "created")),
    Mutation("nested 100000 deep", _deep),
    Mutation("bytes that are no text", lambda made, data: b"\xff\xfe"),
    Mutation("reason with commands", _put("\x1b[2Jgone", "reason"), harmless=True),
)


@dataclass(frozen=True)
class Tried:
    """Outcome of a mutation.

    Attributes:
        message: of the refusal; "" if there was none.
        difference: largest relative L2 distance of a result; None if it did not run.
        written: files that were not there before.
        kept: records that the store has.
    """

    message: str
    difference: float | None = None
    written: tuple[str, ...] = ()
    kept: int = 0


def try_plan(mutation: Mutation, made: Sound, folder: Path) -> Tried:
    """Loads a mutated plan, and runs the step under it if it is not refused."""
    path = folder / "plan.json"
    path.write_bytes(mutation.text(made, made.plan))
    with _watched(folder) as written, warnings.catch_warnings():
        # JAX warns of memory that is given away in vain, and goes on.
        warnings.simplefilter("ignore", UserWarning)
        message, difference = "", None
        try:
            plan = cfp.Plan.load(path, mesh=made.mesh)
            found = plan.apply(step)(*arguments())
            difference = cfp.compare(found, made.expected)[0].relative_l2
        except cfp.CfpError as error:
            message = str(error)
    return Tried(message, difference, tuple(written))


def try_record(mutation: Mutation, made: Sound, folder: Path) -> Tried:
    """Imports a mutated export into an empty store."""
    path = folder / "records.jsonl"
    path.write_bytes(mutation.text(made, made.record) + b"\n")
    message = ""
    with ProfileStore(folder / "store" / "profiles.sqlite") as store:
        with _watched(folder) as written:
            try:
                store.merge(path)
            except cfp.CfpError as error:
                message = str(error)
        return Tried(message, None, tuple(written), len(store))


class _watched:
    """Works in a folder, and notes which files come to be there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written: list[str] = []

    def __enter__(self) -> list[str]:
        self.home = Path.cwd()
        os.chdir(self.folder)  # Where relative paths lead.
        self.before = {*self._files()}
        return self.written

    def __exit__(self, *_: object) -> None:
        os.chdir(self.home)
        self.written += sorted({*self._files()} - self.before)

    def _files(self) -> Iterator[str]:
        for path in self.folder.rglob("*"):
            # SQLite's log comes and goes.
            if not path.name.endswith(("-wal", "-shm")):
                yield path.relative_to(self.folder).as_posix()


def same_numbers(difference: float | None) -> bool:
    """Returns True if results are those of one device but for the order of sums."""
    return (
        difference is not None and bool(np.isfinite(difference)) and difference < 1e-5
    )
