"""The tokenizer of the model to train, with which an import tokenises rows that come without token ids."""

import json
from typing import Any, Protocol

from mopd_dataplane.errors import InputError
from mopd_dataplane.interchange.rows import Messages
from mopd_dataplane.prompts import render


class Vocabulary(Protocol):
    """The tokenizer of the model that will be trained on the samples."""

    digest: str
    size: int
    end: int | None
    """Id of the end-of-sequence token."""

    def file(self) -> dict[str, Any] | None:
        """Content of its tokenizer.json, by which a store shows text; None where it has none."""

    def prompt(self, text: str | Messages) -> list[int]:
        """Ids of a prompt as the student reads it."""

    def response(self, text: str) -> list[int]:
        """Ids of a text, without special tokens of its own."""

    def conversation(self, prompt: Messages, response: Messages) -> tuple[list[int], list[int], list[int]]:
        """(prompt ids, response ids, loss mask of the response) of messages; the assistant's are the policy's.

        Raises InputError where the chat template does not tell whose a token is.
        """


class TokenizerVocabulary:
    """The Vocabulary of a Hugging Face tokenizer, and how a prompt's text is put to the model."""

    def __init__(self, tokenizer: Any, digest: str, *, template: str = "{prompt}") -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.digest = digest
        self.size = len(tokenizer)
        self.end: int | None = tokenizer.eos_token_id

    def file(self) -> dict[str, Any] | None:
        """See Vocabulary: a tokenizer that only Python code knows has no such file."""
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        return json.loads(fast.to_str()) if fast is not None else None

    def prompt(self, text: str | Messages) -> list[int]:
        if isinstance(text, str):
            return render(text, self._tokenizer, template=self._template)
        return self._chat(text, ask=True)

    def response(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def conversation(self, prompt: Messages, response: Messages) -> tuple[list[int], list[int], list[int]]:
        """See Vocabulary: a turn begins behind the template's generation prompt and ends with its first
        end-of-sequence token, or where the template ends it."""
        whole = self._chat([*prompt, *response])
        mask = [0] * len(whole)
        for place, message in enumerate(response):
            if message["role"] != "assistant":
                continue
            before = [*prompt, *response[:place]]
            start, end = self._chat(before, ask=True), self._chat([*before, message])
            if whole[: len(start)] != start or whole[: len(end)] != end:
                raise InputError(
                    f"the chat template writes message {len(before)} another way when more follow; "
                    "such a conversation needs token ids"
                )
            stop = len(end)
            if self.end in whole[len(start) : stop]:
                stop = len(start) + whole[len(start) : stop].index(self.end) + 1
            mask[len(start) : stop] = [1] * (stop - len(start))
        first = len(self._chat(prompt, ask=True))
        last = len(mask) - mask[::-1].index(1) if 1 in mask else first
        return whole[:first], whole[first:last], mask[first:last]

    def _chat(self, messages: Messages, *, ask: bool = False) -> list[int]:
        if not self._tokenizer.chat_template:
            raise InputError("the rows hold messages, and the tokenizer has no chat template; give one that has")
        return list(self._tokenizer.apply_chat_template(messages, add_generation_prompt=ask, return_dict=False))
