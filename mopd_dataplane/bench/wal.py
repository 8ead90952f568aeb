"""Speed of the token log: tokens per second, time to acknowledgement, and its share of a decode step.

The raw limit (large writes and one sync, same folder) is measured in the same run, and so is the decode step that the
log is compared with: a real model on this machine with the same number of sequences.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mopd_dataplane.bench.calls import seconds as seconds_of
from mopd_dataplane.job import sections
from mopd_dataplane.rollout.log import log_records
from mopd_dataplane.rollout.log.ledger import Ledger
from mopd_dataplane.rollout.log.wal import TokenLog
from mopd_dataplane.rollout.partial_sample import SampleSpec

STUDENT = {
    "model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 192, "intermediate_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48, "max_position_embeddings": 1024,
    "eos_token_id": None,
}  # fmt: skip
"""About 1.5 million parameters, the size of the quickstart's student. Random weights would draw an end token soon."""
_RAW_BYTES = 64 << 20
_PACED_STEPS_PER_S = 50
_RESPONSE = 512
"""Response tokens of each sequence beside which the log is timed."""
_STEPS = 256
_HISTOGRAM_MS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def measure(folder: Path | None = None, *, sequences: int = 64, seconds: float = 3.0) -> dict[str, Any]:
    """Measure the log in a folder (default: the current one). The folder is left as it was.

    Returns tokens_per_s (unthrottled, group commit), ack_p50_ms and ack_p99_ms (append to durable by group commit, at
    50 steps/s), wait_p50_ms and wait_p99_ms (append to durable when somebody waits), share_of_decode (log time over
    decode time at `sequences`), raw_write_bytes_per_s, and what they were measured on.
    """
    with tempfile.TemporaryDirectory(dir=folder or Path.cwd(), prefix=".bench-wal-") as scratch:
        home = Path(scratch)
        raw = _raw_write(home / "raw", _RAW_BYTES)
        step = _step(sequences)
        with _log(home / "speed") as log:
            tokens_per_s = _unthrottled(log, step, seconds)
            mount, level = log.mount, log.level
        with _log(home / "paced") as log:
            acks = _paced(log, step, seconds)
            syncs = np.array(log.sync_seconds) * 1000
        with _log(home / "waited") as log:
            waits = _waited(log, step, seconds)
        decode_s, log_s = _beside_decoding(home, sequences)
    counts, _ = np.histogram(syncs, [0, *_HISTOGRAM_MS, np.inf])
    return {
        "tokens_per_s": tokens_per_s,
        "ack_p50_ms": float(np.percentile(acks, 50)),
        "ack_p99_ms": float(np.percentile(acks, 99)),
        "wait_p50_ms": float(np.percentile(waits, 50)),
        "wait_p99_ms": float(np.percentile(waits, 99)),
        "share_of_decode": log_s / decode_s,
        "decode_step_ms": decode_s * 1000,
        "log_step_ms": log_s * 1000,
        "raw_write_bytes_per_s": raw,
        "fdatasync_ms": {f"< {top}": int(n) for top, n in zip([*_HISTOGRAM_MS, "inf"], counts, strict=True)},
        "sequences": sequences,
        "group_commit_ms": sections.Wal().group_commit_ms,
        "filesystem": mount.kind,
        "mount_options": mount.options,
        "level": level,
        "cpus": os.cpu_count(),
    }


@contextmanager
def _log(folder: Path) -> Iterator[TokenLog]:
    log, _ = TokenLog.open(folder, sections.Wal())
    try:
        yield log
    finally:
        log.close(forget=True)


