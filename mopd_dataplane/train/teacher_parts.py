"""Which tokens of a sample its teacher judges: all, those behind the first reply of a tool, or those outside
thoughts."""

from __future__ import annotations

import torch
from torch import Tensor

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job.objectives import TeacherPart
from mopd_dataplane.train.microbatch import MicroBatch

Thought = tuple[int, int]
"""Token ids that begin and end a thought."""


def judged_tokens(batch: MicroBatch, part: TeacherPart, thought: Thought | None) -> Tensor | None:
    """Mark the trained tokens that the teacher judges: [M] bool; None if it judges all.

    Raises MismatchError if thoughts are left out and their tokens are not known.
    """
    if part == "all":
        return None
    if part == "after_tool":
        return _after_tool(batch)
    if thought is None:
        raise MismatchError(
            'a teacher judges the part "outside_thought", and the token ids that begin and end a thought are missing; '
            "give them as thought to ObjectiveLoss"
        )
    return ~_in_thought(batch, *thought)


def _after_tool(batch: MicroBatch) -> Tensor:
    """Mark the tokens of a sequence behind its first gap between trained tokens, which a tool, or the user, wrote."""
    if not len(batch.targets):
        return torch.zeros_like(batch.targets, dtype=torch.bool)
    is_later = batch.sequence[1:] == batch.sequence[:-1]
    gaps = torch.zeros_like(batch.position)
    gaps[1:] = (is_later & (batch.position.diff() > 1)).long()
    passed = gaps.cumsum(0)
    first = (batch.loss_counts.cumsum(0) - batch.loss_counts)[batch.sequence]
    return passed > passed[first]


def _in_thought(batch: MicroBatch, begin: int, end: int) -> Tensor:
    """Mark trained tokens of thoughts, with the tokens that begin and end them. A thought may begin in the prompt, and
    one without an end goes on to the end of the sequence."""
    tokens = batch.input_ids.flatten()
    places = torch.arange(len(tokens), device=tokens.device)
    begun = torch.where(tokens == begin, places, -1).cummax(0).values
    ended = torch.where(tokens == end, places, -1).cummax(0).values
    ended_before = torch.cat([ended.new_full((1,), -1), ended[:-1]])
    starts = places - batch.position_ids.flatten()
    inside = (begun >= starts) & (begun > ended_before)
    return inside[batch.predictors + 1]
