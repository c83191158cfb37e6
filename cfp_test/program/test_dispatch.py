"""Calls as a compiled step remembers them, and what it looks at again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cfp.errors import PlanMismatch
from cfp.plan.execute import CompiledStep
from cfp.program.step import flatten_step

SHAPE = (8, 2)


def arrays(mesh, count=2):
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    return [
        jax.device_put(jnp.full(SHAPE, i, jnp.int32), sharding) for i in range(count)
    ]


def dispatch_of(step, *shardings):
    return CompiledStep(step, None, shardings, (), None).dispatch


def dispatch(mesh, donate=(0,)):
    """Compiles a step ``(a, b), c -> (a', b')`` with a sharded state and c whole."""
    step = flatten_step(
        lambda state, c: state, ((*arrays(mesh),), jnp.ones(3)), donate_argnums=donate
    )
    sharded = NamedSharding(mesh, PartitionSpec("x"))
    whole = NamedSharding(mesh, PartitionSpec())
    return dispatch_of(step, sharded, sharded, whole)


def called(one, leaves, results):
    """Lists what was new in a call, and what was passed on."""
    look = one.look(leaves)
    placed = one.place(look)
    one.remember(placed, results)
    return list(look.new), placed.leaves


def test_a_loop_looks_at_what_comes_anew(mesh):
    one, state = dispatch(mesh), arrays(mesh)
    whole = NamedSharding(mesh, PartitionSpec())
    news = []
    for _ in range(4):
        made, batch = arrays(mesh), jax.device_put(jnp.ones(3), whole)
        new, leaves = called(one, [*state, batch], made)
        assert all(a is b for a, b in zip(leaves, [*state, batch], strict=True))
        news.append(new)
        state = made
    assert news == [[0, 1, 2], [0, 1, 2], [2], [2]]


def test_what_is_passed_again_is_known(mesh):
    one, state = dispatch(mesh, donate=()), arrays(mesh)
    c = jax.device_put(jnp.ones(3), NamedSharding(mesh, PartitionSpec()))
    assert called(one, [*state, c], [])[0] == [0, 1, 2]
    assert called(one, [*state, c], [])[0] == []


def test_what_may_be_overwritten_is_not_known_when_it_comes_again(mesh):
    one, state = dispatch(mesh), arrays(mesh)
    c = jax.device_put(jnp.ones(3), NamedSharding(mesh, PartitionSpec()))
    called(one, [*state, c], [])
    assert called(one, [*state, c], [])[0] == [0, 1]


def test_what_is_elsewhere_is_placed_each_time(mesh):
    one, state = dispatch(mesh, donate=()), arrays(mesh)
    for _ in range(3):
        new, leaves = called(one, [*state, np.ones(3, np.float32)], [])
        assert 2 in new
        assert leaves[2].sharding.is_equivalent_to(
            NamedSharding(mesh, PartitionSpec()), 1
        )


def test_swapped_results_are_followed(mesh):
    one = dispatch(mesh)
    c = jax.device_put(jnp.ones(3), NamedSharding(mesh, PartitionSpec()))
    first, second, third = arrays(mesh), arrays(mesh), arrays(mesh)
    called(one, [*first, c], second)
    called(one, [*second, c], third)
    new, leaves = called(one, [third[1], third[0], c], first)
    assert new == [0, 1]
    assert leaves[0] is third[1], "no copy: no two results share memory"


def test_one_result_in_two_places_is_copied(mesh):
    one = dispatch(mesh)
    c = jax.device_put(jnp.ones(3), NamedSharding(mesh, PartitionSpec()))
    first, second = arrays(mesh), arrays(mesh)
    called(one, [*first, c], second)
    _, leaves = called(one, [second[0], second[0], c], first)
    assert leaves[0] is not leaves[1]
    np.testing.assert_array_equal(leaves[0], leaves[1])


def test_an_expected_array_that_is_gone(mesh):
    one, state = dispatch(mesh, donate=()), arrays(mesh)
    c = jax.device_put(jnp.ones(3), NamedSharding(mesh, PartitionSpec()))
    called(one, [*state, c], [])
    one.check_not_deleted([*state, c])
    state[1].delete()
    with pytest.raises(PlanMismatch, match=r"'state/1' is gone"):
        one.check_not_deleted([*state, c])


def test_nothing_is_kept_alive(mesh):
    one = dispatch(mesh, donate=())
    c = jax.device_put(jnp.ones(3), NamedSharding(mesh, PartitionSpec()))
    state = arrays(mesh)
    called(one, [*state, c], arrays(mesh))
    seen = [id(leaf) for leaf in state]
    del state
    fresh = [*arrays(mesh), c]
    look = one.look(fresh)
    assert list(look.new) == [0, 1], "whatever addresses they have"
    assert seen


@pytest.mark.parametrize(
    "other",
    [
        jnp.ones(3, jnp.int32),
        jnp.ones(4),
        jnp.asarray(1.0) * np.ones(3, np.float64),
        {"a": jnp.ones(3)},
    ],
    ids=["type", "shape", "wide", "tree"],
)
def test_other_types_are_seen(mesh, other):
    one, state = dispatch(mesh), arrays(mesh)
    assert one.has_types(one.look([*state, jnp.ones(3)]))
    same = getattr(other, "dtype", None) == jnp.float32 and other.shape == (3,)
    assert one.has_types(one.look([*state, other])) == same


def test_another_structure_is_seen(mesh):
    step = flatten_step(lambda state, c: state, ({"a": jnp.ones(3)}, jnp.ones(3)))
    assert len(step.leaves_of(({"a": 1.0}, 2.0), {})) == 2
    assert len(step.leaves_of(({"a": 1.0},), {"c": 2.0})) == 2
    for args in [({"b": 1.0}, 2.0), ({"a": 1.0},), ({"a": None}, 2.0), ((1.0,), 2.0)]:
        assert step.leaves_of(args, {}) is None


@pytest.mark.explained("key: planned for key<fry>[], got uint32[2]")
@pytest.mark.parametrize("count", [None, 4])
def test_the_other_kind_of_random_keys_is_named(mesh, count):
    def keys(make):
        return make(0) if count is None else jax.random.split(make(0), count)

    old, modern = keys(jax.random.PRNGKey), keys(jax.random.key)
    typed = "key<fry>[]" if count is None else "key<fry>[4]"
    raw = "uint32[2]" if count is None else "uint32[4,2]"
    for planned, passed, words in (
        (modern, old, f"key: planned for {typed}, got {raw}\n"),
        (old, modern, f"key: planned for {raw}, got {typed}\n"),
    ):
        step = flatten_step(lambda key: key, (planned,))
        one = dispatch_of(step, NamedSharding(mesh, PartitionSpec()))
        with pytest.raises(PlanMismatch) as caught:
            one.place(one.look([passed]))
        assert words in str(caught.value)


@pytest.mark.explained("The arguments do not fit the plan")
def test_all_that_does_not_fit_is_named(mesh):
    """As in the last batch of a data set, which is a short one."""
    one, state = dispatch(mesh), arrays(mesh)
    whole = NamedSharding(mesh, PartitionSpec())
    c = r"c: planned for float32\[3\], got "
    for leaf, words in (
        (jnp.ones(2), c + r"float32\[2\]\n.*smaller last batch"),
        (np.ones(2, np.float32), c + r"float32\[2\]"),
        (jax.device_put(jnp.ones(2), whole), c + r"float32\[2\]"),
        (jnp.ones(3, jnp.int32), c + r"int32\[3\]"),
    ):
        with pytest.raises(PlanMismatch, match=words):
            one.place(one.look([*state, leaf]))
    with pytest.raises(PlanMismatch) as caught:
        one.place(one.look([state[0], jnp.ones((4, 2)), jnp.ones(2)]))
    assert [line.split(":")[0] for line in str(caught.value).splitlines()[1:-1]] == [
        "  state/1",
        "  c",
    ]


def test_shapes_are_no_arguments_of_a_call(mesh):
    one, state = dispatch(mesh), arrays(mesh)
    with pytest.raises(PlanMismatch, match=r"'c' is a ShapeDtypeStruct\. Call"):
        one.place(one.look([*state, jax.ShapeDtypeStruct((3,), "float32")]))
