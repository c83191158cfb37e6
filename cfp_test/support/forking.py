"""An interpreter for tests that has loaded cfp already: each start is a fork.

To load JAX and cfp takes two to four seconds of a processor, and tests start some
hundred commands. `quick_python` returns a program that is called like Python. It hands
its words, environment, folder and standard streams to a server, which has loaded what
commands need and has no JAX backend; the server forks, and the fork runs the words as a
process of its own, which reads its environment, chooses its devices and ends by itself.

What such a process shares with others: the seed of hashes, and what is loaded. Tests of
loading, of a variable that is read while modules are loaded, or of the same answer in
processes with different seeds, take `sys.executable`.
"""

import atexit
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

# Runs without site packages, in a fiftieth of a second.
_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    words = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
    socket.send_fds(server, [len(words).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(words)
    answers = server.makefile("r")
    process = int(answers.readline())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: os.kill(process, number))
    code = int(answers.readline())
if code < 0:
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class _Request(NamedTuple):
    words: list[str]
    environment: dict[str, str]
    folder: str


@functools.cache
def quick_python() -> str:
    """Starts the server of this process, once; returns what to call as Python."""
    place = tempfile.TemporaryDirectory(prefix="cfp_test_forking")
    address = str(Path(place.name) / "server")
    client = Path(place.name) / "python"
    client.write_text(_CLIENT.format(python=sys.executable, address=address))
    client.chmod(0o700)
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "JAX_PLATFORMS")
    }
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        server = subprocess.Popen(
            [sys.executable, "-m", "cfp_test.support.forking", str(listening.fileno())],
            env={**kept, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            pass_fds=[listening.fileno()],
            start_new_session=True,
        )

    def end() -> None:
        server.communicate()  # Closes its input.
        place.cleanup()

    atexit.register(end)
    return str(client)


def _load() -> None:
    """Loads what commands need; no JAX backend, which a fork could not use."""
    import pytest
    import typer.testing

    import cfp.cli

    assert pytest and typer.testing and cfp.cli


def _accept(listening: socket.socket) -> _Request | None:
    """Returns a request in the process that is for it; None at the server's end."""
    # What attends to a process ends unseen.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([listening, sys.stdin], [], [])
        if sys.stdin in ready:
            return None
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _begin(connection)
        connection.close()


def _begin(connection: socket.socket) -> _Request:
    """Forks once more, and returns in the new process; this one attends to it."""
    head, streams, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as incoming:
        request = _Request(*json.loads(incoming.read(int.from_bytes(head, "big"))))
    process = os.fork()
    if process == 0:
        os.setsid()
        # Tests in the background, and what they start, ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return request
    for stream in streams:
        os.close(stream)
    connection.sendall(f"{process}\n".encode())
    ended = os.pidfd_open(process)
    ready, _, _ = select.select([connection, ended], [], [])
    if ended not in ready:  # Whoever asked is gone.
        os.killpg(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    if ended in ready:
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _run(request: _Request) -> None:
    """Runs words as Python would."""
    import jax

    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    # JAX has read the variable when it was imported.
    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS"))
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [path for path in sys.path if path not in ("", str(ROOT))]
    kind, *rest = request.words
    sys.path[:] = [*filter(None, paths), *kept]
    if kind == "-m":
        sys.path.insert(0, request.folder)
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path.insert(0, "")
        sys.argv = [kind, *rest[1:]]
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)
    else:
        sys.path.insert(0, str(Path(kind).parent))
        sys.argv = request.words
        runpy.run_path(kind, run_name="__main__")


def main() -> None:
    """Serves, until its standard input is closed."""
    gc.disable()
    _load()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)  # As in `conftest.py`.
    gc.enable()
    request = _accept(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        _run(request)


if __name__ == "__main__":
    main()
