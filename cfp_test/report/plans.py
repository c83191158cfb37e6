"""Plans of made-up figures."""

from cfp.plan.plan import Plan, PlanRow, RaceRow
from cfp.program.graft import Constraints

SHARDED = {"attention": "x: rows (dim 0 of 8)", "mlp": "x: columns (dim 1 of 64)"}


def row(segment: int, kind: int, name: str, **changes) -> PlanRow:
    values = {
        "block": segment,
        "segment": segment,
        "kind": kind,
        "name": name,
        "op": "dot_general",
        "sharded": SHARDED.get(name.rpartition("/")[2], "replicated"),
        "storage": "sharded",
        "collectives": f"all-reduce x {16 + segment}.25 KiB",
        "segment_ms": 1.5 * (kind + 1),
    }
    return PlanRow(**{**values, **changes})


def layers(kinds: list[int]) -> list[PlanRow]:
    """One block per segment; the first and the last stand alone."""
    inner = [row(i + 1, k, f"Net/layer_{i}/mlp") for i, k in enumerate(kinds)]
    last = len(kinds) + 1
    return [row(0, 8, "Net/embedding"), *inner, row(last, 9, "Net/head")]


def make_plan(rows: list[PlanRow], race: list[RaceRow]) -> Plan:
    return Plan(
        fingerprint="0" * 64,
        mesh_axes=(("x", 4),),
        arg_names=(),
        arg_types=(),
        arg_specs=(),
        output_specs=(),
        constraints=Constraints({}, {}),
        donated=(),
        winner="planned",
        predicted_ms=9.5,
        measured_ms=10.25,
        peak_bytes=3 * 2**20,
        rows=tuple(rows),
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
