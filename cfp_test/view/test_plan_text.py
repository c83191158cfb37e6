"""Plans and other records as they are printed for a person."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.custom_partitioning import custom_partitioning

import cfp
from cfp.analysis.analyze import analyze, build_frame
from cfp.analysis.layout import lay_out
from cfp.cli.options import save
from cfp.plan.describe import whole_ops
from cfp.plan.figures import (
    GIVEN_SECONDS,
    UNPLANNED,
    VARIANTS_SECONDS,
    Figures,
    VariantFigures,
    WorthFigures,
)
from cfp.plan.parts import Role
from cfp.planner_settings import DetailedSettings
from cfp.presets.presets import presets
from cfp.profiling.compiler_options import MEMORY_SHARE
from cfp.profiling.hlo import collectives_in
from cfp.profiling.rates import Rates
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp.settings import NO_LATENCY_HIDING
from cfp.view.page import page_html
from cfp.view.remarks import remarks, unplanned_text
from cfp.view.text import explain_text, plan_text
from cfp.view.words import VERIFIED, summary_line
from cfp_test.report.plans import RACE, Block, axis_role, layers, make_plan, row
from cfp_test.support.checking import make_mesh


@pytest.mark.smoke
def test_a_plan_prints_in_a_few_lines():
    plan = replace(
        make_plan(layers([0, 0, 0, 0]), RACE), arg_specs=((("x",), ()), ((), ()))
    )
    assert repr(plan) == str(plan)
    assert repr(plan).splitlines() == [
        "Plan 'planned' for a mesh x=4 of abacus",
        "  10.250 ms per step, measured; 9.500 ms predicted; 3.00 MiB on each device",
        "  chosen: the fastest of 2 raced on the whole step; next, data_parallel: "
        "12.250 ms",
        "  segment 0: embedding replicated; parameters sharded",
        "  segment 1-4 (layer_0-3): mlp x: columns; parameters sharded",
        "  segment 5: head replicated; parameters sharded",
        "  arguments: 1 of 2 is sharded",
        '  more: plan.save("plan.json"), then: cfp show plan.json',
    ]


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("params/blocks/{}/mlp/up", "params/blocks/0-3"),
        ("blocks/{}/up", "blocks/0-3"),
        ("params/layer_{}/up", "params/layer_0-3"),
    ],
)
def test_segments_are_named_by_the_number_of_their_layers(path, where):
    blocks = [row(i, 0, path.format(i)) for i in range(4)]
    blocks += [row(4, 9, "head")]
    assert f"  segment 0-3 ({where}): " in repr(make_plan(blocks, RACE))


def test_times_of_a_truncated_race_are_not_set_beside_those_of_whole_steps():
    counts = {"segments": 6.0, "segments_raced": 4.0}
    plan = replace(make_plan(layers([0, 0, 0, 0]), RACE), search=counts)
    words = re.sub(r"\s+", " ", repr(plan))
    own = next(row.time_ms for row in RACE if row.name == "planned")
    assert (
        "the fastest of 2 raced on 4 of its segments; next, data_parallel: "
        f"12.250 ms, against {own:.3f} ms there"
    ) in words


def test_compiler_options_are_no_lead_over_what_ran_without_them():
    """The fastest alone runs with them: both are compared as they are without, too."""
    rival, own = RACE[:2]
    options = "large collectives"
    quick = replace(own, name=f"planned, {options}", time_ms=9.5, samples_ms=(9.4, 9.6))

    def said(*race):
        plan = replace(make_plan([], race), winner=quick.name, options={"large": "1"})
        both = [re.sub(r"\s+", " ", text) for text in (repr(plan), explain_text(plan))]
        assert len({"without its own" in text for text in both}) == 1
        return both[0]

    also = "; the plan without its own compiler options: 10.250 ms"
    assert f"next, data_parallel: 12.250 ms{also}" in said(quick, own, rival)
    # It ran with the same options, or the plan was never without them.
    same = replace(rival, name=f"data_parallel, {options}")
    assert "without its own" not in said(quick, own, same)
    assert "without its own" not in said(quick, rival)


def test_a_plan_with_the_memory_limit_is_not_compared_with_one_that_has_it():
    """Within the budget it did not run without options of its own."""
    rival, own = RACE[:2]
    limited = replace(own, name="planned, within the budget")
    quick = replace(own, name=f"{limited.name}, no latency hiding", time_ms=9.5)
    plan = replace(
        make_plan([], (quick, limited, rival)),
        winner=quick.name,
        options={MEMORY_SHARE: "70", **NO_LATENCY_HIDING},
    )
    for text in (repr(plan), explain_text(plan)):
        assert "data_parallel" in text and "without its own" not in text


def wide_row(segment: int, place: int) -> Block:
    """A block of segments that are all different, with many ways to shard them."""
    first = axis_role(Role.ROWS, place, 8)
    second = axis_role(Role.CONTRACTED, -1, 64, axis="y", scattered_dim=place)
    name = f"Net/layer/part_{place}/up"
    return row(segment, segment, name, strategy=(first, second))


def test_a_plan_of_many_different_segments_prints_in_a_few_lines_too():
    rows = [wide_row(segment, place) for segment in range(50) for place in range(30)]
    lines = repr(make_plan(rows, RACE)).splitlines()
    assert len(lines) < 30
    assert max(map(len, lines)) <= 100
    assert "  and 46 more runs of segments" in lines
    five = repr(make_plan([row for row in rows if row[1].segment < 5], RACE))
    assert "  and 1 more run of segments" in five.splitlines()
    assert "and 26 more; parameters sharded" in " ".join(map(str.strip, lines))


@pytest.mark.parametrize(
    ("race", "predicted_ms", "chosen"),
    [
        (RACE[1:2], 9.5, "timed on the whole step, by itself"),
        ([RACE[1], RACE[3]], 9.5, "timed on the whole step, by itself"),
        (
            [RACE[1], replace(RACE[1], name="zero3")],
            9.5,
            "timed on the whole step, by itself, the same program as zero3",
        ),
        (
            [*RACE, replace(RACE[1], name="zero3")],
            9.5,
            "the fastest of 2 raced on the whole step, the same program as zero3; "
            "next,",
        ),
        (
            [replace(RACE[0], time_ms=10.2), *RACE[1:]],
            9.5,
            "as fast as the fastest of 2 raced on the whole step; next, ",
        ),
        ([], 9.5, "by prediction, without a race"),
        ([], None, "by its name"),
    ],
)
def test_a_plan_says_how_it_was_chosen(race, predicted_ms, chosen):
    plan = replace(make_plan([], race), predicted_ms=predicted_ms)
    [line] = [line for line in repr(plan).splitlines() if line.startswith("  chosen")]
    assert line.startswith(f"  chosen: {chosen}")


def test_a_choice_that_is_worth_nothing_is_not_listed():
    def worth(name, without_ms):
        return WorthFigures(
            name=name, with_ms=9.5, without_ms=without_ms, is_measured=False
        )

    def said(*parts):
        return repr(replace(make_plan([], RACE), figures=Figures(worth=parts)))

    storage, kernels = worth("storage", 9.5004), worth("attention kernels", 11.0)
    assert "worth by prediction: attention kernels 1.500 ms\n" in said(storage, kernels)
    assert "worth" not in said(storage)


@pytest.mark.explained("Nothing is sharded, all blocks run whole")
def test_where_nothing_is_sharded_every_text_says_so():
    gain = WorthFigures(
        name="sharding", with_ms=9.5, without_ms=11.0, is_measured=False
    )
    figures = Figures(worth=(gain,))
    whole = replace(make_plan([row(0, 0, "Net/head")], RACE), figures=figures)
    sharded = replace(make_plan([row(0, 0, "Net/mlp")], RACE), figures=figures)
    for show in (repr, plan_text, page_html):
        said = " ".join(show(whole).split())
        assert "othing is sharded: 4 devices are no faster than one for this" in said
        assert "what one would: use one, or a larger batch" in said
        assert "orth by prediction" not in said
        said = " ".join(show(sharded).split())
        assert "othing is sharded" not in said
        assert "sharding 1.500 ms, against all blocks data parallel" in said
    said = " ".join(repr(whole).split())
    assert (
        "(the best with all blocks data parallel: 11.000 ms, this one 9.500, "
        "predicted), and every" in said
    )


def test_a_plan_whose_blocks_run_whole_says_so_though_some_arguments_are_sharded():
    """An optimizer's moments, say, of which every device updates a part."""
    gain = WorthFigures(name="sharding", with_ms=9.5, without_ms=11.0, is_measured=True)
    blocks = [row(0, 0, "Net/head"), row(1, 1, "Net/tail")]
    plan = replace(
        make_plan(blocks, RACE),
        figures=Figures(worth=(gain,)),
        arg_specs=((("x",), ()), ((), ())),
    )
    plan = replace(plan, search={**plan.search, "model_flops": 41e9})
    words = (
        "ll blocks run whole on each of the 4 devices: but for the update of what is "
        "stored in parts, 4 devices are no faster than one for this step (the "
        "best with all blocks data parallel: 11.000 ms, this one 9.500, measured): use "
        "one, or a larger batch"
    )
    for show in (repr, plan_text, page_html):
        said = " ".join(show(plan).split())
        assert words in said
        assert "othing is sharded" not in said and "orth as measured" not in said
        assert (
            "step; 4 TFLOP/s on each of the devices, which all compute the same" in said
        )
    one_result = replace(plan, arg_specs=((), ()), output_specs=((("x",),),))
    assert "all blocks run whole" in repr(one_result)
    assert "data parallel" not in repr(replace(plan, figures=None))
    one_block = replace(plan, rows=(blocks[0][1], row(1, 1, "Net/mlp")[1]))
    kernels = replace(plan.figures, kernels=("scale over x",))
    one_device = replace(plan, mesh_axes=(("x", 1),), arg_specs=((), ()))
    for one in (one_block, replace(plan, figures=kernels), one_device):
        assert "run whole" not in repr(one)
        assert "TFLOP/s on each device" in repr(one)


