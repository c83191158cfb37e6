"""Keys and values that all processes of a program see, beside their devices.

`jax.distributed` has them for the runtime, without a public name. Every wait has a
deadline here; a collective waits for its devices for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import distributed

_LATE = "DEADLINE_EXCEEDED"


@dataclass(frozen=True, slots=True)
class Channel:
    """Key-value messages between the processes of a program.

    Attributes:
        coordinator: HOST:PORT of process 0, or "" if it is not known.
    """

    process: int
    count: int
    coordinator: str
    _client: Any

    def put(self, key: str, text: str) -> None:
        """Stores a value; an earlier value of the key is replaced."""
        self._client.key_value_set(key, text, allow_overwrite=True)

    def get(self, key: str, seconds: float) -> str | None:
        """Waits for the value of a key; None if that takes longer.

        Raises:
            jax.errors.JaxRuntimeError: the coordinator cannot be reached.
        """
        try:
            return self._client.blocking_key_value_get(key, int(seconds * 1000))
        except jax.errors.JaxRuntimeError as error:
            if _LATE not in str(error):
                raise
            return None

    def below(self, folder: str) -> Mapping[str, str]:
        """Returns all values so far under keys in a folder."""
        found = self._client.key_value_dir_get(f"{folder}/")
        return {key.removeprefix(f"{folder}/"): text for key, text in found}

    def forget(self, folder: str) -> None:
        """Removes all keys that begin with a folder's name."""
        self._client.key_value_delete(f"{folder}/")


def open_channel() -> Channel | None:
    """The channel of this program; None where it has one process."""
    state = distributed.global_state
    if state.client is None or state.num_processes < 2:
        return None
    address = state.coordinator_address or ""
    return Channel(state.process_id, state.num_processes, address, state.client)
