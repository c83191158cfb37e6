"""`cfp run`'s steps, where modules have leaves that are no arrays."""

import equinox as eqx
import jax
import numpy as np
import pytest

import cfp
from cfp.checking import trial as trial_module
from cfp.checking.trial import run_trial
from cfp.errors import CfpError
from cfp.targets import resolve
from cfp_test.checks.module_steps import training
from cfp_test.support.checking import make_mesh

STEPS = 3


def trial_of(name, folder, *, donate=(), **how):
    target = resolve(f"cfp_test.checks.module_steps:{name}", donate=donate)
    plan = cfp.plan(
        target.step,
        *target.args,
        mesh=make_mesh((("x", 4),)),
        donate_argnums=donate,
        preset="fully_sharded",
        cache_dir=folder,
        settings=cfp.PlannerSettings(race=False),
    )
    return run_trial(plan, target, **how)


def plain_losses(steps):
    """Runs the step's library on the same arguments."""
    step, (net, opt, *rest) = training()
    step = eqx.filter_jit(step)
    losses = []
    for _ in range(steps):
        net, opt, metrics = step(net, opt, *rest)
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.parametrize("donate", [(), (0, 1)], ids=["kept", "donated"])
def test_steps_go_on_from_each_other(donate, tmp_path):
    trial = trial_of("training", tmp_path, donate=donate, steps=STEPS)
    losses = [step.metrics["loss"] for step in trial.steps]
    assert len(set(losses)) == STEPS
    np.testing.assert_allclose(losses, plain_losses(STEPS), rtol=1e-5)


def test_one_step_has_its_loss(tmp_path):
    trial = trial_of("training", tmp_path, steps=1)
    np.testing.assert_allclose(
        trial.steps[0].metrics["loss"], *plain_losses(1), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("name", "donate", "leaves"), [("training", (0, 1), 14), ("updating", (0,), 4)]
)
def test_steps_are_checked(name, donate, leaves, tmp_path, monkeypatch):
    how, told = {"steps": 2, "check": True}, []
    calls: list[tuple[list, list]] = []

    def feed_back(args, result, feedback, usual=trial_module.feed_back):
        calls.append((jax.tree.leaves(args), jax.tree.leaves(result)))
        usual(args, result, feedback)

    monkeypatch.setattr(trial_module, "feed_back", feed_back)
    trial = trial_of(name, tmp_path, donate=donate, progress=told.append, **how)
    assert trial.failures == []
    # They are timed as without a check: one takes the very arrays of the one before.
    (_, returned), (passed, _) = calls
    state = [leaf for leaf in returned if isinstance(leaf, jax.Array) and leaf.ndim]
    assert state and {*map(id, state)} <= {*map(id, passed)}
    # What takes long beside the steps themselves is said.
    runs = (
        "running the reference",
        "running the plan's step, and comparing results",
    )
    assert [line for line in told if line.startswith("checking")] == [
        f"checking step {number} of 2: {what}" for number in (1, 2) for what in runs
    ]
    # The plan's own program is there already, and is not compiled for the check.
    (prepared,) = (line for line in told if line.startswith("preparing the check"))
    assert "compiling steps that are not compiled yet" in prepared
    paths = [d.path for d in trial.steps[0].comparison]
    named = {trial.named(path).partition("/")[0] for path in paths}
    assert named == ({"net"} if name == "updating" else {"net", "opt", "result[2]"})
    for step in trial.steps:
        # Of arrays alone, and each of them was changed by the step.
        assert len(step.comparison) == leaves
        changed = [leaf for leaf in step.comparison if (leaf.change or 0) > 0]
        assert len(changed) >= 4


@pytest.mark.explained("An argument is donated, and the step can run only once")
def test_what_is_donated_and_not_returned_runs_once(tmp_path):
    """The message is true of modules, too."""
    for name, word in (("listing", "net"), ("widening", "state")):
        with pytest.raises(CfpError, match=rf"Argument 0 .{word}. is donated"):
            trial_of(name, tmp_path, donate=(0,), steps=2)
    [step] = trial_of("listing", tmp_path, donate=(0,), steps=1).steps
    assert step.metrics == {}