def variants_of(plan):
    """Lines of a plan about its variants."""
    return [line for line in remarks(plan) if line.startswith("variant ")]


def test_each_variant_that_a_plan_was_chosen_among_has_a_line():
    nothing = {"step_ms": None, "estimated_ms": None}
    fields = {"step_ms": 9.5, "estimated_ms": 8.0, "note": ""}
    variants = (
        VariantFigures(name="x=4", taken=True, **fields),
        VariantFigures(name="x=2,y=2", taken=False, **nothing, note="Too large."),
    )
    plan = replace(make_plan([], RACE), figures=Figures(variants=variants))
    found = [line for line in repr(plan).splitlines() if "variant" in line]
    assert found == [
        "  variant x=4: 9.500 ms, its best by estimate, before planning, 8.000 ms "
        "(this one)",
        "  variant x=2,y=2: Too large.",
    ]
    assert (plan.predicted_ms, plan.measured_ms) == (9.5, 10.25)
    # Measured on other devices since then: no race of variants is guessed.
    verified = {**plan.search, VERIFIED: 1.0}
    [first, _] = variants_of(replace(plan, search=verified))
    assert first.endswith("8.000 ms (this one; 10.250 ms as verified)")
    assert "race of the variants" not in first
    raced = Figures(variants=variants[:1], variants_raced=True)
    plan = replace(plan, figures=raced)
    assert variants_of(plan) == [
        "variant x=4: 9.500 ms in the race of the variants, its best by estimate, "
        "before planning, 8.000 ms (this one; 10.250 ms in its own race)"
    ]
    [line] = variants_of(replace(plan, search=verified))
    assert "in the race of" in line and line.endswith("10.250 ms as verified)")


