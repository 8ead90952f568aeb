"""A random but reproducible life of a token log, and what its reader must find after any part of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mopd_dataplane.base.sampling_masks import SamplingMasks
from mopd_dataplane.job import sections
from mopd_dataplane.rollout.engines.engine import STOP
from mopd_dataplane.rollout.log import log_records
from mopd_dataplane.rollout.log.ledger import Ledger
from mopd_dataplane.rollout.log.recovery import recover
from mopd_dataplane.rollout.log.wal import TokenLog
from mopd_dataplane.rollout.partial_sample import PartialSample, SampleSpec

LENGTH = 150
SETTINGS = sections.Wal(group_commit_ms=1, segment_bytes=1 << 13, full_disk_wait_s=0)
POINTS = (
    "wal.epoch.claimed", "wal.epoch", "wal.segment.header", "wal.segment.renamed", "wal.segment.named", "wal.base",
    "wal.base.synced", "wal.retire", "wal.append", "wal.appended", "wal.sync", "wal.synced",
)  # fmt: skip
OPENING_POINTS = POINTS[:8]


def story(seed: int, length: int) -> Iterator[log_records.LogRecord]:
    """Messages of a legal life: samples open, grow, hear from an environment, finish, are committed."""
    draw = random.Random(seed)
    ledger = Ledger()
    for ordinal in range(length):
        message = _next(draw, ledger, f"{seed}-{ordinal}")
        ledger.apply(message)
        yield message


def _next(draw: random.Random, ledger: Ledger, name: str) -> log_records.LogRecord:
    growing = {h: d for h, d in ledger.partials.items() if not d.finish_reason and not d.ended}
    stopped = {h: d for h, d in ledger.partials.items() if d.ended and not d.finish_reason}
    done = [h for h, d in ledger.partials.items() if d.finish_reason]
    choice = draw.random()
    if not growing or (choice < 0.12 and len(ledger.partials) < 12):
        return log_records.Open(ledger.next_handle, _opening(name, draw))
    if stopped and choice < 0.3:
        handle, partial = draw.choice(list(stopped.items()))
        if draw.random() < 0.3:
            said = np.array([draw.randrange(99) for _ in range(3)], np.int32)
            return log_records.Tokens(handle, len(partial), said, np.zeros(3, np.float32), np.zeros(3, np.uint8))
        return log_records.Finish(handle, len(partial), partial.digest(), "stop")
    if done and choice < 0.36:
        return log_records.Commit(tuple(done))
    if choice < 0.4:
        handle, partial = draw.choice(list(growing.items()))
        return log_records.Span(handle, len(partial), draw.randrange(9), "digest")
    handles = sorted(draw.sample(list(growing), k=draw.randint(1, len(growing))))
    if lacking := [h for h in handles if _lacks_its_set(growing[h])]:
        return _support(draw, {handle: growing[handle] for handle in lacking})
    if unread := [h for h in handles if _is_unread(growing[h])]:
        return _routed(draw, {handle: growing[handle] for handle in unread})
    count = len(handles)
    return log_records.Step(
        np.array(handles, np.uint32),
        np.array([len(growing[handle]) for handle in handles], np.uint32),
        np.array([draw.randrange(50_000) for _ in handles], np.uint32),
        np.array([-draw.random() for _ in handles], np.float32),
        np.array([STOP if draw.random() < 0.1 else 0 for _ in range(count)], np.uint8),
    )


def _lacks_its_set(partial: PartialSample) -> bool:
    return partial.spec.sampling_mask and len(partial.masks) == partial.masks.drawn


def _support(draw: random.Random, partials: dict[int, PartialSample]) -> log_records.SamplingMask:
    sizes = [draw.randrange(5) for _ in partials]
    ids = [draw.randrange(50_000) for _ in range(sum(sizes))]
    return log_records.SamplingMask(
        np.array(list(partials), np.uint32),
        np.array([partial.masks.drawn for partial in partials.values()], np.uint32),
        SamplingMasks(np.array(sizes, np.int32), np.array(ids, np.int32)),
    )


def _is_unread(partial: PartialSample) -> bool:
    return partial.spec.experts and partial.routed < len(partial.spec.prompt_ids) + len(partial)


def _routed(draw: random.Random, partials: dict[int, PartialSample]) -> log_records.Routed:
    read = {handle: range(d.routed, len(d.spec.prompt_ids) + len(d)) for handle, d in partials.items()}
    places = [(handle, position) for handle, positions in read.items() for position in positions]
    ids = [[draw.randrange(64) for _ in range(6)] for _ in places]
    handles, positions = np.array(places, np.uint32).T
    return log_records.Routed(handles, positions, np.array(ids, np.int16))


def _opening(name: str, draw: random.Random) -> SampleSpec:
    return SampleSpec(
        uid=name, prompt_id=name, group_id=name, group_index=0, iteration=1, domain="d", effort="", stage="r",
        writer="w", writer_seq=0, policy="p", temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1 << 20, stop=("#",),
        tokenizer="t", prompt_ids=tuple(draw.randrange(99) for _ in range(draw.randrange(1, 9))),
        sampling_mask=draw.random() < 0.3, experts=draw.random() < 0.3,
    )  # fmt: skip


def tell(log: TokenLog, ledger: Ledger, message: log_records.LogRecord) -> int:
    """Append, apply, and rotate when the segment is full; as the runner does."""
    lsn = log.append(message)
    ledger.apply(message)
    if log.full:
        log.rotate(ledger)
    return lsn


def state(ledger: Ledger) -> tuple[object, ...]:
    """Everything a ledger knows, comparable."""
    return tuple(
        (
            handle, partial.spec, bytes(partial.tokens.tobytes()), bytes(partial.logprobs.tobytes()),
            bytes(partial.loss_mask), tuple(partial.spans), partial.ended, partial.finish_reason, partial.digest(),
        )
        for handle, partial in ledger.partials.items()
    )  # fmt: skip


def states(seed: int, length: int) -> list[tuple[object, ...]]:
    """State after 0, 1, 2 … messages of a story."""
    ledger = Ledger()
    history = [state(ledger)]
    for message in story(seed, length):
        ledger.apply(message)
        history.append(state(ledger))
    return history


def segments(folder: Path) -> list[Path]:
    """Segment files of a log, oldest first."""
    return sorted(folder.glob("*/*.wal"))


def is_prefix(home: Path, history: list[tuple[object, ...]], least: int, most: int) -> bool:
    """Whether the log holds the state after n messages, least <= n <= most."""
    recovered_state = state(recover(home).ledger)
    return any(recovered_state == history[n] for n in range(least, min(most, len(history) - 1) + 1))
