import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfp.errors import CfpError
from cfp.models import find
from cfp.program.step import flatten_step
from cfp.targets import parse_options, resolve

GPT_OPTIONS = find("gpt").options
FILE = f"{__file__.rpartition('/')[0]}/toy_targets.py"
MODULE = "cfp_test.cli.toy_targets"


def single(tree):
    """Shardings for a tree, all on the first device."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda _: here, tree)


@pytest.mark.smoke
def test_a_model_is_a_target_with_its_options():
    target = resolve("gpt", ["--layers", "1", "--hidden=32", "--heads", "2", "--tied"])
    state, batch = target.args
    assert target.donate == (0,)
    assert batch["tokens"].shape == (16, 1024)
    assert state.params["embedding"]["token"]["embedding"].shape == (51200, 32)
    assert "head" not in state.params


def test_switches_have_an_opposite():
    assert parse_options("gpt", GPT_OPTIONS, ["--scan", "--no-remat"]) == {
        "scan": True,
        "remat": False,
    }


def test_options_are_parsed_by_type():
    words = ["--layers", "2", "--learning-rate=1e-3", "--learning_rate", "2e-3"]
    assert parse_options("gpt", GPT_OPTIONS, words) == {
        "layers": 2,
        "learning_rate": 2e-3,
    }
    assert parse_options("gpt", GPT_OPTIONS, ["--tied", "--dtype", "float32"]) == {
        "tied": True,
        "dtype": "float32",
    }
    assert parse_options("gpt", GPT_OPTIONS, ["--tied", "false"]) == {"tied": False}


@pytest.mark.parametrize("where", [FILE, MODULE])
def test_a_function_is_a_target(where):
    target = resolve(f"{where}:toy", donate=[0])
    assert target.donate == (0,)
    assert target.args[1].shape == (16, 32)


def test_a_file_alone_lists_its_functions():
    with pytest.raises(
        CfpError, match=f"^Name a function, as in {FILE}:NAME. "
    ) as found:
        resolve(FILE)
    assert "toy" in str(found.value).partition("There are: ")[2]


def test_a_functions_parameters_are_options(tmp_path):
    path = tmp_path / "sized.py"
    path.write_text(
        "import jax, jax.numpy as jnp\n"
        "def made(batch=4, *, width: int, wide=False, dtype='float32', seq=None):\n"
        "    shape = jax.ShapeDtypeStruct((batch, width, int(wide), seq), dtype)\n"
        "    return jnp.sin, (shape,)\n"
    )
    words = ["--batch", "18", "--width=3", "--wide", "--dtype=bfloat16", "--seq", "2"]
    (shape,) = resolve(f"{path}:made", words).args
    assert (shape.shape, shape.dtype) == ((18, 3, 1, 2), jnp.bfloat16)
    with pytest.raises(CfpError, match="Parameters of the function are its options"):
        resolve(f"{path}:made", ["--heads", "2"])
    with pytest.raises(
        CfpError, match=r"--batch cannot be 'many'. Give a value of type"
    ):
        resolve(f"{path}:made", ["--batch", "many", "--width", "1"])


def test_a_function_may_be_asked_for_microbatches():
    plain, parts = (
        jax.make_jaxpr(target.step)(*target.args)
        for target in (
            resolve(f"{FILE}:in_parts"),
            resolve(f"{FILE}:in_parts", ["--microbatches", "4"]),
        )
    )
    loops = [
        [e.params["length"] for e in jaxpr.eqns if e.primitive.name == "scan"]
        for jaxpr in (plain, parts)
    ]
    assert loops == [[], [4]]


def test_arguments_are_made_where_only_shapes_are_known():
    target = resolve(f"{FILE}:toy")
    weights, x, y = target.make_args([single(arg) for arg in target.args], 0)
    assert weights["up"].shape == (32, 64)
    assert not np.array_equal(x, y)
    places = [single(arg) for arg in target.args]
    for seed, same in ((0, True), (1, False)):
        assert np.array_equal(target.make_args(places, seed)[1], x) == same
    assert np.isfinite(np.sqrt(x)).all()  # What may be a variance is not negative.


def looked_up():
    """A step whose tokens pick rows of a table, and labels one of seven classes."""

    def step(table, batch):
        found = table[batch["tokens"]].sum() + batch["image"].astype(float).sum()
        return found + jax.nn.one_hot(batch["labels"], 7).sum()

    shape = jax.ShapeDtypeStruct
    batch = {
        "tokens": shape((64, 16), jnp.int32),
        "labels": shape((64,), jnp.int8),
        "image": shape((8, 8), jnp.uint8),
        "phase": shape((16,), jnp.complex64),
        "keys": shape((2,), jax.random.key(0).dtype),
        "count": shape((), jnp.int32),
    }
    return step, (shape((1000, 8), jnp.float32), batch)


def test_integers_that_pick_rows_are_drawn_from_all_of_them():
    """Rows of the first device alone would not show that another's are wrong."""
    target = resolve("cfp_test.cli.test_targets:looked_up")
    _, batch = target.make_args([single(arg) for arg in target.args], 0)
    assert set(np.asarray(batch["labels"])) == set(range(7))
    tokens = np.asarray(batch["tokens"])
    assert tokens.min() < 100 and 900 < tokens.max() < 1000
    assert set(np.asarray(batch["image"]).flat) == {0, 1}
    assert np.imag(np.asarray(batch["phase"])).any()
    assert batch["keys"].dtype == jax.random.key(0).dtype
    assert batch["count"] == 1  # A random count may be a schedule's end.


