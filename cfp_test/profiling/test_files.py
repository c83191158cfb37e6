"""No other user of the machine reads the cache, or writes to it."""

import os

import pytest

from cfp.profiling.builder import BuildEnvironment
from cfp.profiling.record import ProfileKey, ProfileRecord
from cfp.profiling.store import STORE_NAME, ProfileStore
from cfp.profiling.tasks import InFlight


@pytest.fixture(autouse=True)
def open_umask():
    """The most open one, which takes nothing away."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path):
    return path.stat().st_mode & 0o777


def test_folders_and_files_are_the_owners_alone(tmp_path):
    folder = tmp_path / "some" / "cfp"
    key = ProfileKey((("a", "b"),))
    with ProfileStore(folder / STORE_NAME) as store, InFlight(store) as marks:
        with marks.doing(key, "it", "build"):
            store.put(
                ProfileRecord(
                    key=key.digest, parts=key.parts, status="ok", samples_ms=(1.0,)
                )
            )
            BuildEnvironment.beside(store.path).options("cuda")
            made = [folder, *folder.rglob("*")]
            kinds = {path.suffix for path in made}
            assert {".sqlite", ".lock", ".sqlite-wal"} <= kinds
            assert "autotune" in {path.name for path in made}
            for path in made:
                assert mode(path) == (0o700 if path.is_dir() else 0o600), path


def test_what_the_user_made_is_as_the_user_made_it(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir(mode=0o755)
    (folder / STORE_NAME).touch(mode=0o644)
    ProfileStore(folder / STORE_NAME).close()
    assert (mode(folder), mode(folder / STORE_NAME)) == (0o755, 0o600)
