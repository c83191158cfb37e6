"""The rules of the house, held by reading the sources of the package.

Each rule is a function from a source tree to a list of breaches, tried here on made-up
modules too, so that a rule that finds nothing is known to look.
"""

import ast
import functools
import importlib
import io
import pkgutil
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "cfp"

# The rooms, in the order of the passes. A module imports from its own room and from
# those above it. A new room is one more line here, at its place.
ROOMS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("units", "printable", "settings"),
    ("discovery",),
    ("fields",),
    ("program",),
    ("analysis",),
    ("attention",),
    ("presets",),
    ("profiling",),
    ("devices",),
    ("cost",),
    ("search",),
    ("planner_settings",),
    ("context",),
    ("solution",),
    ("race",),
    ("runtime",),
    ("export", "plan"),
    ("view",),
    ("passes",),
    ("models",),
    ("targets", "platform"),
    ("checking",),
    ("report",),
    ("cluster",),
    ("find",),
    ("outcomes",),
    ("variant_turns",),
    ("variants",),
    ("api",),
    ("operators",),
    ("__init__",),  # The public names, gathered from the rooms above.
    ("cli",),
    ("__main__",),
)

# Modules that import from a room below, when a function is called: a plan shows itself
# where it is printed, in a notebook, and as a page.
SHOWN_BY = {("plan/plan.py", "view")}

# Only this room touches MLIR and what JAX keeps to itself.
MLIR_ROOM = "program"
MLIR_MODULES = ("jax.extend.mlir", "jaxlib", "jax._src")
MLIR_ATTRIBUTES = ("_lowering",)

# Every use of something non-public, as (file, name): modules in full, attributes with
# a leading dot. Each can break with a release of JAX: add one only if there is no
# public way, and say in the code what it is for.
NON_PUBLIC: set[tuple[str, str]] = {
    # The key by which jax.jit knows one configuration from another.
    ("program/meaning.py", "jax._src.config.trace_context"),
    # The setting by which jax.lax.ragged_dot is lowered to products with rules.
    (
        "program/trace.py",
        "jax._src.config.jax_ragged_dot_use_ragged_dot_instruction",
    ),
    # What JAX's call of cuDNN's attention asks of the machine while it is traced.
    ("program/step.py", "jax._src.cudnn.fused_attention_stablehlo"),
    # The client of jax.distributed, which carries what processes say to each other.
    ("program/channel.py", "jax._src.distributed"),
    # custom_partitioning ops: the op and the rule that comes with it, as JAX lowers
    # them; the table in which JAX's partitioner finds callbacks, and what it finds
    # there; the axes of XLA's shardings; the ops that ask for devices while they are
    # lowered; and the setting without which ops that have callbacks alone are traced.
    ("program/partitioned.py", "jax._src.custom_partitioning"),
    ("program/partitioned.py", "jax._src.custom_partitioning_sharding_rule"),
    ("program/partitioned.py", "._sharding_callbacks"),
    ("program/partitioned.py", "._ShardingCallbackInfo"),
    (
        "program/partitioned.py",
        "jax._src.dispatch.prim_requires_devices_during_lowering",
    ),
    ("program/partitioned.py", "jax._src.config.use_shardy_partitioner"),
    # Calls of the host's functions, and their lowerings, which ask for a runtime.
    ("program/partitioned.py", "jax._src.callback"),
    ("program/partitioned.py", "jax._src.debugging"),
    # The partitioned program, which XLA writes as HLO, as StableHLO again.
    ("program/local.py", "jax._src.lib._jax"),
    # Public, whatever its name: the end of a process whose devices wait for ever.
    ("profiling/coordination.py", "._exit"),
}

MAX_LINES = 800
FORBIDDEN_FILES = ("utils.py",)

# cfp plans any program: only these may know of particular models and libraries. The
# inventory's operators are called what the field calls them, "GPT attention", and some
# are modules of libraries; planning knows none of them.
MODEL_WORDS = ("gpt", "moe", "llama", "bert", "flax")
MAY_NAME_MODELS = ("models/", "cli/", "operators/")


