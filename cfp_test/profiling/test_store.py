import dataclasses
import json
import sqlite3
import threading
from pathlib import Path

import pytest

from cfp.errors import CfpError
from cfp.profiling.files import cache_dir
from cfp.profiling.record import Collective, ProfileKey, ProfileRecord, Status
from cfp.profiling.store import ProfileStore


def make(name: str, *, value: float = 1.0, status: Status = "ok") -> ProfileRecord:
    key = ProfileKey((("segment", name), ("mesh", "4"), ("jax_version", "0.10.2")))
    return ProfileRecord(
        key=key.digest,
        parts=key.parts,
        status=status,
        reason="" if status == "ok" else "no room",
        samples_ms=(value, value + 1.0) if status == "ok" else (),
        collectives=(Collective(kind="all-reduce", bytes=8, group_size=4, count=2),),
        created="2026-01-02T03:04:05+00:00",
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "profiles.sqlite3"


def fill(path: Path, count: int = 60) -> dict[str, ProfileRecord]:
    """A store with records in a closed file, its log written back."""
    records = [make(f"segment {index}", value=float(index)) for index in range(count)]
    with ProfileStore(path) as store:
        for record in records:
            assert store.put(record)
    assert not path.with_name(f"{path.name}-wal").exists()
    return {record.key: record for record in records}


def set_aside(path: Path) -> list[str]:
    return sorted(item.name for item in path.parent.glob(f"{path.name}.damaged-*Z"))


def test_records_outlive_the_store(path):
    record = make("gpt")
    with ProfileStore(path) as store:
        assert len(store) == 0
        assert store.get(record.key) is None
        assert store.put(record)
        assert store.get(record.key) == record
    with ProfileStore(path) as store:
        assert len(store) == 1
        assert store.get(record.key) == record
        assert store.records() == [record]
    assert set_aside(path) == []


def test_get_many_returns_what_there_is_in_the_order_asked(path):
    records = fill(path, 1200)
    keys = list(records)[::-1]
    with ProfileStore(path) as store:
        found = store.get_many([*keys, "absent", keys[0]])
        assert list(found) == keys
        assert found == records
        assert store.get_many([]) == {}


OK_1, OK_2 = make("gpt", value=1.0), make("gpt", value=2.0)
FAILED_1 = make("gpt", status="out_of_memory")
FAILED_2 = make("gpt", status="crashed")


@pytest.mark.parametrize(
    ("first", "second", "replace", "kept"),
    [
        (OK_1, OK_1, False, OK_1),
        (OK_1, OK_2, False, OK_1),
        (OK_1, OK_2, True, OK_2),
        (OK_1, FAILED_1, False, OK_1),
        (OK_1, FAILED_1, True, FAILED_1),
        (FAILED_1, OK_1, False, OK_1),
        (FAILED_1, FAILED_2, False, FAILED_1),
        (FAILED_1, FAILED_2, True, FAILED_2),
    ],
)
def test_which_record_of_a_key_stays(path, first, second, replace, kept):
    with ProfileStore(path) as store:
        assert store.put(first)
        assert store.put(second, replace=replace) == (kept == second != first)
        assert store.get(first.key) == kept
        assert len(store) == 1


def test_export_and_merge(path, tmp_path):
    records = fill(path, 20)
    lines = tmp_path / "profiles.jsonl"
    with ProfileStore(path) as store:
        assert store.export(lines) == 20
    assert [item.name for item in tmp_path.glob("*.unfinished")] == []
    texts = lines.read_text().splitlines()
    assert {ProfileRecord.from_json(text) for text in texts} == set(records.values())

    known = next(iter(records.values()))
    with ProfileStore(tmp_path / "other.sqlite3") as other:
        other.put(dataclasses.replace(known, samples_ms=(9.0,)))
        assert other.merge(lines) == 19
        assert other.merge(lines) == 0
        assert other.get_many(records) == records | {
            known.key: dataclasses.replace(known, samples_ms=(9.0,))
        }


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        json.dumps(json.loads(make("a").to_json()) | {"colour": "red"}),
        dataclasses.replace(make("a"), key="0" * 64).to_json(),
    ],
)
def test_a_bad_line_merges_nothing(path, tmp_path, bad):
    lines = tmp_path / "profiles.jsonl"
    lines.write_text(f"{make('b').to_json()}\n{bad}\n")
    with ProfileStore(path) as store:
        with pytest.raises(
            CfpError, match=r"(?s)Nothing.*after 1 good lines\. Export it"
        ):
            store.merge(lines)
        assert len(store) == 0


def test_files_that_cannot_be_exported_to_or_merged_from(path, tmp_path):
    with ProfileStore(path) as store:
        store.put(make("gpt"))
        with pytest.raises(CfpError, match="No such file"):
            store.merge(tmp_path / "absent")
        with pytest.raises(CfpError, match="cannot be exported"):
            store.export(tmp_path / "absent" / "profiles.jsonl")
        (tmp_path / "folder").mkdir()
        with pytest.raises(CfpError, match="cannot be exported"):
            store.export(tmp_path / "folder")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["cache", "folder"]


