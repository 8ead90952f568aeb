"""Compares two vocabularies by the texts of their ids: decides which teachers may score which student's tokens.

The texts of ordinary tokens must agree. A base model and an instruct model of one family use different tokens as ends
and padding, one of them may have more added tokens, and another family may rename the special ones. All of that is
reported with its consequences, and refused nowhere.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.models.chat_template import terminators

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_EXAMPLES = 3
"""Number of tokens that a message shows."""


@dataclass(frozen=True)
class Vocabulary:
    """Ids of a tokenizer and their texts."""

    texts: dict[int, str]
    """Text of each id as its model writes it: pieces of bytes or characters, and added tokens as they are."""
    added: frozenset[int]
    """Ids of added tokens, special ones and whole words, which the splitting algorithm does not make."""
    special: frozenset[int]
    """Ids in `added` that the tokenizer marks as special."""
    end: int | None
    """Id of the tokenizer's end-of-sequence token."""
    roles: dict[str, int | None]
    """Ids of `bos`, `eos` and `pad`."""
    splitting: str
    """Digest of the merges, the normaliser and the pre-tokeniser; empty for tokenizers without such a description."""


_vocabularies: WeakKeyDictionary[PreTrainedTokenizerBase, Vocabulary] = WeakKeyDictionary()
"""Vocabularies read so far: an iteration compares those of all its teachers, and reading 49,152 tokens takes 0.3 s."""


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    """The vocabulary of a tokenizer, which must not change afterwards."""
    if tokenizer not in _vocabularies:
        _vocabularies[tokenizer] = _read(tokenizer)
    return _vocabularies[tokenizer]


def _read(tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    texts = {index: text for text, index in tokenizer.get_vocab().items()}
    added = {int(index): token for index, token in tokenizer.added_tokens_decoder.items()}
    special = frozenset(index for index, token in added.items() if token.special)
    roles = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return Vocabulary(texts, frozenset(added), special, roles["eos"], roles, _splitting(tokenizer))


def _splitting(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return ""
    described: dict[str, Any] = json.loads(backend.to_str())
    model = {key: value for key, value in described["model"].items() if key != "vocab"}
    text = json.dumps([model, described["normalizer"], described["pre_tokenizer"]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def compare_vocabularies(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, *, name: str, ends_mapped: bool = False
) -> tuple[str, ...]:
    """Compare the tokenizers of a student and of the teacher `name`. Returns harmless differences, as sentences.

    Each sentence says what follows from the difference. ends_mapped: teachers.NAME.end is "map".
    Raises MismatchError when an ordinary token of one has another text in the other.
    """
    ours, theirs = vocabulary_of(student), vocabulary_of(teacher)
    other = [index for index, text in ours.texts.items() if theirs.texts.get(index, text) != text]
    relabelled = [index for index in other if _is_marker(ours, index) and _is_marker(theirs, index)]
    wrong = sorted(set(other) - set(relabelled))
    shared = len(ours.texts.keys() & theirs.texts.keys())
    if wrong:
        shown = "; ".join(
            f"{index} is {ours.texts[index]!r} for the student and {theirs.texts[index]!r} for the teacher"
            for index in wrong[:_EXAMPLES]
        )
        raise MismatchError(
            f"teacher {name!r} has another vocabulary than the student: {len(wrong)} of {shared} common token ids "
            f"stand for other texts ({shown}); per-token distillation needs the same ids: use a teacher of the "
            "student's family"
        )
    stops = terminators(student)
    return tuple(_differences(ours, theirs, sorted(relabelled), name, ends_mapped, stops))


def _differences(
    ours: Vocabulary,
    theirs: Vocabulary,
    relabelled: list[int],
    name: str,
    ends_mapped: bool,
    stops: frozenset[int],
) -> list[str]:
    sentences = []
    if ours.end != theirs.end and ends_mapped and theirs.end in stops:
        sentences.append(
            f"the student's chat template ends an answer with {_shown(theirs, theirs.end)}, as teacher {name!r} does, "
            f'and teachers.{name}.end = "map" reads the teacher\'s end at {_shown(ours, ours.end)} instead: with '
            'prompt_template = "chat" set end = "own"'
        )
    elif ours.end != theirs.end and ends_mapped:
        sentences.append(
            f"the student ends an answer with {_shown(ours, ours.end)}, at which teacher {name!r} is read with the "
            f"probability of its own end, {_shown(theirs, theirs.end)}"
        )
    elif ours.end != theirs.end and theirs.end in stops:
        sentences.append(
            f"the student ends a text with {_shown(ours, ours.end)} and an answer of its chat template with "
            f"{_shown(theirs, theirs.end)}, as teacher {name!r} does: it stops at either, and this teacher brings it "
            "to the latter"
        )
    elif ours.end != theirs.end:
        sentences.append(
            f"the student ends an answer with {_shown(ours, ours.end)}, teacher {name!r} with "
            f"{_shown(theirs, theirs.end)}: this teacher gives the student's end a probability near 0, so the student "
            f"may never learn to stop. With teachers.{name}.end = \"map\" the teacher's end is read at the student's"
        )
    for role in ("bos", "pad"):
        if ours.roles[role] != theirs.roles[role]:
            sentences.append(
                f"the {role} token is {_shown(ours, ours.roles[role])} for the student and "
                f"{_shown(theirs, theirs.roles[role])} for teacher {name!r}. This has no effect: texts are written "
                "with the student's"
            )
    if relabelled:
        shown = ", ".join(f"{i} {ours.texts[i]!r} / {theirs.texts[i]!r}" for i in relabelled[:_EXAMPLES])
        sentences.append(
            f"{len(relabelled)} special tokens have other names for teacher {name!r} ({shown}): it knows them under "
            "its own name, so write its prompts with its own template (prompt_template) where they matter"
        )
    if only_student := sorted(ours.texts.keys() - theirs.texts.keys()):
        sentences.append(
            f"teacher {name!r} does not know {len(only_student)} tokens of the student "
            f"({', '.join(repr(ours.texts[i]) for i in only_student[:_EXAMPLES])}): a sample that has one is refused "
            f'when it is scored, or left out with teachers.{name}.unknown_tokens = "mask"'
        )
    if ours.splitting and theirs.splitting and ours.splitting != theirs.splitting:
        sentences.append(
            f"teacher {name!r} splits text in another way than the student: it reads the student's tokens, which are "
            "not those it was trained on"
        )
    return sentences


def unknown_tokens(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return the student's tokens that the teacher's tokenizer does not have, by id."""
    ours, theirs = vocabulary_of(student), vocabulary_of(teacher)
    return {index: text for index, text in ours.texts.items() if index not in theirs.texts}


def _is_marker(vocabulary: Vocabulary, index: int) -> bool:
    """Check if an id is an added token that marks structure, such as `<|im_end|>`, and not a word of the text."""
    text = vocabulary.texts[index]
    bracketed = (text[:1], text[-1:]) in (("<", ">"), ("[", "]"))
    return index in vocabulary.special or (index in vocabulary.added and bracketed)


def _shown(vocabulary: Vocabulary, index: int | None) -> str:
    return "none" if index is None else f"{vocabulary.texts.get(index, '?')!r} ({index})"
