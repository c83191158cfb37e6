"""The benchmark: its rows, its files, its command, and what it says to wrong use."""

import functools
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from cfp.devices.device_kind import kind
from cfp.errors import CfpError
from cfp.operators import OPERATORS, command, find, gpt_attention, layer_norm, matching
from cfp.operators import benchmark as b
from cfp.operators.benchmark import bound_ms
from cfp.operators.cases import Shape, compare, limit_of
from cfp.operators.command import (
    parse_share,
    print_list,
    print_results,
    read,
    write,
)
from cfp.operators.operator import (
    Argument,
    Implementation,
    Operator,
)

TINY = Shape(batch=1, seq=4, hidden=8, heads=2, vocab=5)
SHAPE = "1,4,8,2,5"


def broken(x):
    raise RuntimeError("kernel refused to launch\nsecond line")


def one_row_is_wrong(x):
    return (2.0 * x).at[0, -1].set(0.0)


def wrong_gradient(x):
    return 2.0 * jax.lax.stop_gradient(x) + 0.0 * x


def of(call, **how):
    return Implementation("here", call, **how)


DOUBLE = Operator(
    name="double",
    summary="2 x",
    arguments=(Argument(name="x", dims="* h"),),
    oracle=lambda x: 2.0 * x,
    implementations={
        "right": of(lambda x: x + x),
        "one_row": of(one_row_is_wrong),
        "gradient": of(wrong_gradient),
        "nan": of(lambda x: x + jnp.nan),
        "broken": of(broken),
        "absent": of(broken, probe=lambda: "needs a device"),
        "refusing": of(broken, refuses=lambda x: "wants more"),
    },
)


@pytest.fixture(scope="module")
def rows():
    found = b.run([DOUBLE], [TINY], ["float32"], sample_seconds=0.01)
    return {row.implementation: row for row in found}


def test_what_is_wrong_is_found_and_not_timed(rows):
    assert {name: row.state for name, row in rows.items()} == {
        "right": b.MEASURED,
        "one_row": b.WRONG,
        "gradient": b.WRONG,
        "nan": b.WRONG,
        "broken": b.FAILED,
        "absent": b.ABSENT,
        "refusing": b.REFUSED,
    }
    assert not rows["one_row"].passes and not rows["nan"].passes
    assert "x is off by 1 of its norm" in rows["gradient"].reason
    assert rows["broken"].reason == "RuntimeError: kernel refused to launch"
    assert "second line" in rows["broken"].detail
    assert rows["absent"].reason == "needs a device"
    assert set(rows["right"].passes) == {"forward", "both"}
    assert rows["right"].passes["both"].samples_ms


def test_what_the_budget_does_not_reach_is_named():
    clock = iter(range(1000))
    how = {"seconds": 0.5, "clock": lambda: float(next(clock))}
    found = list(b.run([DOUBLE], [TINY], ["float32"], **how))
    assert {row.state for row in found} == {b.NO_TIME, b.ABSENT, b.REFUSED}
    assert "the budget of 0.5 s was spent" in found[0].reason


def test_a_file_is_read_back_and_compared(rows, tmp_path, capsys):
    file = tmp_path / "rows.json"
    write(file, {"device": "a"}, list(rows.values()))
    known = read(file)
    assert known == list(rows.values())
    slow = json.loads(file.read_text())
    for row in slow["rows"]:
        for one in row["passes"].values():
            one["median_ms"] *= 2
    file.write_text(json.dumps(slow))
    assert not command.compare(known, read(file), None)
    assert not command.compare(known, read(file), 1.01)
    assert command.compare(known, read(file), 0.99)
    out = capsys.readouterr().out
    assert out.count("2 medians") == 3 and out.count("(+100.0%)") == 6


def test_a_limit_is_for_norms_and_for_the_largest_difference():
    right = np.ones(10_000, np.float32)

    def wrong(count, by):
        off = np.where(np.arange(len(right)) < count, by, 0.0)
        return compare({"x": right + off}, {"x": right}, 1e-2)[1]

    assert wrong(1, 3e-2) == "" and "x is off" in wrong(1, 5e-2)
    assert wrong(10_000, 5e-3) == "" and "x is off" in wrong(10_000, 2e-2)
    assert "x is off by nan" in wrong(1, np.nan)
    assert limit_of("float32", "cpu") < limit_of("float32", "gpu") < 1e-2


def test_the_roofline_counts_contractions_and_bytes():
    found = kind("h200")
    # x and the result, 32 elements of two bytes; then x, cotangent and gradient.
    for backward, moved in ((False, 128), (True, 128 + 128 + 64)):
        least = bound_ms(DOUBLE, TINY, "bfloat16", found, backward=backward)
        assert least == moved / 4800e6
    big = Shape(batch=8, seq=1024, hidden=1024, heads=16, vocab=50257)
    assert OPERATORS["swiglu"].flops(big.dims) == 4 * 8192 * 1024 * 4096


