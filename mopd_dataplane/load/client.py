"""The trainer's side of the loader: batches of packs in shared memory.

    client = LoaderClient(socket, rank=0, world_size=1)
    for batch in client.batches("student", window=0):
        for pack in batch.packs:
            train_on(pack.tokens, pack.loss_mask)
        batch.release()

Arrays are read-only views, valid until their batch (or pack) is released; nothing is copied. This module imports
neither Lance nor pyarrow, and torch only for torch views.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket as sockets
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

import numpy as np

from mopd_dataplane.errors import DamagedError, DeadlineError, InputError, ResourceError
from mopd_dataplane.fields import DTYPES, arguments
from mopd_dataplane.load import pinned
from mopd_dataplane.load.protocol import VERSION, Channel, Message, PeerGone, raise_error
from mopd_dataplane.load.slot_layout import Field, arrays_of, read_header, slot_crc
from mopd_dataplane.records import Batch, Pack

Views = Literal["torch", "numpy"]
CONNECT_RETRY_S = 0.05


class LoaderClient:
    """One trainer process's connection to the loader of its node."""

    def __init__(
        self,
        socket: str | Path,
        rank: int = 0,
        world_size: int = 1,
        *,
        member: int = 0,
        members: int = 1,
        views: Views = "torch",
        deadline_s: float = 60.0,
        window_deadline_s: float | None = None,
        verify: bool = True,
        pin: bool = False,
    ) -> None:
        """Connect to a loader.

        rank, world_size: of data parallelism. member, members: index and size within a tensor- or context-parallel
        group, whose processes read the same packs from the same slots. deadline_s: longest silence of the loader, in
        seconds. window_deadline_s: longest wait for data while the loader reports that it is coming (a window that is
        still being planned), in seconds; defaults to deadline_s. verify: check each slot's checksum. pin: register each
        slot with CUDA once, so that its torch views are pinned memory; a copy from such a view must have ended before
        its pack is released.

        Raises DeadlineError when no loader answers, and the loader's error when it refuses the connection.
        """
        self._views = views
        self._deadline_s = deadline_s
        self._window_deadline_s = deadline_s if window_deadline_s is None else window_deadline_s
        self._verify = verify
        self._pin = pin
        self._slots: dict[int, _MappedSlot] = {}
        self._position = {"window": 0, "step": 0}
        self._batch: LoadedBatch | None = None
        self._released: list[_Lease] = []
        """Leases given back here that the loader has not been told of yet."""
        self._used_at: list[float] = []
        """Times (monotonic) at which the trainer first read a pack that it had not requested, since the last report."""
        self._asked_next = False
        """True between sending the request for the next batch and taking its answer."""
        self._next_answer: tuple[Message, list[int]] | None = None
        """Answer to the request for the next batch, if it arrived while another request waited for its own."""
        self._channel = Channel(_connect(Path(socket), deadline_s))
        greeting = self._ask({
            "op": "hello", "version": VERSION, "rank": rank, "world_size": world_size, "member": member,
            "members": members,
        })  # fmt: skip
        self._stage = str(greeting["stage"])

    def batches(self, stage: str, window: int, start_step: int = 0) -> Iterator[LoadedBatch]:
        """Yield the batches of one window from its step `start_step` on, waiting for the window to be planned.

        Asking for the next batch, or for another stream, releases the last one.
        Raises InputError if the loader serves another stage, and DeadlineError if data does not come in time.
        """
        self._check_stage(stage)
        self._end_batch()
        self._drop_next()
        opened = self._ask({"op": "open", "window": window, "step": start_step})
        self._position = {"window": window, "step": start_step}
        while True:
            self._end_batch()
            header, lent = self._take_next()
            if "end" in header:
                self._position = {"window": window + 1, "step": 0}
                return
            self._position = {"window": window, "step": int(header["step"]) + 1}
            self._batch = LoadedBatch(
                stage=stage,
                window=window,
                step=int(opened["base"]) + int(header["step"]),
                packs=_LazyPacks(self, int(header["step"]), header["packs"], lent),
                loss_tokens=int(header["loss_tokens"]),
                sequences=int(header["sequences"]),
            )
            yield self._batch

    def plan(self, stage: str, window: int) -> dict[str, Any]:
        """Return {"steps", "plan_digest", "snapshot_digest"} of a window, waiting until it is planned.

        0 steps mean that the plan log is closed: no further window will come.
        """
        self._check_stage(stage)
        return self._ask({"op": "plan", "window": window})

    def stats(self) -> dict[str, Any]:
        """Return how many packs the loader has ready for each rank, and the size of its ring.

        {"ranks": [{"rank", "depth", "ready", "pack_s", "longest_read_s"}, …], "slots", "lent", "bytes", "max_bytes",
        "cache"}: `depth` is the number of packs to keep ready and `ready` the number that are. `pack_s` is the
        trainer's mean time for a pack without its waits, `longest_read_s` the reading time that the depth bridges.
        `cache` is RangeCache.stats, None for a local store.
        """
        return self._ask({"op": "stats"})

    def _check_stage(self, stage: str) -> None:
        if stage != self._stage:
            raise InputError(f"this loader serves stage {self._stage!r}, not {stage!r}; start a loader for that stage")

    def close(self) -> None:
        """Disconnect; the loader takes back every slot that this trainer still reads."""
        with contextlib.suppress(DeadlineError):  # the loader may be gone already
            self._channel.send({"op": "bye"}, deadline_s=self._deadline_s)
        self._channel.close()
        self._batch = None
        for slot in self._slots.values():
            slot.unpin()
        self._slots.clear()

    def __enter__(self) -> LoaderClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _end_batch(self) -> None:
        if self._batch is not None:
            self._batch.release()
            self._batch = None

    def _ask_next(self) -> None:
        """Request the next batch, once, without waiting: the loader prepares it while the last batch computes."""
        if not self._asked_next:
            self._release([], tell=True)
            self._say({"op": "next", "used": self._ages()})
            self._asked_next = True

    def _take_next(self) -> tuple[Message, dict[int, _Lease]]:
        """Wait for the next batch. Returns its description, and the leases of the packs that came with it by
        ordinal."""
        self._ask_next()
        answer, fds = self._next_answer or self._receive("next")
        self._asked_next, self._next_answer = False, None
        raise_error(answer)
        return answer, self._leases_of(answer, fds)

    def _drop_next(self) -> None:
        """Release the packs of a requested batch that nobody will read."""
        if self._asked_next:
            self._release(list(self._take_next()[1].values()), tell=True)

    def _claim(self, step: int, ordinal: int) -> dict[int, _Lease]:
        """Request a pack. Returns ordinal → lease for it and for the packs that the loader lends with it."""
        return self._leases_of(*self._request({"op": "pack", "step": step, "ordinal": ordinal, "used": self._ages()}))

    def _ages(self) -> list[float]:
        """Return the seconds since each time in `_used_at`, and clear the list."""
        now = time.monotonic()
        ages, self._used_at = [round(now - moment, 6) for moment in self._used_at], []
        return ages

    def _leases_of(self, answer: Message, fds: list[int]) -> dict[int, _Lease]:
        """Return ordinal → lease for the packs that an answer lends, mapping slots that are new to this process."""
        for gone in answer.get("gone", ()):  # the memory is freed with the last view of it
            if (retired := self._slots.pop(int(gone), None)) is not None:
                retired.unpin()
        leases = {}
        fresh = iter(fds)
        for ordinal, slot, generation, nbytes in answer.get("lent", ()):
            if slot not in self._slots:
                self._slots[slot] = _MappedSlot(next(fresh), nbytes, self._pin)
            leases[ordinal] = _Lease(slot, generation)
        return leases

    def _view(self, lease: _Lease, entry: Message) -> Pack:
        """Return the pack in a slot. Raises DamagedError when it is another pack, or when its checksum is wrong."""
        slot = self._slots[lease.slot]
        header = read_header(slot.memory)
        if header.generation != lease.generation or header.pack != int(entry["pack"]):
            raise DamagedError(
                f"slot {lease.slot} of the shared memory holds pack {header.pack} (generation {header.generation}) "
                f"instead of pack {entry['pack']} (generation {lease.generation}); connect again"
            )
        if self._verify and slot_crc(slot.memory, header.fields) != header.crc:
            raise DamagedError(
                f"pack {header.pack} in slot {lease.slot} of the shared memory does not have the checksum with which "
                "the loader wrote it"
            )
        if self._views == "torch":
            arrays: dict[str, Any] = {field.name: slot.torch_view(field) for field in header.fields}
        else:
            arrays = arrays_of(slot.memory, header.fields)
        return Pack(
            index=header.pack,
            teacher=str(entry["teacher"]),
            hidden_codec=str(entry["codec"]),
            **arguments(Pack, arrays),
        )

    def _release(self, leases: list[_Lease], *, tell: bool) -> None:
        """Give leases back. The loader is told now if `tell`, else with the next message that tells it."""
        self._released += leases
        if tell and self._released:
            told, self._released = self._released, []
            self._say({"op": "release", "leases": told})

    def _ask(self, message: Message) -> Message:
        return self._request(message)[0]

    def _request(self, message: Message) -> tuple[Message, list[int]]:
        if self._asked_next and self._next_answer is None:  # answers come in the order of their requests
            self._next_answer = self._receive("next")
        self._release([], tell=True)
        self._say(message)
        answer, fds = self._receive(message["op"])
        raise_error(answer)
        return answer, fds

    def _receive(self, token: str) -> tuple[Message, list[int]]:
        """Wait for the answer to a request, skipping messages in which the loader says that it is still working on
        it."""
        started = time.monotonic()
        while True:
            try:
                answer, fds = self._channel.receive(deadline_s=self._deadline_s)
            except PeerGone as error:
                raise self._gone(error) from None
            except DeadlineError:
                silence = f"the loader said nothing for {self._deadline_s:g} s"
                raise DeadlineError(f"{silence} in answer to the request {token!r}; start it again") from None
            if "wait" not in answer:
                return answer, fds
            if time.monotonic() - started > self._window_deadline_s:
                raise DeadlineError(f"no data after {self._window_deadline_s:g} s: {answer['wait']}")

    def _say(self, message: Message) -> None:
        try:
            self._channel.send(message, deadline_s=self._deadline_s)
        except PeerGone as error:
            raise self._gone(error) from None

    def _gone(self, error: PeerGone) -> PeerGone:
        return PeerGone(f"{error}; start the loader again and resume at {self._position}")


