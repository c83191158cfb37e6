"""Programs that read what they have overwritten, as XLA writes them."""

import textwrap
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from cfp.errors import CfpError
from cfp.profiling.hlo import (
    _read_too_late,
    compile_right,
    miscompile_reason,
    modules_in,
)

GEMM = (
    "%{name} = (f32[8,4]{{1,0}}, s8[64]{{0}}) custom-call(%a, %b, %{onto}), "
    'custom_call_target="__cublas$lt$matmul", '
    "output_to_operand_aliasing={{{{0}}: (2, {{}})}}, "
    'metadata={{op_name="a => {{0}}: (9, {{}})"}}'
)


def program(*lines: str, header: str = "", before: str = "") -> str:
    """A module; its entry has parameters a, b and x, and the last line is its root."""
    *body, last = lines
    parameters = [
        f"%{name} = f32[8,4]{{1,0}} parameter({i})" for i, name in enumerate("abx")
    ]
    text = "\n".join(f"  {line}" for line in [*parameters, *body, f"ROOT {last}"])
    return (
        f"HloModule m, is_scheduled=true{header}\n{before}\n"
        f"ENTRY %main (a: f32[8,4]) -> f32[8,4] {{\n{text}\n}}\n"
    )


def norm(name: str, of: str) -> str:
    return f"%{name} = f32[8,4]{{1,0}} fusion(%{of}), kind=kLoop, calls=%norm"


NORM = textwrap.dedent("""
    %norm (p: f32[8,4]) -> f32[8,4] {
      %p = f32[8,4]{1,0} parameter(0)
      ROOT %t = f32[8,4]{1,0} tanh(%p)
    }
""")


def read_after_overwritten(text: str) -> str | None:
    """The first late read of modules that may lack computations."""
    return next(filter(None, map(_read_too_late, modules_in(text))), None)


def test_a_product_is_added_in_place_to_what_is_read_again():
    text = program(
        "%early.1 = f32[8,4]{1,0} bitcast(%x)",
        norm("n", "x"),
        GEMM.format(name="gemm", onto="early.1"),
        "%sum = f32[8,4]{1,0} get-tuple-element(%gemm), index=0",
        norm("n.remat", "x"),
        "%out = f32[8,4]{1,0} add(%sum, %n.remat)",
        before=NORM,
    )
    assert read_after_overwritten(text) == "%n.remat reads %x after %gemm wrote there"


class Lowered:
    """Compiles to given texts, without rematerialization to the other one."""

    def __init__(self, text, other):
        self.text, self.other, self.options = text, other, []

    def compile(self, compiler_options):
        self.options.append(compiler_options)
        off = "xla_disable_hlo_passes" in (compiler_options or {})
        return SimpleNamespace(as_text=lambda: self.other if off else self.text)


WRONG = program(
    GEMM.format(name="gemm", onto="x"),
    "%out.remat = f32[8,4]{1,0} copy(%x)",
)
RIGHT = program("%out = f32[8,4]{1,0} copy(%x)")


def test_what_is_right_is_compiled_once():
    lowered = Lowered(RIGHT, WRONG)
    assert compile_right(lowered, {})[1] == RIGHT
    assert compile_right(lowered, {"a": "1"})[1] == RIGHT
    assert lowered.options == [None, {"a": "1"}]


def test_what_is_wrong_is_compiled_without_rematerialization():
    lowered = Lowered(WRONG, RIGHT)
    assert compile_right(lowered, {"a": "1"})[1] == RIGHT
    assert lowered.options == [
        {"a": "1"},
        {"a": "1", "xla_disable_hlo_passes": "rematerialization"},
    ]


def test_what_is_switched_off_already_stays_so():
    lowered = Lowered(WRONG, WRONG)
    with pytest.raises(CfpError, match="may compute wrong results"):
        compile_right(lowered, {"xla_disable_hlo_passes": "cse,dce"})
    assert lowered.options == [
        {"xla_disable_hlo_passes": "cse,dce"},
        {"xla_disable_hlo_passes": "cse,dce,rematerialization"},
    ]


def test_what_stays_wrong_is_refused():
    with pytest.raises(
        CfpError, match=r"%out.remat reads %x after %gemm.*Install another"
    ):
        compile_right(Lowered(WRONG, WRONG), {})