def test_variants_that_there_was_no_time_for_are_told_first(tmp_path, capsys):
    def variant(name, estimated_ms, note=UNPLANNED, **changes):
        values = {"step_ms": None, "taken": False, **changes}
        return VariantFigures(name=name, estimated_ms=estimated_ms, note=note, **values)

    own = variant("x=4", 8.0, "", step_ms=9.5, taken=True)
    late = variant("x=2,y=2", 8.0, f"{UNPLANNED}; estimated at 8.000 ms")
    others = variant("y=4", 8.5), variant("z=4", None)
    known = {"planning_seconds": 107.7}

    def planned(*variants):
        figures = Figures(variants=variants)
        return replace(make_plan([], RACE), figures=figures, search=known)

    plan = planned(own, late)
    words = (
        "ime was over before 1 variant of 2 could be planned: x=2,y=2, estimated at "
        "8.000 ms like this one; a longer --time-budget, or PlannerSettings("
        "seconds=...), has time for them"
    )
    for show in (repr, plan_text, page_html):
        said = " ".join(show(plan).split())
        assert words in said
        assert "variant x=2,y=2" not in said
    save(plan, tmp_path / "plan.json", say=True)
    saved, *said = capsys.readouterr().out.splitlines()
    assert saved.startswith("Saved ")
    assert " ".join(" ".join(said).split()) == f"T{words}"
    save(plan, tmp_path / "plan.json", say=False)
    save(planned(own), tmp_path / "plan.json", say=True)
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert (
        "3 variants of 4 could be planned: x=2,y=2, estimated at 8.000 ms like this "
        "one; y=4, estimated at 8.500 ms; z=4, not estimated; this one, before it was "
        "planned, at 8.000 ms; a longer "
    ) in " ".join(repr(planned(own, late, *others)).split())
    assert "estimated at 8.500 ms" in unplanned_text(planned(others[0]))
    many = [variant(f"{n}", 9.0) for n in range(6)]
    said = unplanned_text(planned(own, *many))
    assert "; 3, estimated at 9.000 ms; 2 other variants; this one, before" in said