@dataclass(kw_only=True)
class LoadedBatch(Batch):
    """A batch whose packs are mapped from shared memory when they are first used.

    `packs` is a sequence: its length is known from the start, and an element is fetched at first use and stays valid
    until it is released.
    """

    packs: _LazyPacks

    @property
    def teachers(self) -> list[str]:
        """Teacher of each pack. Fetches no pack."""
        return [str(entry["teacher"]) for entry in self.packs.entries]

    @property
    def lengths(self) -> list[list[int]]:
        """Number of tokens of each sample of each pack. Fetches no pack."""
        return [[int(length) for length in entry["lengths"]] for entry in self.packs.entries]

    def release(self, *packs: Pack) -> None:
        """Release these packs, or all packs if none is named. Their arrays must not be read afterwards."""
        self.packs.release([pack.index for pack in packs] or None)

    def __enter__(self) -> LoadedBatch:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class _Lease(NamedTuple):
    """A slot that the loader has lent, with the generation that its header must have."""

    slot: int
    generation: int


class _LazyPacks(Sequence[Pack]):
    """The packs of one batch, each claimed at first use unless it came with the batch."""

    def __init__(self, client: LoaderClient, step: int, entries: list[Message], lent: dict[int, _Lease]) -> None:
        self._client = client
        self._step = step
        self.entries = entries
        self._leases = lent
        """Ordinal → lease of each pack lent to this trainer, whether it has been read or not."""
        self._packs: dict[int, Pack] = {}
        self._released: set[int] = set()

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, index: int) -> Pack: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pack]: ...
    def __getitem__(self, index: int | slice) -> Pack | list[Pack]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        ordinal = range(len(self))[index]
        if ordinal in self._released:
            raise ResourceError(
                f"pack {self.entries[ordinal]['pack']} of step {self._step} was released already, and a released pack "
                "cannot be read again"
            )
        if ordinal not in self._packs:
            if ordinal in self._leases:
                self._client._used_at.append(time.monotonic())
            else:
                self._leases |= self._client._claim(self._step, ordinal)
            self._packs[ordinal] = self._client._view(self._leases[ordinal], self.entries[ordinal])
        return self._packs[ordinal]

    def release(self, indices: list[int] | None) -> None:
        """Release packs by their number in the window; None releases all."""
        places = list(self._leases)
        if indices is not None:
            places = [index for index, pack in self._packs.items() if pack.index in indices]
        for index in places:
            self._packs.pop(index, None)
        leases = [self._leases.pop(index) for index in places]
        self._released.update(places if indices is not None else range(len(self)))
        self._client._release(leases, tell=len(self._packs) == len(self._leases))
        if len(self._packs) + len(self._released) == len(self):
            self._client._ask_next()


