import dataclasses
import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from cfp.errors import CfpError
from cfp.profiling import collectives
from cfp.profiling.builder import Built
from cfp.profiling.collectives import (
    KINDS,
    ProbeSizes,
    Rates,
    build_probe,
    measure_rates,
)
from cfp.profiling.inputs import make_inputs
from cfp.profiling.store import ProfileStore
from cfp.profiling.tasks import MeasureOptions

pytestmark = pytest.mark.usefixtures("compiled_once")

SIZES = ProbeSizes(
    collective_bytes=(1 << 10, 1 << 13),
    chain_bytes=1 << 14,
    longest_chain=8,
    matmul_width={"float32": 32, "bfloat16": 32},
    memory_bytes=1 << 12,
    memory_passes=4,
)


@pytest.fixture(autouse=True)
def small(monkeypatch, quick):
    monkeypatch.setattr(collectives, "SMALL", SIZES)
    monkeypatch.setattr(collectives, "_CPU_TIMING", quick)


@pytest.fixture(scope="module")
def square():
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture(scope="module")
def measured(square, tmp_path_factory):
    """Rates of a mesh of two axes, the events, and the store."""
    path = tmp_path_factory.mktemp("rates") / "profiles.sqlite"
    events = []
    with pytest.MonkeyPatch.context() as patch, ProfileStore(path) as store:
        patch.setattr(collectives, "SMALL", SIZES)
        rates = measure_rates(square, store, MeasureOptions(progress=events.append))
        yield rates, events, store


def size_of(parts):
    return int(parts["bytes"])


def test_every_kind_is_measured_on_every_group_of_axes(measured):
    rates, _, _ = measured
    assert rates.mesh == (("x", 2), ("y", 4))
    groups = [("x",), ("y",), ("x", "y")]
    assert set(rates.curves) == {(kind, group) for kind in KINDS for group in groups}
    for curve in rates.curves.values():
        assert [size for size, _ in curve] == [1 << 10, 1 << 13]
        assert all(0 < ms < 1e3 for _, ms in curve)
    assert set(rates.matmul_flops_per_ms) == {"float32", "bfloat16"}
    assert all(rate > 0 for rate in rates.matmul_flops_per_ms.values())
    assert rates.memory_bytes_per_ms > 0


def test_the_programs_do_what_their_names_say(measured):
    _, _, store = measured
    for record in store.records():
        parts = dict(record.parts)
        # The result is written over an argument: nothing is allocated.
        assert record.alias_bytes == record.output_bytes
        if parts["what"] != "collective":
            assert record.collectives == ()
            continue
        sizes = {"x": 2, "y": 4, "all": 8}
        # All of the chain, none of them merged with another.
        [found] = record.collectives
        ways = sizes[parts["axes"]]
        assert (found.kind, found.group_size) == (parts["kind"], ways)
        assert found.count == int(parts["chain"]) == {1024: 8, 8192: 2}[size_of(parts)]
        # An all-to-all's pieces, otherwise the whole tensor of a group.
        share = ways if found.kind == "all-to-all" else 1
        assert found.bytes == size_of(parts) // share


def test_every_link_of_a_chain_needs_the_one_before(square):
    """The chains compute what as many collectives in a row do."""
    mesh, by_key = collectives._probes_by_key(square)
    for key, probe in by_key.items():
        parts = dict(probe.parts)
        if parts["what"] != "collective" or parts["axes"] != "x,y":
            continue
        [given] = make_inputs(probe.inputs, mesh)
        before = np.asarray(given, np.float64).reshape(8, -1)
        built = build_probe(key, probe, mesh)
        assert isinstance(built, Built)
        [made] = built.compiled(given)
        after = np.asarray(made).reshape(8, -1)
        wanted = before.copy()
        for _ in range(probe.count):
            if parts["kind"] == "all-reduce":
                wanted[:] = wanted.sum(0)
            elif parts["kind"] == "all-to-all":
                wanted = np.stack(np.split(wanted, 8, 1), 1).reshape(8, 8, -1)
                wanted = np.stack([np.concatenate(rows) for rows in wanted])
            elif parts["kind"] == "all-gather":
                wanted[:, 0] = wanted[-1, -1]
            else:
                last = np.stack(np.split(wanted.sum(0), 8))[:, -1]
                wanted[:, 0] = last
        # Sums of many numbers may be near zero.
        close = 1e-6 * np.abs(wanted).max()
        np.testing.assert_allclose(after, wanted, rtol=1e-4, atol=close)


