"""Batches for any trainer, in five lines:

    stream = BatchStream("runs/demo", LoadSpec(stage="student", signals=("logprob",)))
    for batch in stream:
        for pack in batch.packs:
            train_on(pack.tokens, pack.loss_mask, pack.teacher_logprobs)
    stream.close()

The first rank of a node starts the loader unless one is already running (`mopd load serve`); the others connect to it.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from mopd_dataplane.errors import InputError
from mopd_dataplane.load.client import LoadedBatch, LoaderClient, Views
from mopd_dataplane.load.launch import LoaderProcess, is_served, start_server
from mopd_dataplane.load.spec import LoadSpec


class BatchStream:
    """An iterable of batches with `state_dict` and `load_state_dict`, like PyTorch's stateful loaders.

    Iterating starts at the current position and moves it: a second loop continues where the first one stopped.
    """

    def __init__(
        self,
        store: str | Path,
        spec: LoadSpec,
        *,
        windows: Sequence[int] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        socket: str | Path | None = None,
        views: Views = "torch",
        pin: bool = False,
        window_deadline_s: float | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Connect to the node's loader, starting it if this is the node's first rank and none is running yet.

        windows: numbers of the windows to read, in order; None reads all that are planned, waits for more, and ends
        where the plan log is closed. rank, world_size: of data parallelism; by default torchrun's (RANK, WORLD_SIZE),
        else 0 of 1. socket: path of the socket of a loader started by hand; by default derived from store and spec.
        pin: see LoaderClient. window_deadline_s: longest wait for a window that is still being planned, in seconds.

        Raises the loader's error when it refuses the connection, DeadlineError when no loader answers.
        """
        self._stage = spec.stage
        self._deadline_s = spec.deadline_s
        self._windows = None if windows is None else list(windows)
        self._window = self._windows[0] if self._windows else 0
        self._step = 0
        path = Path(socket) if socket is not None else socket_of(store, spec)
        first = int(environment.get("LOCAL_RANK", "0")) == 0
        self._loader: LoaderProcess | None = None
        if socket is None and first and not is_served(path):
            self._loader = start_server(str(store), path, spec)
        try:
            self._client = LoaderClient(
                path,
                int(environment.get("RANK", "0")) if rank is None else rank,
                int(environment.get("WORLD_SIZE", "1")) if world_size is None else world_size,
                views=views,
                pin=pin,
                deadline_s=spec.deadline_s,
                window_deadline_s=window_deadline_s,
            )
        except BaseException:
            if self._loader is not None:
                self._loader.stop()
            raise

    def __iter__(self) -> Iterator[LoadedBatch]:
        """Yield batches from the current position on. Asking for the next one releases the last."""
        windows: Iterable[int] = count(self._window)
        if self._windows is not None:
            windows = [window for window in self._windows if window >= self._window]
        for window in windows:
            if self._windows is None and self._client.plan(self._stage, window)["steps"] == 0:
                return
            if window != self._window:
                self._window, self._step = window, 0
            for batch in self._client.batches(self._stage, window, self._step):
                self._step += 1
                yield batch
        if self._windows:
            self._window, self._step = self._windows[-1] + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Position of the next batch: {"window", "step"}, the same at any world size."""
        return {"window": self._window, "step": self._step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a saved position. Raises InputError for a window that this stream does not read."""
        window, step = int(state["window"]), int(state["step"])
        if self._windows and window not in [*self._windows, self._windows[-1] + 1]:
            raise InputError(f"the saved position is in window {window}, but this stream reads windows {self._windows}")
        self._window, self._step = window, step

    def stats(self) -> dict[str, Any]:
        """Return how many packs the loader has ready for each rank, and the size of its ring; see
        LoaderClient.stats."""
        return self._client.stats()

    def close(self) -> None:
        """Disconnect and release all packs. The rank that started the loader waits for the other ranks to leave."""
        self._client.close()
        if self._loader is not None:
            self._loader.finish(self._deadline_s)

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def socket_of(store: str | Path, spec: LoadSpec) -> Path:
    """Return the default path of the loader's socket for a store and a spec on this node, in a folder of this user."""
    local = "://" not in str(store)
    where = str(Path(store).resolve()) if local else str(store)
    name = hashlib.blake2b(f"{where}\0{spec.model_dump_json()}".encode(), digest_size=8, person=b"mopd-sock")
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"mopd-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise InputError(
            f"{folder} is not a folder that only this user may enter (mode {stat.filemode(status.st_mode)}, owner "
            f"{status.st_uid}); remove it, or set XDG_RUNTIME_DIR to a folder of yours"
        )
    return folder / f"{name.hexdigest()}.sock"
