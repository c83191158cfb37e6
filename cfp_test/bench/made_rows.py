"""Rows of a benchmark, made up."""

from cfp_test.bench.rows import (
    Row,
    configuration,
)


def row(name, group, *samples, status="ok", **more):
    return Row(
        name=name, group=group, mesh="x=4", status=status, samples_ms=samples, **more
    )


ROWS = [
    row("planned", "planned", 8.0, 10.0, 9.0),
    row("planned on x=2,y=2", "planned", 12.0),
    row("fsdp", "handwritten", 10.0),
    row("tp", "handwritten", 20.0),
    row("wrong", "handwritten", status="wrong", reason="off by 1"),
    row("cost model", "cost_model", 18.0),
    row("preset zero1", "preset", 8.0),
]


def made(rows, name="gpt, 4 layers"):
    return configuration(
        name=name,
        model="gpt",
        options={"layers": 4, "batch": 24},
        devices=4,
        rows=rows,
        planning={"x=4": {"planning_seconds": 9.0}, "x=2,y=2": {"planning_seconds": 1}},
        comparison=[],
        tflop=59.4,
    )