def counted():
    def step(x, count):
        return x * count, count + 1

    shape = jax.ShapeDtypeStruct
    return step, (shape((8, 8), "float64"), shape((), "int64"))


@pytest.mark.filterwarnings("error")
def test_shapes_of_64_bits_are_of_32_without_x64():
    """As `jax.jit` reads them; a plan would refuse the drawn numbers otherwise."""
    target = resolve("cfp_test.cli.test_targets:counted")
    planned = flatten_step(target.step, target.args).avals
    assert [str(one.dtype) for one in planned] == ["float32", "int32"]
    made = target.make_args([single(arg) for arg in target.args], 0)
    assert [one.dtype for one in made] == [one.dtype for one in planned]
    with jax.enable_x64(True):
        wide = flatten_step(target.step, target.args).avals
    assert [str(one.dtype) for one in wide] == ["float64", "int64"]


def test_concrete_and_static_arguments_stay_what_they_are():
    target = resolve(f"{FILE}:with_static", static=[1])
    weights, layers, x = target.make_args([single(target.args[i]) for i in (0, 2)], 0)
    assert layers == 2
    np.testing.assert_array_equal(weights, np.eye(32))
    assert isinstance(x, jax.Array) and x.dtype == jnp.float32


BAD = (
    ("gtp", []),
    ("nothing", []),
    ("step.py", []),
    ("gpt", ["--layrs", "2"]),
    ("gpt", ["layers", "2"]),
    ("gpt", ["--layers"]),
    ("gpt", ["--layers", "two"]),
    ("gpt", ["--tied", "maybe"]),
    ("gpt", ["--layers", "0"]),
    ("gpt", ["--hidden", "65"]),
    ("gpt", ["--dtype", "int4"]),
    ("absent.py:step", []),
    ("absent.module:step", []),
    ("cfp_test.absent:step", []),
    (f"{FILE}:absent", []),
    (f"{FILE}:not_a_function", []),
    (f"{FILE}:needs_size", []),
    (f"{FILE}:no_step", []),
    (f"{FILE}:raising", []),
    (f"{FILE}:toy", ["--layers", "2"]),
    (f"{FILE}:toy", ["1"]),
    (f"{FILE}:toy", ["--microbatches", "2"]),
    (f"{FILE}:in_parts", ["--layers", "2"]),
    (f"{FILE}:in_parts", ["--microbatches", "two"]),
    (f"{FILE}:in_parts", ["--microbatches", "3"]),
    ("gpt", ["--microbatches", "3"]),
)


def test_bad_targets_are_explained(golden):
    texts = {}
    for text, options in BAD:
        with pytest.raises(CfpError) as caught:
            resolve(text, options)
        name = " ".join([text.replace(FILE, "toy_targets.py"), *options])
        texts[name] = str(caught.value)
    golden("bad_targets", texts)


def test_the_file_whose_name_is_nearest_is_suggested_first(tmp_path):
    for name in ("aa", "bb", "cc", "dd", "ee", "train"):
        (tmp_path / f"{name}.py").touch()
    with pytest.raises(CfpError) as caught:
        resolve(f"{tmp_path}/trian.py:tiny")
    listed = "There are: aa.py, bb.py, cc.py, dd.py, ee.py, train.py."
    assert str(caught.value).endswith(f"Did you mean 'train.py'? {listed}")


def test_what_a_target_raises_is_placed():
    with pytest.raises(CfpError, match=r"no data here\n  at .*toy_targets\.py:\d+, in"):
        resolve(f"{FILE}:raising")


def test_functions_that_can_be_targets_are_suggested(tmp_path):
    (tmp_path / "train.py").write_text(
        "def train_step(state, batch): ...\n"
        "def helper(x): ...\n"
        "def tiny(): ...\n"
        "def small(layers=2): ...\n"
    )
    with pytest.raises(CfpError) as caught:
        resolve(f"{tmp_path}/train.py:smal")
    assert str(caught.value).endswith("Did you mean 'small'? There are: tiny, small.")


@pytest.mark.parametrize("option", ["donate", "static"])
def test_positions_must_be_those_of_arguments(option):
    with pytest.raises(
        CfpError, match=rf"--{option} 3 is no argument's position: the step's 3"
    ):
        resolve(f"{FILE}:toy", **{option: [3]})


def test_models_take_no_positions():
    with pytest.raises(CfpError, match="Leave them out"):
        resolve("gpt", donate=[0])


def test_a_file_that_python_cannot_read_is_explained(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("def step(:\n")
    with pytest.raises(CfpError, match="cannot be imported: SyntaxError"):
        resolve(f"{broken}:step")