def test_times_are_of_one_link_without_what_is_between(square):
    """Records as if everything took known times: the rates are those."""
    mesh, by_key = collectives._probes_by_key(square)
    write_ms, matmul_ms, memory_ms = 0.25, 2.0, 0.5

    def one_ms(probe):
        parts = dict(probe.parts)
        if parts["what"] == "collective":
            writes = parts["kind"] in ("all-gather", "reduce-scatter")
            return 1.0 + size_of(parts) / 1024 + write_ms * writes
        return {"write": write_ms, "matmul": matmul_ms, "memory": memory_ms}[
            parts["what"]
        ]

    rates = collectives._rates(
        mesh,
        [
            (
                probe,
                Built(key=key, compiled=None).record(
                    "ok", samples_ms=[one_ms(probe) * probe.count]
                ),
            )
            for key, probe in by_key.items()
        ],
    )
    for curve in rates.curves.values():
        assert curve == ((1 << 10, 2.0), (1 << 13, 9.0))
    assert set(rates.matmul_flops_per_ms.values()) == {2 * 32**3 / matmul_ms}
    assert rates.memory_bytes_per_ms == 2 * SIZES.memory_bytes / memory_ms


def test_a_program_that_the_compiler_made_something_else_of_is_a_failure(
    square,
):
    mesh, by_key = collectives._probes_by_key(square)
    key, probe = next(iter(by_key.items()))
    shorter = dataclasses.replace(probe, count=probe.count + 1)
    record = build_probe(key, shorter, mesh)
    assert not isinstance(record, Built)
    assert record.status == "compile_error"
    assert "{'all-reduce': 9}" in record.reason and "{'all-reduce': 8}" in record.reason


def test_the_second_time_nothing_runs(measured, square):
    rates, events, store = measured
    assert events[-1].total == len(store) == 4 * 3 * 2 + 4
    # Events name what is measured, of which none is the best.
    labels = [event.label for event in events if event.label]
    assert labels and all(one.startswith("rates of the devices: ") for one in labels)
    assert all(event.best_ms == math.inf for event in events)
    again = []
    assert measure_rates(square, store, MeasureOptions(progress=again.append)) == rates
    assert [event.cached for event in again] == [28]


def test_axes_of_any_type_and_of_size_one(store):
    devices = jax.devices()[:2]
    mesh = jax.make_mesh(
        (1, 2), ("one", "two"), axis_types=(AxisType.Explicit,) * 2, devices=devices
    )
    rates = measure_rates(mesh, store)
    assert {group for _, group in rates.curves} == {("two",)}
    assert rates.collective_ms("all-reduce", ("one", "two"), 1e4) > 0
    assert rates.collective_ms("all-reduce", ("one",), 1e4) == 0


def test_what_fails_is_filled_with_defaults(monkeypatch, store):
    run = collectives.execute

    def execute(built, kinds, mesh, **options):
        if dict(built.key.parts).get("kind") == "all-to-all":
            return built.record("crashed", reason="boom")
        return run(built, kinds, mesh, **options)

    monkeypatch.setattr(collectives, "execute", execute)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    rates = measure_rates(mesh, store)
    default = Rates.default(mesh)
    curve = ("all-to-all", ("x",))
    assert rates.curves[curve] == default.curves[curve]
    assert rates.curves["all-reduce", ("x",)] != default.curves["all-reduce", ("x",)]
    # Failures are answered from the store, until they are to be tried again.
    monkeypatch.setattr(collectives, "execute", run)
    assert measure_rates(mesh, store).curves[curve] == default.curves[curve]
    mended = measure_rates(mesh, store, MeasureOptions(retry_failures=True))
    assert mended.curves[curve] != default.curves[curve]


def test_devices_that_run_nothing_are_an_error(monkeypatch, store):
    def execute(built, kinds, mesh, **options):
        return built.record("crashed", reason="INTERNAL: no device")

    monkeypatch.setattr(collectives, "execute", execute)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    with pytest.raises(CfpError, match="INTERNAL: no device"):
        measure_rates(mesh, store)


def test_nothing_stays_on_the_devices(store, live_arrays):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    measure_rates(mesh, store)
    assert live_arrays() == 0


def test_shapes_of_a_mesh_share_what_does_not_depend_on_them(measured):
    """Noise would make one shape the faster, of one sharding on two."""
    rates, _, store = measured
    count = len(store)
    line = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    on_line = measure_rates(line, store)
    assert len(store) == count
    assert on_line.matmul_flops_per_ms == rates.matmul_flops_per_ms
    assert on_line.memory_bytes_per_ms == rates.memory_bytes_per_ms
    for kind in KINDS:
        assert on_line.curves[kind, ("x",)] == rates.curves[kind, ("x", "y")]