# ------------------------------------------------------------------------ the command


@pytest.fixture
def hasty(monkeypatch):
    """Samples that are over at once."""
    monkeypatch.setattr(b, "run", functools.partial(b.run, sample_seconds=0.01))


def test_the_command_checks_times_and_compares(tmp_path, capsys, hasty):
    file = tmp_path / "now.json"
    words = ["--only-run", "rms,t5", "--shapes", SHAPE, "--json", str(file)]
    assert command.main(words) == 0
    out = capsys.readouterr().out
    assert "===== Environment =====" in out and "rms_norm: forward and backward" in out
    assert "needs an NVIDIA GPU" in out
    data = json.loads(file.read_text())
    for row in data["rows"]:
        for one in row["passes"].values():
            one["median_ms"] /= 1e6
    file.write_text(json.dumps(data))
    # Any time is a regression from a millionth of it.
    again = ["--only-run", "rms", "--forward-only", "--shapes", SHAPE]
    again += ["--compare", str(file)]
    assert command.main([*again, "--fail-if-regression", "5%"]) == 1
    assert ", a regression" in capsys.readouterr().out


def test_a_wrong_implementation_is_exit_code_1(monkeypatch, capsys, hasty):
    monkeypatch.setattr(command, "matching", lambda words: [DOUBLE])
    assert command.main(["--shapes", SHAPE, "--dtypes", "float32"]) == 1
    error = capsys.readouterr().err
    assert "error: double by one_row, (1,4,8,2,5) float32 is wrong: " in error


def test_the_list_says_what_is_missing_and_why(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    assert command.main(["--list", "--only-run", "gpt_attention,swiglu"]) == 0
    out = capsys.readouterr().out
    assert "needs an NVIDIA GPU" in out and "layer_norm" not in out


@pytest.mark.parametrize("width", [60, 80, 100])
def test_tables_fit_the_columns_that_are_given(width, rows):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as captured:
        print_list([DOUBLE, *matching("gpt_attention,swiglu")], console)
        print_results([DOUBLE], list(rows.values()), console)
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= width
    assert not any("\u2026" in line for line in lines)
    times = [
        f"{rows['right'].passes[name].median_ms:.3f}" for name in ("forward", "both")
    ]
    assert all(time in "".join(lines) for time in times)


# -------------------------------------------------------------------------- wrong use


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only-run", "layernorm"], "no operator called 'layernorm'"),
        (["--shapes", "1,2,3"], "'1,2,3' is no shape"),
        (["--shapes", "1,4,9,2,5"], "hidden a multiple of heads"),
        (["--dtypes", "int8"], "called 'int8'"),
        (["--compare", "nowhere.json"], "holds no results of operators"),
        (["--fail-if-regression", "5%"], "needs --compare"),
        (["--lst"], "Unrecognized arguments: --lst. cfp operators --help"),
        (["--seconds", "long"], "--seconds: invalid float value: 'long'"),
    ],
)
def test_wrong_use_of_the_command_is_one_message(words, said, capsys):
    assert command.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error.replace("\n", " ")
    assert "Traceback" not in error


def test_wrong_use_of_functions_is_one_message():
    x = jnp.ones((2, 8))
    with pytest.raises(CfpError, match="Did you mean 'layer_norm'"):
        find("layernorm")
    with pytest.raises(CfpError, match=r"not \[h=8\]"):
        layer_norm(x, jnp.ones(4), jnp.ones(8))
    with pytest.raises(CfpError, match="takes 3 arguments"):
        layer_norm(x)
    with pytest.raises(CfpError, match="no option of layer_norm called 'epsilon'"):
        layer_norm(x, jnp.ones(8), jnp.ones(8), epsilon=1e-3)
    with pytest.raises(CfpError, match="no implementation of layer_norm"):
        layer_norm(x, jnp.ones(8), jnp.ones(8), implementation="cuda")
    q = jnp.ones((1, 8, 2, 4))
    with pytest.raises(CfpError, match=r"by cudnn does not take.*NVIDIA GPU"):
        gpt_attention(q, q, q, implementation="cudnn")
    with pytest.raises(CfpError, match="head's width 3 is odd"):
        find("rotary_embedding")(jnp.ones((1, 2, 1, 3)))


def test_a_share_is_percent_or_not():
    assert parse_share("5%") == parse_share(" 0.05 ") == 0.05
    with pytest.raises(CfpError, match="a share such as 5%"):
        parse_share("five")


def test_only_some_operators_by_part_of_their_names():
    assert [one.name for one in matching("gpt, rms")] == ["gpt_attention", "rms_norm"]
    assert len(matching("")) == len(OPERATORS) == 18
