"""Plans with figures, made up: deep ones, and ones with names that mean harm."""

from dataclasses import replace

from cfp.analysis.layout import AS_WRITTEN, Storage
from cfp.plan.parts import (
    AlikeBlocks,
    Figures,
    KindFigures,
    OptionFigures,
    StrategyFigures,
)
from cfp.plan.plan import Plan
from cfp.printable import printable
from cfp_test.view.plans import RACE, ROWS, make_plan, move, row

KIB = 2**10
HARMFUL = (
    "<script>alert(1)</script>",
    "\"quotes' &amp; </style><img src=x onerror=alert(2)>",
    "x" * 300,
    "ünïcödé-层-🙂-\u202e-rtl\x1b[31m",
    "{{ 7 * 7 }}{% raw %}",
)


# What a block of a deep plan has beside its name.
DRAWN = {
    "source": "net/layers.py:7",
    "op": "dot_general f32[8,16] x f32[16,32] -> f32[8,32]",
}
MOVES = (
    move("all-gather", 3, count=2, time_ms=0.125),
    move("all-reduce", 1, axes=("x", "y"), time_ms=0.25),
)


def option(name: str, step_ms: float, memory_kib: int, taken: int) -> OptionFigures:
    return OptionFigures(
        name=name,
        strategy=StrategyFigures(
            blocks=(AlikeBlocks(names=(f"block of {name}",), strategy=(ROWS,)),),
            storage=Storage.USED,
            kernels=AS_WRITTEN,
            rematerialized=False,
        ),
        segment_ms=step_ms / 10,
        state_bytes=4 * KIB,
        residual_bytes=2 * KIB,
        temp_bytes=3 * KIB,
        step_ms=step_ms,
        memory_bytes=memory_kib * KIB,
        taken=taken,
    )


def figured(names: list[str], budget_bytes: int | None = None) -> Plan:
    """A plan whose segments are one block each, all of one kind and shardings."""
    count = len(names)
    rows = [
        row(i, 0, name, strategy=(ROWS,), moves=MOVES if i else (), **DRAWN)
        for i, name in enumerate(names)
    ]
    options = (
        option("zero1", 9.5, 600, count),
        option("#2", 10.5, 500, 0),
        option("slow & large", 12.0, 700, 0),
        option("fastest", 9.0, 900, 0),
    )
    figures = Figures(
        kinds=(KindFigures(name=f"Segments of {names[0]}", options=options),),
        segment_kinds=(0,) * count,
        picks=(0,) * count,
        fixed_bytes=KIB,
        budget_bytes=budget_bytes,
    )
    plan = make_plan(rows, RACE)
    return replace(
        plan,
        mesh_axes=(("x", 2), ("y", 2)),
        arg_names=tuple(f"params/{printable(name)}" for name in names),
        arg_types=("float32[16,32]",) * count,
        arg_specs=(((), ("y",)),) * count,
        donated=(True,) * count,
        figures=figures,
    )


def untimed(plan: Plan) -> Plan:
    """A plan whose collectives have no times."""
    rows = [
        replace(one, moves=tuple(replace(m, time_ms=None) for m in one.moves))
        for one in plan.rows
    ]
    return replace(plan, rows=tuple(rows))


DEEP = figured([f"Net/layer_{i}/up" for i in range(96)], budget_bytes=650 * KIB)
HOSTILE = figured(list(HARMFUL))
