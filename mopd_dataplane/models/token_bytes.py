"""The bytes that each token of a tokenizer stands for, so that two tokenizers can be compared on one text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mopd_dataplane.errors import MismatchError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_SPACE = "\u2581"
"""The character that SentencePiece writes for a space."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PLAIN_DECODERS = {"ByteFallback", "Replace", "Metaspace", "Fuse", "Strip"}
"""Decoders that leave a token's text as it is, but for the space and for tokens of single bytes."""


class TokenBytes:
    """The bytes of each token.

    A tokenizer writes a text as bytes in the alphabet of GPT-2 (byte-level BPE), as pieces of SentencePiece, or as
    plain texts. Example: in Qwen's tokenizer the id of "Ġhello" has the bytes b" hello".
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | Tokenizer) -> None:
        """tokenizer: of transformers, or the one of a tokenizer.json. Raises MismatchError for a tokenizer of another
        form, whose tokens have no bytes of their own."""
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        backend: Any = getattr(tokenizer, "backend_tokenizer", tokenizer if hasattr(tokenizer, "to_str") else None)
        decoders = set() if backend is None else set(_decoders(json.loads(backend.to_str())["decoder"]))
        if backend is None or not (decoders == {"ByteLevel"} or decoders <= _PLAIN_DECODERS):
            form = "has no description" if backend is None else f"decodes by {', '.join(sorted(decoders))}"
            raise MismatchError(
                f"the tokenizer {name} {form}, so the bytes of a token "
                "are not known; byte-level BPE, SentencePiece and plain words are supported"
            )
        self._tokenizer, self._name = backend, name
        self._is_byte_level = decoders == {"ByteLevel"}
        self._described = {int(index): token for index, token in backend.get_added_tokens_decoder().items()}
        self.added = {index: str(token) for index, token in self._described.items()}
        """Ids of tokens that were added to the vocabulary, special ones among them, with their texts."""
        self._by_id: dict[int, bytes] = {}

    @cached_property
    def special(self) -> dict[int, str]:
        """Ids of tokens that mark structure and have no text, with their names."""
        return {index: str(token) for index, token in self._described.items() if token.special}

    def __call__(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token. Raises MismatchError for an id without a token."""
        return [self._bytes_of(int(index)) for index in ids]

    def _bytes_of(self, index: int) -> bytes:
        if index not in self._by_id:
            self._by_id[index] = self._read(index)
        return self._by_id[index]

    def _read(self, index: int) -> bytes:
        if index in self.added:
            return self.added[index].encode()
        text: Any = self._tokenizer.id_to_token(index)
        if text is None:
            raise MismatchError(f"token {index} is not in the vocabulary of {self._name}")
        if self._is_byte_level:
            return bytes(_ALPHABET[character] for character in text)
        if single := _BYTE.fullmatch(text):
            return bytes([int(single[1], 16)])
        return str(text).replace(_SPACE, " ").encode()


def _decoders(described: dict[str, Any] | None) -> Iterator[str]:
    """Names of the decoders in a tokenizer's description."""
    if described is None:
        return
    if described["type"] == "Sequence":
        for part in described["decoders"]:
            yield from _decoders(part)
    else:
        yield described["type"]


def _alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others begin at 256, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_ALPHABET = _alphabet()
