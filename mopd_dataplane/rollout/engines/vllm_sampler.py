"""vLLM's sampler as a pure function of (logits, sample key, position): sampling.py as a logits processor.

It runs inside vLLM; docs/engines.md shows how to start a server with it. The processor itself chooses the token: in a
row whose request carries SamplerArguments, only the chosen token keeps a finite value, and that value is its log-prob.
vLLM, asked for the greedy token and for `logprobs_mode = "processed_logits"`, returns both unchanged.

Rows without SamplerArguments are left alone. Non-finite logits give a NaN log-prob, which the client refuses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

from mopd_dataplane.models.vllm_replies import LOWEST
from mopd_dataplane.rollout.engines.device_sampling import distribution_of
from mopd_dataplane.rollout.engines.philox import Words, key_words
from mopd_dataplane.rollout.engines.sampler_arguments import SamplerArguments
from mopd_dataplane.rollout.engines.sampling import by_sampler


class _Row(NamedTuple):
    """One request in the batch."""

    arguments: SamplerArguments
    key: Words
    drawn: list[int]
    """vLLM's own list of the request's tokens, which grows with each."""

    @property
    def repeats(self) -> int:
        """The token that must come next; -1 when none is prescribed."""
        due = self.arguments.again[len(self.drawn) :]
        return due[0] if due else -1


class KeyedSampler(LogitsProcessor):  # type: ignore[misc]
    """vLLM logits processor that draws tokens with this package's keyed noise."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse incomplete SamplerArguments before the request enters the batch."""
        SamplerArguments.read(sampling_params.extra_args)

    def is_argmax_invariant(self) -> bool:
        """Return False: the processor changes the greedy token."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow the requests through vLLM's batch: removed, added, then moved."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, drawn in batch_update.added:
            arguments = SamplerArguments.read(params.extra_args)
            self._rows.pop(index, None)
            if arguments is not None:
                self._rows[index] = _Row(arguments, key_words(arguments.sample_key), drawn)
        for source, target, direction in batch_update.moved:
            moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self._rows[source] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Replace the logits [B, V] in the tensor itself."""
        indices = sorted(self._rows)
        if not indices:
            return logits
        where = torch.tensor(indices, device=logits.device)
        own = logits if len(indices) == len(logits) else logits[where]
        tokens, values = _drawn(own.float(), [self._rows[index] for index in indices])
        logits[where] = -torch.inf
        logits[where, torch.from_numpy(tokens).to(logits.device)] = torch.from_numpy(values).to(logits)
        return logits


def _drawn(logits: torch.Tensor, rows: list[_Row]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Draw a token per row. Returns tokens [B] and log-probs [B]; token 0 and NaN for non-finite logits."""
    temperature = np.array([row.arguments.temperature for row in rows])
    top_k = np.array([row.arguments.top_k for row in rows], np.int64)
    top_p = np.array([row.arguments.top_p for row in rows])
    keys, repeated = np.stack([row.key for row in rows]), np.array([row.repeats for row in rows])
    positions = np.array([row.arguments.first + len(row.drawn) for row in rows])
    tokens, logprobs = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.float32)
    for kind, own in by_sampler([row.arguments.sampler for row in rows]):
        distribution = distribution_of(kind, logits[own], temperature[own], top_k[own], top_p[own])
        drawn = distribution.draw(keys[own], positions[own], temperature[own])
        tokens[own] = np.where(repeated[own] >= 0, repeated[own], drawn)
        logprobs[own] = np.maximum(distribution.logprobs(tokens[own]), LOWEST)
    # A sum is finite if all logits are.
    good = logits.sum(1).isfinite().cpu().numpy()
    tokens[~good], logprobs[~good] = 0, np.nan
    return tokens, logprobs
