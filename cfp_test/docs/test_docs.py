"""Everything that the README and docs/ show must exist, and run."""

import builtins
import re
import shlex
import subprocess
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from symtable import symtable

import pytest

from cfp.models import find
from cfp_test.cli.cli_runner import ROOT, environment, run_batch
from cfp_test.support.forking import quick_python
from cfp_test.support.waiting import GUARD_SECONDS

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "install").glob("*.md")),
    ROOT / "third_party" / "README.md",
]


def blocks(page: Path, language: str) -> list[str]:
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, page.read_text(), re.MULTILINE | re.DOTALL)


# Options of cfp itself, before the command, and how many values they take.
BEFORE_COMMANDS = {"--join": 0, "--coordinator": 1, "--processes": 1, "--process-id": 1}


def of_command(words: list[str]) -> list[str]:
    """A command line from its command on."""
    while words and words[0] in BEFORE_COMMANDS:
        words = words[1 + BEFORE_COMMANDS[words[0]] :]
    return words


def commands(page: Path) -> list[list[str]]:
    lines = "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [of_command(line[1:]) for line in words if line[:1] == ["cfp"]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#]+)", page.read_text())
    local = [target for target in targets if not target.startswith("http")]
    assert [t for t in local if not (page.parent / t).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_begin_with_what_they_are_for(page):
    title, empty, first, *_ = page.read_text().split("\n")
    assert title.startswith("# ") and not empty
    assert re.match(r"[\w`*\[]", first) and not re.match(r"\d+\. ", first), first


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if (ROOT / "docs") in p.parents],
    ids=lambda page: page.name,
)
def test_guides_begin_with_who_needs_them(page):
    """The sentence begins with ``For``, in the first paragraph."""
    paragraph = page.read_text().split("\n\n")[1]
    assert re.match(r"For [a-z]", paragraph), paragraph


def test_the_sites_navigation_has_every_page():
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    named = re.findall(r"([\w/-]+\.md)$", text, re.MULTILINE)
    docs = ROOT / "docs"
    pages = [str(p.relative_to(docs)) for p in PAGES if docs in p.parents]
    assert sorted(named) == sorted(pages)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_are_python(page):
    for block in blocks(page, "python"):
        compile(block, page.name, "exec")


def test_commands_have_the_options_shown(tmp_path):
    shown = [line for page in PAGES for line in commands(page)]
    assert len(shown) >= 5
    names = sorted({line[0] for line in shown})
    helps = run_batch([[*name.split(), "--help"] for name in names], tmp_path)
    texts = {name: done.out for name, done in zip(names, helps, strict=True)}
    for name, *words in shown:
        target = words[0] if words else ""
        known = set(re.findall(r"--[a-z-]+", texts[name])) | {"-o"}
        known |= {"--batch"} if target == "train.py:tiny" else set()
        if ":" not in target and target.isalpha():
            known |= {option.flag for option in find(target).options}
        flags = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert flags <= known, (name, target, flags - known)


def test_corrections_of_measured_numbers_are_where_the_table_says():
    """Each name in a cell is in the module that comes next."""
    text = (ROOT / "docs" / "planning-rules.md").read_text()
    section = text.split("## How measured numbers are corrected")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 10
    for row in rows:
        *_, cell = row.strip("| ").split(" | ")
        names: list[str] = []
        for quoted in re.findall("`([^`]+)`", cell):
            if not quoted.endswith(".py"):
                owner = names[-1].partition(".")[0] if quoted.startswith(".") else ""
                names.append(owner + quoted)
                continue
            assert (ROOT / quoted).exists(), row
            module = import_module(quoted.removesuffix(".py").replace("/", "."))
            for name in names:
                assert attrgetter(name)(module) is not None, row
            names = []
        assert not names, f"no module for {names}: {row}"


