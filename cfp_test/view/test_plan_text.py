"""Plans and other records as they are printed for a person.

Texts are in `golden/`; `--update-golden` writes them anew.
"""

import re
from dataclasses import replace
from string import Formatter

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.custom_partitioning import custom_partitioning

import cfp
from cfp.analysis.analyze import analyze, build_frame
from cfp.analysis.layout import lay_out
from cfp.analysis.presets import presets
from cfp.cli.options import save
from cfp.context import DetailedSettings
from cfp.plan.describe import whole_ops
from cfp.plan.parts import (
    UNPLANNED,
    VARIANTS_SECONDS,
    Figures,
    LeftFigures,
    Role,
    VariantFigures,
    WorthFigures,
)
from cfp.profiling.record import MEMORY_SHARE
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp.settings import NO_LATENCY_HIDING
from cfp.view.remarks import _REMARKS, precision_text, remarks, unplanned_text
from cfp.view.rows import blocks_rows, race_rows, segments_of, variants_rows
from cfp.view.text import explain_text, page_html
from cfp.view.words import VERIFIED, headline, summary_line
from cfp_test.cli.cli_runner import ROOT
from cfp_test.support.checking import make_mesh
from cfp_test.support.golden import plan_text
from cfp_test.view.plans import RACE, Block, axis_role, layers, make_plan, row

DATA, OWN, ZERO1, FULL = RACE
PLAIN = make_plan([], RACE)


def searched(plan, **counts):
    return replace(plan, search={**plan.search, **counts})


def wide_row(segment: int, place: int) -> Block:
    """A block of segments that are all different, with many ways to shard them."""
    first = axis_role(Role.ROWS, place, 8)
    second = axis_role(Role.CONTRACTED, -1, 64, axis="y", scattered_dim=place)
    name = f"Net/layer/part_{place}/up"
    return row(segment, segment, name, strategy=(first, second))


def named(path):
    blocks = [row(i, 0, path.format(i)) for i in range(4)]
    return make_plan([*blocks, row(4, 9, "head")], RACE)


def raced(*race, **changes):
    return replace(make_plan([], race), **changes)


def worth(name, with_ms=9.5, without_ms=11.0, is_measured=False):
    return WorthFigures(
        name=name, with_ms=with_ms, without_ms=without_ms, is_measured=is_measured
    )


def variant(name, step_ms=None, estimated_ms=None, taken=False, note=""):
    return VariantFigures(
        name=name, step_ms=step_ms, estimated_ms=estimated_ms, taken=taken, note=note
    )


def among(*variants, plan=PLAIN, **figures):
    return replace(plan, figures=Figures(variants=variants, **figures))


BOTH = (
    variant("x=4", 9.5, 8.0, taken=True),
    variant("x=2,y=2", note="Too large."),
)
LATE = (
    variant("x=4", 9.5, 8.0, taken=True),
    variant("x=2,y=2", None, 8.0, note=f"{UNPLANNED}; estimated at 8.000 ms"),
    variant("y=4", None, 8.5, note=UNPLANNED),
    variant("z=4", note=UNPLANNED),
)
TWIN = replace(OWN, name="zero3")
QUICK = replace(
    OWN, name="planned, large collectives", time_ms=9.5, samples_ms=(9.4, 9.6)
)
LIMITED = replace(OWN, name="planned, within the budget")
LIMITED_QUICK = replace(LIMITED, name=f"{LIMITED.name}, no latency hiding", time_ms=9.5)
GAIN = Figures(worth=(worth("sharding"),))
WHOLE_BLOCKS = [row(0, 0, "Net/head"), row(1, 1, "Net/tail")]
SOME_ARGUMENTS = replace(
    searched(make_plan(WHOLE_BLOCKS, RACE), model_flops=41e9),
    figures=Figures(worth=(worth("sharding", is_measured=True),)),
    arg_specs=((("x",), ()), ((), ())),
)
GAINS = Figures(
    worth=(
        worth("storage", 9.0, 11.0, is_measured=True),
        worth("remat", 9.0, 11.0),
    )
)
EXACT = replace(PLAIN, measured_ms=75.3044, figures=GAINS)
VIRTUAL = searched(
    replace(
        EXACT,
        measured_ms=None,
        race=(),
        rung="estimated",
        environment={"platform": "cpu"},
    ),
    strategies_estimated=4,
)
WIDE = [wide_row(segment, place) for segment in range(50) for place in range(30)]

