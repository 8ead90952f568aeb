"""Runs inside vLLM: writes what `extract_hidden_states` collects of a request to one file, on any device.

vLLM's own connector copies through pinned memory on a CUDA stream. This one copies in the worker's own thread, so it
also runs on a CPU, and it names a file only when it is complete.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)

STATES = "hidden_states"
"""Tensor in the file: [T, layers, D], before the final norm, in the model's dtype."""


class StatesConnector(ExampleHiddenStatesConnector):  # type: ignore[misc]
    """Connector of vLLM that writes a request's collected hidden states to one file."""

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        inside = torch.arange(self._block_size)
        slots = (torch.tensor(pending.block_ids)[:, None] * self._block_size + inside).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots.to(self._kv_cache.device), len(pending.token_ids))
        staging = f"{pending.filename}.part"
        save_file({STATES: states.cpu().contiguous()}, staging)
        os.replace(staging, pending.filename)
        # vLLM's connector asks an event if the copy is over. Here it is over before that, so this always says yes.
        self._req_copy_events[pending.req_id] = SimpleNamespace(query=lambda: True)
