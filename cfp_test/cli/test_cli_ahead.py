"""`cfp plan --for` and `cfp verify` from the outside: every bad input, one message."""

import json
from pathlib import Path

import pytest

from cfp_test.cli.cli_runner import Outcome, run_batch

TOY = f"{Path(__file__).with_name('toy_targets.py')}:toy"
EXPERTS = f"{Path(__file__).with_name('toy_targets.py')}:experts"
OTHER = f"{Path(__file__).with_name('toy_targets.py')}:in_parts"
PARTS = ["--microbatches", "2", "--platform", "cpu"]
PLAN = ["plan", TOY, "-q", "--for"]
FILES = {
    "lacks.toml": "memory_gib = 40\n",
    "negative.toml": 'kind = "h200"\nbfloat16_tflop_per_s = -1\n',
    "guessed.toml": 'kind = "h200"\nmemory_gib = { value = 1, basis = "guessed" }\n',
    "curves.toml": 'kind = "h200"\n[curves]\nall-gather = [[1, 0.0]]\n',
    "broken.toml": "kind =\n",
}
MISTAKES: list[tuple[list[str], str]] = [
    ([*PLAN, "4xh300"], "There is no such kind of device"),
    ([*PLAN, "four h200"], "cannot be read"),
    ([*PLAN, "0xh200"], "greater than or equal to 1"),
    ([*PLAN, "4xh200", "--mesh", "x=3"], "not of the cluster's devices"),
    ([*PLAN, "2x8xh100", "--mesh", "x=2,y=4"], "all devices of 2x8xh100, 16"),
    ([*PLAN, "1xh200", "--mesh", "x=2"], "not of the cluster's devices"),
    ([*PLAN, "2x4xl40s"], "Nothing is known of a network"),
    ([*PLAN, "lacks.toml"], "none for bfloat16_tflop_per_s"),
    ([*PLAN, "negative.toml"], "bfloat16_tflop_per_s.value = -1"),
    ([*PLAN, "guessed.toml"], "memory_gib.basis"),
    ([*PLAN, "curves.toml"], "curves.all-"),
    ([*PLAN, "broken.toml"], "cannot be read"),
    ([*PLAN, "missing.toml"], "cannot be read"),
    ([*PLAN, "4xh200", "--devices", "8"], "--devices does not go with --for"),
    ([*PLAN, "4xh200", "--platform", "cpu"], "--platform does not go with --for"),
    ([*PLAN, "4xh200", "--measure"], "got: --for 4xh200 --measure\n"),
    (["verify", "none.json", TOY, "--platform", "cpu"], "none.json"),
    (["verify", "plan.json", TOY, "--platform", "cpu"], "other devices than the plan"),
    (["verify", "plan.json", TOY, "--platform", "cpu"], "unless the step draws random"),
    (["verify", "plan.json", TOY, "--devices", "4"], "try: without --devices, which"),
    (["plan", TOY, "--memory-budgt", "3MiB"], "did you mean '--memory-budget'? cfp"),
    (["plan", "gpt", "--hiden", "64"], "did you mean '--hidden'? cfp plan --help"),
    ([*PLAN, "8xh1000"], "did you mean 'h100'?"),
    (["verify", "plan.json", OTHER, *PARTS, "--other-devices"], "not the one that was"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[Outcome]:
    folder = tmp_path_factory.mktemp("ahead")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    made = [*PLAN, "4xh200", "-o", "plan.json", "--json"]
    told = [[*PLAN, "4xh200"], ["plan", TOY, "-q", "--platform", "cpu", "--no-race"]]
    experts = ["plan", EXPERTS, "-q", "--for", "4xh200", "--donate", "0", "--json"]
    lines = [made, *(line for line, _ in MISTAKES), experts, *told]
    return run_batch(lines, folder)


def test_without_a_gpu_choices_are_by_estimates(outcomes):
    assert outcomes[0].code == 0, outcomes[0].err
    plan = json.loads(outcomes[0].out)
    assert plan["rung"] == "estimated"
    assert {row["rung"] for row in plan["race"]} == {"estimated"}


def test_a_mixture_of_experts_is_sharded_for_gpus(outcomes):
    outcome = outcomes[1 + len(MISTAKES)]
    assert outcome.code == 0, outcome.err
    plan = json.loads(outcome.out)
    specs = {a["path"]: a["spec"] for a in plan["arguments"]}
    assert any(specs["weights/up"]) and any(specs["weights/down"])
    products = 5 * 2 * 512 * 1024 * 4096  # Of each row with its own expert's matrix.
    assert products <= plan["search"]["model_flops"] <= 1.1 * products
    assert not plan["replicated_ops"]


def test_what_comes_after_a_plan_is_said(outcomes):
    ahead, here = (outcome.out.splitlines()[-1] for outcome in outcomes[-2:])
    assert ahead == (
        "Save a plan with -o plan.json; on its devices, cfp verify plan.json TARGET "
        "times it"
    )
    assert here.endswith("then run it with cfp run --plan plan.json")


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_mistakes_end_in_one_message(outcomes, number):
    line, message = MISTAKES[number]
    outcome = outcomes[1 + number]
    assert (outcome.crash, outcome.code, outcome.out) == ("", 2, ""), line
    assert message in outcome.err, outcome.err
    assert outcome.err.count("error: ") == 1 and "Traceback" not in outcome.err


def test_without_a_plans_devices_only_what_helps_there_is_suggested(tmp_path):
    # Each process has the devices that its first command asks for.
    run_batch([[*PLAN, "4xh200", "-o", "plan.json"]], tmp_path)
    verify = ["verify", "plan.json", TOY]
    lines = [verify, ["run", TOY, "--plan", "plan.json"]]
    verified, ran = run_batch(lines, tmp_path, JAX_PLATFORMS="cpu")
    [there] = run_batch([[*lines[1], "--platform", "cpu", "--steps", "2"]], tmp_path)
    assert there.code == 0, there.err
    assert "is for 4 of NVIDIA H200, and ran on 4 of cpu" in there.out
    assert "of its rate" not in there.out
    assert "4 devices of NVIDIA H200 for the mesh x=4\n  got: 1 of" in verified.err
    assert "try: cfp verify on a machine with the devices that the" in verified.err
    # On virtual devices alone it would be refused for these.
    here = "--platform cpu --other-devices"
    assert f"; {here}, to time it here all the same, on 4 virtual" in verified.err
    assert "--devices" not in verified.err and verified.err.count("--platform") == 1
    assert "try: this command on a machine with the plan's devices; or" in ran.err
    assert "--devices" not in ran.err
    [here] = run_batch([[*verify, *here.split(), "-q"]], tmp_path, JAX_PLATFORMS="cpu")
    assert here.code == 0 and "times of these are not compared" in here.out, here.err
    assert here.out.startswith("The plan '") and "\n\nPlan '" in here.out