def test_the_steps_in_the_guides_are_targets(tmp_path):
    pages = [ROOT / "docs" / name for name in ("getting-started.md", "more-choices.md")]
    for block in (block for page in pages for block in blocks(page, "python")):
        name = re.match(r"# (\w+\.py)\n", block)
        if name is not None:
            (tmp_path / name[1]).write_text(block)
    cpu = ["--platform", "cpu", "--devices", "4"]
    plain, parts = run_batch(
        [
            ["analyze", "train.py:tiny", *cpu, "--batch", "64"],
            ["analyze", "parts.py:parts", *cpu, "--microbatches", "4"],
        ],
        tmp_path,
    )
    assert (plain.code, parts.code) == (0, 0), plain.err + parts.err
    assert "2 blocks" in plain.out and "f32[64," in plain.out
    assert "dot_general f32[128,64]" in parts.out  # A quarter of the 512 rows.


# What stands around a block that is a part of a program: a step, and its arguments.
_STEP = """
import jax, jax.numpy as jnp
import cfp
def step(state, batch):
    loss, grad = jax.value_and_grad(lambda w: ((batch @ w) ** 2).mean())(state)
    return state - 0.1 * grad, loss
train_step = step
state, batch = jnp.ones((16, 16)), jnp.ones((16, 16))
args = state, batch
mesh = jax.make_mesh((4,), ("x",))
"""
_ROUTER = """
import jax, jax.numpy as jnp
import cfp
def step(state, batch):
    new = [batch @ layer["w"] for layer in state["layers"]]
    return state, sum(new) @ state["router"]
w = jnp.ones((4, 4))
args = {"router": w, "layers": [{"w": w}]}, w
"""
# cfp makes the mesh, as a command does.
_EXPORT = "cfp.plan(step, *args, preset='zero1').export('step.jax')\n"
_TRAIN = "train(train_step, lambda key: state, [batch] * 2, args)\n"
# JAX is one process here, and finds no others.
_ALONE = "cfp.join = lambda: None\n"
_MODELS = """
import jax, jax.numpy as jnp
from flax import linen, nnx
x = jnp.ones((2, 8))
model = nnx.Sequential(nnx.RMSNorm(8, rngs=nnx.Rngs(0)))
linen_model = linen.LayerNorm()
variables = linen_model.init(jax.random.key(0), x)
"""
# (page, words of the block) -> what goes before it, and after it.
AROUND = {
    ("fp8.md", "cfp.parallelize"): (_STEP, ""),
    ("fp8.md", "-*/router"): (_ROUTER, ""),
    ("operators.md", "injection("): (_MODELS, ""),
    ("planning-ahead.md", "cfp.described"): (_STEP, ""),
    ("reading-plans.md", "step.jax"): (_STEP + _EXPORT, ""),
    ("troubleshooting.md", "miscompile_reason"): (_STEP, ""),
    ("several-hosts.md", "cfp.join()"): (_STEP + _ALONE, _TRAIN),
    ("tpu.md", "v5e:16x16"): (_STEP, ""),
}
# Of the blocks that run here those that take a preset, or plan little, are quick.
QUICK = (
    "decoding.md",
    "reading-plans.md",
    "troubleshooting.md",
    "ocp.Standard",
    "mesh_utils",
)

# Packages not installed here; the page says when their programs were tried by hand.
BY_HAND = ("import keras", "from transformers")

# Their programs follow from each other: plan/test_keep.py, test_tutorial.py.
FOLLOWING = ("keep-a-plan.md", "tutorial.md")


def programs() -> list:
    """All Python blocks, each as a program that runs."""
    found = []
    for page in PAGES:
        if page.name in FOLLOWING:
            continue
        for number, block in enumerate(blocks(page, "python")):
            if any(words in block for words in BY_HAND):
                continue
            before, after = next(
                (
                    around
                    for (name, words), around in AROUND.items()
                    if name == page.name and words in block
                ),
                ("", ""),
            )
            quick = any(word in block or word == page.name for word in QUICK)
            found.append(
                pytest.param(
                    before + block + after,
                    id=f"{page.name}-{number}",
                    marks=() if quick else pytest.mark.nightly,
                )
            )
    return found


