"""Micro-batches on their way to the device.

    slot ──side stream──▶ device          the copy of one micro-batch runs while the last one is computed
      ▲                     │ event
      └── given back ◀── finish

On a CPU there is nothing to copy, and nothing to wait for; on a device other than CUDA the copy is an ordinary one.
"""

from dataclasses import fields

import torch

from mopd_dataplane.train.microbatch import MicroBatch


class DeviceCopies:
    """Copies to one device, in order, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None

    def to_device(self, micro: MicroBatch) -> MicroBatch:
        """The micro-batch on the device; what is computed next waits for the copy, this process does not.

        Its source must stay as it is until `finish` returns.
        """
        if self._stream is None:
            return micro.to(self._device)
        with torch.cuda.stream(self._stream):
            moved = micro.to(self._device)
            self._copied = self._stream.record_event()
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(self._copied)
        for field in fields(moved):
            value = getattr(moved, field.name)
            if torch.is_tensor(value):
                value.record_stream(computing)  # else its memory could be used for a later copy while it is read
        return moved

    def finish(self) -> None:
        """Wait until the last copy has read its source."""
        if self._copied is not None:
            self._copied.synchronize()