SHORT = {
    "a plan": replace(
        make_plan(layers([0, 0, 0, 0]), RACE), arg_specs=((("x",),), *[((),)] * 5)
    ),
    "many segments": make_plan(WIDE, RACE),
    "five segments": make_plan([one for one in WIDE if one[1].segment < 5], RACE),
    "segments named below params": named("params/blocks/{}/mlp/up"),
    "segments named by numbers": named("blocks/{}/up"),
    "segments named by layers": named("params/layer_{}/up"),
    "segments of one module": make_plan(
        [row(i, i, f"params/{name}/weight") for i, name in enumerate(("embed", "head"))]
        + [row(2, 2, "norm"), row(3, 3, "norm/scale")],
        RACE,
    ),
    "blocks of one name": make_plan(
        [row(0, 0, f"Net/square#{1 + i}", block=i) for i in range(3)]
        + [row(1, 1, "Net/square#4", block=3)],
        RACE,
    ),
    "options of the winner alone": raced(
        QUICK, OWN, DATA, winner=QUICK.name, options={"large": "1"}
    ),
    "options of the next, too": raced(
        QUICK,
        OWN,
        replace(DATA, name="data_parallel, large collectives"),
        winner=QUICK.name,
        options={"large": "1"},
    ),
    "never without options": raced(
        QUICK, DATA, winner=QUICK.name, options={"large": "1"}
    ),
    "within the budget": raced(
        *(LIMITED_QUICK, LIMITED, DATA),
        winner=LIMITED_QUICK.name,
        options={MEMORY_SHARE: "70", **NO_LATENCY_HIDING},
    ),
    "timed by itself": raced(OWN),
    "timed by itself, the same as another": raced(OWN, TWIN),
    "the same as another": raced(*RACE, TWIN),
    "as fast as the fastest": raced(replace(DATA, time_ms=10.2), *RACE[1:]),
    "does not fit": raced(replace(DATA, note="does not fit"), *RACE[1:]),
    "no race": raced(),
    "by its name": raced(predicted_ms=None),
    "worth": replace(
        PLAIN,
        figures=Figures(worth=(worth("storage", 9.5, 9.5004), worth("kernels"))),
    ),
    "worth nothing": replace(PLAIN, figures=Figures(worth=(worth("a", 9.5, 9.5),))),
    "nothing is sharded": replace(make_plan(WHOLE_BLOCKS[:1], RACE), figures=GAIN),
    "sharding is worth something": replace(
        make_plan([row(0, 0, "Net/mlp")], RACE), figures=GAIN
    ),
    "all blocks whole, some arguments sharded": SOME_ARGUMENTS,
    "all blocks whole, a result sharded": replace(
        SOME_ARGUMENTS, arg_specs=((), ()), output_specs=((("x",),),)
    ),
    "all blocks whole on one device": replace(
        SOME_ARGUMENTS, mesh_axes=(("x", 1),), arg_specs=((), ())
    ),
    "a sharded kernel beside whole blocks": replace(
        SOME_ARGUMENTS, figures=replace(SOME_ARGUMENTS.figures, kernels=("scale",))
    ),
    "variants": among(*BOTH),
    "variants, verified": searched(among(*BOTH), **{VERIFIED: 1.0}),
    "variants that raced": among(*BOTH, variants_raced=True),
    "variants that raced, verified": searched(
        among(*BOTH, variants_raced=True), **{VERIFIED: 1.0}
    ),
    "variants by estimates": among(*BOTH, plan=VIRTUAL),
    "a variant too late": searched(among(*LATE[:2]), planning_seconds=107.7),
    "variants too late": searched(among(*LATE), planning_seconds=107.7),
    "measured exactly": EXACT,
    "measured before": searched(replace(EXACT, measured_ms=1234.5), race_cached=1.0),
    "estimated on virtual devices": VIRTUAL,
    "estimated, verified": searched(
        replace(VIRTUAL, measured_ms=75.3, rung="measured"), **{VERIFIED: 1.0}
    ),
    "wishes left out": searched(PLAIN, constraints_left_out=1),
}


