"""Teachers that vLLM runs as generating models: `prompt_logprobs` gives the log-prob of every token in a text.

vLLM computes them from the plain softmax, so they are at temperature 1, and it has no hidden states to give.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.base.http_client import Answer, Call
from mopd_dataplane.errors import EngineError, MismatchError
from mopd_dataplane.models.architecture import UNLIMITED
from mopd_dataplane.models.hf import model_shape
from mopd_dataplane.models.server_identity import FINGERPRINT_TEXTS, ServerIdentity, encoded, identity_of
from mopd_dataplane.models.vllm_server import read_prompt_logprobs
from mopd_dataplane.score.readers import IntArrays
from mopd_dataplane.score.vllm_batch import ServerBatches, VllmBatches, room_to_generate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SequenceLogprobs(NamedTuple):
    """A teacher's log-probs of N tokens of a sequence."""

    token_logprobs: NDArray[np.float32]
    """[N] log-prob of the token itself"""
    ids: NDArray[np.int32]
    """[N, k] the likeliest tokens, likeliest first"""
    logprobs: NDArray[np.float32]
    """[N, k] log-probs of those tokens"""
    topk_source: Literal["teacher", "student"] = "teacher"
    """Whose likeliest tokens `ids` are."""


class LogprobReader(Protocol):
    """One teacher, ready to score text."""

    vocab_size: int

    def read(self, sequences: IntArrays, k: int) -> list[SequenceLogprobs]:
        """Return the log-probs of each token but the first of each sequence, with the k likeliest tokens at its
        position."""

    def close(self) -> None:
        """Free what the teacher holds."""


class VllmLogprobs(VllmBatches):
    """The LogprobReader of a teacher that vLLM runs on this machine."""

    def __init__(self, folder: Path, *, dtype: str, options: Mapping[str, Any]) -> None:
        self.vocab_size = int(model_shape(folder)["vocab_size"])
        super().__init__(folder, {"dtype": dtype, "max_logprobs": -1, **room_to_generate(folder)}, options)

    def read(self, sequences: IntArrays, k: int) -> list[SequenceLogprobs]:
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=k, detokenize=False)
        answers = self.ask(sequences, parameters)
        return [
            sequence_logprobs(ids, map(_ranked, answer.prompt_logprobs[1:]), k)
            for ids, answer in zip(sequences, answers, strict=True)
        ]


class ServerLogprobs(ServerBatches):
    """A teacher behind a running vLLM server; without a folder its weights are only there."""

    def __init__(self, folder: Path | None, *, url: str, vocab_size: int) -> None:
        super().__init__(folder, url)
        self.vocab_size = vocab_size

    @property
    def context_length(self) -> int:
        """Number of tokens that the server can read, minus the one that it must generate."""
        return self._server.context_length - 1 if self._server.context_length else UNLIMITED

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Check that the server encodes FINGERPRINT_TEXTS to the same ids as a tokenizer. Raises MismatchError."""
        for text in FINGERPRINT_TEXTS:
            here, there = encoded(tokenizer, text), self._server.tokenize(text)
            if here != there:
                raise self.other_tokens(text, there, here)

    def other_tokens(self, text: str, there: Sequence[object], here: Sequence[int]) -> MismatchError:
        """Return the error for a text that the server reads as other tokens than the student's tokenizer."""
        return MismatchError(
            f"{self._server.url} serves {self._server.name!r}, which reads {text[:40]!r} as {there[:8]} ({len(there)} "
            f"ids), the student as {here[:8]} ({len(here)} ids); use a teacher that has the student's tokenizer"
        )

    def identity(self, tokenizer: PreTrainedTokenizerBase) -> ServerIdentity:
        """Return the identity of the teacher at its server."""
        return identity_of(self._server, self._name, tokenizer, self.vocab_size)

    def read(self, sequences: IntArrays, k: int) -> list[SequenceLogprobs]:
        """See LogprobReader. A server returns at most its --max-logprobs likeliest tokens, 20 by default."""

        def call(ids: NDArray[np.int64]) -> Call:
            return self._server.reading(self._name, ids.tolist(), k)

        def read(ids: NDArray[np.int64], answer: Answer) -> SequenceLogprobs:
            rows = read_prompt_logprobs(answer, ids.tolist(), k, self.vocab_size)
            return sequence_logprobs(ids, rows, k)

        return self.ask(sequences, call, read)


def _ranked(row: Mapping[int, Any]) -> dict[int, tuple[int, float]]:
    return {token: (said.rank, said.logprob) for token, said in row.items()}


def sequence_logprobs(
    ids: NDArray[np.int64], rows: Iterable[Mapping[int, tuple[int, float]]], k: int
) -> SequenceLogprobs:
    """Convert {token: (rank, log-prob)} of every position but the first; ranks begin at 1.

    Raises EngineError when a token of the text, or one of the k likeliest, is missing.
    """
    own, top = [], []
    for token, row in zip(ids[1:].tolist(), rows, strict=True):
        likeliest = sorted((rank, other, logprob) for other, (rank, logprob) in row.items() if rank <= k)[:k]
        if token not in row or len(likeliest) < k:
            raise EngineError(f"vLLM gave {len(row)} log-probs for token {token} and its {k} likeliest; run again")
        own.append(row[token][1])
        top.append([(other, logprob) for _, other, logprob in likeliest])
    entries = np.array(top, np.float64).reshape(len(own), k, 2)
    return SequenceLogprobs(
        np.array(own, np.float32), entries[..., 0].astype(np.int32), entries[..., 1].astype(np.float32)
    )
