"""A store in one file, for faults that are not about the store."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mopd_dataplane.records import Sample


class Shelf:
    """A store in one file: a line per sample, synced, cut back to whole lines when it is opened."""

    def __init__(self, file: Path) -> None:
        self.file = file
        whole = file.read_bytes() if file.exists() else b""
        file.write_bytes(whole[: whole.rfind(b"\n") + 1])
        self.uids = {line["uid"] for line in self.rows()}

    def rows(self) -> list[dict[str, Any]]:
        """Every sample, as `row` wrote it."""
        return [json.loads(line) for line in self.file.read_text().splitlines()]

    def commit(self, samples: list[Sample]) -> None:
        """Append what is new, durably."""
        new = [sample for sample in samples if sample.uid not in self.uids]
        with self.file.open("a") as file:
            file.writelines(json.dumps(row(sample)) + "\n" for sample in new)
            file.flush()
            os.fsync(file.fileno())
        self.uids |= {sample.uid for sample in new}


def row(sample: Sample) -> dict[str, Any]:
    """A sample as JSON, log-probs as float32 bits."""
    assert sample.logprobs is not None
    return {
        "uid": sample.uid,
        "tokens": sample.tokens.tolist(),
        "bits": sample.logprobs.view("int32").tolist(),
        "reason": sample.finish_reason,
        "resume": sample.resume,
        "interruptions": sample.interruptions,
    }
