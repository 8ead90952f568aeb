"""Moving averages of policies: weights between those of two folders, and of which policy an average is the newest."""

from __future__ import annotations

import json
from pathlib import Path

from mopd_dataplane.base.file_checksums import write_checksums
from mopd_dataplane.base.files import make_folder, publish_file
from mopd_dataplane.models.hf import copy_tokenizer, load_model, weights_digest

_SOURCE = "average.json"
"""File of an averaged folder that names the policy which was averaged in last."""


def save_average(previous: Path, newest: Path, share: float, folder: Path) -> None:
    """Write a model folder with (1 - share) of the previous weights and share of the newest ones, in float32.

    Both models are in memory at once. Buffers are those of the newest model.
    """
    import torch

    model, other = load_model(newest), load_model(previous)
    with torch.no_grad():
        for own, earlier in zip(model.parameters(), other.parameters(), strict=True):
            own.lerp_(earlier, 1.0 - share)
    source = json.dumps({"policy": weights_digest(newest)}).encode()

    def fill(staging: Path) -> None:
        model.save_pretrained(staging)
        copy_tokenizer(newest, staging)
        publish_file(staging / _SOURCE, source)
        write_checksums(staging, identities=True)

    make_folder(folder, fill)


def is_average_up_to(folder: Path, newest: Path) -> bool:
    """Whether the policy that a folder averaged in last is this one; after a rewind it may be another of its number."""
    source = json.loads((folder / _SOURCE).read_text())
    return bool(source["policy"] == weights_digest(newest))