def _raw_write(path: Path, total: int) -> float:
    """Bytes per second of large writes and one sync."""
    block = os.urandom(1 << 20)
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(total // len(block)):
            file.write(block)
        os.fdatasync(file.fileno())
    rate = total / (time.perf_counter() - began)
    path.unlink()
    return rate


def _step(sequences: int) -> log_records.Step:
    handles = np.arange(sequences, dtype=np.uint32)
    positions, logprobs = np.zeros(sequences, np.uint32), np.full(sequences, -0.5, np.float32)
    return log_records.Step(handles, positions, handles, logprobs, np.zeros(sequences, np.uint8))


def _unthrottled(log: TokenLog, step: log_records.Step, seconds: float) -> float:
    """Tokens per second through append, the last one durable."""
    steps = 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(100):
            lsn = log.append(step)
        steps += 100
        if log.full:
            log.rotate(Ledger())
    log.wait_durable(lsn)
    return steps * len(step.handles) / (time.perf_counter() - began)


def _paced(log: TokenLog, step: log_records.Step, seconds: float) -> list[float]:
    """Milliseconds from append to durable when nobody waits, at a realistic pace."""
    acks = []
    for _ in range(int(seconds * _PACED_STEPS_PER_S)):
        began = time.perf_counter()
        lsn = log.append(step)
        while log.synced_lsn < lsn:
            time.sleep(0.0002)
        acks.append((time.perf_counter() - began) * 1000)
        time.sleep(max(0.0, 1 / _PACED_STEPS_PER_S - (time.perf_counter() - began)))
    return acks


def _waited(log: TokenLog, step: log_records.Step, seconds: float) -> list[float]:
    """Milliseconds from append to durable when somebody waits for it."""
    times = int(seconds * _PACED_STEPS_PER_S)
    return [1000 * seconds_of(lambda: log.wait_durable(log.append(step))) for _ in range(times)]


def _beside_decoding(home: Path, sequences: int) -> tuple[float, float]:
    """Mean seconds of a decode step of a real model, and of logging and applying what it returned.

    A steady state: responses of _RESPONSE tokens that began at different times, so that one ends, is finished in the
    log and makes room for another every few steps.
    """
    from mopd_dataplane.models.hf import load_tokenizer
    from mopd_dataplane.models.initial_weights import make_student
    from mopd_dataplane.rollout.engines.engine import Request
    from mopd_dataplane.rollout.engines.hf import HfEngine

    model = make_student(sections.Student(config=STUDENT), home / "model", seed=0)
    tokenizer = load_tokenizer(model)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(model)
    engine = HfEngine(model, slots=sequences)
    prompt = np.arange(4, 36, dtype=np.int32)
    ledger = Ledger()
    handles = np.zeros(sequences, np.uint32)
    log_s = decode_s = 0.0

    def say(message: log_records.LogRecord) -> None:
        log.append(message)
        ledger.apply(message)

    def opened(slot: int, budget: int) -> tuple[int, Request]:
        handle = ledger.next_handle
        handles[slot] = handle
        say(log_records.Open(handle, _spec(handle)))
        return slot, Request(uid="", prompt_ids=prompt, key=handle, max_new_tokens=budget)

    with _log(home / "decode") as log:
        engine.admit([opened(index, 1 + index * _RESPONSE // sequences) for index in range(sequences)])
        for _ in range(_STEPS):
            began = time.perf_counter()
            output = engine.step()
            decoded = time.perf_counter()
            columns = (output.positions.view(np.uint32), output.token_ids.view(np.uint32))
            step = log_records.Step(handles[output.slots], *columns, output.logprobs, output.finished)
            log.append(step)
            ledger.apply(step)
            free = output.slots[output.finished > 0].tolist()
            for slot in free:
                partial = ledger.partials[handle := int(handles[slot])]
                say(log_records.Finish(handle, len(partial), partial.digest(), "length"))
            requests = [opened(slot, _RESPONSE) for slot in free]
            log_s += time.perf_counter() - decoded
            decode_s += decoded - began
            engine.admit(requests)
    engine.close()
    return decode_s / _STEPS, log_s / _STEPS


def _spec(handle: int) -> SampleSpec:
    return SampleSpec(
        uid=str(handle), prompt_id="", group_id="", group_index=0, iteration=0, domain="", effort="", stage="bench",
        writer="bench", writer_seq=handle, policy="", temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1 << 20,
        stop=(), tokenizer="", prompt_ids=(),
    )  # fmt: skip
