"""Rules are proved by running; faults that are planted, and those of XLA, are found."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.mlir.dialects import chlo, stablehlo

from cfp.program import read
from cfp.program.rules import Rule
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.proving.__main__ import main
from cfp_test.proving.catalogue import ENTRIES, WITHOUT
from cfp_test.proving.engine import jobs, prove, singles
from cfp_test.proving.faults import MENDED, SHOWN, faults
from cfp_test.proving.programs import MESHES, mesh_of, singles_of
from cfp_test.proving.shown import outcome
from cfp_test.support.covering import at_night

_FLAT, _GRID = MESHES


def outcomes(fn, *args, kind, sizes=_GRID):
    """Proves the ops of a kind in a function."""
    mesh = mesh_of(sizes)
    step = flatten_step(fn, args)
    program, _ = trace(step, mesh)
    some = [s for s in singles(program, args) if s.op.kind == kind]
    assert some, f"an op of the kind {kind} that has a rule"
    return list(prove(jobs(some, mesh), mesh))


def ones(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    "name", ["products", "movements", *at_night(["convolutions", "scatters"])]
)
def test_a_part_of_the_catalogue(name):
    some = singles_of(name, 3)
    found = list(prove(jobs(some, mesh_of(_GRID)), mesh_of(_GRID)))
    assert len(found) > 20
    assert [one for one in found if one.is_wrong] == []


@pytest.mark.parametrize(
    ("name", "kind"), [("convolutions", "convolution"), ("scatters", "scatter")]
)
def test_one_op_of_a_part_that_is_nightly(name, kind):
    one = next(one for one in singles_of(name, 1) if one.op.kind == kind)
    found = list(prove(jobs([one], mesh_of(_GRID)), mesh_of(_GRID)))
    assert len(found) > 10
    assert [one for one in found if one.is_wrong or one.moved] == []


@pytest.mark.nightly
def test_the_whole_catalogue(tmp_path):
    file = tmp_path / "rules.json"
    assert main(["--json", str(file)]) == 0
    assert json.loads(file.read_text())["checks"] > 5000


_BITS = np.arange(32, dtype=np.int32).reshape(8, 4)
GATHERED = {
    "dynamic_update_slice": (
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, np.int32(0))),
        (ones(8, 4), ones(4, 4), np.int32(2)),
    ),
    "scatter": (lambda x, u: x.at[:4].set(u), (ones(8, 4), ones(4, 4))),
    "gather": (lambda x, i: x[jnp.arange(8), i], (ones(8, 4), _BITS[:, 0] % 4)),
    "reduce": (lambda x: jnp.argmax(x, 0), (ones(8, 4),)),
    "rng_bit_generator": (
        lambda key: lax.rng_bit_generator(key, (8, 4), np.uint32),
        (np.arange(4, dtype=np.uint32),),
    ),
}


@pytest.mark.parametrize("kind", GATHERED)
def test_what_the_compiler_gathers_is_not_said_to_be_sharded(kind):
    """No device makes more of an op than its sharding says, nor is more sent."""
    fn, args = GATHERED[kind]
    found = outcomes(fn, *args, kind=kind)
    assert not any(one.is_wrong or one.moved or one.larger for one in found)


def test_a_rule_that_the_compiler_does_not_keep_is_found(monkeypatch):
    monkeypatch.setattr(read, "correct_rule", lambda rule, op, shapes: rule)
    kind = "dynamic_update_slice"
    fn, args = GATHERED[kind]
    found = outcomes(fn, *args, kind=kind)
    assert any(one.moved and one.larger for one in found)


def dialect_ops():
    """Names of all ops of StableHLO and CHLO that this jaxlib has."""
    for dialect, module in (("stablehlo", stablehlo), ("chlo", chlo)):
        for each in vars(module).values():
            name = getattr(each, "OPERATION_NAME", "")
            if name.startswith(f"{dialect}."):
                yield name


def test_every_op_is_in_the_catalogue_or_has_a_reason():
    known = {kind for entry in ENTRIES.values() for kind in entry.kinds}
    every = set(dialect_ops())
    assert len(every) > 140
    assert sorted(every - known - set(WITHOUT)) == []
    assert sorted(known & set(WITHOUT)) == []


def with_rule(monkeypatch, kind, change):
    """Has cfp read another rule for the ops of a kind."""
    correct = read.correct_rule

    def wrong(rule, op, shapes):
        found = correct(rule, op, shapes)
        return change(found) if op.name == f"stablehlo.{kind}" and found else found

    monkeypatch.setattr(read, "correct_rule", wrong)


def test_a_factor_of_the_wrong_dim_is_found(monkeypatch):
    def swap(rule: Rule) -> Rule:
        (first, second), *_ = rule.results
        return replace(rule, results=((second, first),))

    x = ones(8, 8)
    assert not any(one.moved for one in outcomes(lax.exp, x, kind="exponential"))
    with_rule(monkeypatch, "exponential", swap)
    assert any(one.moved for one in outcomes(lax.exp, x, kind="exponential"))


def test_a_lost_reduction_is_found(monkeypatch):
    product = jnp.matmul
    x, y = ones(8, 16), ones(16, 4)
    assert not any(one.moved for one in outcomes(product, x, y, kind="dot_general"))
    with_rule(
        monkeypatch, "dot_general", lambda rule: replace(rule, reduction=frozenset())
    )
    assert any(one.moved for one in outcomes(product, x, y, kind="dot_general"))


def test_a_factor_that_may_not_be_split_is_found(monkeypatch):
    with_rule(monkeypatch, "sort", lambda rule: replace(rule, fixed=frozenset()))
    found = outcomes(lambda x: lax.sort(x, dimension=0), ones(8, 8), kind="sort")
    assert any(one.moved for one in found)


@pytest.mark.parametrize("fault", SHOWN)
def test_plain_jax_has_the_faults_of_the_table(fault):
    """A failure means that the table names the wrong releases of jaxlib."""
    known = fault in faults()
    assert outcome(fault) == (SHOWN[fault].shows if known else "right")


def test_integers_are_part_of_a_variant():
    """A read at another place is another variant: it may be clamped, or lie outside."""
    found = {one.text for one in singles_of("places_at_run_time", 8)}
    assert len({text for text in found if text.startswith("dynamic_slice")}) == 4


def test_a_run_that_was_ended_goes_on(tmp_path):
    """Known outcomes stay, but a line that was not written to its end."""
    arguments = ["--only", "others", "--keep", str(tmp_path)]
    assert main(arguments) == 0
    [file] = tmp_path.glob("*/others.jsonl")
    whole = file.read_text().splitlines(keepends=True)
    known = [line for line in whole if '"op"' in line]
    assert len(known) > 20
    file.write_text("".join(known[:8]) + known[8][:40])
    assert main(arguments) == 0
    again = [line for line in file.read_text().splitlines(True) if '"op"' in line]
    assert again[:8] == known[:8]
    assert [json.loads(a)["axes"] for a in again] == [
        json.loads(k)["axes"] for k in known
    ]


@pytest.mark.parametrize("how", [lax.bitwise_xor, lax.bitwise_and])
def test_reductions_that_no_collective_computes_stay_whole(how):
    def reduce(x):
        return lax.reduce(x, np.int32(0), how, (0,))

    bits = np.arange(32, dtype=np.int32).reshape(8, 4)
    found = outcomes(reduce, bits, kind="reduce")
    assert found and not any(one.is_wrong or one.axes[0] for one in found)


def test_mended_faults_are_faults():
    assert {*MENDED} < {*SHOWN}


def test_a_release_that_was_not_tried_is_taken_for_the_one_before():
    assert faults("0.11.2") == faults("0.10.2") != ()
    assert faults("0.9.1") == ()


def test_newer_releases_are_taken_to_have_what_the_newest_has():
    assert faults("0.13.1") == faults("0.12.0")
    assert len(faults("0.13.1")) < len(faults("0.10.2"))
