"""The benchmark: its rows, its command, and what it says to wrong use."""

import io
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from cfp.cost.described import kind
from cfp.errors import CfpError
from cfp.operators import (
    OPERATORS,
    Refused,
    command,
    find,
    gpt_attention,
    layer_norm,
    matching,
)
from cfp.operators import benchmark as b
from cfp.operators.benchmark import bound_ms
from cfp.operators.cases import Shape, compare, limit_of
from cfp.operators.command import print_list, print_results
from cfp.operators.operator import Argument, Operator

TINY = Shape(batch=1, seq=4, hidden=8, heads=2, vocab=5)
SHAPE = "1,4,8,2,5"


def broken(x):
    raise RuntimeError("kernel refused to launch\nsecond line")


def one_row_is_wrong(x):
    return (2.0 * x).at[0, -1].set(0.0)


def wrong_gradient(x):
    return 2.0 * jax.lax.stop_gradient(x) + 0.0 * x


def too_large(x):
    raise MemoryError


def refusing(x):
    raise Refused("wants more")


DOUBLE = Operator(
    name="double",
    summary="2 x",
    arguments=(Argument(name="x", dims="* h"),),
    oracle=lambda x: 2.0 * x,
    implementations={
        "right": lambda x: x + x,
        "one_row": one_row_is_wrong,
        "gradient": wrong_gradient,
        "nan": lambda x: x + jnp.nan,
        "broken": broken,
        "large": too_large,
        "refusing": refusing,
    },
)


@pytest.fixture(scope="module", autouse=True)
def hasty():
    """Samples that are over at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(b, "TIMING", replace(b.TIMING, budget_seconds=0.01))
        yield


@pytest.fixture(scope="module")
def rows():
    found = b.run([DOUBLE], [TINY], ["float32"])
    return {row.implementation: row for row in found}


def test_what_is_wrong_is_found_and_not_timed(rows):
    assert {name: row.state for name, row in rows.items()} == {
        "right": b.MEASURED,
        "one_row": b.WRONG,
        "gradient": b.WRONG,
        "nan": b.WRONG,
        "broken": b.FAILED,
        "large": b.NO_MEMORY,
        "refusing": b.REFUSED,
    }
    assert {name for name, row in rows.items() if row.passes} == {"right"}
    assert rows["gradient"].errors["output"] == 0.0 < rows["gradient"].errors["x"]
    assert rows["nan"].errors["output"] is None
    assert rows["broken"].reason == "RuntimeError: kernel refused to launch"
    assert "second line" in rows["broken"].detail
    assert rows["refusing"].reason == "wants more"
    assert set(rows["right"].passes) == {"forward", "both"}
    assert rows["right"].passes["both"].samples_ms


def test_what_the_budget_does_not_reach_is_a_row():
    found = b.run([DOUBLE], [TINY], ["float32"], seconds=0.0)
    assert [row.state for row in found] == [b.NO_TIME] * 7


def test_no_seconds_reach_no_implementation(capsys):
    words = ["--only-run", "swiglu", "--shapes", SHAPE, "--seconds", "0"]
    assert command.main(words) == 0
    assert b.NO_TIME in capsys.readouterr().out


def test_a_limit_is_for_norms_and_for_the_largest_difference():
    right = np.ones(10_000, np.float32)

    def wrong(count, by):
        off = np.where(np.arange(len(right)) < count, by, 0.0)
        return bool(compare({"x": right + off}, {"x": right}, 1e-2)[1])

    assert not wrong(1, 3e-2) and wrong(1, 5e-2)
    assert not wrong(10_000, 5e-3) and wrong(10_000, 2e-2)
    assert wrong(1, np.nan)
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


def test_the_command_checks_times_and_writes(tmp_path, capsys):
    file = tmp_path / "now.json"
    words = ["--only-run", "rms,t5", "--forward-only", "--shapes", SHAPE]
    assert command.main([*words, "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "===== Environment =====" in out
    data = json.loads(file.read_text())
    assert data["environment"]["platform"] == "cpu"
    assert [
        (row["operator"], row["implementation"], row["state"], *row["passes"])
        for row in data["rows"]
    ] == [
        ("t5_attention", "cudnn", b.REFUSED),
        ("t5_attention", "jax_nn", b.MEASURED, "forward"),
        ("t5_attention", "xla", b.MEASURED, "forward"),
        ("rms_norm", "xla", b.MEASURED, "forward"),
    ]


def test_a_wrong_implementation_is_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(command, "matching", lambda words: [DOUBLE])
    assert command.main(["--shapes", SHAPE, "--dtypes", "float32"]) == 1
    error = capsys.readouterr().err
    assert "error: double by one_row, (1,4,8,2,5) float32 is wrong: " in error


def test_the_list_says_what_is_missing_and_why(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    assert command.main(["--list", "--only-run", "gpt_attention,swiglu"]) == 0
    out = capsys.readouterr().out
    assert "it needs NVIDIA GPUs" in out and "layer_norm" not in out


@pytest.mark.parametrize("width", [60, 80, 100])
def test_tables_fit_the_columns_that_are_given(width, rows):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as captured:
        print_list(matching("gpt_attention,swiglu"), console)
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
        (["--only-run", "layernorm"], "'layernorm'"),
        (["--shapes", "1,2,3"], "'1,2,3'"),
        (["--shapes", "1,4,9,2,5"], "hidden a multiple of heads"),
        (["--dtypes", "int8"], "'int8'"),
        (["--lst"], "--lst"),
        (["--seconds", "long"], "'long'"),
    ],
)
def test_wrong_use_of_the_command_is_one_message(words, said, capsys):
    assert command.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error
    assert "Traceback" not in error


def test_an_interrupt_is_one_message(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(command.benchmark, "run", interrupted)
    assert command.main(["--shapes", SHAPE, "--only-run", "swiglu"]) == 130
    assert capsys.readouterr().err == "error: Interrupted.\n"


X, EIGHT = jnp.ones((2, 8)), jnp.ones(8)
Q = jnp.ones((1, 8, 2, 4))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: find("layernorm"), "layer_norm"),
        (lambda: layer_norm(X, jnp.ones(4), EIGHT), r"\[h=8\], got \[4\]"),
        (lambda: layer_norm(X, jnp.ones((8, 1)), EIGHT), r"\[h=8\], got \[8, 1\]"),
        (lambda: layer_norm(X), "3 arguments.*got 1"),
        (lambda: layer_norm(X, EIGHT, EIGHT, epsilon=1e-3), "option.*'epsilon'.*eps"),
        (lambda: layer_norm(X, EIGHT, EIGHT, implementation="cuda"), "'cuda'.*jax_nn"),
        (lambda: gpt_attention(Q, Q, Q, implementation="cudnn"), "cudnn.*NVIDIA GPU"),
        (lambda: find("rotary_embedding")(Q[..., :3]), "xla.*3 is odd.*complex"),
    ],
)
def test_wrong_use_of_functions_is_one_message(call, said):
    with pytest.raises(CfpError, match=said):
        call()


def test_only_some_operators_by_part_of_their_names():
    assert [one.name for one in matching("gpt, rms")] == ["gpt_attention", "rms_norm"]
    assert len(matching("")) == len(OPERATORS) == 18
