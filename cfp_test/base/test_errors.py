import inspect
import pickle

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp import errors


def test_every_error_is_a_cfp_error():
    found = [
        item
        for _, item in inspect.getmembers(errors, inspect.isclass)
        if item.__module__ == errors.__name__
    ]
    assert len(found) == 6
    assert all(issubclass(item, errors.CfpError) for item in found)


def test_known_names_begin_with_the_nearest():
    known = ["fully_sharded", "zero1"]
    listed = "There are: fully_sharded, zero1."
    assert errors.known_names("fuly-sharded", known) == (
        f"Did you mean 'fully_sharded'? {listed}"
    )
    assert errors.known_names("fsdp", known) == listed
    with_alias = errors.known_names("fsdp", known, {"fsdp": "fully_sharded"})
    assert with_alias == f"Did you mean 'fully_sharded'? {listed}"
    assert errors.known_names("fsdp", []) == "There are: none."


def test_memory_budget_error_lists_the_largest_first_and_survives_pickling():
    error = errors.MemoryBudgetError(
        "too small",
        smallest_feasible_bytes=70,
        contributors=[("biases", 1), ("weights", 60)],
    )
    error.add_note("on device 3")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.MemoryBudgetError
    assert str(copy) == "too small"
    assert copy.smallest_feasible_bytes == 70
    assert copy.contributors == [("weights", 60), ("biases", 1)]
    assert copy.__notes__ == ["on device 3"]


def test_plain_errors_survive_pickling():
    copy = pickle.loads(pickle.dumps(errors.CfpError("no room")))
    with pytest.raises(errors.CfpError, match="no room"):
        raise copy


def test_an_error_is_placed_in_the_users_own_code():
    def broken(x):
        return jnp.zeros(3) @ x  # this line

    with pytest.raises(TypeError) as caught:
        jax.jit(broken)(jnp.zeros(4))
    place = errors.place_of(caught.value)
    line = inspect.getsourcelines(broken)[1] + 1
    assert place == (
        f"\n  at {__file__}:{line}, in broken: return jnp.zeros(3) @ x  # this line"
    )


def test_an_error_of_installed_code_alone_has_no_place():
    error = ValueError("raised nowhere")
    assert errors.place_of(error) == ""


def test_code_is_installed_wherever_its_packages_are(tmp_path):
    path = tmp_path / "site-packages" / "library.py"
    space = {}
    exec(compile("def fail():\n    raise ValueError", str(path), "exec"), space)
    with pytest.raises(ValueError) as caught:
        space["fail"]()  # mine
    line = caught.tb.tb_lineno
    assert f"at {__file__}:{line}, in test_code_is" in errors.place_of(caught.value)


def test_a_traceback_has_no_frames_of_planning():
    """The user's frame, the public function's and its wrapper's."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])

    def failing(x):
        raise ValueError("of my own")

    def planned():
        return cfp.plan(failing, jnp.ones(4), mesh=mesh, quiet=True)

    def called():
        return cfp.parallelize(failing, mesh=mesh, quiet=True)(jnp.ones(4))

    for run, most in ((planned, 3), (called, 4)):
        with pytest.raises(errors.StepNotTraceable, match="of my own") as caught:
            run()
        assert len(caught.traceback) <= most
        assert isinstance(caught.value.__cause__, ValueError)
