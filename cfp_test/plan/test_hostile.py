"""Files that were damaged, or made to do harm: refused with a reason, or harmless."""

import os

import pytest
from typer.testing import CliRunner

import cfp
from cfp.cli import app
from cfp.errors import CfpError
from cfp.platform import select
from cfp.profiling.record import MEMORY_SHARE, refused_option
from cfp.settings import defaults_of
from cfp_test.plan import hostile


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return hostile.sound(tmp_path_factory.mktemp("cache"))


def test_there_are_enough_mutations_and_no_two_are_alike(made):
    texts = {m.text(made, made.plan) for m in hostile.PLANS}
    assert len(texts) == len(hostile.PLANS) >= 45
    texts = {m.text(made, made.record) for m in hostile.RECORDS}
    assert len(texts) == len(hostile.RECORDS) >= 15


def test_the_sound_plan_and_record_are_taken(made, tmp_path):
    nothing = hostile.Mutation("nothing", lambda made, data: None, harmless=True)
    tried = hostile.try_plan(nothing, made, tmp_path)
    assert tried.message == ""
    assert hostile.same_numbers(tried.difference)
    assert hostile.try_record(nothing, made, tmp_path).kept == 1


@pytest.mark.explained("The file is a damaged plan")
def test_a_plan_is_refused_with_its_reason_or_harmless(made, tmp_path, golden):
    before, texts = dict(os.environ), {}
    for mutation in hostile.PLANS:
        tried = hostile.try_plan(mutation, made, tmp_path)
        assert tried.written == (), mutation.name
        assert dict(os.environ) == before, mutation.name
        if mutation.harmless:
            assert tried.message == "", mutation.name
            assert hostile.same_numbers(tried.difference), mutation.name
        else:
            assert tried.message and tried.difference is None, mutation.name
            texts[mutation.name] = tried.message
    golden("refused_plans", texts)


def test_an_export_is_refused_with_its_reason_or_harmless(made, tmp_path, golden):
    texts = {}
    for number, mutation in enumerate(hostile.RECORDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        tried = hostile.try_record(mutation, made, folder)
        assert tried.written == (), mutation.name
        assert tried.kept == mutation.harmless, mutation.name
        assert bool(tried.message) != mutation.harmless, mutation.name
        if not mutation.harmless:
            texts[mutation.name] = tried.message
    golden("refused_records", texts)


def test_the_command_line_shows_no_traceback_and_no_commands_to_terminals(
    made, tmp_path
):
    path = tmp_path / "plan.json"
    for mutation in hostile.PLANS:
        path.write_bytes(mutation.text(made, made.plan))
        done = CliRunner().invoke(app, ["show", str(path)])
        assert done.exception is None or isinstance(done.exception, SystemExit), (
            mutation.name
        )
        assert "Traceback" not in done.output
        assert not {"\x1b", "\x07", "\u202e", "\ud800"} & {*done.output}, mutation.name
        assert done.exit_code in (0, 2)


def test_names_are_printed_as_they_are(made, tmp_path):
    mutation = next(m for m in hostile.PLANS if "markup" in m.name)
    path = tmp_path / "plan.json"
    path.write_bytes(mutation.text(made, made.plan))
    done = CliRunner().invoke(app, ["show", str(path)])
    assert "[bold red][/nope] :warning:" in done.output


def test_options_that_cfp_itself_chooses_may_be_loaded():
    for options in defaults_of("cuda").compiler_options.values():
        assert refused_option(options) is None
    assert refused_option({MEMORY_SHARE: "37"}) is None
    assert refused_option({"xla_dump_to": "here"}) is not None
    assert refused_option({"xla_dump_to": "here"}, ["xla_dump_to"]) is None


def test_a_caller_may_trust_an_option_by_name(made, tmp_path):
    mutation = next(m for m in hostile.PLANS if m.name == "option for fast math")
    path = tmp_path / "plan.json"
    path.write_bytes(mutation.text(made, made.plan))
    name = "xla_cpu_enable_fast_math"
    plan = cfp.Plan.load(path, allowed_options=[name])
    assert plan.options == {name: "true"}
    with pytest.warns(UserWarning, match="allowed_options"):
        plan.save(path)


def test_a_file_does_not_ask_for_a_million_devices(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(CfpError, match="4096"):
        select("cpu", (("x", 2**20),))
    assert os.environ["XLA_FLAGS"] == ""