@pytest.mark.parametrize("count", [1, 4, 5])
def test_sharded_arguments_are_named_the_largest_first(count):
    names = [f"w/{letter}" for letter in "abcde"[:count]]
    types = [f"float32[8,{2 + i}]" for i in range(count)]
    specs, few = (((), ("x",)),) * count, [*reversed(names)][:4]
    given = {"arg_names": ("x", *names), "arg_types": ("float32[99]", *types)}
    text = repr(replace(PLAIN, **given, arg_specs=(((),), *specs), donated=()))
    more = " and 1 more (all: cfp show --python)" * (count == 5)
    assert f"arguments: {count} of {count + 1} sharded: {', '.join(few)}{more}" in text


def test_blocks_of_several_lines_name_these():
    every = [row(i, 1, f"Net/layer_{i}/mlp", source=f"{i}.py:7") for i in (0, 1)]
    segments, rows = zip(*every, strict=True)
    plan = replace(PLAIN, segments=segments, rows=rows)
    assert "layer_0-1/mlp  at 0.py:7, 1.py:7" in explain_text(plan)


@pytest.mark.smoke
@pytest.mark.explained("Nothing is sharded, all blocks run whole")
def test_short_texts(golden):
    golden("short", {name: repr(plan) for name, plan in SHORT.items()})
    assert all(str(plan) == repr(plan) for plan in SHORT.values())
    lines = [line for plan in SHORT.values() for line in repr(plan).splitlines()]
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("name", SHORT)
def test_a_table_and_a_page_say_what_the_short_text_says(name):
    plan = SHORT[name]
    shown = [" ".join(show(plan).split()) for show in (plan_text, page_html)]
    for one in remarks(plan):
        assert all(one[1:] in text.replace("&#39;", "'") for text in shown), one


def test_a_summary_divides_the_time_of_planning(golden):
    times = {"search_seconds": 1.0, "race_seconds": 2.0, "planning_seconds": 9.5}
    plain = replace(PLAIN, search=times)
    unrun = [replace(r, samples_ms=(), time_ms=None, peak_bytes=9) for r in RACE]
    plans = {
        "raced": plain,
        "compiled": searched(plain, compile_seconds=8.0),
        "nothing compiled": replace(
            plain, race=tuple(unrun), peak_bytes=None, measured_ms=None
        ),
        "one strategy": searched(plain, strategies_measured=1.0),
        "variants": searched(PLAIN, planning_seconds=13.1, **{VARIANTS_SECONDS: 33.8}),
    }
    golden("summaries", {name: summary_line(plan) for name, plan in plans.items()})


def test_the_guide_explains_each_remark_and_each_column():
    page = " ".join((ROOT / "docs" / "reading-plans.md").read_text().split())
    unfixed = {unplanned_text: "time was over", precision_text: "computed in FP8"}
    for values_of, template in _REMARKS:
        parts = [text for text, *_ in Formatter().parse(template)]
        words = next((re.split("[:(,]", one)[0].strip() for one in parts if one), "")
        words = unfixed.get(values_of, words)
        assert words in page, template
    plan = among(*BOTH, plan=make_plan(layers([0, 0]), RACE))
    tables = blocks_rows(segments_of(plan)), variants_rows(plan), race_rows(plan)
    for name in {name.strip() for one in tables for name in one.headings} - {""}:
        assert f"*{name}*" in page or f'"{name}"' in page, name


