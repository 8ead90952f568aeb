"""Teachers that vLLM runs as pooling models: `token_embed` returns the final-norm state of every token it reads.

The states are float32 whatever the weights are. The head is applied in this process, so log-probs, top-k and hidden
states come from the same kernels as with a transformers model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mopd_kernels.heads import Head
from numpy.typing import NDArray
from torch import Tensor

from mopd_dataplane.errors import EngineError
from mopd_dataplane.models.vllm_local import require_vllm
from mopd_dataplane.score.model_input import IntArrays
from mopd_dataplane.score.vllm_batch import ServerBatches, VllmBatches

_TASK = "token_embed"


class VllmReader(VllmBatches):
    """A teacher that vLLM runs on this machine.

    options: more of vLLM's EngineArgs. Raises InputError without vLLM, EngineError when it does not start.
    """

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
        """See Reader."""
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
        """See Reader; the states of one sequence are one answer."""
        return predicting(self.ask(sequences, self._read), sequences, predicted).to(self.head.weight.device)

    def _read(self, ids: NDArray[np.int64]) -> Tensor:
        width = self.head.weight.shape[1]
        body = {
            "model": self._name,
            "input": ids.tolist(),
            "task": _TASK,
            "use_activation": False,
            "encoding_format": "bytes",
            "embed_dtype": "float32",
            "endianness": "little",
        }
        raw = self._server.post_bytes("pooling", body)
        if len(raw) != 4 * width * len(ids):
            raise EngineError(
                f"{self._server.url} sent {len(raw)} bytes of states for {len(ids)} tokens of width {width}; start it "
                f'as a pooling server: --runner pooling --convert embed --pooler-config \'{{"task": "{_TASK}", '
                '"use_activation": false}}\''
            )
        return torch.from_numpy(np.frombuffer(raw, "<f4").reshape(len(ids), width).copy())


def predicting(states: Sequence[Tensor], sequences: IntArrays, predicted: IntArrays) -> Tensor:
    """[sum of M, D] of states [T, D] of each sequence. Raises EngineError when a sequence has not one state a token."""
    for own, ids in zip(states, sequences, strict=True):
        if len(own) != len(ids):
            raise EngineError(f"vLLM returned {len(own)} states for {len(ids)} tokens; run again to continue")
    return torch.cat([own[torch.from_numpy(places - 1)] for own, places in zip(states, predicted, strict=True)])
