"""The tokenizer of the model to train, with which an import tokenises rows that come without token ids."""

import json
from typing import Any, Protocol

from mopd_dataplane.models.chat_template import NO_OPTIONS, AnswerTokens, ChatOptions, Messages, answer_tokens
from mopd_dataplane.prompts import render


class Vocabulary(Protocol):
    """The tokenizer of the model that will be trained on the samples."""

    digest: str
    size: int
    end: int | None
    """Id of the end-of-sequence token."""
    template: str
    """How the student reads a prompt text: a template, or `chat` for its chat template."""

    def file(self) -> dict[str, Any] | None:
        """Return the content of its tokenizer.json, with which a store shows text, or None if it has none."""

    def prompt(self, text: str) -> list[int]:
        """Encode a prompt text as the student reads it."""

    def response(self, text: str) -> list[int]:
        """Encode a text without adding special tokens."""

    def conversation(
        self, prompt: Messages, response: Messages, *, options: ChatOptions, is_cut_off: bool
    ) -> AnswerTokens:
        """Encode messages as the chat template writes them; the assistant's tokens are the policy's.

        Raises InputError when the chat template does not show which tokens belong to which message.
        """


class TokenizerVocabulary:
    """The Vocabulary of a Hugging Face tokenizer, with the template for prompts."""

    def __init__(self, tokenizer: Any, digest: str, *, template: str = "{prompt}") -> None:
        self._tokenizer = tokenizer
        self.template = template
        self.digest = digest
        self.size = len(tokenizer)
        self.end: int | None = tokenizer.eos_token_id

    def file(self) -> dict[str, Any] | None:
        """See Vocabulary; a tokenizer that exists only as Python code has no such file."""
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        return json.loads(fast.to_str()) if fast is not None else None

    def prompt(self, text: str) -> list[int]:
        return render(text, self._tokenizer, template=self.template)

    def response(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def conversation(
        self, prompt: Messages, response: Messages, *, options: ChatOptions = NO_OPTIONS, is_cut_off: bool = False
    ) -> AnswerTokens:
        """See Vocabulary."""
        return answer_tokens(self._tokenizer, prompt, response, options=options, is_cut_off=is_cut_off)
