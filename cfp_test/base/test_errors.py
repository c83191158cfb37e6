import ast
import builtins
import inspect
import pickle
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp import errors

ROOT = Path(errors.__file__).parents[1]
# Signs that a text has two sentences, or says what to do in one.
WHOLE = r"""[.?:}] |[.}]\\n|must be|^f?['"](Expected|Give) """
TEXTS = ast.Constant, ast.JoinedStr
# {Python's type: modules of cfp that may raise it}. pydantic and the readers of files
# turn ValueErrors into a CfpError.
OTHER_ERRORS = {
    "AssertionError": {"constrain", "printable", "replace"},
    "AttributeError": {"__init__"},
    "FloatingPointError": {"jaxprs"},  # As of jax_debug_nans.
    "KeyError": {"collectives"},
    "KeyboardInterrupt": {"supervise"},
    "NotImplementedError": {"parts"},
    "SystemExit": {"supervise"},
    "ValueError": {
        *("described", "file", "graph", "hlo", "model", "parts", "printable"),
        *("read", "record", "roles", "runner", "shardy", "store"),
    },
}


def test_every_error_is_a_cfp_error():
    found = [
        item
        for _, item in inspect.getmembers(errors, inspect.isclass)
        if item.__module__ == errors.__name__
    ]
    assert len(found) == 8
    assert all(issubclass(item, errors.CfpError) for item in found)
    page = (ROOT / "docs" / "api.md").read_text()
    assert all(f"::: cfp.{item.__name__}\n" in f"{page}\n" for item in found)
    for kind, usual in (
        (errors.OptionError, TypeError),
        (errors.NotBound, AttributeError),
        (errors.NoSuchFile, FileNotFoundError),
    ):
        assert issubclass(kind, usual)


def test_what_users_can_mend_is_raised_as_a_cfp_error_in_two_sentences():
    """Other exceptions are caught within cfp, end a process, or say that cfp is wrong.

    A message with a colon gives cause and remedy, as "Expected ..., got ..." does.
    """
    for path in sorted((ROOT / "cfp").rglob("*.py")):
        tree = ast.parse(path.read_text())
        calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call)]
        for call in calls:
            kind = getattr(errors, getattr(call.func, "id", ""), None)
            if inspect.isclass(kind) and issubclass(kind, errors.CfpError):
                given, text = call.args[0], ast.unparse(call.args[0])
                if isinstance(given, TEXTS) and re.search("[a-z] ", text):
                    assert re.search(WHOLE, text), path
        classes = [one for one in ast.walk(tree) if isinstance(one, ast.ClassDef)]
        for base in (ast.unparse(base) for one in classes for base in one.bases):
            is_public = path.stem == "errors" or not hasattr(errors, base)
            assert is_public, (path, base)
        for one in (one for one in ast.walk(tree) if isinstance(one, ast.Raise)):
            name = getattr(getattr(one.exc, "func", one.exc), "id", "")
            kind = getattr(builtins, name, None)
            if inspect.isclass(kind):
                assert path.stem in OTHER_ERRORS[name], (path, name)


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
    many = {f"layer_{i}/kernel": f"f32[{i}]" for i in range(30)}
    assert errors.known_names("layer_29/kernl", many, types=many).startswith(
        "Did you mean 'layer_29/kernel'? There are: layer_29/kernel f32[29], layer_"
    )
    assert "f32[0], layer_1/kernel f32[1]" in errors.known_names(
        "other", many, types=many
    )


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


@pytest.mark.parametrize(("value", "has_inner"), [("", False), ("1", True)])
def test_inner_frames_are_shown_if_the_variable_is_not_empty(
    monkeypatch, value, has_inner
):
    @errors.brief
    def fails():
        raise errors.CfpError("The test has failed. Call nothing.")

    monkeypatch.setenv("CFP_TRACEBACK", value)
    with pytest.raises(errors.CfpError) as found:
        fails()
    assert (fails.__name__ in [one.name for one in found.traceback]) == has_inner
