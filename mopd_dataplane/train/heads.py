"""Teacher heads: at most one on the device, the next one read ahead by a thread. Teacher models are not needed."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from mopd_kernels.heads import Head
from safetensors import SafetensorError, safe_open

from mopd_dataplane.base.files import file_digest
from mopd_dataplane.base.tensor_header import read_tensor_header
from mopd_dataplane.errors import DamagedError, DeadlineError, require_known
from mopd_dataplane.train.spec import HeadFile

READ_S = 600.0
"""Longest wait for a head file, in seconds."""


class TeacherHeads:
    """Heads by teacher name, from the head files that scoring wrote."""

    def __init__(self, files: Mapping[str, HeadFile], device: torch.device) -> None:
        self._files = dict(files)
        self._device = device
        self._resident: tuple[str, Head] | None = None
        self._ahead: tuple[str, Future[Head]] | None = None
        self._verified: set[str] = set()
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="teacher-head")

    def get(self, teacher: str) -> Head:
        """The head of a teacher, frozen, on the device. Raises UnknownNameError, DamagedError, DeadlineError."""
        if self._resident is not None and self._same(self._resident[0], teacher):
            return self._resident[1]
        self._resident = None
        if self._ahead is None or not self._same(self._ahead[0], teacher):
            self.prefetch(teacher)
        assert self._ahead is not None
        try:
            head = _on_device(self._ahead[1].result(timeout=READ_S), self._device)
        except TimeoutError:
            raise DeadlineError(
                f"the head of teacher {teacher!r} was not read in {READ_S:.0f} s; check the disk, then run again"
            ) from None
        self._resident, self._ahead = (teacher, head), None
        return head

    def prefetch(self, teacher: str) -> None:
        """Start reading a head into host memory, unless it is there or being read."""
        if any(
            entry_pair is not None and self._same(entry_pair[0], teacher)
            for entry_pair in (self._resident, self._ahead)
        ):
            return
        require_known(teacher, self._files, "no head file for teacher")
        self._ahead = (teacher, self._reader.submit(self._read, teacher))

    def _same(self, one: str, other: str) -> bool:
        """Check if two teachers have the same head, as adapters on one base do."""
        return one == other or (one in self._files and self._files[one] == self._files.get(other))

    def close(self) -> None:
        """Stop the reader thread and free every head."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._resident = self._ahead = None

    def _read(self, teacher: str) -> Head:
        entry = self._files[teacher]
        path = Path(entry.path)
        try:
            if teacher not in self._verified:
                if (digest := file_digest(path)) != entry.digest:
                    raise DamagedError(
                        f"{path} has sha256 {digest[:16]}…, the store recorded {entry.digest[:16]}…; restore the file"
                    )
                self._verified.add(teacher)
            read_tensor_header(path)
            with safe_open(path, framework="pt") as stored:
                metadata = stored.metadata() or {}
                # get_tensor maps the file; the clone reads it here, inside the thread.
                tensors = {name: stored.get_tensor(name).clone() for name in stored.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise DamagedError(f"head of teacher {teacher!r}: {error}; score again to rewrite it") from None
        softcap = float(metadata.get("logit_softcap", 0.0)) or None
        return Head(tensors["weight"], tensors.get("bias"), softcap, float(metadata.get("logit_scale", 1.0)))


def _on_device(head: Head, device: torch.device) -> Head:
    return replace(head, weight=head.weight.to(device), bias=None if head.bias is None else head.bias.to(device))
