"""Context parallelism: the ranks of a group share a pack, each with a run of its tokens.

    body        every rank computes its own tokens
    attention   tokens are exchanged for heads (all-to-all): a rank sees every token of the pack for its share of heads
    loss        each rank has the tokens that its own states predict; losses and gradients add up over ranks

The exchange is DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv 2309.14509). Packed sequences, sliding windows and grouped
heads need no change, because attention itself still sees whole sequences.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.fields import FIELDS, arguments, in_record, value
from mopd_dataplane.train.microbatch import MicroBatch, starts_of

MADE = ("targets", "sequence", "position", "policy_versions", "sampling_mask")
"""Fields of a MicroBatch with one row per trained token that no pack carries as they are, besides `predictors`."""
BODY_FIELDS = tuple(field for field in FIELDS if field.batch == "body")
"""Fields of a MicroBatch with one row for each position of the forward pass."""


def part_of(batch: MicroBatch, member: int, members: int) -> MicroBatch:
    """Cut out the share of one member: its columns of the row [1, W / members], and the tokens that they predict.

    The row is padded to a multiple of `members` with a sequence of its own; `sequence_lengths` and their starts cover
    the whole row. Fields of sequences ([S]) stay whole.
    """
    if members == 1:
        return batch
    width = batch.input_ids.shape[1]
    padding = -width % members
    lengths = [*batch.sequence_lengths, padding] if padding else batch.sequence_lengths
    share = (width + padding) // members
    first = member * share
    mine = (batch.predictors >= first) & (batch.predictors < first + share)
    rows = {name: value(batch, name) for name in trained_token_fields(batch)}
    cut: dict[str, Any] = {name: row[mine] for name, row in rows.items() if row is not None}
    for field in BODY_FIELDS:
        if (whole := value(batch, field.pack)) is not None:
            behind = (0, 0) * (whole.ndim - 1) + (0, padding)
            cut[field.pack] = torch.nn.functional.pad(whole, behind, value=field.blank)[first : first + share]
    return replace(
        batch,
        input_ids=torch.nn.functional.pad(batch.input_ids, (0, padding))[:, first : first + share],
        position_ids=torch.nn.functional.pad(batch.position_ids, (0, padding))[:, first : first + share],
        sequence_lengths=lengths,
        sequence_starts=starts_of(lengths),
        predictors=batch.predictors[mine] - first,
        **arguments(MicroBatch, cut),
    )


def trained_token_fields(batch: MicroBatch) -> tuple[str, ...]:
    """Return the fields of a MicroBatch with one row per trained token, besides `predictors`."""
    carried = (field.pack for field in in_record(batch) if field.batch == "rows" and field.axis != "sample")
    return (*MADE, *carried)


def check_heads(query_heads: int, members: int, model: str) -> None:
    """Check that a model's attention heads divide evenly among the members. Raises MismatchError if not."""
    if query_heads % members:
        raise MismatchError(
            f"scale.context_parallel = {members} does not divide the {query_heads} attention heads of {model}; "
            "use a divisor"
        )


def heads_for_tokens(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange own tokens of all heads [1, H, T / n, d] for all tokens of own heads [1, H / n, T, d].

    Key and value heads that n does not divide are repeated first, as few times as needed.
    """
    members = group.size()
    shared = key.shape[1]
    times = members // math.gcd(shared, members)
    if query.shape[1] % (shared * times):
        times = query.shape[1] // shared
    if times > 1:
        key, value = (states.repeat_interleave(times, dim=1) for states in (key, value))
    return _exchange(query, group, 1, 2), _exchange(key, group, 1, 2), _exchange(value, group, 1, 2)


def tokens_for_heads(output: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange all tokens of own heads [1, H / n, T, d] for own tokens of all heads [1, H, T / n, d]."""
    return _exchange(output, group, 2, 1)


def _exchange(states: Tensor, group: dist.ProcessGroup, dim_split: int, dim_join: int) -> Tensor:
    exchanged: Tensor = _Exchange.apply(states, group, dim_split, dim_join)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    """Splits `dim_split` over the group and joins `dim_join`; the gradient does the reverse."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: dist.ProcessGroup, dim_split: int, dim_join: int) -> Tensor:
        ctx.group, ctx.dims = group, (dim_split, dim_join)
        return _exchanged(states, group, dim_split, dim_join)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        dim_split, dim_join = ctx.dims
        return _exchanged(gradients[0], ctx.group, dim_join, dim_split), None, None, None


def _exchanged(states: Tensor, group: dist.ProcessGroup, dim_split: int, dim_join: int) -> Tensor:
    sent = torch.stack(states.chunk(group.size(), dim=dim_split)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), dim=dim_join)
