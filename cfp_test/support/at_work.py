"""Jobs that processes are at, as the store has them."""

import json
from dataclasses import asdict, replace
from pathlib import Path

from cfp.profiling.record import ProfileKey
from cfp.profiling.store import ProfileStore
from cfp.profiling.tasks import Operation, is_alive, operations

# A number that no process of Linux has.
GONE = 1 << 30
SINCE = "2026-01-02T03:04:05+00:00"


def at_work(store: ProfileStore | Path) -> dict[str, list[Operation]]:
    """Reads all operations of a store, or of the one of a folder."""
    if isinstance(store, Path):
        with ProfileStore(store / "profiles.sqlite") as opened:
            return at_work(opened)
    with store.transaction() as connection:
        return operations(connection)


def of_living(store: ProfileStore | Path) -> dict[str, list[Operation]]:
    """The same, of processes that live."""
    every = at_work(store).items()
    return {owner: mine for owner, mine in every if owner and is_alive(owner)}


def alone(store: ProfileStore) -> list[Operation]:
    """The same, of the only process."""
    [found] = of_living(store).values()
    return found


def operation(key: ProfileKey, name: str, doing="run", **changes) -> Operation:
    """Something that a process is at."""
    made = Operation(
        parts=key.parts,
        label=f"task {name}",
        doing=doing,
        since=SINCE,
        limit_seconds=60.0,
        deadline=1e9,
    )
    return replace(made, **changes)


def leave(store: ProfileStore, *mine: Operation, owner: str = "") -> None:
    """Leaves what a process was at, or, without an owner, has died of."""
    with store.transaction() as connection:
        for one in mine:
            row = one.key, owner, json.dumps(asdict(one))
            connection.execute("INSERT OR REPLACE INTO in_flight VALUES (?, ?, ?)", row)
