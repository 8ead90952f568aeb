"""Teachers that vLLM runs, as readers of final-norm states.

A pooling model returns them in float32, whatever the dtype of its weights. A generating model writes out its last
layer, to which the final norm is applied here, in float32: the store holds states after the norm only
(docs/engines.md).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mopd_kernels.heads import Head
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from mopd_dataplane.base.http_client import SMALL_BYTES, Answer, Call
from mopd_dataplane.errors import DeadlineError, EngineError
from mopd_dataplane.models.hf import load_final_norm, model_shape
from mopd_dataplane.models.vllm_local import is_dead, require_vllm
from mopd_dataplane.score.readers import IntArrays
from mopd_dataplane.score.vllm_batch import ServerBatches, VllmBatches, room_to_generate

_TASK = "token_embed"
_FILE_S = 120.0
"""Longest wait for a file after vLLM has reported the end of the request, in seconds."""
_LOOK_S = 0.002


class VllmReader(VllmBatches):
    """The Reader of a teacher that vLLM runs on this machine as a pooling model. options: more of vLLM's EngineArgs."""

    def __init__(self, folder: Path, head: Head, *, dtype: str, options: Mapping[str, Any]) -> None:
        require_vllm()
        from vllm.config import PoolerConfig

        self.head = head
        arguments = {
            "runner": "pooling",
            "convert": "embed",
            "pooler_config": PoolerConfig(task=_TASK, use_activation=False),
            "dtype": dtype,
        }
        super().__init__(folder, arguments, options)

    def predicting_states(self, sequences: IntArrays, predicted: IntArrays) -> Tensor:
        from vllm import PoolingParams

        answers = self.ask(sequences, PoolingParams(task=_TASK, use_activation=False))
        states = [answer.outputs.data.float() for answer in answers]
        return predicting(states, sequences, predicted).to(self.head.weight.device)


class ServerReader(ServerBatches):
    """A teacher behind a running vLLM pooling server."""

    def __init__(self, folder: Path, head: Head, *, url: str) -> None:
        super().__init__(folder, url)
        self.head = head

    def predicting_states(self, sequences: IntArrays, predicted: IntArrays) -> Tensor:
        """See Reader; one answer holds the states of one sequence."""
        states = self.ask(sequences, self._call, self._read)
        return predicting(states, sequences, predicted).to(self.head.weight.device)

    def _call(self, ids: NDArray[np.int64]) -> Call:
        body = {
            "model": self._name,
            "input": ids.tolist(),
            "task": _TASK,
            "use_activation": False,
            "encoding_format": "bytes",
            "embed_dtype": "float32",
            "endianness": "little",
        }
        size = 4 * self.head.weight.shape[1] * len(ids)
        purpose = f"states of {len(ids)} tokens"
        return Call(url=f"{self._server.root}/pooling", body=body, purpose=purpose, limit_bytes=size + SMALL_BYTES)

    def _read(self, ids: NDArray[np.int64], answer: Answer) -> Tensor:
        raw, width = answer.require_success().content, self.head.weight.shape[1]
        if len(raw) != 4 * width * len(ids):
            raise EngineError(
                f"{answer.call} failed: {self._server.url} sent {len(raw)} bytes of states for {len(ids)} tokens of "
                f"width {width} ({answer.shown}); start it as a pooling server: --runner pooling --convert embed "
                f'--pooler-config \'{{"task": "{_TASK}", "use_activation": false}}\''
            )
        return torch.from_numpy(np.frombuffer(raw, "<f4").reshape(len(ids), width).copy())


class ExtractingReader(VllmBatches):
    """The Reader of a teacher that vLLM runs on this machine as a generating model.

    Its states come through files in a folder that is gone with it. options: more of vLLM's EngineArgs. Raises
    MismatchError for a model whose final norm is not found.
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
        from vllm import SamplingParams

        answers = self.ask(sequences, SamplingParams(max_tokens=1, temperature=0.0, detokenize=False))
        states = [self._taken(Path(answer.kv_transfer_params["hidden_states_path"])) for answer in answers]
        with torch.no_grad():
            before = predicting(states, sequences, predicted).to(self.head.weight.device)
            return self._norm(before)  # type: ignore[no-any-return]

    def _taken(self, file: Path) -> Tensor:
        """Read a file that vLLM wrote, [T, D] float32, and delete it. Raises EngineError, DeadlineError."""
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


def predicting(states: Sequence[Tensor], sequences: IntArrays, predicted: IntArrays) -> Tensor:
    """Select the states before predicted tokens, [sum of M, D], from the states [T, D] of each sequence.

    Raises EngineError when a sequence does not have one state per token.
    """
    for own, ids in zip(states, sequences, strict=True):
        if len(own) != len(ids):
            raise EngineError(f"vLLM returned {len(own)} states for {len(ids)} tokens; run again to continue")
    return torch.cat([own[torch.from_numpy(places - 1)] for own, places in zip(states, predicted, strict=True)])