def test_variants_too_late_are_said_where_a_plan_is_saved(tmp_path):
    plan = SHORT["a variant too late"]
    saved, *said = save(plan, tmp_path / "plan.json")
    assert saved == f"Saved {tmp_path / 'plan.json'}"
    text = unplanned_text(plan)
    assert " ".join(" ".join(said).split()) == text[0].upper() + text[1:]
    assert len(save(among(LATE[0]), tmp_path / "plan.json")) == 1
    assert save(plan, None) == []


def data_parallel(step, *args, devices=2, **more):
    """A plan of the preset, which nothing is measured for."""
    mesh = jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices])
    settings = cfp.PlannerSettings(race=False)
    how = {"preset": "data_parallel", "settings": settings, **more}
    return cfp.plan(step, *args, mesh=mesh, **how)


def over_rows(w, x):
    """A loop over a batch of one, and an op without a rule."""
    found = jax.lax.scan(lambda h, row: (jnp.tanh(h @ w + row), h), x[0], x)[1]
    return found.sum(), jax.lax.top_k(x @ w, 2)


def sharded_loop(w, x):
    jax.debug.callback(lambda _: None, x)  # It makes nothing.
    return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=5)[0].sum()


def constrained(w, x):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("x",), auto, devices=jax.devices()[:2])
    wanted = jax.NamedSharding(mesh, jax.P(None, "x"))
    return jax.lax.with_sharding_constraint(x @ w, wanted).sum()


def own_norm(w, x):
    """A step with a kernel whose rows may be sharded."""

    def scaled(x):
        return x / (1 + jnp.abs(x).sum(-1, keepdims=True))

    @custom_partitioning
    def row_scale(x):
        return scaled(x)

    row_scale.def_partition(
        partition=lambda mesh, given, made: (
            mesh,
            scaled,
            given[0].sharding,
            (given[0].sharding,),
        ),
        infer_sharding_from_operands=lambda mesh, given, made: given[0].sharding,
        sharding_rule="r c -> r c",
        need_replication_factors=("c",),
    )
    return (row_scale(x @ w) @ w.T).sum()


def sorting_loop(w, x):
    """As a Pallas kernel that is interpreted, of which XLA sees each op."""

    def body(h, _):
        return jnp.tanh(h) + jnp.sort(h, axis=0), None

    return (jax.lax.scan(body, x @ w, length=8)[0] @ w).sum()


def split_loss(in_turn):
    """A loop over two parts of the batch: halves, or every second row."""

    def step(w, x):
        parts = x.reshape(2, 4, 8)
        if in_turn:
            parts = x.reshape(4, 2, 8).swapaxes(0, 1)

        def add(total, part):
            return total + jax.grad(lambda w: ((part @ w) ** 2).sum())(w), None

        return w - jax.lax.scan(add, jnp.zeros_like(w), parts)[0]

    return step


STEPS = {
    "constraints of its own": (constrained, 2, (8, 8), (8, 8)),
    "uneven rows": (lambda w, x, y: ((x @ w).sum(), y @ w), 2, (8, 8), (7, 8), (6, 8)),
    "a batch split in order": (split_loss(False), 2, (8, 8), (8, 8)),
    "a batch below 1 % of the memory": (split_loss(False), 2, (8, 2048), (8, 8)),
    "a batch split in turn": (split_loss(True), 2, (8, 8), (8, 8)),
    "a loop over rows": (over_rows, 2, (8, 8), (5, 1, 8)),
    "a loop that is sharded": (sharded_loop, 2, (8, 8), (4, 8)),
    "a kernel that is sharded": (own_norm, 4, (64, 64), (16, 64)),
    "a kernel that no axis divides": (own_norm, 4, (64, 64), (18, 64)),
    "a loop that communicates": (sorting_loop, 4, (64, 64), (32, 64)),
}


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    plans = {}
    for name, (step, devices, *shapes) in STEPS.items():
        args = map(jnp.ones, shapes)
        plans[name] = data_parallel(step, *args, devices=devices, cache_dir=folder)
    return plans


