"""Identity of a model at a server, whose weights cannot be read: its name there, and log-probs of fixed texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mopd_dataplane.base.http_client import Answer
from mopd_dataplane.models.vllm_server import VllmServer, read_prompt_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FINGERPRINT_TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "If 3 x + 7 = 22, then 3 x = 15, so x = 5. Check: 3 * 5 + 7 = 22.",
    "def area(width, height): return width * height  # in square metres",
)
"""Texts whose log-probs distinguish models. They are compared with stored ones, so they never change."""
_DIGITS = 6
"""Decimals to which log-probs are rounded; float32 has no more."""


class ServerIdentity(NamedTuple):
    """Identity of a model at a server."""

    name: str
    root: str
    """Path or name from which the server loaded it; two servers may have one model at two paths."""
    logprobs: tuple[float, ...]
    """Log-probs of each token but the first of every fingerprint text."""

    def difference(self, other: ServerIdentity) -> float:
        """Mean absolute difference of the log-probs; infinite when their numbers differ."""
        if len(self.logprobs) != len(other.logprobs):
            return float("inf")
        return float(np.abs(np.subtract(self.logprobs, other.logprobs)).mean())


def identity_of(server: VllmServer, name: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> ServerIdentity:
    """Request the log-probs of FINGERPRINT_TEXTS from a server under the model `name`. Raises EngineError."""
    texts = [encoded(tokenizer, text) for text in FINGERPRINT_TEXTS]

    def own(index: int, answer: Answer) -> list[float]:
        ids = texts[index]
        rows = read_prompt_logprobs(answer, ids, 0, vocab_size)
        return [row[token][1] for token, row in zip(ids[1:], rows, strict=True)]

    values = server.gather([server.reading(name, ids, 0) for ids in texts], own)
    return identity_from(server, [value for text in values for value in text])


def identity_from(server: VllmServer, logprobs: Sequence[float]) -> ServerIdentity:
    """Return an identity from the log-probs of each token but the first of FINGERPRINT_TEXTS."""
    return ServerIdentity(server.name, server.folder, tuple(round(value, _DIGITS) for value in logprobs))


def encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode a text without special tokens."""
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
