"""The state of a token log, computed by replaying its messages.

The runner applies every message that it appends, and recovery applies every message that it reads: one code computes
the state of a live process and the state rebuilt from its log.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from mopd_dataplane.rollout.engines.engine import GOING
from mopd_dataplane.rollout.log import log_records
from mopd_dataplane.rollout.partial_sample import PartialSample
from mopd_dataplane.rollout.tools.sandbox import Call

_RUN = 1 << 16
"""Tokens per checkpoint record: 9 bytes each, well below the record limit."""


class Ledger:
    """Samples that are not yet in the store, by handle in admission order."""

    def __init__(self) -> None:
        self.partials: dict[int, PartialSample] = {}
        self.next_handle = 0

    def unfinished(self) -> dict[int, PartialSample]:
        """Return the samples without a FINISH record."""
        return {handle: partial for handle, partial in self.partials.items() if not partial.finish_reason}

    def apply(self, message: log_records.LogRecord) -> None:
        """Replay one message. Raises ValueError when it contradicts earlier messages."""
        match message:
            case log_records.Step():
                self._step(message)
            case log_records.SamplingMask():
                self._support(message)
            case log_records.Routed():
                self._routed(message)
            case log_records.Open(handle, spec, interruptions, resume):
                if handle in self.partials:
                    raise ValueError(f"handle {handle} is opened twice")
                self.partials[handle] = PartialSample(spec=spec, interruptions=interruptions, resume=resume)
                self.next_handle = max(self.next_handle, handle + 1)
            case log_records.Span(handle, position, version, digest):
                spans = self._at(handle, position).spans
                if spans and spans[-1][0] == position:
                    spans.pop()  # that policy was replaced before it wrote a token
                spans.append((position, version, digest))
            case log_records.Tokens():
                self._tokens(message)
            case log_records.Resume(handle, exact, _):
                partial = self._open_draft(handle)
                partial.interruptions += 1
                partial.resume = "exact" if exact and partial.resume != "statistical" else "statistical"
            case log_records.Finish(handle, count, digest, reason):
                partial = self._at(handle, count)
                if partial.digest() != digest:
                    raise ValueError(f"sample {partial.spec.uid}: digest {partial.digest()}, FINISH says {digest}")
                partial.finish_reason = reason
            case log_records.Commit(handles):
                for handle in handles:
                    del self.partials[handle]
            case log_records.Tool(handle, ordinal, call):
                _set_call(self._open_draft(handle), ordinal, call)
            case log_records.Abandon(handle, reason):
                self._open_draft(handle).abandoned = reason
            case log_records.Base(samples, next_handle):
                if len(self.partials) != samples:
                    raise ValueError(f"checkpoint carries {len(self.partials)} samples, BASE says {samples}")
                self.next_handle = next_handle

    def checkpoint(self) -> Iterator[log_records.LogRecord]:
        """Yield messages that turn an empty ledger into this one."""
        for handle, partial in self.partials.items():
            yield log_records.Open(handle, partial.spec, partial.interruptions, partial.resume)
            yield from _carried(handle, partial)
        yield log_records.Base(len(self.partials), self.next_handle)

    def _support(self, message: log_records.SamplingMask) -> None:
        ends = np.cumsum(message.masks.sizes)
        columns = (message.handles, message.ordinals, ends - message.masks.sizes, ends)
        for handle, ordinal, first, last in zip(*(column.tolist() for column in columns), strict=True):
            self._open_draft(handle).masks.put(ordinal, message.masks.ids[first:last])

    def _routed(self, message: log_records.Routed) -> None:
        handles, positions, width = message.handles, message.positions, message.ids.shape[1]
        cuts = [0, *(np.flatnonzero(np.diff(handles)) + 1).tolist(), len(handles)]
        for begin, end in pairwise(cuts if len(handles) else [0]):
            partial = self._open_draft(int(handles[begin]))
            first, count = int(positions[begin]), partial.routed
            steady = int(positions[end - 1]) - first == end - 1 - begin
            if not steady or first > count or partial.routes_width not in (0, width):
                raise ValueError(
                    f"sample {partial.spec.uid}: experts of {end - begin} tokens from {first} on, {width} ids each; "
                    f"{count} tokens of {partial.routes_width} ids so far"
                )
            partial.routes_width = width
            partial.routes += message.ids[begin + count - first : end].astype(np.int16).tobytes()

    def _step(self, message: log_records.Step) -> None:
        partials = self.partials
        columns = (message.handles, message.positions, message.tokens, message.logprobs, message.ended)
        for handle, position, token, logprob, ended in zip(*(column.tolist() for column in columns), strict=True):
            partial = partials[handle]
            if position != len(partial.tokens) or partial.ended or partial.finish_reason:
                raise ValueError(f"sample {partial.spec.uid}: token {position} follows token {len(partial) - 1}")
            if partial.spec.sampling_mask:
                partial.masks.take(1)
            if partial.spec.experts and partial.routed < len(partial.spec.prompt_ids) + position:
                raise ValueError(f"sample {partial.spec.uid}: token {position} was drawn of unknown experts")
            partial.tokens.append(token)
            partial.logprobs.append(logprob)
            partial.loss_mask.append(1)
            partial.ended = ended

    def _tokens(self, message: log_records.Tokens) -> None:
        partial = self._at(message.handle, message.position)
        if partial.spec.sampling_mask:
            partial.masks.take(int(np.count_nonzero(message.loss_mask)))
        partial.tokens.frombytes(message.tokens.astype(np.int32).tobytes())
        partial.logprobs.frombytes(message.logprobs.astype(np.float32).tobytes())
        partial.loss_mask += message.loss_mask.astype(np.uint8).tobytes()
        partial.ended = message.ended

    def _at(self, handle: int, position: int) -> PartialSample:
        partial = self._open_draft(handle)
        if position != len(partial):
            raise ValueError(f"sample {partial.spec.uid}: position {position}, {len(partial)} tokens so far")
        return partial

    def _open_draft(self, handle: int) -> PartialSample:
        partial = self.partials[handle]
        if partial.finish_reason:
            raise ValueError(f"sample {partial.spec.uid} goes on after its FINISH")
        return partial


def _set_call(partial: PartialSample, ordinal: int, call: Call) -> None:
    """Record a new call, or the result of a call that has none."""
    if ordinal == len(partial.calls):
        partial.calls.append(call)
    elif ordinal > len(partial.calls):
        raise ValueError(f"sample {partial.spec.uid}: call {ordinal} follows call {len(partial.calls) - 1}")
    elif partial.calls[ordinal].result is None:
        partial.calls[ordinal] = call
    else:
        raise ValueError(f"sample {partial.spec.uid}: call {ordinal} has its result already")


def _carried(handle: int, partial: PartialSample) -> Iterator[log_records.LogRecord]:
    """Yield a partial sample's masks, spans, tokens and FINISH, in an order that can be replayed."""
    tokens, logprobs = partial.response, np.array(partial.logprobs, np.float32)
    mask = np.array(partial.loss_mask, np.uint8)
    if sets := len(partial.masks):
        handles = np.full(sets, handle, np.uint32)
        ordinals = np.arange(sets, dtype=np.uint32)
        yield from log_records.SamplingMask.records(handles, ordinals, partial.masks.first(sets))
    if partial.routed:
        routes = np.frombuffer(bytes(partial.routes), np.int16).reshape(partial.routed, -1)
        positions = np.arange(len(routes), dtype=np.uint32)
        yield from log_records.Routed.records(np.full(len(routes), handle, np.uint32), positions, routes)
    cuts = sorted({*range(0, len(tokens), _RUN), *(start for start, _, _ in partial.spans), len(tokens)})
    for begin, end in zip(cuts, [*cuts[1:], len(tokens)], strict=True):
        for span in partial.spans:
            if span[0] == begin:
                yield log_records.Span(handle, *span)
        if end > begin:
            ended = partial.ended if end == len(tokens) else GOING
            part = slice(begin, end)
            yield log_records.Tokens(handle, begin, tokens[part], logprobs[part], mask[part], ended)
    for ordinal, call in enumerate(partial.calls):
        yield log_records.Tool(handle, ordinal, call)
    if partial.abandoned:
        yield log_records.Abandon(handle, partial.abandoned)
    if partial.finish_reason:
        yield log_records.Finish(handle, len(partial), partial.digest(), partial.finish_reason)