@pytest.mark.parametrize(
    "lines",
    [
        # Read before; and what writes reads it, too.
        (
            norm("n.remat", "x"),
            GEMM.format(name="gemm", onto="x"),
            "%out = f32[8,4]{1,0} get-tuple-element(%gemm), index=0",
        ),
        # A copy is overwritten.
        (
            "%copy.1 = f32[8,4]{1,0} copy(%x)",
            GEMM.format(name="gemm", onto="copy.1"),
            "%sum = f32[8,4]{1,0} get-tuple-element(%gemm), index=0",
            norm("n.remat", "x"),
            "%out = f32[8,4]{1,0} add(%sum, %n.remat)",
        ),
        # What was written is read, not what was there before.
        (
            GEMM.format(name="gemm", onto="x"),
            "%sum = f32[8,4]{1,0} get-tuple-element(%gemm), index=0",
            norm("n.remat", "sum"),
            "%out = f32[8,4]{1,0} add(%sum, %n.remat)",
        ),
        # Another name of the old value, which is not read.
        (
            GEMM.format(name="gemm", onto="x"),
            "%old.remat = f32[8,4]{1,0} bitcast(%x)",
            "%out = f32[8,4]{1,0} get-tuple-element(%gemm), index=0",
        ),
    ],
)
def test_what_is_read_in_time(lines):
    assert read_after_overwritten(program(*lines, before=NORM)) is None


def test_through_barriers_and_tuples_it_is_the_same_memory():
    text = program(
        "%pair = (f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%a, %x)",
        "%held = (f32[8,4]{1,0}, f32[8,4]{1,0}) opt-barrier(%pair)",
        "%x.1 = f32[8,4]{1,0} get-tuple-element(%held), index=1",
        GEMM.format(name="gemm", onto="x.1"),
        norm("n.remat", "x"),
        "%out = f32[8,4]{1,0} copy(%n.remat)",
        before=NORM,
    )
    assert read_after_overwritten(text) == "%n.remat reads %x after %gemm wrote there"


UPDATE = textwrap.dedent("""
    %update (p0: f32[8,4], p1: f32[1,4], p2: s32[]) -> f32[8,4] {
      %p0 = f32[8,4]{1,0} parameter(0)
      %p1 = f32[1,4]{1,0} parameter(1)
      %p2 = s32[] parameter(2)
      %same = f32[8,4]{1,0} bitcast(%p0)
      ROOT %dus = f32[8,4]{1,0} dynamic-update-slice(%same, %p1, %p2, %p2)
    }
""")


def test_a_fusion_that_ends_in_an_update_writes_in_place():
    update = "%u = f32[8,4]{1,0} fusion(%x, %row, %i), kind=kLoop, calls=%update"
    late = program(
        "%row = f32[1,4]{1,0} slice(%a), slice={[0:1], [0:4]}",
        "%i = s32[] constant(0)",
        update,
        norm("n.remat", "x"),
        "%out = f32[8,4] add(%u, %n.remat)",
        before=NORM + UPDATE,
    )
    assert read_after_overwritten(late) == "%n.remat reads %x after %u wrote there"
    # Others in it that read the operand, too, read it before.
    body = UPDATE.replace(
        "  ROOT",
        "  %row = f32[1,4]{1,0} dynamic-slice(%p0, %p2, %p2)\n"
        "  %more = f32[1,4]{1,0} add(%row, %p1)\n  ROOT",
    ).replace("(%same, %p1,", "(%same, %more,")
    assert read_after_overwritten(late.replace(UPDATE, body)) == (
        "%n.remat reads %x after %u wrote there"
    )


LOOP = textwrap.dedent("""
    %body (state: (f32[8,4], f32[8,4])) -> (f32[8,4], f32[8,4]) {
      %state = (f32[8,4]{1,0}, f32[8,4]{1,0}) parameter(0)
      %kept = f32[8,4]{1,0} get-tuple-element(%state), index=0
      %changed = f32[8,4]{1,0} get-tuple-element(%state), index=1
      %next = f32[8,4]{1,0} add(%kept, %changed)
      ROOT %both = (f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%kept, %next)
    }
""")


LOOP_RUNS = (
    "%init = (f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%a, %x)\n"
    "  %loop = (f32[8,4]{1,0}, f32[8,4]{1,0}) while(%init), condition=%c, body=%body"
)


@pytest.mark.parametrize(
    ("read", "found"), [("a", None), ("x", "%n.remat reads %x after %loop wrote there")]
)
def test_a_loop_overwrites_what_its_body_changes(read, found):
    text = program(
        "%init = (f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%a, %x)",
        "%loop = (f32[8,4]{1,0}, f32[8,4]{1,0}) while(%init), condition=%c, body=%body",
        norm("n.remat", read),
        "%last = f32[8,4]{1,0} get-tuple-element(%loop), index=1",
        "%out = f32[8,4]{1,0} add(%last, %n.remat)",
        before=NORM + LOOP,
    )
    assert read_after_overwritten(text) == found


