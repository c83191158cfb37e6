"""Small training steps, checks of their results, and looks at what a store holds."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cfp.profiling.store import ProfileStore, store_path

STEPS = ("mlp", "attention", "scan")
# Rounding of float32 over these sizes, with sums in another order.
_TOLERANCE = 1e-4

Step = tuple[Callable[..., Any], tuple[Any, ...]]


def make_step(name: str, batch: int = 16) -> Step:
    """Makes a new function and its arguments."""
    keys = iter(jax.random.split(jax.random.key(7), 8))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / shape[0] ** 0.5

    def train(loss: Callable[..., Any]) -> Callable[..., Any]:
        def step(params: Any, x: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

        return step

    if name == "mlp":
        params = {"up": normal(32, 64), "down": normal(64, 32)}
        return train(
            lambda p, x: ((jnp.tanh(x @ p["up"]) @ p["down"] - x) ** 2).mean()
        ), (params, normal(batch, 32))
    if name == "attention":

        def attend(p: Any, x: Any) -> Any:
            q, k, v = (jnp.einsum("btd,dhe->bthe", x, p[n]) for n in "qkv")
            scores = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k))
            return (jnp.einsum("bhst,bthe->bshe", scores, v) ** 2).mean()

        params = {n: normal(16, 4, 8) for n in "qkv"}
        return train(attend), (params, normal(batch, 8, 16))

    def scan(p: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return x + jax.nn.gelu(x @ w), None

        return (jax.lax.scan(layer, x, p)[0] ** 2).mean()

    return train(scan), (normal(3, 32, 32), normal(batch, 32))


class Wrong(Exception):
    """Raised where a check fails."""


def compare(name: str, got: Any, wanted: Any) -> float:
    """Returns the largest difference, relative to each array's largest value.

    Raises:
        Wrong: it is no rounding.
    """
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        worst = max(worst, float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-6)))
    if not worst < _TOLERANCE:
        raise Wrong(f"{name}: results differ from one device's by {worst:.2e}")
    return worst


@contextlib.contextmanager
def logged_puts() -> Iterator[list[str]]:
    """Lists keys of what is stored without being asked to replace anything."""
    keys: list[str] = []
    put_all = ProfileStore.put_all

    def logging(store: ProfileStore, records: Any, *, replace: bool = False) -> int:
        if not replace:
            keys.extend(record.key for record in records if record.ok)
        return put_all(store, records, replace=replace)

    ProfileStore.put_all = logging  # pyright: ignore
    try:
        yield keys
    finally:
        ProfileStore.put_all = put_all


def stored(folder: Path) -> set[str]:
    """Keys of a store's good records.

    Raises:
        Wrong: a row cannot be read, or SQLite finds fault with the file.
    """
    path = store_path(folder)
    if not path.exists():
        return set()
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT count(*) FROM records").fetchone()[0]
        sound = connection.execute("PRAGMA integrity_check").fetchone()[0]
    connection.close()
    with ProfileStore(path) as store:
        records = store.records()
    if sound != "ok" or len(records) != rows:
        raise Wrong(f"{path}: {sound}; {len(records)} of {rows} rows can be read")
    if bad := [one for one in records if one.status == "crashed"]:
        raise Wrong(f"{path}: something counts as the cause of a death: {bad[0]}")
    return {record.key for record in records if record.ok}
