"""Stop strings, matched over the text of the whole response as it grows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopText:
    """Turns ids into text token by token and detects when a stop string has appeared.

    Text is decoded with a few ids of context, because the text of one id depends on its neighbours (leading spaces,
    characters split over several tokens). Only as much text is stored as the longest stop string can still need. stop:
    may be empty. prefix: ids of the response so far.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...], prefix: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._keep = max(map(len, stop), default=1) - 1
        self._ids: list[int] = []
        self._context = 0
        self._read = 0
        self._tail = ""
        for token in prefix:
            self.add(token)

    def add(self, token: int) -> bool:
        """Add an id. Returns True when the text so far completes a stop string."""
        if not self._stop:
            return False
        self._ids.append(token)
        text_before = str(self._tokenizer.decode(self._ids[self._context : self._read]))
        text = str(self._tokenizer.decode(self._ids[self._context :]))
        if text.endswith("\ufffd"):
            return False  # half a character; its other bytes are still missing
        window = self._tail + text[len(text_before) :]
        self._context, self._read = self._read, len(self._ids)
        self._tail = window[-self._keep :] if self._keep else ""
        return any(stop in window for stop in self._stop)