@functools.cache
def sources() -> dict[str, str]:
    """The package's modules: path from the package's folder -> text."""
    return {
        path.relative_to(PACKAGE).as_posix(): path.read_text()
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@functools.cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """All nodes of a module's tree."""
    return tuple(ast.walk(ast.parse(text)))


@pytest.fixture(scope="module", autouse=True)
def no_trees_after():
    """Trees of the whole package are not kept for the tests of other files."""
    yield
    nodes.cache_clear()


# ------------------------------------------------------------------- reading imports


def module_name(file: str) -> str:
    """'program/graph.py' -> 'cfp.program.graph'; '__init__.py' -> 'cfp'."""
    parts = ["cfp", *file.removesuffix(".py").split("/")]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(file: str, text: str) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted name) of all imports, wherever they stand.

    `from a import b` gives `a.b`, whether b is a module or not.
    """
    package = module_name(file).split(".")
    if not file.endswith("__init__.py"):
        package = package[:-1]
    for node in nodes(text):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package[: len(package) - node.level + 1]
                base = ".".join([*up, *([base] if base else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def within(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


# ---------------------------------------------------------------- (a) order of rooms


def room_of(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def import_breaches(files: dict[str, str]) -> list[str]:
    level = {room: i for i, rooms in enumerate(ROOMS) for room in rooms}
    breaches = []
    for file, text in files.items():
        own = room_of(file)
        if own not in level:
            breaches.append(f"cfp/{file}: room {own!r} has no place in ROOMS")
            continue
        for line, name in imported(file, text):
            top, _, rest = name.partition(".")
            if top != "cfp":
                continue
            room = rest.split(".")[0]
            # Anything else is a public name that the package itself gathered.
            room = room if room in level else "__init__"
            if level[room] > level[own] and (file, room) not in SHOWN_BY:
                breaches.append(
                    f"cfp/{file}:{line}: {own} imports from {room} ({name})"
                )
    return breaches


def test_imports_follow_the_order_of_the_passes():
    assert import_breaches(sources()) == []


@pytest.mark.parametrize(
    ("file", "text", "breach"),
    [
        ("program/trace.py", "from cfp.program.graph import Op", None),
        ("program/trace.py", "import cfp.errors", None),
        ("program/trace.py", "from . import graph", None),
        ("search/costs.py", "from ..analysis import blocks", None),
        ("__init__.py", "from cfp.api import parallelize", None),
        ("__init__.py", "from .api import parallelize", None),
        ("cli/options.py", "import cfp", None),
        ("__main__.py", "from cfp.cli import main", None),
        ("api.py", "import jax", None),
        ("program/trace.py", "import cfp.plan", "program imports from plan"),
        ("program/trace.py", "from cfp import plan", "program imports from plan"),
        ("program/trace.py", "def f():\n  from ..api import g", "imports from api"),
        ("program/__init__.py", "from ..analysis import a", "imports from analysis"),
        ("plan/plan.py", "from ..report import t", "plan imports from report"),
        ("plan/plan.py", "from ..view import text", None),
        ("plan/parts.py", "from ..view import text", "plan imports from view"),
        ("view/model.py", "from ..report import t", "view imports from report"),
        ("runtime/execute.py", "from ..plan import p", "runtime imports from plan"),
        ("api.py", "import cfp", "api imports from __init__"),
        ("api.py", "from cfp import parallelize", "api imports from __init__"),
        ("api.py", "from cfp.cli import main", "api imports from cli"),
        ("api.py", "if TYPE_CHECKING:\n  import cfp.cli", "api imports from cli"),
        ("attic/x.py", "", "room 'attic' has no place in ROOMS"),
    ],
)
def test_import_rule(file, text, breach):
    found = import_breaches({file: text})
    assert (not found) if breach is None else (breach in found[0])


# ------------------------------------------------------- (b) MLIR and what is private


def test_tests_and_scripts_import_what_there_is():
    """Most of them are not run by tests, and would break unseen."""
    missing = []
    for folder in ("cfp_test", "alpa_test"):
        for path in (PACKAGE.parent / folder).rglob("*.py"):
            for node in nodes(path.read_text()):
                module = getattr(node, "module", None) or ""
                if not isinstance(node, ast.ImportFrom) or node.level:
                    continue
                if module.partition(".")[0] == "cfp":
                    names = [alias.name for alias in node.names]
                    missing += [(path.name, *gone) for gone in absent(module, names)]
    assert missing == []


def absent(module: str, names: list[str]) -> list[tuple[str, str]]:
    """Names that a module does not have, neither itself nor as modules below it."""
    there = importlib.import_module(module)
    below = {
        found.name for found in pkgutil.iter_modules(getattr(there, "__path__", []))
    }
    return [(module, n) for n in names if not hasattr(there, n) and n not in below]


def test_absent_names_are_found():
    assert absent("cfp.plan.plan", ["Plan", "x"]) == [("cfp.plan.plan", "x")]
    assert absent("cfp", ["plan", "units"]) == []


def attributes(text: str) -> Iterator[tuple[int, str]]:
    """Yields (line, name) of each attribute reached, also by name with getattr."""
    for node in nodes(text):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr", "setattr", "delattr")
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
        ):
            yield node.lineno, str(node.args[1].value)


# The text of modules that need no cfp, and so cannot import the room.
EXPORTED = "export/runtime.py"


def mlir_breaches(files: dict[str, str]) -> list[str]:
    breaches = []
    for file, text in files.items():
        if room_of(file) == MLIR_ROOM or file == EXPORTED:
            continue
        for line, name in imported(file, text):
            if within(name, MLIR_MODULES):
                breaches.append(f"cfp/{file}:{line}: imports {name}")
        for line, name in attributes(text):
            if name in MLIR_ATTRIBUTES:
                breaches.append(f"cfp/{file}:{line}: reaches .{name}")
    return breaches


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def own_private_names(text: str) -> set[str]:
    """The private names that a module defines: its own affair, in that module."""
    names = {"_replace", "_asdict", "_fields", "_make"}  # Public, on a NamedTuple.
    for node in nodes(text):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def non_public_uses(files: dict[str, str]) -> set[tuple[str, str]]:
    """All (file, name) of modules and attributes that are private to another."""
    uses = set()
    for file, text in files.items():
        for _, name in imported(file, text):
            if name.split(".")[0] == "cfp":
                continue
            if within(name, ("jaxlib",)) or any(map(is_private, name.split("."))):
                uses.add((file, name))
        own = own_private_names(text)
        for _, name in attributes(text):
            if is_private(name) and name not in own:
                uses.add((file, f".{name}"))
    return uses


def test_only_one_room_touches_mlir():
    assert mlir_breaches(sources()) == []


def test_non_public_uses_are_those_listed():
    assert non_public_uses(sources()) == NON_PUBLIC


@pytest.mark.parametrize(
    ("text", "breach"),
    [
        ("from jax.extend.mlir import ir", "imports jax.extend.mlir.ir"),
        ("from jax.extend import mlir", "imports jax.extend.mlir"),
        ("import jaxlib", "imports jaxlib"),
        ("import jax._src.core as c", "imports jax._src.core"),
        ("def f(lowered):\n  return lowered._lowering.stablehlo()", "._lowering"),
        ("x = getattr(lowered, '_lowering')", "._lowering"),
        ("import jax.extend.core", None),
        ("import jaxlibrary", None),
    ],
)
def test_mlir_rule(text, breach):
    found = mlir_breaches({"analysis/blocks.py": text})
    assert (not found) if breach is None else (breach in found[0])
    assert mlir_breaches({"program/trace.py": text}) == []


@pytest.mark.parametrize(
    ("text", "uses"),
    [
        ("from jax._src import core", {"jax._src.core"}),
        ("from jaxlib.mlir import ir", {"jaxlib.mlir.ir"}),
        ("from jax.extend.mlir import ir", set()),
        ("from cfp.models.registry import _Recipe", set()),
        ("from __future__ import annotations", set()),
        ("x = lowered._lowering.stablehlo()", {"._lowering"}),
        ("x = getattr(lowered, '_lowering', None)", {"._lowering"}),
        ("x = f(y)[0]._executable._hlo", {"._executable", "._hlo"}),
        ("class A:\n  def __init__(self):\n    self._x = 1\n  b = a._x", set()),
        ("class A:\n  _x: int = 1\n  def f(self, o):\n    return o._x", set()),
        ("class A:\n  def _f(self):\n    return self._f().__class__", set()),
        ("x = record._replace(a=1)", set()),
    ],
)
def test_non_public_rule(text, uses):
    found = non_public_uses({"program/trace.py": text})
    assert found == {("program/trace.py", use) for use in uses}


# ---------------------------------------------------------------- (c), (d) the files


def test_files_stay_short():
    lengths = {file: len(text.splitlines()) for file, text in sources().items()}
    assert {file: n for file, n in lengths.items() if n > MAX_LINES} == {}


def bound_twice(text: str) -> list[str]:
    """Constants of a module that it assigns twice, so that the first one is lost."""
    names = [
        name.id
        for statement in ast.parse(text).body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for name in ast.walk(statement)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    ]
    return [name for name, count in Counter(names).items() if count > 1]


def test_no_constant_is_bound_twice():
    paths = sorted(PACKAGE.rglob("*.py"))
    found = {str(path): bound_twice(path.read_text()) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}


def test_bound_twice_rule():
    assert bound_twice("A, B = 1, 2\nif C:\n    D = 3\n") == []
    assert bound_twice("A, B = 1, 2\ndef f(): ...\nA: int = 3") == ["A"]


def test_no_file_is_a_drawer_for_everything():
    assert [f for f in sources() if Path(f).name in FORBIDDEN_FILES] == []


# --------------------------------------------------------- (e) no model is special


MODEL_WORD = re.compile(
    # A word begins after something that is no letter, or where camel case has a hump,
    # and ends before anything but a small letter.
    r"(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))"
    rf"(?i:{'|'.join(MODEL_WORDS)})"
    r"(?![a-z])"
)


def model_word_breaches(files: dict[str, str]) -> list[str]:
    """Finds model words in identifiers and strings; in comments they may stand."""
    breaches = []
    for file, text in files.items():
        if file.startswith(MAY_NAME_MODELS):
            continue
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                continue
            for word in MODEL_WORD.findall(token.string):
                breaches.append(f"cfp/{file}:{token.start[0]}: {word}")
    return breaches


def test_no_model_is_known_by_name():
    assert model_word_breaches(sources()) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpt = 1", ["gpt"]),
        ("x = GPTConfig()", ["GPT"]),
        ("from a import MoEConfig as C", ["MoE"]),
        ("def plan_moe_layer(): pass", ["moe"]),
        ("import flax.linen", ["flax"]),
        ("runLlama2()", ["Llama"]),
        ("'a BERT'", ["BERT"]),
        ("'''\nSuch as gpt2.'''", ["gpt"]),
        ("x = f'{y} gpt {z}'", ["gpt"]),
        ("# As a GPT does.", []),
        ("hubert = 'Hubert Albert'", []),
        ("flaxen = smoed = 1", []),
    ],
)
def test_model_word_rule(text, words):
    found = model_word_breaches({"api.py": text + "\n"})
    assert [breach.split(": ")[1] for breach in found] == words
    assert model_word_breaches({"models/a.py": text + "\n"}) == []


# ----------------------------------------------------------- (f) docstrings' openings

# Question words hide what a function returns, and what a class is.
QUESTION_WORDS = (
    *("What", "Whether", "Which", "Of", "How", "Where", "Who", "Why", "When", "Whose"),
)


def opening_breaches(files: dict[str, str], folder: str = "cfp") -> list[str]:
    """Finds docstrings that open with a question word."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    breaches = []
    for file, text in files.items():
        for node in nodes(text):
            words = (ast.get_docstring(node) if isinstance(node, kinds) else "") or ""
            first = re.match(r"\w*", words)
            if first is not None and first[0] in QUESTION_WORDS:
                line = getattr(node, "lineno", 1)
                breaches.append(f"{folder}/{file}:{line}: {words.splitlines()[0]}")
    return breaches


