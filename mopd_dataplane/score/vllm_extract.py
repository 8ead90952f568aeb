"""Teachers that vLLM runs as generating models whose last layer is written out: `extract_hidden_states`.

What comes out is the state before the final norm. The norm is applied here, in float32, so that the states of every
reader are after it, and the store holds one kind only (`teachers.norm_placement` is `post`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from mopd_kernels.heads import Head
from safetensors.torch import load_file
from torch import Tensor

from mopd_dataplane.errors import DeadlineError, EngineError
from mopd_dataplane.models.hf import load_final_norm, model_shape
from mopd_dataplane.models.vllm_local import is_dead, require_vllm
from mopd_dataplane.score.model_input import IntArrays
from mopd_dataplane.score.vllm_batch import VllmBatches, room_to_generate
from mopd_dataplane.score.vllm_states import predicting

_FILE_S = 120.0
"""Longest wait for a file after vLLM has said that the request is done."""
_LOOK_S = 0.002


class ExtractingReader(VllmBatches):
    """A teacher that vLLM runs on this machine; its states come through files in a folder that is gone with it.

    options: more of vLLM's EngineArgs. Raises InputError without vLLM, MismatchError for a model whose final norm is
    not found, EngineError when it does not start.
    """

    def __init__(self, folder: Path, head: Head, *, dtype: str, options: Mapping[str, Any]) -> None:
        require_vllm()
        from vllm.config import KVTransferConfig

        self.head = head
        self._norm = load_final_norm(folder, dtype="float32").to(head.weight.device)
        self._files = tempfile.TemporaryDirectory(prefix="mopd-states-")
        last = {"eagle_aux_hidden_state_layer_ids": [int(model_shape(folder)["num_hidden_layers"])]}
        arguments = {
            "dtype": dtype,
            **room_to_generate(folder),
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": last},
            },
            "kv_transfer_config": KVTransferConfig(
                kv_connector="StatesConnector",
                kv_connector_module_path="mopd_dataplane.score.vllm_connector",
                kv_role="kv_producer",
                kv_connector_extra_config={"shared_storage_path": self._files.name, "use_synchronization_lock": False},
            ),
        }
        super().__init__(folder, arguments, options)

    def predicting_states(self, sequences: IntArrays, predicted: IntArrays) -> Tensor:
        """See Reader."""
        from vllm import SamplingParams

        answers = self.ask(sequences, SamplingParams(max_tokens=1, temperature=0.0, detokenize=False))
        states = [self._taken(Path(answer.kv_transfer_params["hidden_states_path"])) for answer in answers]
        with torch.no_grad():
            before = predicting(states, sequences, predicted).to(self.head.weight.device)
            return self._norm(before)  # type: ignore[no-any-return]

    def _taken(self, file: Path) -> Tensor:
        """[T, D] of a file that vLLM writes, float32; the file is gone. Raises EngineError, DeadlineError."""
        from mopd_dataplane.score.vllm_connector import STATES

        until = time.monotonic() + _FILE_S
        while not file.exists():
            if is_dead(self.engine):
                raise EngineError("vLLM died while it wrote hidden states; run again to continue with a new engine")
            if time.monotonic() > until:
                raise DeadlineError(
                    f"vLLM has not written {file} in {_FILE_S:g} s; its own output says more, run again"
                )
            time.sleep(_LOOK_S)
        states = load_file(file)[STATES]
        file.unlink()
        return states[:, 0].float()

    def close(self) -> None:
        """End vLLM's process and delete what it has written."""
        super().close()
        self._files.cleanup()