def test_a_plan_says_by_how_much_planning_took_longer_than_it_might():
    def said(**search):
        plan = make_plan([], RACE)
        return repr(replace(plan, search={**plan.search, **search}))

    over = "planning took 17 s more than the 120 s asked for"
    given = {GIVEN_SECONDS: 120.0}
    assert over in said(**given, planning_seconds=137.2)
    assert over in said(**given, planning_seconds=40.0, **{VARIANTS_SECONDS: 137.2})
    assert "planning took" not in said(**given, planning_seconds=120.4)
    assert "planning took" not in said(planning_seconds=137.2)


def test_a_time_of_one_turn_on_virtual_devices_has_few_digits_and_no_worth():
    def worth(name, is_measured=True):
        return WorthFigures(
            name=name, with_ms=9.0, without_ms=11.0, is_measured=is_measured
        )

    gains = Figures(worth=(worth("storage"), worth("mesh"), worth("remat", False)))
    exact = replace(make_plan([], RACE), measured_ms=75.3044, figures=gains)
    search = {**exact.search, "strategies_estimated": 4}
    rough = replace(exact, search=search)
    assert "75.304 ms per step, measured;" in repr(exact)
    assert "75.3 ms per step, measured in one turn (2 samples);" in repr(rough)
    again = replace(rough, search={**search, "race_cached": 1.0}, measured_ms=1234.5)
    assert "1234 ms per step, measured in one turn of an earlier race" in " ".join(
        repr(again).split()
    )
    assert "worth as measured: storage 2.000 ms; mesh 2.000 ms" in repr(exact)
    assert "worth as measured: mesh 2.000 ms" in repr(rough)
    for plan in (exact, rough):
        assert "worth by prediction: remat 2.000 ms" in repr(plan)
    verified = replace(rough, search={**search, VERIFIED: 1.0})
    assert "75.304 ms per step, measured;" in repr(verified)


def test_a_headline_has_the_time_of_the_race_of_the_variants_too():
    fields = {"estimated_ms": None, "note": ""}
    variants = (
        VariantFigures(name="x=4", step_ms=292.221, taken=True, **fields),
        VariantFigures(name="y=4", step_ms=300.0, taken=False, **fields),
    )
    raced = Figures(variants=variants, variants_raced=True)
    plan = replace(make_plan([], RACE), figures=raced)
    words = "10.250 ms per step, measured; 292.221 ms in the race of the variants; "
    assert words in plan_text(plan, 500)
    alone = replace(plan, figures=replace(raced, variants_raced=False))
    assert "in the race of the variants" not in plan_text(alone, 500)