def test_a_closed_store_is_of_no_use(path):
    store = ProfileStore(path)
    store.close()
    store.close()
    with pytest.raises(ValueError, match="closed"):
        len(store)


# Several at once


def test_stores_that_find_damage_at_once_set_one_file_aside(path):
    fill(path)
    path.write_bytes(b"no database" * 1000)
    stores: list[ProfileStore] = []

    def open_and_write(name: str) -> None:
        barrier.wait()
        stores.append(ProfileStore(path))
        stores[-1].put(make(name))

    barrier = threading.Barrier(6)
    threads = [
        threading.Thread(target=open_and_write, args=(str(index),))
        for index in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set_aside(path)) == 1
    assert [len(store) for store in stores] == [6] * 6
    for store in stores:
        store.close()


# Damage


def test_a_new_file_that_is_damaged_is_an_error(path, monkeypatch):
    monkeypatch.setattr("cfp.profiling.store._damage", lambda _: "no such table")
    with pytest.raises(CfpError, match="cannot be made: no such table"):
        ProfileStore(path)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_a_truncated_file_is_set_aside(path, part, caplog):
    records = fill(path)
    data = path.read_bytes()[: int(path.stat().st_size * part)]
    path.write_bytes(data)
    with ProfileStore(path) as store:
        assert len(store) == 0
        assert store.get_many(records) == {}
        (aside,) = set_aside(path)
        assert path.with_name(aside).read_bytes() == data
        assert store.put(make("after"))
    assert aside in caplog.text and "damaged" in caplog.text
    with ProfileStore(path) as store:
        assert len(store) == 1
    assert set_aside(path) == [aside]


def test_the_log_is_set_aside_too(path):
    fill(path)
    with ProfileStore(path) as store:
        store.put(make("gpt"))
        log = path.with_name(f"{path.name}-wal").read_bytes()
        assert log
        damaged = path.read_bytes()[:4096] + b"no database" * 5000
        path.write_bytes(damaged)
        ProfileStore(path).close()
        (aside,) = set_aside(path)
        assert path.with_name(aside).read_bytes() == damaged
        assert path.with_name(f"{aside}-wal").read_bytes() == log
        assert path.with_name(f"{aside}-shm").exists()


def test_a_row_that_cannot_be_read_is_left_out(path, caplog):
    record = make("gpt")
    fill(path, 1)
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("INSERT INTO records VALUES (?, ?)", (record.key, "{}"))
    connection.close()
    with ProfileStore(path) as store:
        assert store.get(record.key) is None
        assert len(store.records()) == 1
        assert store.put(record) and store.get(record.key) == record
    assert f"the profile {record.key} cannot be read" in caplog.text


@pytest.mark.parametrize(
    "statement",
    ["PRAGMA user_version = 1", "PRAGMA user_version = 0"],
)
def test_another_schema_is_set_aside(path, statement):
    fill(path, 3)
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.close()
    with ProfileStore(path) as store:
        assert len(store) == 0
    assert len(set_aside(path)) == 1


def test_an_empty_file_is_a_new_store(path):
    path.parent.mkdir()
    path.touch()
    with ProfileStore(path) as store:
        assert store.put(make("gpt"))
    assert set_aside(path) == []


def test_damage_below_an_open_store_is_set_aside_by_the_next(path):
    fill(path)
    with ProfileStore(path):
        damaged = bytearray(path.read_bytes())
        damaged[4096:] = bytes(len(damaged) - 4096)
        # In place, as a bad disk does it.
        with path.open("r+b") as file:
            file.write(damaged)
        with ProfileStore(path) as other:
            assert len(set_aside(path)) == 1
            assert other.put(make("theirs"))
    with ProfileStore(path) as store:
        assert len(store) == 1
    assert len(set_aside(path)) == 1


# Places


@pytest.mark.explained("The cache cannot be used")
def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CfpError, match=r"file.*name another folder"):
        ProfileStore(tmp_path / "file" / "cache" / "profiles.sqlite3")


def test_a_path_that_is_a_directory(tmp_path):
    with pytest.raises(CfpError, match="unable to open"):
        ProfileStore(tmp_path)


def test_a_writer_that_never_ends(path, monkeypatch):
    monkeypatch.setattr("cfp.profiling.store._BUSY_SECONDS", 0.05)
    with ProfileStore(path) as store:
        connection = sqlite3.connect(path)
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(CfpError, match="locked"):
            store.put(make("gpt"))
        assert store.get(make("gpt").key) is None
        connection.close()
        assert store.put(make("gpt"))


def test_default_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CFP_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "cfp"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache" / "cfp"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/cfp")
    monkeypatch.setenv("CFP_CACHE_DIR", "~/mine")
    assert cache_dir() == tmp_path / "mine"
    assert not (tmp_path / "mine").exists()
