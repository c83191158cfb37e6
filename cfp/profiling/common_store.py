"""Process 0's profile store, shared by all processes of a program.

Stored measurements decide what is measured, so processes with different stores would
measure different things; and one file for all would have to lie where SQLite works for
several hosts. Process 0 looks up, tells the others, and keeps new records.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from cfp.profiling.processes import Agreement
from cfp.profiling.record import ProfileRecord
from cfp.profiling.store import STORE_NAME, ProfileStore


class CommonStore(ProfileStore):
    """A store whose `common` gives the same records in all processes.

    Attributes:
      path: the file; of other processes than 0 one that goes when it is closed.
    """

    def __init__(self, path: Path, agreement: Agreement) -> None:
        """Opens the file, in process 0; elsewhere an empty one.

        Args:
          path: the file.
          agreement: of the processes.

        Raises:
          CacheError: it cannot be made or written.
        """
        self._agreement = agreement
        self._build_path = path
        self._folder = None if agreement.decides else TemporaryDirectory()
        own = path if self._folder is None else Path(self._folder.name) / STORE_NAME
        super().__init__(own)

    @property
    def build_path(self) -> Path:
        """Beside which this process's compilers keep what they have learnt."""
        return self._build_path

    def common(self, keys: Iterable[str]) -> dict[str, ProfileRecord]:
        """The records that process 0 has of some keys."""
        found = self.get_many(keys) if self._agreement.decides else {}
        texts = {key: record.to_json() for key, record in found.items()}
        common = self._agreement.decided("what is known", texts)
        if self._agreement.decides:
            return found
        return {key: ProfileRecord.from_json(text) for key, text in common.items()}

    def close(self) -> None:
        """Ends the use of the file."""
        super().close()
        if self._folder is not None:
            self._folder.cleanup()


def open_store(path: Path, agreement: Agreement) -> ProfileStore:
    """The store of a file; with several processes that of process 0."""
    return ProfileStore(path) if agreement.alone else CommonStore(path, agreement)