def test_the_time_of_all_variants_is_divided():
    plan = make_plan([], RACE)
    times = {"planning_seconds": 13.1, VARIANTS_SECONDS: 33.8}
    said = summary_line(replace(plan, search={**plan.search, **times}))
    assert "13.1 s in all for this variant, with tracing" in said
    others = "20.7 s more, to plan the others and to compare them"
    assert f"; 33.8 s for all variants ({others})" in said
    [alone] = summary_line(plan).split("; ")[-1:]
    assert "variant" not in alone


def data_parallel(step, *args, devices=2, **more):
    """A plan of the preset, which nothing is measured for."""
    mesh = jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices])
    settings = cfp.PlannerSettings(race=False)
    how = {"preset": "data_parallel", "settings": settings, **more}
    return cfp.plan(step, *args, mesh=mesh, **how)


@pytest.mark.explained("Left out: the step's own sharding constraints")
def test_a_plan_says_which_wishes_it_does_not_keep():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("x",), auto, devices=jax.devices()[:2])
    wanted = jax.NamedSharding(mesh, jax.P(None, "x"))

    def step(w, x):
        return jax.lax.with_sharding_constraint(x @ w, wanted).sum()

    plan = data_parallel(step, jnp.ones((8, 8)), jnp.ones((8, 8)))
    words = "eft out: 1 of the step's own sharding constraints, since the plan decides"
    assert words in repr(plan)
    assert words in plan_text(plan)
    assert "left out" not in repr(replace(plan, search={}))


def test_a_plan_says_what_is_too_uneven_to_be_sharded(tmp_path):
    def step(w, x, y):
        return (x @ w).sum(), y @ w

    plan = data_parallel(step, *(jnp.ones((rows, 8)) for rows in (8, 7, 6)))
    assert plan.uneven == ("x (7 over x=2)",)
    words = "hole, since the mesh does not divide it: x (7 over x=2)"
    plan.save(tmp_path / "plan.json")
    for one in (plan, cfp.Plan.load(tmp_path / "plan.json")):
        assert words in repr(one)
        assert words in plan_text(one)


def test_a_plan_says_what_every_device_runs_in_full(tmp_path):
    """A loop over a batch of one, an op without a rule; not what is sharded."""

    def step(w, x):
        def body(h, row):
            return jnp.tanh(h @ w + row), h

        return jax.lax.scan(body, x[0], x)[1].sum(), jax.lax.top_k(x @ w, 2)

    how = {"cache_dir": tmp_path}  # Without the devices' rates.
    plan = data_parallel(step, jnp.ones((8, 8)), jnp.ones((5, 1, 8)), **how)
    sites = [re.sub(r"\d+", "#", one) for one in plan.replicated_ops]
    assert sites == [f"{op} at test_plan_text.py:# (#%)" for op in ("while", "top_k")]
    plan.save(tmp_path / "plan.json")
    for one in (plan, cfp.Plan.load(tmp_path / "plan.json")):
        assert (
            f"in full, with its share of all bytes made: {plan.replicated_ops[0]}"
            in repr(one)
        )
        assert plan.replicated_ops[0] in plan_text(one)

    def even(w, x):
        jax.debug.callback(lambda _: None, x)  # It makes nothing.
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=5)[0].sum()

    plan = data_parallel(even, jnp.ones((8, 8)), jnp.ones((4, 8)), **how)
    assert not plan.replicated_ops


def own_norm(scaled):
    """A step with a kernel whose rows may be sharded."""

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
    return lambda w, x: (row_scale(x @ w) @ w.T).sum()


