"""vLLM that reads texts, started on this machine or a running server: one answer each, in the order of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, TypeVar

from mopd_dataplane.base.http_client import Answer, Call
from mopd_dataplane.models.hf import model_shape, weights_digest
from mopd_dataplane.models.vllm_local import answering, require_vllm, start
from mopd_dataplane.models.vllm_server import VllmServer
from mopd_dataplane.score.readers import IntArrays
from mopd_dataplane.score.server_use import ServerUse

_SLOTS = 64
"""Number of sequences that vLLM reads together."""

Value = TypeVar("Value")
Text = TypeVar("Text", bound=Sized)
"""Token ids that a request sends, or an object with them, whose length is their number."""


class VllmBatches:
    """A running engine; base class of the teachers that it runs.

    Raises InputError without vLLM, EngineError when it does not start. arguments: EngineArgs that reading needs;
    options: the job's own, which take precedence.
    """

    def __init__(self, folder: Path, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        require_vllm()
        settings = {
            "max_num_seqs": _SLOTS,
            "max_model_len": int(model_shape(folder)["max_position_embeddings"]),
            "enable_prefix_caching": False,  # vLLM returns nothing for a cached prefix
        }
        self.engine = start(folder, settings | dict(arguments) | dict(options), threads=0)
        self.adapter: Any = None
        """The LoRA request for reading texts; None for the model itself."""
        self._asked = 0

    def ask(self, sequences: IntArrays, parameters: Any) -> list[Any]:
        """Return vLLM's final output for each sequence of token ids. Raises EngineError."""
        places: dict[str, int] = {}
        answers: dict[int, Any] = {}
        with answering():
            for index, ids in enumerate(sequences):
                self._asked += 1
                places[str(self._asked)] = index
                prompt = {"prompt_token_ids": ids.tolist()}
                self.engine.add_request(str(self._asked), prompt, parameters, lora_request=self.adapter)
            while len(answers) < len(sequences):
                for answer in self.engine.step():
                    if answer.finished:
                        answers[places[answer.request_id]] = answer
        return [answers[index] for index in range(len(sequences))]

    def close(self) -> None:
        """End vLLM's process."""
        self.engine.engine_core.shutdown()


class ServerBatches:
    """A running server with the weights of `folder`, see VllmServer.take; base class of the teachers behind one.

    Without a folder the teacher is whatever model the server serves.
    """

    def __init__(self, folder: Path | None, url: str) -> None:
        self._server = VllmServer(url)
        self._tokens = 0
        try:
            digest = "" if folder is None else weights_digest(folder)
            self._name = self._server.name if folder is None else self._server.take(folder, digest, reload=False)
        except BaseException:
            self.close()
            raise
        """Name of the model in requests to the server."""

    def ask(
        self, texts: Sequence[Text], call: Callable[[Text], Call], read: Callable[[Text, Answer], Value]
    ) -> list[Value]:
        """Send a request for each text, several at a time and begun in order. Returns `read` of each answer."""
        self._tokens += sum(map(len, texts))
        return self._server.gather([call(text) for text in texts], lambda i, answer: read(texts[i], answer))

    @property
    def use(self) -> ServerUse:
        """What was requested from the server so far."""
        traffic = self._server.traffic
        return ServerUse(traffic.requests, traffic.retries, self._tokens)

    def close(self) -> None:
        """Disconnect from the server, which keeps running."""
        self._server.close()


def room_to_generate(folder: Path) -> dict[str, Any]:
    """Return the EngineArgs of a generating model for texts of full length: it must generate one more token."""
    longest = int(model_shape(folder)["max_position_embeddings"]) + 1
    return {"max_model_len": longest, "hf_overrides": {"max_position_embeddings": longest}}
