import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from cfp.checking.check import Differences, Leaf, brought_together, compare
from cfp.checking.trial import StepResult, Trial, _metrics
from cfp.cli.running import check_lines
from cfp.errors import CfpError
from cfp.program import memory


def trial(*steps: tuple[float, ...], tolerance: float = 1e-5) -> Trial:
    """Steps of (difference from one device, what rounding does, what a step does)."""
    return Trial(
        steps=tuple(
            StepResult(
                time_ms=float(i + 1),
                metrics={"accuracy": 0.5, "train/loss": 2.0},
                comparison=Differences(
                    [
                        Leaf(
                            path="w",
                            relative_l2=off,
                            rounding=rounding,
                            change=sum(change) if change else None,
                            tolerance=tolerance,
                        ),
                        Leaf(path="b", relative_l2=0.0),
                    ]
                ),
            )
            for i, (off, rounding, *change) in enumerate(steps)
        ),
        tolerance=tolerance,
        checked=True,
    )


@pytest.mark.parametrize(
    ("off", "rounding", "change", "fails"),
    [
        (0.0, 0.0, 0.0, False),
        (9e-6, 0.0, 0.0, False),
        (2e-5, 0.0, 0.0, True),
        (2e-5, 1e-6, 0.0, True),
        (2e-5, 1e-5, 0.0, False),  # Rounding explains it.
        (math.inf, 1e-5, 0.0, True),
        (math.inf, math.inf, 0.0, True),
        (math.nan, 1.0, 0.0, True),
        (0.5, 1.0, 0.0, False),  # Nothing but noise in that leaf, whoever computes it.
        (9e-6, 0.0, 1.0, False),
        (9e-6, 0.0, 1e-3, False),
        (9e-6, 0.0, 1e-4, True),  # A tenth of what the step does is missing.
        (9e-6, 1e-6, 1e-4, False),
    ],
)
def test_what_fails_a_check(off, rounding, change, fails):
    found = trial((0.0, 0.0), (off, rounding, change)).failures
    assert [number for number, _ in found] == ([1] if fails else [])


def test_summaries():
    found = trial((1e-7, 0.0), (3e-7, 0.0), (2e-7, 0.0))
    assert found.every[0] == Leaf(path="w", relative_l2=3e-7)
    assert found.median_ms == 2.5  # Without the first step.
    assert trial((0.0, 0.0)).median_ms == 1.0


def test_a_result_that_is_one_array_has_a_name():
    assert trial((0.0, 0.0)).named("") == "result"
    assert _metrics(jnp.ones(()), {}) == {"result": 1.0}
    assert _metrics((jnp.ones(()),), {}) == {"result[0]": 1.0}
    assert trial((0.0, 0.0)).named("0") == "result[0]"
    assert _metrics({"loss": jnp.ones(())}, {}) == {"loss": 1.0}


def test_metrics_are_scalars_also_integers():
    made = _metrics((jnp.int32(1234567), jnp.bfloat16(0.5), 1j * jnp.ones(())), {})
    assert made == {"result[0]": 1234567, "result[1]": 0.5}
    assert isinstance(made["result[0]"], int)


def test_state_that_no_step_changes_is_named():
    still, once = trial((0.0, 0.0, 0.0)), trial((0.0, 0.0, 0.0), (0.0, 0.0, 1.0))
    text = "Unchanged in all steps, so not checked (more --steps?): w"
    assert text in [*check_lines(still)]
    assert "Unchanged" not in "\n".join(check_lines(once))


def test_infinities_must_agree_and_hide_nothing():
    expected = {"a": np.array([-np.inf, 1.0, 2.0])}
    [same] = compare({"a": np.array([-np.inf, 1.0, 2.0])}, expected)
    assert same.relative_l2 == 0.0
    [off] = compare({"a": np.array([-np.inf, 1.0, 4.0])}, expected)
    assert 0.5 < off.relative_l2 < 1.0
    [gone] = compare({"a": np.array([0.0, 1.0, 2.0])}, expected)
    assert gone.relative_l2 == math.inf


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"w": [1.0, {"a": 2.0}]}, "w/1/b is not found"),
        ({"w": [1.0, {"a": 2.0, "b": 3.0, "c": 4.0}]}, "w/1/c is not expected"),
        ({"w": [1.0, {"a": 2.0, "b": 3.0}, 4.0]}, "w/2 is not expected"),
        ({"w": [1.0, 2.0]}, "w/1 is not expected"),
        (1.0, "the result is not expected"),
    ],
)
def test_the_first_place_where_structures_differ_is_named(found, words):
    with pytest.raises(CfpError, match=f"structures cannot be compared: {words}"):
        compare(found, {"w": [1.0, {"a": 2.0, "b": 3.0}]})


