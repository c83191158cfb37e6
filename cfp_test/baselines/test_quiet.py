"""Whatever a solver prints, from C or Python, standard output holds answers only."""

import subprocess
import sys

from cfp_test.cli.cli_runner import environment
from cfp_test.support.forking import quick_python
from cfp_test.support.waiting import GUARD_SECONDS

# A solver that prints while it is at work, then solves as it would.
PROGRAM = """
import ctypes, logging, os, sys
import pulp
from cfp_test.search import ilp
from cfp.search.problem import Problem
from alpa_test.cost_model.quiet import quiet_solver
from cfp_test.search.drawn import option

logging.getLogger("alpa_test").setLevel(logging.DEBUG)
logging.basicConfig(stream=sys.stderr)
libc = ctypes.CDLL(None)
solve = pulp.HiGHS.actualSolve

def loud(self, lp):
    print("noise of Python")
    libc.puts(b"noise of C")
    os.write(1, b"noise of the system" + b"." * 100_000)
    return solve(self, lp)

pulp.HiGHS.actualSolve = loud
options = (option(2.0, 0, 0, 1), option(1.0, 0, 0, 2))
problem = Problem(kinds=(0,), options=(options,), edge_ms={})
libc.puts(b"C before it")
print("Python before it")
print(*ilp.solve_ilp(problem).picks, *ilp.leanest(problem).picks)
try:
    with quiet_solver(), quiet_solver():
        print("noise before an error")
        raise ValueError("an error")
except ValueError as error:
    print(error)
libc.puts(b"C after it")
"""


def printed(program: str, closed: str = "") -> tuple[str, str]:
    """Returns a program's standard output and standard error."""
    python = sys.executable if closed else quick_python()
    done = subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", python, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=GUARD_SECONDS,
        check=True,
    )
    return done.stdout, done.stderr


def test_nothing_that_a_solver_prints_reaches_standard_output():
    out, err = printed(PROGRAM)
    assert sorted(out.splitlines()) == [
        "1 0",
        "C after it",
        "C before it",
        "Python before it",
        "an error",
    ]
    assert err.count("noise of Python") == 2
    assert err.count("noise of C") == 2
    assert err.count("noise of the system...") == 2
    assert "noise before an error" in err
