"""Replaced parts beside the parts as written: right ones pass, planted faults fail."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfp import PlannerSettings, api
from cfp.analysis.layout import constraints, lay_out
from cfp.analysis.presets import plainest, presets
from cfp.context import open_context
from cfp.kernels.matches import propose
from cfp.platform import all_meshes
from cfp.profiling.record import ProfileRecord
from cfp.profiling.store import ProfileStore, store_path
from cfp.profiling.tasks import InFlight, Operation
from cfp.race import sites
from cfp.race.sites import check_sites
from cfp_test.kernels.replaced import Step
from cfp_test.support.at_work import of_living

BATCH, TOKENS, HEADS, DIM = 4, 32, 2, 8
POSITIONS = np.arange(TOKENS)
CAUSAL = POSITIONS[:, None] >= POSITIONS
LOCAL = CAUSAL & (POSITIONS[:, None] - POSITIONS < 8)


def attention(q, k, v, mask):
    scores = jnp.einsum("bqnd,bknd->bnqk", q, k) / DIM**0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1)
    return jnp.einsum("bnqk,bknd->bqnd", weights, v)


def layer(x, w, mask):
    q, k, v = jnp.split((x @ w).reshape(BATCH, TOKENS, 3 * HEADS, DIM), 3, 2)
    return x + attention(q, k, v, mask).reshape(x.shape)


def unrolled(w, x, valid, mask):
    for i in range(2):
        x = layer(x, w[i], mask)
    return x


def scanned(w, x, valid, mask):
    return jax.lax.scan(lambda x, w: (layer(x, w, mask), None), x, w)[0]


def padded(w, x, valid, mask):
    return unrolled(w, x, valid, mask & valid[:, None, None, :])


def step_of(model, mask, dtype=jnp.float32):
    def step(w, x, valid):
        return jax.grad(lambda w: jnp.square(model(w, x, valid, mask)).mean())(w)

    keys = jax.random.split(jax.random.key(0), 2)
    w = jax.random.normal(keys[0], (2, HEADS * DIM, 3 * HEADS * DIM), dtype) / 4
    x = jax.random.normal(keys[1], (BATCH, TOKENS, HEADS * DIM), dtype)
    valid = jnp.ones((BATCH, TOKENS), bool).at[1, 20:].set(False)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    return Step(step, (w, x, valid), mesh)


def checked(step, folder, change=lambda meaning: meaning):
    """Compares all parts of a step, their kernels' meaning changed."""
    frame = step.frame
    layout = lay_out(frame, plainest(presets(frame)))
    found = []
    for match in step.attentions.found.values():
        one = propose(frame.program, match, "xla", layout.axes)
        assert not isinstance(one, str), one
        found += one.replacements(frame.program)
    changed = []
    for one in found:
        meaning = change(one.functions.meaning)
        functions = dataclasses.replace(one.functions, meaning=meaning)
        changed.append(dataclasses.replace(one, functions=functions))
    how = dataclasses.replace(constraints(layout), replaced=tuple(changed))
    with (
        open_context(step.mesh, folder) as context,
        InFlight(context.store) as in_flight,
    ):
        return check_sites(context, frame.program, how, in_flight), len(found)


MODELS = {
    "unrolled": step_of(unrolled, CAUSAL),
    "scanned": step_of(scanned, CAUSAL),
    "window": step_of(unrolled, LOCAL),
    "padded": step_of(padded, CAUSAL),
    "bfloat16": step_of(padded, CAUSAL, jnp.bfloat16),
    "float16": step_of(unrolled, LOCAL, jnp.float16),
}


@pytest.mark.parametrize("name", MODELS)
def test_right_parts_pass_and_are_compared_once(name, tmp_path):
    checks, parts = checked(MODELS[name], tmp_path)
    assert parts and len(checks) == (2 if name == "scanned" else 1)
    assert all(one.off < 0.5 for one in checks)
    # The backward loop of a scan reads the softmax's weights, which kernels do not.
    assert [bool(one.reason) for one in checks].count(True) == (name == "scanned")
    again, _ = checked(MODELS[name], tmp_path)
    assert [one.off for one in again] == [0.0] * len(checks)


def test_a_part_that_ended_the_process_is_not_compared_again(tmp_path, monkeypatch):
    """The comparison is noted, so that no other operation is blamed for its end."""
    noted = list[Operation]()

    def compare(context, part, constraints, site, in_flight):
        [mine] = of_living(context.store).values()
        noted.extend(mine)
        return dataclasses.replace(site, reason="there is not enough memory")

    monkeypatch.setattr(sites, "_compare", compare)
    for _ in range(2):  # Memory may be free later.
        checks, _ = checked(MODELS["unrolled"], tmp_path)
        assert [one.reason for one in checks] == ["there is not enough memory"]
    mine, _ = noted
    assert (mine.label, mine.doing) == ("attention", "run")
    crash = {"status": "crashed", "reason": "the process died"}
    with ProfileStore(store_path(tmp_path)) as store:
        store.put(ProfileRecord(key=mine.key, parts=mine.parts, **crash))
    checks, _ = checked(MODELS["unrolled"], tmp_path)
    assert [one.reason for one in checks] == ["the process died"] and len(noted) == 2


FAULTS = {
    "scale": ("unrolled", lambda m: dataclasses.replace(m, scale=1.02 * m.scale)),
    "causal": ("unrolled", lambda m: dataclasses.replace(m, causal=False)),
    "causal in a scan": ("scanned", lambda m: dataclasses.replace(m, causal=False)),
    "window": ("window", lambda m: dataclasses.replace(m, left=m.left + 1)),
    "padding": ("padded", lambda m: dataclasses.replace(m, sides=(), empty="")),
    "bfloat16": ("bfloat16", lambda m: dataclasses.replace(m, scale=1.05 * m.scale)),
    "mask": ("bfloat16", lambda m: dataclasses.replace(m, sides=(), empty="")),
    "left": ("float16", lambda m: dataclasses.replace(m, left=m.left + 1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, tmp_path):
    name, change = FAULTS[fault]
    checks, _ = checked(MODELS[name], tmp_path, change)
    assert any(one.is_wrong for one in checks)
    assert "was refused" in str(next(one for one in checks if one.is_wrong))


def test_options_are_made_anew_without_a_wrong_kernel(monkeypatch, tmp_path):
    """An estimate's options have the wrong kernel, too."""
    found = iter([(frozenset({"chunked"}), ("chunked is wrong",)), (frozenset(), ())])
    asked = []

    def profile(context, analysis):
        asked.append(context.settings.kernels)
        return made(context, analysis)

    made = api.profile
    monkeypatch.setattr(api, "wrong_kernels", lambda context, plan: next(found))
    monkeypatch.setattr(api, "profile", profile)
    args = (jax.ShapeDtypeStruct((8, 8), "float32"),) * 2
    variants = [
        api.Variant(name=name, fn=jnp.matmul, args=args, mesh=mesh)
        for name, mesh in all_meshes(2).items()
    ]
    how = {"cache_dir": tmp_path, "settings": PlannerSettings(race=False)}
    plan = api.plan_fastest(variants, **how).plan
    assert asked == [()] and plan.site_checks == ("chunked is wrong",)
