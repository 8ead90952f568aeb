"""Common base of the engines that run in another process: they send requests and receive tokens as these arrive.

admit ──_send──▶ the engine ──_listen──▶ Streams ──step──▶ the loop, one token a slot
                              a slot that ends, or is released ──_cancel──▶ the engine
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.errors import EngineError
from mopd_dataplane.models.hf import load_tokenizer, model_shape, stop_ids, tokenizer_digest
from mopd_dataplane.rollout.engines.engine import RESCORED, Request, StepOutput
from mopd_dataplane.rollout.engines.sampler_arguments import SamplerArguments
from mopd_dataplane.rollout.engines.sampling import SAMPLERS
from mopd_dataplane.rollout.engines.token_streams import Stream, Streams

Noise = Literal["keyed", "seeded"]


class StreamingEngine(ABC):
    """The slots, the tokenizer and the shape of the model; see Engine for what the public methods promise.

    folder: model folder. noise: `keyed` repeats the newest RESCORED tokens of a resumed prefix, see token_streams.py.
    """

    lockstep = False
    policy_version: int
    policy_digest: str

    def __init__(self, folder: Path, *, slots: int, noise: Noise) -> None:
        self.slots = slots
        self.samplers: tuple[str, ...] = tuple(SAMPLERS) if noise == "keyed" else ()
        self.tokenizer = load_tokenizer(folder)
        self.tokenizer_digest = tokenizer_digest(self.tokenizer)
        self._shape = model_shape(folder)
        self.vocab_size = int(self._shape["vocab_size"])
        self.context_length = int(self._shape["max_position_embeddings"])
        self._streams = Streams(slots, self.tokenizer, stop_ids(folder, self.tokenizer))

    def admit(self, requests: Sequence[tuple[int, Request]]) -> dict[int, NDArray[np.float32]]:
        """See Engine.admit. Other live slots continue meanwhile; their tokens are kept for the following steps."""
        again = RESCORED if self.samplers else 0
        opened = []
        for slot, request in requests:
            self._check(request)
            stream = self._streams.open(slot, request, again=min(again, len(request.prefix_ids)))
            known = [*request.prompt_ids.tolist(), *request.prefix_ids.tolist()]
            self._send(stream, known[: len(known) - len(stream.again)])
            opened.append((slot, stream))
        while not all(stream.is_rescored for _, stream in opened):
            self._listen()
        return {slot: np.array(stream.rescored, np.float32) for slot, stream in opened if stream.again}

    def step(self) -> StepOutput:
        """See Engine.step. Waits until at least one slot's next token is here."""
        while not self._streams.ready or self._waiting():
            self._listen()
        output, ended = self._streams.step()
        self._cancel(ended)
        return output

    def release(self, slot: int) -> None:
        """See Engine.release."""
        if slot in self._streams:
            self._cancel([self._streams.close(slot)])

    def _require_free(self) -> None:
        """Raise EngineError while a slot is live: another policy may not be loaded then."""
        if len(self._streams):
            raise EngineError(f"{len(self._streams)} slots are still live; release them before loading another policy")

    def save(self, file: Path, requests: Sequence[tuple[int, Request]], *, limit_bytes: int) -> int:
        """Saves nothing, because the engine's keys and values cannot be read; prefixes are read again."""
        return 0

    def restore(self, file: Path, requests: Sequence[Request]) -> list[tuple[str, float]]:
        """See save."""
        return []

    def _drawing(self, request: Request, again: Sequence[int], *, arguments_as: str) -> dict[str, Any]:
        """Settings of vLLM for what follows a request's prefix, whose newest tokens `again` are drawn once more.

        arguments_as: where it takes the keyed sampler's arguments.
        """
        settings = {
            "max_tokens": request.max_new_tokens - len(request.prefix_ids) + len(again),
            "logprobs": 0,
            "ignore_eos": True,  # Streams ends a sample; a repeated prefix may hold end-of-sequence tokens
        }
        if self.samplers:
            arguments = SamplerArguments.of(request, again).as_arguments()
            return settings | {"temperature": 0.0, "top_p": 1.0, "top_k": 0, arguments_as: arguments}
        drawn = {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
        return settings | drawn | {"seed": native_seed(request)}

    def _check(self, request: Request) -> None:  # noqa: B027  most engines take every request
        """Raise MismatchError for a request that the engine cannot serve as it is meant."""

    def _waiting(self) -> bool:
        """Whether something waits to be listened to."""
        return False

    @abstractmethod
    def _send(self, stream: Stream, prompt: list[int]) -> None:
        """Ask for what follows `prompt`, the token ids before those that are drawn again."""

    @abstractmethod
    def _listen(self) -> None:
        """Take what the engine says next into the streams; wait for it."""

    @abstractmethod
    def _cancel(self, names: Sequence[str]) -> None:
        """These requests need no more tokens."""


def native_seed(request: Request) -> int:
    """Seed of an engine's own generator: other noise for every prefix, so that a resume does not repeat noise."""
    text = f"{request.key:032x}:{len(request.prefix_ids)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
