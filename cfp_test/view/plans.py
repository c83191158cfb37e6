"""Plans of made-up figures."""

from cfp.analysis.layout import AS_WRITTEN, Storage
from cfp.plan.parts import (
    AxisRole,
    MoveFigure,
    PlanRow,
    PlanSegment,
    Role,
    StoredParameter,
)
from cfp.plan.plan import Plan, RaceRow
from cfp.program.constrain import Constraints

Block = tuple[PlanSegment, PlanRow]


def axis_role(role: Role, dim: int, size: int, **changes) -> AxisRole:
    values = {"axis": "x", "factor": max(dim, 0), "scattered_dim": None}
    return AxisRole(role=role, dim=dim, size=size, **{**values, **changes})


ROWS, COLUMNS = axis_role(Role.ROWS, 0, 8), axis_role(Role.COLUMNS, 1, 64)
STRATEGIES = {"attention": (ROWS,), "mlp": (COLUMNS,)}


def move(kind: str, size_kib: float, **changes) -> MoveFigure:
    values = {"axes": ("x",), "count": 1, "time_ms": None}
    size = round(1024 * size_kib)
    return MoveFigure(kind=kind, total_bytes=size, **{**values, **changes})


def row(segment: int, kind: int, name: str, **changes) -> Block:
    """A block with its segment."""
    values = {
        "block": segment,
        "segment": segment,
        "name": name,
        "op": "dot_general",
        "strategy": STRATEGIES.get(name.rpartition("/")[2], ()),
        "source": "",
        "moves": (move("all-reduce", 16.25 + segment),),
        "repeats": 1,
    }
    chosen = PlanSegment(
        kind=kind,
        parameters=(StoredParameter(argument=segment, storage=Storage.SHARDED),),
        rematerialized=False,
        kernels=AS_WRITTEN,
        time_ms=1.5 * (kind + 1),
    )
    return chosen, PlanRow(**{**values, **changes})


def layers(kinds: list[int]) -> list[Block]:
    """One block per segment; the first and the last stand alone."""
    inner = [row(i + 1, k, f"Net/layer_{i}/mlp") for i, k in enumerate(kinds)]
    last = len(kinds) + 1
    return [row(0, 8, "Net/embedding"), *inner, row(last, 9, "Net/head")]


def make_plan(blocks: list[Block], race: list[RaceRow]) -> Plan:
    segments = {one.segment: segment for segment, one in blocks}
    return Plan(
        fingerprint="0" * 64,
        mesh_axes=(("x", 4),),
        arg_names=tuple(f"params/{i}" for i in segments),
        arg_types=("float32[4]",) * len(segments),
        arg_specs=(((),),) * len(segments),
        output_specs=(),
        constraints=Constraints({}, {}),
        donated=(True,) * len(segments),
        winner="planned",
        predicted_ms=9.5,
        measured_ms=10.25,
        peak_bytes=3 * 2**20,
        segments=tuple(segments.values()),
        rows=tuple(one for _, one in blocks),
        race=tuple(race),
        environment={"device_kind": "abacus"},
        search={
            "strategies_measured": 12,
            "strategies_cached": 3,
            "strategies_failed": 1,
            "profile_seconds": 20.04,
            "search_seconds": 0.5,
            "race_seconds": 7.0,
            "race_cached": 0.0,
        },
    )


RACE = [
    RaceRow(
        name="data_parallel",
        predicted_ms=11.0,
        samples_ms=(12.0, 12.5),
        time_ms=12.25,
        peak_bytes=5 * 2**20,
    ),
    RaceRow(
        name="planned",
        predicted_ms=9.5,
        samples_ms=(10.0, 10.5),
        time_ms=10.25,
        peak_bytes=3 * 2**20,
    ),
    RaceRow(
        name="zero1",
        predicted_ms=None,
        samples_ms=(12.0, 12.5),
        time_ms=12.25,
        peak_bytes=5 * 2**20,
    ),
    RaceRow(
        name="fully_sharded",
        predicted_ms=None,
        samples_ms=(),
        time_ms=None,
        peak_bytes=0,
        note="out_of_memory: needs 9 bytes",
    ),
]


def as_data(plan: Plan) -> dict:
    import json

    return json.loads(plan.to_json())
