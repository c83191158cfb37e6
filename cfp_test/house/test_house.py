"""The rules of the house that no tool holds. `make lint` holds the order of imports."""

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "cfp"
MAX_LINES = 800

# What only `program/` touches.
MLIR = re.compile(r"jax\.extend\.mlir|jaxlib|jax\._src|\._lowering")
# Every use of what is not public. Each can break with a release of JAX: add one only if
# there is no public way, and say in the code what it is for.
NON_PUBLIC = {
    "program/jaxprs.py": {
        "jax._src.dispatch.prim_requires_devices_during_lowering",
        "jax._src.config.trace_context",
        "jax._src.cudnn.fused_attention_stablehlo",
        "jax._src.distributed",
    },
    "program/partitioned.py": {
        "jax._src.callback",
        "jax._src.config.use_shardy_partitioner",
        "jax._src.custom_partitioning",
        "jax._src.custom_partitioning_sharding_rule",
        "jax._src.debugging",
        "._ShardingCallbackInfo",
        "._sharding_callbacks",
    },
    "program/trace.py": {
        "jax._src.config.jax_ragged_dot_use_ragged_dot_instruction",
        "jax._src.export._export",
        "._export_lowered",
    },
    # Public, whatever its name: the end of a process whose devices wait for ever.
    "profiling/coordination.py": {"._exit"},
}
# cfp plans any program: only these rooms may know of models and their libraries.
MAY_NAME_MODELS = ("models/", "cli/", "operators/")
MODEL_WORD = re.compile(
    r"(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))(?i:gpt|moe|llama|bert|flax)(?![a-z])"
)
# Question words hide what a function returns, and what a class is.
QUESTION = re.compile(r"(What|Whether|Which|Of|How|Where|Who|Why|When|Whose)\b")
OTHER_TEST = re.compile(r"cfp_test\.(\w+\.)*test_\w+(\.\w+)?$")


def read(folder: Path) -> dict[str, str]:
    """Path from a folder -> text, of its modules."""
    files = sorted(folder.rglob("*.py"))
    return {file.relative_to(folder).as_posix(): file.read_text() for file in files}


SOURCES = read(PACKAGE)


def names_of(text: str) -> Iterator[str]:
    """Modules that a module imports, and `.attributes` that it reaches."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(base), names=names, level=0):
                yield from (f"{base}.{alias.name}" for alias in names)
            case ast.Attribute(attr=name):
                yield f".{name}"
            case ast.Call(ast.Name("getattr"), [_, ast.Constant(str(name)), *_]):
                yield f".{name}"


def non_public(text: str) -> set[str]:
    """Names that a module uses and that are private to another one."""
    own = set(re.findall(r"(?:def |class |self\.|^ *)(_\w+)", text, re.M))
    own |= {"_replace", "_asdict", "_fields", "_make"}  # Public, on a NamedTuple.
    private = re.compile(r"jaxlib\b|(.*\.)?_(?!\w*__(\.|$))")
    names = {n for n in names_of(text) if private.match(n) and n[1:] not in own}
    return {name for name in names if not name.startswith("cfp.")}


def model_words(text: str) -> list[str]:
    """Models that identifiers and strings name; in comments they may stand."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = [token.string for token in tokens if token.type != tokenize.COMMENT]
    return [word for string in code for word in MODEL_WORD.findall(string)]


def openings(text: str) -> list[str]:
    """Docstrings that open with a question word."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    found = [ast.get_docstring(node) or "" for node in nodes]
    return [words for words in found if QUESTION.match(words)]


def test_only_one_room_touches_mlir():
    others = {f for f in SOURCES if not f.startswith("program/")}
    assert [f for f in others if any(map(MLIR.match, names_of(SOURCES[f])))] == []


def test_non_public_uses_are_those_listed():
    found = {file: non_public(text) for file, text in SOURCES.items()}
    assert {file: names for file, names in found.items() if names} == NON_PUBLIC


def test_files_are_short_and_no_drawer():
    long = {f for f, text in SOURCES.items() if text.count("\n") > MAX_LINES}
    assert long | {file for file in SOURCES if file.endswith("utils.py")} == set()


def test_rooms_keep_their_limits():
    """Limits only fall: CONTRIBUTING.md."""
    rooms = tomllib.loads((TESTS / "house" / "limits.toml").read_text())
    room_of = {part: room for room, (_, *parts) in rooms.items() for part in parts}
    counts = dict.fromkeys(rooms, 0)
    for file, text in SOURCES.items():
        counts[room_of[file.split("/")[0]]] += text.count("\n")
    assert {r: n for r, n in counts.items() if n > rooms[r][0]} == {}


def test_no_model_is_known_by_name():
    files = {f: t for f, t in SOURCES.items() if not f.startswith(MAY_NAME_MODELS)}
    assert [(f, word) for f, text in files.items() for word in model_words(text)] == []


def test_a_precision_is_known_to_its_module_and_the_list():
    """Other modules ask `PRECISIONS`: CONTRIBUTING.md."""
    named = {f for f, t in SOURCES.items() if re.search("fp8|e4m3|e5m2", t, re.I)}
    assert named == {"program/fp8.py", "program/trace.py"}


def test_docstrings_open_with_a_verb_or_a_noun():
    texts = [*SOURCES.values(), *read(TESTS).values()]
    assert [words for text in texts for words in openings(text)] == []


def test_a_test_imports_from_no_other_test():
    """Code that several need is a module without `test_`: CONTRIBUTING.md."""
    names = {(f, n) for f, text in read(TESTS).items() for n in names_of(text)}
    assert {(f, n) for f, n in names if OTHER_TEST.match(n)} == set()


@pytest.mark.parametrize(
    ("rule", "text", "found"),
    [
        (non_public, "from jax._src import core", {"jax._src.core"}),
        (non_public, "x = getattr(lowered, '_lowering')", {"._lowering"}),
        (non_public, "class A:\n  _x: int = 1\n\n  def f(s, o): return o._x", set()),
        (model_words, "x = GPTConfig(hubert=1)  # As BERT does.\n", ["GPT"]),
        (openings, 'def f():\n  """Whether it is so."""', ["Whether it is so."]),
    ],
)
def test_rules_find_breaches(rule, text, found):
    assert rule(text) == found