def test_docstrings_open_with_a_verb_or_a_noun():
    assert opening_breaches(sources()) == []
    tests = {
        path.relative_to(TESTS).as_posix(): path.read_text()
        for path in sorted(TESTS.rglob("*.py"))
    }
    assert opening_breaches(tests, "cfp_test") == []


@pytest.mark.parametrize(
    ("text", "breach"),
    [
        ('"""What a module is."""', "What a module is."),
        ('def f():\n  """Whether it is so."""', "Whether it is so."),
        ('class A:\n  def f(self):\n    """Of each\n\n    more."""', "Of each"),
        ('async def f():\n  """How: so."""', "How: so."),
        ('def f():\n  """Returns what is left."""', None),
        ('class A:\n  """Whatever."""', None),
        ("def f():\n  pass", None),
        ('def f():\n  x = "What"', None),
    ],
)
def test_opening_rule(text, breach):
    found = opening_breaches({"api.py": text})
    assert [b.split(": ", 1)[1] for b in found] == ([breach] if breach else [])


def test_a_test_imports_from_no_other_test():
    """Code that several need is a module without `test_`: CONTRIBUTING.md."""
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        for node in nodes(path.read_text()):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            found += [
                (path.name, name)
                for name in names
                if re.fullmatch(r"cfp_test\.(\w+\.)*test_\w+", name)
            ]
    assert not found