def unbound(program: str) -> set[str]:
    """Names that a program reads and nowhere binds, imports or has as builtins."""
    scopes = [symtable(program, "program", "exec")]
    for scope in scopes:
        scopes += scope.get_children()
    symbols = [(scope is scopes[0], s) for scope in scopes for s in scope.get_symbols()]
    bound = {
        s.get_name()
        for is_outer, s in symbols
        if (is_outer or s.is_declared_global()) and (s.is_assigned() or s.is_imported())
    }
    read = {s.get_name() for _, s in symbols if s.is_global() and s.is_referenced()}
    return read - bound - {*vars(builtins)}


def test_a_name_that_is_nowhere_bound_is_found():
    text = "import a.b\ndef f(x):\n    return [a.c + y(x, z) for z in len(w)]\n"
    assert unbound(text) == {"y", "w"} and unbound(text + "w, y = f(1)") == set()


def test_python_blocks_bind_all_their_names():
    """The quick part of `test_python_blocks_run`, for blocks that run nightly, too."""
    found = {one.id: unbound(one.values[0]) for one in programs()}
    assert len(found) > 20 and {key: x for key, x in found.items() if x} == {}


@pytest.mark.parametrize("program", programs())
def test_python_blocks_run(program, tmp_path):
    flags = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4 "
        "--xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
        "CFP_CACHE_DIR": str(tmp_path / "cache"),
    }
    subprocess.run(
        [quick_python(), "-c", program],
        cwd=tmp_path,
        env=environment(**flags),
        timeout=GUARD_SECONDS,
        check=True,
    )


# A number that was measured: with a decimal point, or with a unit.
_FIGURE = re.compile(
    r"(?<![\w.,=])(\d[\d,]*\.\d+|\d[\d,]*(?= ?(?:%|s\b|ms\b|GiB|TFLOP|tokens)))"
)


def test_every_figure_of_the_readme_is_in_a_page_of_results():
    text = (
        (ROOT / "README.md").read_text().split("\n## What changes in your numbers")[0]
    )
    for block in (
        *blocks(ROOT / "README.md", "python"),
        *re.findall("`[^`\n]+`", text),
    ):
        text = text.replace(block, "")
    figures = set(_FIGURE.findall(text))
    # Of the printed plan, of the table, and of FP8.
    assert {"344.508", "49.6", "107.22", "131.2", "97.17", "3"} <= figures
    pages = "\n".join(p.read_text() for p in (ROOT / "docs" / "results").glob("*.md"))
    known = set(re.findall(r"\d[\d,]*(?:\.\d+)?", pages))
    assert figures - known == set()
    (plan,) = re.findall(r"```\n(Plan .*?)```", text, re.DOTALL)
    assert plan in (ROOT / "docs" / "results" / "full_models.md").read_text()


def test_the_readme_has_800_words_and_begins_with_one_sentence():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 800
    (program,) = blocks(ROOT / "README.md", "python")
    assert len(text.partition("```python")[0].split()) < 110
    assert len([line for line in program.splitlines() if line]) <= 16


def test_figures_of_the_readme_are_in_its_pages():
    """Each number of a row is in the page that the row links to."""
    text = (ROOT / "README.md").read_text()
    rows = [line for line in text.splitlines() if "](docs/results/" in line]
    rows = [row for row in rows if row.startswith("|")]
    assert len(rows) >= 6
    for row in rows:
        *cells, link = row.strip("| ").split("|")
        page = (ROOT / re.search(r"\((.*)\)", link)[1]).read_text()
        for figure in cells[1:]:
            number = figure.strip().removesuffix(" s")
            assert not number or re.search(rf"\b{re.escape(number)}\b", page), row
