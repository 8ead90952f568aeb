"""The messages of a token log, replayed.

The runner applies every message it appends, and recovery applies every message it reads: the state of a live process
and the state rebuilt from its log come out of the same code.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from mopd_dataplane.rollout.engines.engine import GOING
from mopd_dataplane.rollout.log import log_records
from mopd_dataplane.rollout.partial_sample import Draft
from mopd_dataplane.rollout.tools.sandbox import Call

_RUN = 1 << 16
"""Tokens per checkpoint record: 9 bytes each, well below the record limit."""


class Ledger:
    """Samples that are not yet in the store, by handle in admission order."""

    def __init__(self) -> None:
        self.drafts: dict[int, Draft] = {}
        self.next_handle = 0

    def unfinished(self) -> dict[int, Draft]:
        """Samples without a FINISH record."""
        return {handle: draft for handle, draft in self.drafts.items() if not draft.finish_reason}

    def finished(self) -> dict[int, Draft]:
        """Samples that wait for their commit."""
        return {handle: draft for handle, draft in self.drafts.items() if draft.finish_reason}

    def apply(self, message: log_records.Any) -> None:
        """Replay one message. Raises ValueError when it contradicts what came before."""
        match message:
            case log_records.Step():
                self._step(message)
            case log_records.Support():
                self._support(message)
            case log_records.Routed():
                self._routed(message)
            case log_records.Open():
                self._open(message)
            case log_records.Span(handle, position, version, digest):
                spans = self._at(handle, position).spans
                if spans and spans[-1][0] == position:
                    spans.pop()  # that policy was replaced before it wrote a token
                spans.append((position, version, digest))
            case log_records.Tokens():
                self._tokens(message)
            case log_records.Resume(handle, exact, _):
                draft = self._open_draft(handle)
                draft.interruptions += 1
                draft.resume = "exact" if exact and draft.resume != "statistical" else "statistical"
            case log_records.Finish(handle, count, digest, reason):
                draft = self._at(handle, count)
                if draft.digest() != digest:
                    raise ValueError(f"sample {draft.opening.uid}: digest {draft.digest()}, FINISH says {digest}")
                draft.finish_reason = reason
            case log_records.Commit(handles):
                for handle in handles:
                    del self.drafts[handle]
            case log_records.Tool(handle, ordinal, call):
                _set_call(self._open_draft(handle), ordinal, call)
            case log_records.Abandon(handle, reason):
                self._open_draft(handle).abandoned = reason
            case log_records.Base(samples, next_handle):
                if len(self.drafts) != samples:
                    raise ValueError(f"checkpoint carries {len(self.drafts)} samples, BASE says {samples}")
                self.next_handle = next_handle

    def checkpoint(self) -> Iterator[log_records.Any]:
        """Messages from which an empty ledger becomes this one."""
        for handle, draft in self.drafts.items():
            yield log_records.Open(handle, draft.opening, draft.interruptions, draft.resume)
            yield from _carried(handle, draft)
        yield log_records.Base(len(self.drafts), self.next_handle)

    def _open(self, message: log_records.Open) -> None:
        if message.handle in self.drafts:
            raise ValueError(f"handle {message.handle} is opened twice")
        draft = Draft(opening=message.opening, interruptions=message.interruptions, resume=message.resume)
        self.drafts[message.handle] = draft
        self.next_handle = max(self.next_handle, message.handle + 1)

    def _support(self, message: log_records.Support) -> None:
        ends = np.cumsum(message.kept.sizes)
        columns = (message.handles, message.ordinals, ends - message.kept.sizes, ends)
        for handle, ordinal, first, last in zip(*(column.tolist() for column in columns), strict=True):
            self._open_draft(handle).kept.put(ordinal, message.kept.ids[first:last])

    def _routed(self, message: log_records.Routed) -> None:
        handles, positions, width = message.handles, message.positions, message.ids.shape[1]
        cuts = [0, *(np.flatnonzero(np.diff(handles)) + 1).tolist(), len(handles)]
        for begin, end in pairwise(cuts if len(handles) else [0]):
            draft = self._open_draft(int(handles[begin]))
            first, known = int(positions[begin]), draft.routed
            steady = int(positions[end - 1]) - first == end - 1 - begin
            if not steady or first > known or draft.routes_width not in (0, width):
                raise ValueError(
                    f"sample {draft.opening.uid}: experts of {end - begin} tokens from {first} on, {width} ids each; "
                    f"{known} tokens of {draft.routes_width} ids so far"
                )
            draft.routes_width = width
            draft.routes += message.ids[begin + known - first : end].astype(np.int16).tobytes()

    def _step(self, message: log_records.Step) -> None:
        drafts = self.drafts
        columns = (message.handles, message.positions, message.tokens, message.logprobs, message.ended)
        for handle, position, token, logprob, ended in zip(*(column.tolist() for column in columns), strict=True):
            draft = drafts[handle]
            if position != len(draft.tokens) or draft.ended or draft.finish_reason:
                raise ValueError(f"sample {draft.opening.uid}: token {position} follows token {len(draft) - 1}")
            if draft.opening.support:
                draft.kept.take(1)
            if draft.opening.experts and draft.routed < len(draft.opening.prompt_ids) + position:
                raise ValueError(f"sample {draft.opening.uid}: token {position} was drawn of unknown experts")
            draft.tokens.append(token)
            draft.logprobs.append(logprob)
            draft.loss_mask.append(1)
            draft.ended = ended

    def _tokens(self, message: log_records.Tokens) -> None:
        draft = self._at(message.handle, message.position)
        if draft.opening.support:
            draft.kept.take(int(np.count_nonzero(message.loss_mask)))
        draft.tokens.frombytes(message.tokens.astype(np.int32).tobytes())
        draft.logprobs.frombytes(message.logprobs.astype(np.float32).tobytes())
        draft.loss_mask += message.loss_mask.astype(np.uint8).tobytes()
        draft.ended = message.ended

    def _at(self, handle: int, position: int) -> Draft:
        draft = self._open_draft(handle)
        if position != len(draft):
            raise ValueError(f"sample {draft.opening.uid}: position {position}, {len(draft)} tokens so far")
        return draft

    def _open_draft(self, handle: int) -> Draft:
        draft = self.drafts[handle]
        if draft.finish_reason:
            raise ValueError(f"sample {draft.opening.uid} goes on after its FINISH")
        return draft


def _set_call(draft: Draft, ordinal: int, call: Call) -> None:
    """A new call, or the result of one that has none."""
    if ordinal == len(draft.calls):
        draft.calls.append(call)
    elif ordinal > len(draft.calls):
        raise ValueError(f"sample {draft.opening.uid}: call {ordinal} follows call {len(draft.calls) - 1}")
    elif draft.calls[ordinal].result is None:
        draft.calls[ordinal] = call
    else:
        raise ValueError(f"sample {draft.opening.uid}: call {ordinal} has its result already")


def _carried(handle: int, draft: Draft) -> Iterator[log_records.Any]:
    """A draft's kept sets, spans, tokens and FINISH, in an order that replays."""
    tokens, logprobs = draft.response, np.array(draft.logprobs, np.float32)
    mask = np.array(draft.loss_mask, np.uint8)
    if sets := len(draft.kept):
        handles = np.full(sets, handle, np.uint32)
        yield from log_records.Support.records(handles, np.arange(sets, dtype=np.uint32), draft.kept.first(sets))
    if draft.routed:
        routes = np.frombuffer(bytes(draft.routes), np.int16).reshape(draft.routed, -1)
        positions = np.arange(len(routes), dtype=np.uint32)
        yield from log_records.Routed.records(np.full(len(routes), handle, np.uint32), positions, routes)
    cuts = sorted({*range(0, len(tokens), _RUN), *(start for start, _, _ in draft.spans), len(tokens)})
    for begin, end in zip(cuts, [*cuts[1:], len(tokens)], strict=True):
        for span in draft.spans:
            if span[0] == begin:
                yield log_records.Span(handle, *span)
        if end > begin:
            ended = draft.ended if end == len(tokens) else GOING
            part = slice(begin, end)
            yield log_records.Tokens(handle, begin, tokens[part], logprobs[part], mask[part], ended)
    for ordinal, call in enumerate(draft.calls):
        yield log_records.Tool(handle, ordinal, call)
    if draft.abandoned:
        yield log_records.Abandon(handle, draft.abandoned)
    if draft.finish_reason:
        yield log_records.Finish(handle, len(draft), draft.digest(), draft.finish_reason)