def test_loops_bodies_are_looked_at_too():
    body = LOOP.replace(
        "  ROOT",
        "  %i = s32[] constant(0)\n"
        "  %sum = f32[8,4]{1,0} dynamic-update-slice(%changed, %kept, %i, %i)\n"
        "  %n.remat = f32[8,4]{1,0} tanh(%changed)\n  ROOT",
    )
    text = program("%out = f32[8,4]{1,0} copy(%x)", before=body)
    assert read_after_overwritten(text) == (
        "%n.remat reads %state after %sum wrote there"
    )


@pytest.mark.parametrize(
    ("read", "found"),
    [("changed", "%n.remat reads %state after %next wrote there"), ("kept", None)],
)
def test_a_body_writes_where_the_state_of_the_last_turn_was(read, found):
    body = LOOP.replace("  ROOT", f"  %n.remat = f32[8,4] tanh(%{read})\n  ROOT")
    text = program(LOOP_RUNS, "%out = f32[8,4]{1,0} copy(%b)", before=body)
    assert read_after_overwritten(text) == found


def test_what_a_loop_in_a_loop_hands_on_is_not_overwritten():
    outer = textwrap.dedent("""
        %outer (of: (f32[8,4], f32[8,4])) -> (f32[8,4], f32[8,4]) {
          %of = (f32[8,4]{1,0}, f32[8,4]{1,0}) parameter(0)
          %there = (f32[8,4], f32[8,4]) while(%of), condition=%c, body=%body
          %first = f32[8,4]{1,0} get-tuple-element(%there), index=0
          %second = f32[8,4]{1,0} get-tuple-element(%there), index=1
          ROOT %two = (f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%first, %second)
        }
    """)

    def reads(name):
        return program(
            LOOP_RUNS.replace("%body", "%outer"),
            norm("n.remat", name),
            "%out = f32[8,4]{1,0} copy(%n.remat)",
            before=NORM + LOOP + outer,
        )

    assert read_after_overwritten(reads("a")) is None
    assert read_after_overwritten(reads("x")) == (
        "%n.remat reads %x after %loop wrote there"
    )


def test_a_state_that_is_handed_on_whole_is_read_with_all_its_parts():
    outer = textwrap.dedent("""
        %outer (of: (f32[8,4], f32[8,4])) -> (f32[8,4], f32[8,4]) {
          %of = (f32[8,4]{1,0}, f32[8,4]{1,0}) parameter(0)
          %there = (f32[8,4], f32[8,4]) while(%of), condition=%c, body=%body
          ROOT %out.remat = (f32[8,4], f32[8,4]) while(%of), condition=%c, body=%body
        }
    """)
    text = program(
        LOOP_RUNS.replace("%body", "%outer"),
        "%out = f32[8,4]{1,0} copy(%b)",
        before=LOOP + outer,
    )
    assert read_after_overwritten(text) == (
        "%out.remat reads %of after %there wrote there"
    )


BRANCHES = textwrap.dedent("""
    %left (q: (f32[8,4], s32[])) -> f32[8,4] {
      %q = (f32[8,4]{1,0}, s32[]) parameter(0)
      %old = f32[8,4]{1,0} get-tuple-element(%q), index=0
      %at = s32[] get-tuple-element(%q), index=1
      ROOT %set = f32[8,4]{1,0} dynamic-update-slice(%old, %old, %at, %at)
    }

    %right (r: f32[8,4]) -> f32[8,4] {
      %r = f32[8,4]{1,0} parameter(0)
      ROOT %sine = f32[8,4]{1,0} sine(%r)
    }

    %called (s: f32[8,4], at.1: s32[]) -> f32[8,4] {
      %s = f32[8,4]{1,0} parameter(0)
      %at.1 = s32[] parameter(1)
      ROOT %put = f32[8,4]{1,0} dynamic-update-slice(%s, %s, %at.1, %at.1)
    }
""")