def test_functions_and_containers_may_differ():
    """Each call of `make` has its own closures in the optimizer."""

    def make(seed):
        net = nnx.Linear(4, 4, rngs=nnx.Rngs(seed))
        return net, nnx.Optimizer(net, optax.adam(lambda count: 0.1), wrt=nnx.Param)

    differences = compare(make(0), [*make(1)])
    assert [d.path for d in differences if d.relative_l2] == ["0/kernel/value"]
    assert len(differences) > 6
    assert len(compare({"f": jnp.tanh, "x": 1}, {"f": jnp.sin, "x": 1})) == 1


def test_squares_that_no_float_holds_are_compared():
    expected = {"large": np.full(7, 3e30, np.float32), "small": np.full(7, 3e-30, "f4")}
    found = {
        "large": np.full(7, 3.3e30, np.float32),
        "small": np.full(7, 3.6e-30, "f4"),
    }
    assert {d.path: d.relative_l2 for d in compare(found, expected)} == {
        "large": pytest.approx(0.1, rel=1e-5),
        "small": pytest.approx(0.2, rel=1e-5),
    }


def test_norms_that_no_float_holds_are_compared():
    expected, found = np.full(16, 3e38, np.float32), np.full(16, 1.5e38, np.float32)
    [distance] = compare(found, expected)
    assert distance.relative_l2 == pytest.approx(0.5)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int4", "bfloat16"])
def test_narrow_types_are_compared(dtype):
    [distance] = compare(jnp.full(3, 3, dtype), jnp.full(3, 2, dtype))
    assert distance.relative_l2 == pytest.approx(0.5)


def test_keys_and_integers_and_bits_are_compared():
    def result(seed, flag):
        key = jax.random.key(seed)
        return {
            "key": key,
            "count": jnp.arange(3) + seed,
            "flag": jnp.array([flag]),
            "few bits": (jnp.arange(3) + seed).astype(jnp.int4),
            "float of few": (jnp.arange(3.0) + seed).astype(jnp.float8_e4m3fn),
            "complex": 1j * jnp.arange(3.0) + seed,
        }

    same = compare(result(1, True), result(1, True))
    assert [d.relative_l2 for d in same] == [0.0] * 6
    assert all(d.relative_l2 > 0.1 for d in compare(result(1, True), result(2, False)))


def test_arrays_of_one_device_move_to_those_of_several():
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[2:4])
    rows = NamedSharding(mesh, PartitionSpec("x"))
    split = jax.device_put(jnp.arange(8.0) + 1, rows)
    whole = jax.device_put(jnp.arange(8.0) + 1, jax.devices()[0])
    for one, other in ((split, whole), (whole, split)):
        pair = brought_together(one, other)
        assert any(array is split for array in pair)
        assert [array.sharding for array in pair] == [rows, rows]
        [distance] = compare(2 * one, other)
        assert distance.relative_l2 == pytest.approx(1.0)


@pytest.mark.parametrize("which", ["found", "expected", "both"])
def test_results_in_host_memory_are_compared(which):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    rows = NamedSharding(mesh, PartitionSpec("x"))
    sides = {"found": 2 * (jnp.arange(8.0) + 1), "expected": jnp.arange(8.0) + 1}
    for name in sides if which == "both" else [which]:
        host = rows.with_memory_kind("pinned_host")
        sides[name] = jax.device_put(sides[name], host)
    [distance] = compare(**sides)
    assert distance.relative_l2 == pytest.approx(1.0)


def test_arrays_of_one_shape_are_fetched_by_one_program(monkeypatch):
    traced = []

    def same(leaf):
        traced.append(leaf)
        return leaf

    monkeypatch.setattr(memory, "_same", same)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    rows = NamedSharding(mesh, PartitionSpec("x"))
    for i in range(3):
        leaf = jax.device_put(jnp.arange(10.0) + i, rows)
        whole = memory.fetch(leaf, jax.devices()[1])
        assert whole.devices() == {jax.devices()[1]}
        np.testing.assert_array_equal(whole, np.arange(10.0) + i)
    assert len(traced) == 1


def test_only_what_has_the_same_shape_is_compared():
    with pytest.raises(CfpError, match=r"w: got \(2,\), and \(1,\) is expected"):
        compare({"w": np.ones(2)}, {"w": np.ones(1)})


def test_differences_are_shown_by_the_largest_few():
    expected = {f"w{n}": np.ones(4) for n in range(9)}
    found = {
        name: (1 + 0.01 * n) * one for n, (name, one) in enumerate(expected.items())
    }
    shown = str(compare(found, expected)).splitlines()
    assert shown[1] == "w8: 8.0e-02" and shown[5] == "w4: 4.0e-02"
    assert shown[6] == "and 4 more, at most 3.0e-02" and len(shown) == 7
    assert str(compare(np.ones(2), np.ones(2))) == "1 array is equal."
    assert str(compare([np.ones(2)] * 3, [np.ones(2)] * 3)) == "3 arrays are equal."
    assert str(compare(np.zeros(2), np.ones(2))).endswith("\nresult: 1.0e+00")
