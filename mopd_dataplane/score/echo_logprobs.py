"""Teachers behind servers that return the log-probs of a prompt: OpenAI's completions API with `echo`.

vLLM's server answers it, and so can servers that have no `prompt_logprobs`. Log-probs are at temperature 1.
sglang_logprobs.py reads SGLang's own API in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.base.http_client import Answer, Call
from mopd_dataplane.models.echo_replies import (
    COMPLETIONS,
    REFUSED_FIELDS,
    TextApi,
    names_token,
    read_echoed,
    read_echoed_ids,
    token_id,
)
from mopd_dataplane.models.server_identity import FINGERPRINT_TEXTS, ServerIdentity, encoded, identity_from
from mopd_dataplane.score.readers import IntArrays
from mopd_dataplane.score.vllm_logprobs import SequenceLogprobs, ServerLogprobs, sequence_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EchoLogprobs(ServerLogprobs):
    """A teacher behind a server with a TextApi; without a folder its weights are only there.

    The first request of each width k is sent alone. It finds the form of request that the server takes, and it raises
    EngineError if the server does not return what was requested. tokenizer: the teacher's, for servers that name tokens
    by their texts.
    """

    _api: TextApi = COMPLETIONS

    def __init__(self, folder: Path | None, *, url: str, vocab_size: int, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(folder, url=url, vocab_size=vocab_size)
        self._form: Mapping[str, Any] | None = None
        self._checked_widths: set[int] = set()

        @cache
        def texts_of(token: int) -> tuple[str, str]:
            piece = tokenizer.convert_ids_to_tokens(token)
            return str(tokenizer.decode([token])), str(piece)

        self._texts_of = texts_of

    def read(self, sequences: IntArrays, k: int) -> list[SequenceLogprobs]:
        """See LogprobReader."""
        results = []
        if sequences and k not in self._checked_widths:
            results.append(self._read_first(sequences[0], k))
            self._checked_widths.add(k)
        rest = sequences[len(results) :]
        return results + self.ask(rest, lambda ids: self._call(ids, k), lambda ids, answer: self._read(ids, answer, k))

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Check that the server reads FINGERPRINT_TEXTS as the ids of a tokenizer. Raises MismatchError, EngineError.

        The server may add a token before the text.
        """
        self.read([np.array(encoded(tokenizer, FINGERPRINT_TEXTS[0]), np.int64)], 0)
        for text in FINGERPRINT_TEXTS:
            here = encoded(tokenizer, text)
            answer = self._server.gather([self._request(text, 0)], lambda _, answer: answer)[0]
            labels = read_echoed(answer, 2, self._api).tokens
            starts = range(min(2, len(labels) - len(here) + 1))
            if not any(self._are_tokens(labels[start:], here) for start in starts):
                there = [label if token_id(label) is None else token_id(label) for label in labels]
                raise self.other_tokens(text, there, here)

    def identity(self, tokenizer: PreTrainedTokenizerBase) -> ServerIdentity:
        """Return the identity of the teacher at its server."""
        texts = [np.array(encoded(tokenizer, text), np.int64) for text in FINGERPRINT_TEXTS]
        values = [value for result in self.read(texts, 0) for value in result.token_logprobs.tolist()]
        return identity_from(self._server, values)

    def _are_tokens(self, labels: list[str], ids: list[int]) -> bool:
        return all(names_token(label, token, self._texts_of) for label, token in zip(labels, ids, strict=False))

    def _read_first(self, ids: NDArray[np.int64], k: int) -> SequenceLogprobs:
        """Read a text with the first form of request that the server does not refuse, and keep to that form."""
        forms = self._api.forms if self._form is None else (self._form,)
        for form in forms:
            self._form = form
            [answer] = self.ask([ids], lambda ids: self._call(ids, k), lambda _, answer: answer)
            if answer.status not in REFUSED_FIELDS:
                break
        try:
            return self._read(ids, answer, k)
        except BaseException:
            self._form = None if len(forms) > 1 else self._form
            raise

    def _call(self, ids: NDArray[np.int64], k: int) -> Call:
        return self._request(ids.tolist(), k)

    def _request(self, prompt: list[int] | str, k: int) -> Call:
        assert self._form is not None
        base = self._server.url if self._api.under_v1 else self._server.root
        return self._api.call(base, self._name, prompt, k, self._form)

    def _read(self, ids: NDArray[np.int64], answer: Answer, k: int) -> SequenceLogprobs:
        rows = read_echoed_ids(answer, ids.tolist(), k, self.vocab_size, self._texts_of, self._api)
        return sequence_logprobs(ids, rows, k)
