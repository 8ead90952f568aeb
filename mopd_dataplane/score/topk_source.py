"""The student's top-k, from the policy version that wrote each token: ids at which a teacher's log-probs are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from mopd_kernels import topk_logprobs
from numpy.typing import NDArray
from torch import Tensor

from mopd_dataplane.models import hf
from mopd_dataplane.score.model_input import Scorable
from mopd_dataplane.score.readers import HfReader


class StudentTopk:
    """The k likeliest tokens of a stage's policy, one version in memory at a time.

    folder(version): the weights of a version of the stage's policy.
    """

    def __init__(self, folder: Callable[[int], Path], *, dtype: str = "float32", device: str = "cpu") -> None:
        self._folder = folder
        self._dtype = dtype
        self._device = device
        self._version = -1
        self._reader: HfReader | None = None

    def ids(self, samples: Sequence[Scorable], k: int) -> Tensor:
        """[sum of M loss-masked tokens, k] int64 on the policy's device, likeliest first, sample after sample.

        k is at most the vocabulary. Raises UnknownNameError when the weights of a version are gone.
        """
        written_by = [sample.versions[sample.loss_mask.astype(bool)] for sample in samples]
        every = np.concatenate(written_by)
        parts: list[tuple[NDArray[np.int64], Tensor]] = []
        for version in np.unique(every).tolist():
            reader = self._load(version)
            head = reader.head
            chosen = [(sample, by == version) for sample, by in zip(samples, written_by, strict=True)]
            chosen = [(sample, mine) for sample, mine in chosen if mine.any()]
            states = reader.predicting_states(
                [sample.tokens.astype(np.int64) for sample, _ in chosen],
                [np.flatnonzero(sample.loss_mask)[mine] + sample.prompt_len for sample, mine in chosen],
            )
            found, _ = topk_logprobs(states, head, min(k, len(head.weight)))
            parts.append((np.flatnonzero(every == version), found))
        if not parts:
            return torch.zeros(0, k, dtype=torch.int64, device=self._device)
        ids = parts[0][1].new_zeros(len(every), parts[0][1].shape[1])
        for places, found in parts:
            ids[torch.from_numpy(places).to(ids.device)] = found
        return ids

    def _load(self, version: int) -> HfReader:
        if self._reader is None or self._version != version:
            self._reader = None
            self._reader = HfReader(hf.load_model(self._folder(version), dtype=self._dtype, device=self._device))
            self._version = version
        return self._reader
