"""MicroBatch: the tensors of one forward pass, gathered from packs and copied to the device.

Axes: B rows of the forward pass, W their width, S sequences, M trained tokens (loss_mask 1), K top-k, U ids of the
largest sampling mask, in the order of the packs. A trained token at column t of a row is predicted by the hidden state
at column t - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.fields import arguments, in_record, value
from mopd_dataplane.records import Pack

Layout = Literal["packed", "rows"]
"""packed: one row, every sequence of every pack side by side. rows: a row is one sequence, padded on the right."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Inputs of one forward pass: what the model's body reads, and what the objective needs for every trained token."""

    teacher: str
    """Teacher of every sequence; empty when the objective needs none."""
    input_ids: Tensor
    """[B, W] int64; padding is token 0"""
    position_ids: Tensor
    """[B, W] int64, restarting at 0 in every sequence; padding is 0"""
    sequence_lengths: list[int]
    """Tokens of each sequence, in order; in the packed layout they fill the row."""
    sequence_starts: Tensor
    """[S + 1] int32 start of each sequence in their sum, and its end"""
    predictors: Tensor
    """[M] int64 index into the flattened [B * W] hidden states"""
    targets: Tensor
    """[M] int64 token ids"""
    sequence: Tensor
    """[M] int64 index of each trained token's sequence"""
    position: Tensor
    """[M] int64 index of each trained token in its sequence"""
    sampler_logprobs: Tensor
    """[M] f32"""
    policy_versions: Tensor
    """[M] int64"""
    loss_counts: Tensor
    """[S] int64 trained tokens of each sequence"""
    advantages: Tensor
    """[S] f32"""
    rewards: Tensor
    """[S] f32, NaN for a sample without one"""
    sample_rows: Tensor
    """[S] int64 row of each sample in `samples`"""
    tokens: int
    """Real tokens, padding excluded."""
    sampling_mask: Tensor | None = None
    """[M, U] int32 ids that each token was drawn from, padded with -1; a row of -1 stands for the whole vocabulary"""
    experts: Tensor | None = None
    """[B * W, E] int16 expert ids of each token over all layers; -1 on padding and if none were recorded"""
    teacher_logprobs: Tensor | None = None
    """[M] f32"""
    reference_logprobs: Tensor | None = None
    """[M] f32"""
    helped_logprobs: Tensor | None = None
    """[M] f32"""
    misled_logprobs: Tensor | None = None
    """[M] f32"""
    topk_ids: Tensor | None = None
    """[M, K] int64"""
    topk_logprobs: Tensor | None = None
    """[M, K] f32"""
    hidden: Tensor | None = None
    """[M, row_bytes] uint8"""
    hidden_codec: str = ""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """Fields of fields.py that have no attribute here, by their name in a pack."""

    def to(self, device: torch.device) -> MicroBatch:
        if device.type == "cpu":
            return self
        tensors = {name: value for name, value in vars(self).items() if torch.is_tensor(value)}
        moved: dict[str, Any] = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        extra = {name: tensor.to(device, non_blocking=True) for name, tensor in self.extra.items()}
        return replace(self, extra=extra, **moved)


def build(packs: Sequence[Pack], layout: Layout = "packed") -> MicroBatch:
    """Gather packs of one teacher. Copies the per-token fields; a single pack's hidden states stay a view.

    Raises MismatchError when the first token of a sequence is marked as trained: nothing predicts it.
    """
    lengths = torch.cat([torch.as_tensor(pack.cu_seqlens).long().diff() for pack in packs])
    mask = torch.cat([torch.as_tensor(pack.loss_mask).bool() for pack in packs])
    positions = torch.cat([torch.as_tensor(pack.position_ids).long() for pack in packs])
    tokens = torch.cat([torch.as_tensor(pack.tokens).long() for pack in packs])
    versions = torch.cat([torch.as_tensor(pack.policy_versions).long() for pack in packs])
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    if layout == "packed":
        height, row, column = 1, torch.zeros_like(sequence), torch.arange(len(tokens))
    else:
        height, row, column = len(lengths), sequence, positions
    width = int(column.max()) + 1
    if bool((mask & (positions == 0)).any()):
        raise MismatchError("the first token of a sequence is marked as trained; every sample needs a prompt token")
    input_ids = torch.zeros(height, width, dtype=torch.int64)
    input_ids[row, column] = tokens
    position_ids = torch.zeros_like(input_ids)
    position_ids[row, column] = positions
    trained_sequence = sequence[mask]

    def joined(name: str) -> Tensor | None:
        arrays = [value(pack, name) for pack in packs]
        if arrays[0] is None:
            return None
        tensors = [torch.as_tensor(array) for array in arrays]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    carried: dict[str, Any] = {}
    for entry in in_record(packs[0]):
        if not entry.batch or (own := joined(entry.pack)) is None:
            continue
        if entry.batch == "body":
            whole = torch.full((height * width, *own.shape[1:]), entry.blank, dtype=own.dtype)
            whole[row * width + column] = own
            own = whole
        elif entry.pack_axis == "token":
            own = own[mask]
        carried[entry.pack] = own.long() if entry.token_ids else own
    return MicroBatch(
        teacher=packs[0].teacher,
        input_ids=input_ids,
        position_ids=position_ids,
        sequence_lengths=lengths.tolist(),
        sequence_starts=starts_of(lengths.tolist()),
        predictors=(row * width + column)[mask] - 1,
        targets=tokens[mask],
        sequence=trained_sequence,
        position=positions[mask],
        policy_versions=versions[mask],
        loss_counts=torch.bincount(trained_sequence, minlength=len(lengths)),
        tokens=len(tokens),
        sampling_mask=_padded(joined("sampling_mask_sizes"), joined("sampling_mask_ids")),
        hidden_codec=packs[0].hidden_codec,
        **arguments(MicroBatch, carried),
    )


def starts_of(lengths: list[int]) -> Tensor:
    """Return where each sequence of a row starts and the last one ends, [S + 1] int32."""
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _padded(sizes: Tensor | None, ids: Tensor | None) -> Tensor | None:
    """Pad sampling masks to one row per token, [M, U], with -1 after their ends."""
    if sizes is None or ids is None:
        return None
    columns = torch.arange(int(sizes.max()) if len(sizes) else 0)
    rows = torch.full((len(sizes), len(columns)), -1, dtype=torch.int32)
    rows[columns < sizes[:, None]] = ids
    return rows


class DeviceCopies:
    """Copies to one device, in order, on a separate stream: one micro-batch is copied while the last is computed.

    On a CPU there is nothing to copy and nothing to wait for; on a device other than CUDA the copy is an ordinary one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None

    def to_device(self, micro: MicroBatch) -> MicroBatch:
        """Copy a micro-batch to the device. Later computation waits for the copy; this process does not.

        Its source must stay unchanged until `finish` returns.
        """
        if self._stream is None:
            return micro.to(self._device)
        with torch.cuda.stream(self._stream):
            moved = micro.to(self._device)
            self._copied = self._stream.record_event()
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(self._copied)
        for tensor in (*vars(moved).values(), *moved.extra.values()):
            if torch.is_tensor(tensor):
                tensor.record_stream(computing)  # else a later copy could reuse its memory while it is read
        return moved

    def finish(self) -> None:
        """Wait until the last copy has read its source, whose slots may then be released."""
        if self._copied is not None:
            self._copied.synchronize()