class _MappedSlot:
    """A slot as the trainer sees it: mapped once, read-only, for its whole life."""

    def __init__(self, fd: int, nbytes: int, pin: bool) -> None:
        try:
            self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)
        self.memory = memoryview(self._map)
        self._pinned = pin and pinned.register(self._tensor.data_ptr(), nbytes)

    def torch_view(self, field: Field) -> Any:
        """Return a torch view of a field. Torch does not know read-only memory: writing to the view ends the
        process."""
        whole = self._typed[field.dtype]
        first = field.offset // whole.itemsize
        flat = whole[first : first + field.nbytes // whole.itemsize]
        return flat if len(field.shape) == 1 else flat.view(field.shape)

    def unpin(self) -> None:
        """Undo the registration with CUDA, which would otherwise keep the pages after the slot is unmapped."""
        if self._pinned:
            pinned.unregister(self._tensor.data_ptr())
            self._pinned = False

    @cached_property
    def _typed(self) -> dict[str, Any]:
        """Dtype → tensor of the whole slot in that dtype: a field is then one slice, and a step has some hundred
        fields."""
        import torch

        return {dtype: self._tensor.view(torch.from_numpy(np.empty(0, dtype)).dtype) for dtype in DTYPES}

    @cached_property
    def _tensor(self) -> Any:
        """The slot as a tensor of bytes."""
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns that the memory is read-only, which it is
            return torch.frombuffer(self.memory, dtype=torch.uint8)


def _connect(path: Path, deadline_s: float) -> sockets.socket:
    """Connect to a loader, which may still be starting."""
    until = time.monotonic() + deadline_s
    while True:
        connection = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        try:
            connection.connect(str(path))
            return connection
        except OSError as error:
            connection.close()
            if time.monotonic() > until:
                raise DeadlineError(f"no loader answers on {path}: {error.strerror}; start it first") from error
            time.sleep(CONNECT_RETRY_S)
