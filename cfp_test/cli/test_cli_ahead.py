"""`cfp plan --for` and `cfp verify` from the outside: every bad input, one message."""

import json
from pathlib import Path

import pytest

from cfp_test.cli.cli_runner import Outcome, refusals, run_batch

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
MISTAKES: list[list[str]] = [
    [*PLAN, "4xh300"],
    [*PLAN, "four h200"],
    [*PLAN, "0xh200"],
    [*PLAN, "4xh200", "--mesh", "x=3"],
    [*PLAN, "2x8xh100", "--mesh", "x=2,y=4"],
    [*PLAN, "1xh200", "--mesh", "x=2"],
    [*PLAN, "2x4xl40s"],
    [*PLAN, "lacks.toml"],
    [*PLAN, "negative.toml"],
    [*PLAN, "guessed.toml"],
    [*PLAN, "curves.toml"],
    [*PLAN, "broken.toml"],
    [*PLAN, "missing.toml"],
    [*PLAN, "4xh200", "--devices", "8"],
    [*PLAN, "4xh200", "--platform", "cpu"],
    [*PLAN, "4xh200", "--measure"],
    ["verify", "none.json", TOY, "--platform", "cpu"],
    ["verify", "plan.json", TOY, "--platform", "cpu"],
    ["verify", "plan.json", TOY, "--platform", "cpu"],
    ["verify", "plan.json", TOY, "--devices", "4"],
    ["plan", TOY, "--memory-budgt", "3MiB"],
    ["plan", "gpt", "--hiden", "64"],
    [*PLAN, "8xh1000"],
    ["verify", "plan.json", OTHER, *PARTS, "--other-devices"],
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[Outcome]:
    folder = tmp_path_factory.mktemp("ahead")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    made = [*PLAN, "4xh200", "-o", "plan.json", "--json"]
    told = [[*PLAN, "4xh200"], ["plan", TOY, "-q", "--platform", "cpu", "--no-race"]]
    experts = ["plan", EXPERTS, "-q", "--for", "4xh200", "--donate", "0", "--json"]
    lines = [made, *(line for line in MISTAKES), experts, *told]
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
    specs = dict(zip(plan["arg_names"], plan["arg_specs"], strict=True))
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


def test_mistakes_end_in_one_message(outcomes, golden):
    golden("mistakes_ahead", refusals(MISTAKES, outcomes[1:]))


def test_without_a_plans_devices_only_what_helps_there_is_suggested(tmp_path):
    # Each process has the devices that its first command asks for.
    run_batch([[*PLAN, "4xh200", "-o", "plan.json"]], tmp_path)
    verify = ["verify", "plan.json", TOY]
    lines = [verify, ["run", TOY, "--plan", "plan.json"]]
    exports = ["export", "plan.json", TOY]
    verified, ran, exported = run_batch(
        [*lines, exports], tmp_path, JAX_PLATFORMS="cpu"
    )
    with_it = [*lines[1], "--platform", "cpu", "--steps", "2"]
    refused, there = (
        run_batch([[*with_it, *more]], tmp_path)[0]
        for more in ((), ("--other-devices",))
    )
    assert refused.code == 2
    assert (
        "for 4 devices of NVIDIA H200 (4xh200), and these are 4 of cpu" in refused.err
    )
    assert "or --other-devices" in refused.err
    assert there.code == 0, there.err
    assert "these are 4 of cpu: results are the step's; times are not" in there.out
    assert "of its rate" not in there.out
    for said in (verified.err, ran.err, exported.err):
        assert "x=4 needs 4, and here are 1 of platform cpu" in said
        assert "Run this command on devices of NVIDIA H200; or try it here" in said
        assert "--devices" not in said and said.count("--platform") == 1
    here = "--platform cpu --other-devices"
    [here] = run_batch([[*verify, *here.split(), "-q"]], tmp_path, JAX_PLATFORMS="cpu")
    assert here.code == 0 and "prediction is for other devices" in here.out, here.err
    assert here.out.startswith("The plan '") and "\n\nPlan '" in here.out