@pytest.mark.parametrize(
    "runs",
    [
        "f32[8,4] conditional(%yes, %pair, %a), true_computation=%left, "
        "false_computation=%right",
        "f32[8,4] conditional(%i, %pair, %a), branch_computations={%left, %right}",
        "f32[8,4] call(%x, %i), to_apply=%called",
        "((f32[8,4], s32[]), f32[8,4], s32[]) async-start(%x, %i), calls=%called",
        "((f32[8,4], s32[]), f32[8,4], s32[]) call-start(%x, %i), to_apply=%called",
        "((f32[8,4]), f32[8,4], s32[]) fusion-start(%x, %row, %i), calls=%update",
        "((f32[8,4]), f32[8,4], s32[]) dynamic-update-slice-start(%x, %row, %i, %i)",
        "(f32[8,4], f32[8,4]) scatter(%b, %x, %i, %row, %row), to_apply=%right",
        "f32[8,4] all-reduce-start(%x), to_apply=%right",
        "(f32[8,4], f32[8,4]) all-reduce-start(%b, %x), to_apply=%right",
    ],
)
@pytest.mark.parametrize("read", ["x", "a"])
def test_what_else_writes_in_place(runs, read):
    text = program(
        "%i = s32[] constant(0)",
        "%yes = pred[] constant(true)",
        "%row = f32[1,4]{1,0} slice(%a), slice={[0:1], [0:4]}",
        "%pair = (f32[8,4]{1,0}, s32[]) tuple(%x, %i)",
        f"%runs = {runs}",
        norm("n.remat", read),
        "%out = f32[8,4]{1,0} copy(%n.remat)",
        before=NORM + UPDATE + BRANCHES,
    )
    late = "%n.remat reads %x after %runs wrote there"
    assert read_after_overwritten(text) == (late if read == "x" else None)


def test_what_an_asynchronous_call_computes_is_looked_at():
    late = BRANCHES.replace("ROOT %put", "%put").replace(
        "(%s, %s, %at.1, %at.1)",
        "(%s, %s, %at.1, %at.1)\n  ROOT %n.remat = f32[8,4]{1,0} tanh(%s)",
    )
    text = program(
        "%i = s32[] constant(0)",
        "%runs = (f32[8,4], s32[], f32[8,4]) call-start(%x, %i), to_apply=%called",
        "%out = f32[8,4]{1,0} copy(%b)",
        before=late,
    )
    assert read_after_overwritten(text) == "%n.remat reads %s after %put wrote there"


@pytest.mark.parametrize(
    ("read", "found"),
    [("x", "%n.remat reads %x after %new wrote there"), ("b", None)],
)
def test_results_are_written_where_donated_arguments_were(read, found):
    text = program(
        "%new = f32[8,4]{1,0} add(%x, %a)",
        norm("n.remat", read),
        "%out = (f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%n.remat, %new)",
        header=", input_output_alias={ {1}: (2, {}, may-alias) }, entry_layout={}",
        before=NORM,
    )
    assert read_after_overwritten(text) == found


def test_an_argument_that_is_a_result_stays():
    text = program(
        norm("n.remat", "x"),
        "%out = (f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%n.remat, %x)",
        header=", input_output_alias={ {1}: (2, {}, may-alias) }, entry_layout={}",
        before=NORM,
    )
    assert read_after_overwritten(text) is None


def test_programs_that_were_compiled_here_are_fine():
    def step(state, x):
        def turn(carry, row):
            kept, total = carry
            return (kept.at[0].set(row[0]), total + jnp.tanh(row)), total

        return jax.lax.scan(turn, (state, x[0]), x)

    shape = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    row = jax.ShapeDtypeStruct((4,), jnp.float32)
    compiled = jax.jit(step, donate_argnums=0).lower(row, shape).compile()
    text = compiled.as_text()
    assert "while(" in text
    # As if the compiler had computed something again.
    assert read_after_overwritten(text + "\n// .remat") is None
    assert (
        miscompile_reason(text.replace("HloModule ", "HloModule a.remat.", 1)) is None
    )


AGAIN = program(
    norm("n.remat", "x"),
    GEMM.format(name="gemm", onto="x"),
    "%out = f32[8,4]{1,0} get-tuple-element(%gemm), index=0",
    before=NORM,
)
UNPROVED = {
    "no text": "",
    "no program in it": "// .remat",
    "no schedule": AGAIN.replace("is_scheduled=true", "is_scheduled=false"),
    "no header": AGAIN.partition("\n")[2],
    "no entry": AGAIN.replace("ENTRY ", ""),
    "a line that is no instruction": AGAIN.replace("  ROOT", "  what is this\n  ROOT"),
    "an instruction without a kind": AGAIN.replace("get-tuple-element(", "("),
    "a computation that is not named": AGAIN.replace("%norm (p: f32[8,4])", "odd"),
    "an operand that is nowhere": AGAIN.replace("fusion(%x)", "fusion(%nowhere)"),
    "aliases of another form": AGAIN.replace("{{0}: (2, {})}", "[0 -> 2]"),
}


@pytest.mark.parametrize("text", UNPROVED.values(), ids=UNPROVED)
def test_what_cannot_be_read_counts_as_wrong(text):
    assert miscompile_reason(AGAIN) is None
    assert miscompile_reason(text) is not None
    lowered = Lowered(text, RIGHT)
    assert compile_right(lowered, {})[1] == RIGHT
    assert lowered.options == [None, {"xla_disable_hlo_passes": "rematerialization"}]