@pytest.mark.explained("Left out: the step's own sharding constraints")
@pytest.mark.explained("A kernel is sharded, or whole on every device")
def test_plans_say_what_they_do_not_shard_or_keep(planned, golden, tmp_path):
    texts = {name: "\n".join(remarks(plan)) for name, plan in planned.items()}
    golden("unsharded", {k: re.sub(r"\d+%", "#%", v) for k, v in texts.items()})
    for name, plan in planned.items():
        plan.save(tmp_path / "plan.json")
        loaded = cfp.Plan.load(tmp_path / "plan.json")
        assert repr(loaded) == repr(plan)
        said = " ".join(explain_text(loaded).split())
        assert ("Kernels that are sharded" in said) == (
            name == "a kernel that is sharded"
        )


def test_estimates_near_the_limit_are_no_promise():
    def made(size, budget, **more):
        figures = Figures(budget_bytes=int(budget * 2**30))
        sizes = {"peak_bytes": None, "predicted_bytes": int(size * 2**30)}
        return replace(make_plan([], []), figures=figures, **{**sizes, **more})

    near = made(59.9, 60)
    assert "; may fit in 59.90 GiB of 60.00 GiB on each device, " in headline(near)
    caution = "need up to 1.18 times this memory, here 70.68 GiB: if devices have less,"
    assert any(caution in text for text in remarks(near))
    for plan in (made(50.8, 60), made(59.9, 60, peak_bytes=59 * 2**30), made(61, 60)):
        assert "may fit in" not in headline(plan)
        assert not any("1.18" in text for text in remarks(plan))


def test_parts_without_a_line_of_the_users_name_no_place():
    left = LeftFigures(kind="attention", source="", reason="why", count=2)
    assert "attention as written: why" in [*remarks(among(left=(left,)))]


def test_what_is_run_in_full_has_its_share_of_the_bytes():
    def step(w, x):
        return jax.lax.top_k(x @ w, 2)

    shapes = (jax.ShapeDtypeStruct((8, 8), jnp.float32),) * 2
    program, _ = trace(flatten_step(step, shapes), make_mesh((("x", 2),)))
    frame = build_frame(program, (("x", 2),))
    layout = lay_out(frame, presets(frame)["data_parallel"])
    (text,) = whole_ops(layout)
    # The product makes 8 x 8 numbers, and the op two times 8 x 2.
    assert text.endswith(" (33% of the bytes of all ops)")


def test_plans_are_still_equal_by_what_they_hold():
    plan = make_plan(layers([0, 0]), RACE)
    assert plan == make_plan(layers([0, 0]), RACE)
    other = replace(plan, fingerprint="1")
    assert repr(other) == repr(plan)
    assert other != plan


def test_what_else_a_user_holds_prints_in_a_line(tmp_path):
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    settings = DetailedSettings(per_kind=1, in_context=False, race=False)

    def scaled(w, x):
        return jnp.sum(x @ w)

    args = (jnp.ones((16, 16)), jnp.ones((8, 16)))
    step = cfp.parallelize(scaled, mesh=mesh, cache_dir=tmp_path, settings=settings)
    assert repr(step) == "ParallelStep of scaled: it is planned at its first call"
    step(*args)
    assert repr(step) == f"ParallelStep of scaled: {step.plan}"
    compiled = step.plan.compile(scaled, *args)
    assert repr(compiled) == "CompiledStep of scaled: 2 arguments, 1 result"
    variant = cfp.Variant(name="line", fn=scaled, args=args, mesh=mesh)
    assert "name='line'" in repr(variant) and "1., 1." not in repr(variant)
    program, _ = trace(flatten_step(scaled, args, {}), mesh)
    assert repr(analyze(program, (("x", 4),))) == (
        "Analysis of 1 block in 1 segment of 1 kind, on a mesh {'x': 4}"
    )


def test_a_parameter_is_named_before_its_moments():
    kinds, specs = ("float32[8,4]",) * 3, ((("x",), ()),) * 3
    names = "opt/0/mu/w", "opt/0/nu/w", "params/w"
    plan = replace(PLAIN, arg_names=names, arg_types=kinds, arg_specs=specs)
    assert "3 of 3 sharded: params/w, opt/0/mu/w, opt/0/nu/w" in repr(plan)
