"""Imports rollouts while another framework writes them: each complete row once, across restarts of either side.

uids follow from the content, so a row that is read again adds nothing. That is what makes it exact: nothing is
remembered between two runs of the command, and a later one reads everything from the beginning.
"""

import time
from collections.abc import Callable, Iterator
from itertools import chain

from mopd_dataplane.base.file_urls import is_url
from mopd_dataplane.base.stop_request import StopRequest
from mopd_dataplane.errors import InputError
from mopd_dataplane.interchange.conversion import Conversion, Converted, ImportSettings
from mopd_dataplane.interchange.followed_files import FollowedFiles
from mopd_dataplane.interchange.importer import (
    ImportReport,
    batches,
    check_rows,
    known_prompts,
    record_import,
    write_rows,
)
from mopd_dataplane.interchange.teachers_in import Teachers
from mopd_dataplane.interchange.vocabulary import Vocabulary
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.read.decode import keep_tokenizer

LOOK_S = 1.0
"""Pause between two looks at the files, in seconds."""
WAITED_S = 60.0
"""How long a file may be unreadable until that is said, in seconds."""


def follow_rollouts(
    uri: str,
    path: str,
    settings: ImportSettings,
    vocabulary: Vocabulary,
    *,
    stop: StopRequest,
    progress: Callable[[int], None] = lambda samples: None,
    say: Callable[[str], None] = lambda text: None,
) -> ImportReport:
    """Import the complete rows at a path into a store, and those that come, until a stop is requested.

    path: a file, a folder or a pattern on this machine; there need not be a file yet. The store is created with the
    first rows. say: is told once of a file that has been unreadable for WAITED_S.
    Raises UnknownNameError for an unknown format, and InputError for a URL, or naming file and row of a complete row
    that cannot be imported; earlier batches are in the store.
    """
    if is_url(path):
        raise InputError(f"{path}: only files on this machine are followed; leave --follow out, and import it again")
    follower = _Follower(uri, path, settings, vocabulary, progress)
    told: set[str] = set()
    waiting_since: dict[str, float] = {}
    while True:
        is_last = stop.is_requested
        follower.look()
        for file, reason in follower.files.waiting.items():
            waited_s = time.monotonic() - waiting_since.setdefault(file, time.monotonic())
            if waited_s > WAITED_S and file not in told:
                told.add(file)
                say(f"{reason}; it is read as soon as it is whole")
        if is_last:
            return follower.end()
        time.sleep(LOOK_S)


class _Follower:
    """What was imported so far."""

    def __init__(
        self, uri: str, path: str, settings: ImportSettings, vocabulary: Vocabulary, progress: Callable[[int], None]
    ) -> None:
        self.files = FollowedFiles(path)
        self._uri, self._settings, self._vocabulary, self._progress = uri, settings, vocabulary, progress
        self._store = Store.find(uri)
        self._prompts = known_prompts(self._store)
        self._conversion = Conversion(settings, vocabulary)
        self._report = ImportReport()

    def look(self) -> None:
        """Import the rows that have come since the last look."""
        if self.files.was_rewritten():  # equal rows are counted anew, so that each is again the one that it was
            self._conversion = Conversion(self._settings, self._vocabulary)
            self._report = ImportReport(inserted=self._report.inserted)
        for batch in batches(self._samples()):
            self._write(batch)
            self._progress(self._report.samples)

    def end(self) -> ImportReport:
        """Record the import, and return what it brought."""
        if self._store is not None:
            record_import(self._store, self._settings, [self.files.path], self._report)
        return self._report

    def _samples(self) -> Iterator[Converted]:
        return chain.from_iterable(self._conversion.samples(*row) for row in self.files.new_rows())

    def _write(self, batch: list[Converted]) -> None:
        teachers = Teachers(
            self._store, [self.files.path, *self.files.names()], (self._vocabulary.digest, self._vocabulary.size)
        )
        check_rows(self._store, self._prompts, batch, teachers)
        if self._store is None:
            self._store = Store.create(self._uri)
        keep_tokenizer(self._store, self._vocabulary.digest, self._vocabulary.file())
        teachers.bring(self._store)
        self._report.rows += len({row.location for row, _, _ in batch})
        self._report.split += len({row.location for row, _, _ in batch if row.is_part})
        self._report.ignored = sorted({*self._report.ignored, *(name for row, _, _ in batch for name in row.ignored)})
        write_rows(self._store, batch, self._prompts, self._report)
