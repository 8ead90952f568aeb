"""The student's own likeliest tokens: its weights read the sample again, where the store still has them.

Needs torch, unlike the rest of the viewer; one model and one sample's states are kept.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mopd_dataplane.base.extras import missing_package
from mopd_dataplane.errors import InputError, UnknownNameError
from mopd_dataplane.query.job import remembered_job, stage_starts
from mopd_dataplane.view.topk import ranked

if TYPE_CHECKING:
    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.view.sample import Payload

MOST_BYTES = 4 << 30
"""Largest weights, in bytes, that are loaded for a page."""
MOST_TOKENS = 8192


class Student:
    """Reads samples with the policies of one store. Threads may ask at the same time; one is served."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._model: tuple[Path, Any] | None = None
        self._states: tuple[tuple[Path, str], Any] | None = None

    def candidates(self, row: dict[str, Any], payload: Payload, position: int) -> dict[str, Any]:
        """`version`, and as topk.candidates `ids`, `logprobs`, `rank`, `own`, `tail` and `entropy` of one position of
        the response, at the temperature it was sampled with and before top-k and top-p.

        Raises UnknownNameError (no weights, no torch), InputError (more than a page waits for), MismatchError (damage).
        """
        if row["policy"] == "reference":
            raise UnknownNameError("this sample is a reference answer, which no policy wrote; choose a sampled answer")
        version = version_at(payload, position)
        folder = policy_folder(self._store, row["policy"], version)
        if len(payload.tokens) > MOST_TOKENS:
            raise InputError(f"the sample has {len(payload.tokens):,} tokens; the student reads up to {MOST_TOKENS:,}")
        try:
            with self._lock:
                logprobs = self._logprobs(folder, payload, position, float(row["temperature"]) or 1.0)
        except ModuleNotFoundError as error:
            raise UnknownNameError(missing_package(error) or f"the package {error.name!r} is not installed") from None
        said = ranked(np.arange(len(logprobs)), logprobs, int(payload.response[position]), whole=True)
        return said | {"teacher": f"student v{version}", "source": "weights", "version": version}

    def _logprobs(self, folder: Path, payload: Payload, position: int, temperature: float) -> Any:
        """[V] float32"""
        import torch
        from mopd_kernels import topk_logprobs

        from mopd_dataplane.models import hf

        if self._model is None or self._model[0] != folder:
            self._model = self._states = None
            self._model = folder, hf.load_model(folder)
        model = self._model[1]
        if self._states is None or self._states[0] != (folder, payload.uid):
            with torch.no_grad():
                ids = torch.from_numpy(payload.tokens.astype(np.int64))[None]
                self._states = (folder, payload.uid), hf.hidden_states(model, ids)[0]
        state = self._states[1][payload.prompt_len + position - 1][None]
        head = hf.lm_head(model)
        ids, all_logprobs = topk_logprobs(state, head, len(head.weight), temperature=temperature)
        logprobs = torch.empty_like(all_logprobs[0])
        logprobs[ids[0]] = all_logprobs[0]
        return logprobs.float().numpy()


def version_at(payload: Payload, position: int) -> int:
    """Policy version that wrote a position of the response."""
    span = int(np.searchsorted(payload.version_starts, position, side="right")) - 1
    return payload.versions[span]


def policy_folder(store: Store, policy: str, version: int) -> Path:
    """Weights of one version of a stage's policy. Raises UnknownNameError, and InputError for more than MOST_BYTES."""
    if store.root is None:
        raise UnknownNameError("the student's weights lie on an object store; copy the store to a folder to read them")
    job = remembered_job(store)
    folder = store.root / "policies" / policy / f"v{version}"
    if version == 0:
        folder = _start(store.root, job, policy)
    if not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        raise UnknownNameError(f"the weights of {policy} v{version} are not in the store")
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if size > MOST_BYTES:
        raise InputError(f"the weights of {policy} v{version} have {size >> 30} GiB; up to {MOST_BYTES >> 30} are read")
    return folder


def _start(root: Path, job: dict[str, Any], policy: str) -> Path:
    """Folder that a stage's policy starts from: the student as configured, or the newest version of an earlier
    stage."""
    start = stage_starts(job).get(policy, "init")
    if start == "init":
        return Path((job.get("student") or {}).get("path") or root / "policies" / "init")
    versions = [int(path.name[1:]) for path in (root / "policies" / start).glob("v*") if path.name[1:].isdigit()]
    return root / "policies" / start / f"v{max(versions, default=0)}"