@pytest.mark.explained("A kernel is sharded, or whole on every device")
@pytest.mark.parametrize(
    "rows, told",
    [
        (16, "kernels that are sharded: row_scale at test_plan_text.py:# over x"),
        (18, "custom_partitioning row_scale at test_plan_text.py:#: x=4 divides none"),
    ],
)
def test_a_plan_says_over_what_a_kernel_is_sharded_or_that_it_is_whole(
    rows, told, tmp_path
):
    step = own_norm(lambda x: x / (1 + jnp.abs(x).sum(-1, keepdims=True)))
    args = jnp.ones((64, 64)), jnp.ones((rows, 64))
    plan = data_parallel(step, *args, devices=4, cache_dir=tmp_path)
    is_whole = rows % 4 > 0
    plan.save(tmp_path / "plan.json")
    for one in (plan, cfp.Plan.load(tmp_path / "plan.json")):
        text = " ".join(repr(one).split())
        assert told in re.sub(r":\d+", ":#", text)
        assert "sharding_rule=" not in text  # It has a rule.
        assert (
            len(one.replicated_ops) == is_whole
            and len(one.figures.kernels) == 1 - is_whole
        )
        assert ("Kernel that is sharded" in explain_text(one)) != is_whole


@pytest.mark.explained("Communicated in loops that compute no products")
def test_a_plan_says_what_is_communicated_in_loops_without_products(tmp_path):
    """As in a Pallas kernel that is interpreted, of which XLA sees each op."""
    turns = 8

    def step(w, x):
        def body(h, _):
            return jnp.tanh(h) + jnp.sort(h, axis=0), None

        return (jax.lax.scan(body, x @ w, length=turns)[0] @ w).sum()

    args = jnp.ones((64, 64)), jnp.ones((32, 64))
    plan = data_parallel(step, *args, devices=4, cache_dir=tmp_path)
    [told] = plan.figures.loops
    assert told.startswith("while ")
    assert f": 1 all-gather in each of {turns} iterations" in told
    found = collectives_in(plan.compile(step, *args).as_text())
    assert sum(one.count for one in found if one.kind == "all-gather") >= turns
    text = " ".join(repr(plan).split())
    assert f"communicated in loops that compute no products: {told}" in text
    assert told in " ".join(explain_text(plan).split())


def test_what_is_run_in_full_has_its_cost():
    def step(w, x):
        return jax.lax.top_k(x @ w, 2)

    shapes = (jax.ShapeDtypeStruct((8, 8), jnp.float32),) * 2
    mesh = make_mesh((("x", 2),))
    program, _ = trace(flatten_step(step, shapes), mesh)
    frame = build_frame(program, (("x", 2),))
    layout = lay_out(frame, presets(frame)["data_parallel"])
    rates = Rates(
        mesh=frame.mesh,
        curves={("all-gather", ("x",)): ((1, 1.0), (1 << 20, 1.0))},
        matmul_flops_per_ms={"float32": 1e6, "bfloat16": 1e6},
        memory_bytes_per_ms=128.0,
    )
    (text,) = whole_ops(layout, rates)
    # It reads 8 x 8 numbers, gathered in 1 ms, and makes two times 8 x 2: 384 bytes,
    # of which each of two devices would do half.
    assert text.endswith("%, costs at least 2.50 ms by estimate)")
    (text,) = whole_ops(layout)
    assert text.endswith("%)")


def test_plans_are_still_equal_by_what_they_hold():
    plan = make_plan(layers([0, 0]), RACE)
    assert plan == make_plan(layers([0, 0]), RACE)
    other = replace(plan, fingerprint="1")
    assert repr(other) == repr(plan)
    assert other != plan


def test_the_fastest_of_variants_prints_as_a_list_and_its_plan():
    plan = make_plan(layers([0, 0]), RACE)
    fastest = cfp.Fastest(
        name="line",
        plan=plan,
        outcomes=(
            cfp.Outcome(name="line", plan=plan, step_ms=10.25, seconds=3.0),
            cfp.Outcome(name="flat", seconds=1.0, note="interrupted"),
        ),
        basis=cfp.Basis.RACED,
    )
    assert repr(fastest).splitlines() == [
        "Fastest of 2 variants, raced: line",
        "  line: 10.250 ms per step",
        "  flat: interrupted",
        *repr(plan).splitlines(),
    ]


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
