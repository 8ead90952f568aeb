"""A teacher that reads the student's text in tokens of its own, and its log-probs at the student's tokens.

    student   | Hel | lo |  wor | ld | <end> |
    teacher   |  Hello   |  w | orld | <stop>|
    chunks    |    0     |     1     |   2   |

Both sides are cut into the smallest chunks that end where a token of each ends (the chunks of DPCA, arXiv 2606.09456).
A chunk's text has one log-prob under each model, T and S, the sums over its tokens. Each of the student's tokens gets

    T * s / S                                         s: its own log-prob, S the sum of s over the chunk

so that the values of a chunk sum to T, none is above 0, and T - S goes to the tokens at which the student decided. In a
chunk of one token each way the value is the teacher's log-prob itself. Where S is 0, or no policy sampled the text,
every token gets the same share.

Axes: R response tokens of the student, Q of the teacher.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.fields import ALIGNMENT
from mopd_dataplane.models.chat_template import terminators
from mopd_dataplane.models.token_bytes import TokenBytes
from mopd_dataplane.models.token_chunks import chunk_ends
from mopd_dataplane.records import Signal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mopd_dataplane.score.readers import Scorable


Pieces = tuple[int, ...]
"""The student's tokens of the text of one token of a teacher."""


class Alignment(NamedTuple):
    """The chunk of each token."""

    student: NDArray[np.int64]
    """[R] index of the chunk"""
    teacher: NDArray[np.int64]
    """[Q] index of the chunk"""


def align(student: Sequence[int], teacher: Sequence[int]) -> Alignment:
    """Cut two tokenizations of one text into their smallest common chunks.

    student, teacher: number of bytes of each token; both sum to the length of the text. A token of no bytes belongs to
    the chunk that ends there. Raises ValueError for other sums.
    """
    ours, theirs = np.cumsum(student, dtype=np.int64), np.cumsum(teacher, dtype=np.int64)
    if not len(ours) or not len(theirs) or ours[-1] != theirs[-1]:
        raise ValueError(f"{sum(student)} and {sum(teacher)} bytes are not one text")
    ends = np.intersect1d(ours, theirs)
    ends = ends[ends > 0] if ours[-1] else ends
    return Alignment(np.searchsorted(ends, ours), np.searchsorted(ends, theirs))


def credit(
    alignment: Alignment, teacher: NDArray[np.float32], student: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """Return the teacher's log-probs at the student's tokens: [R].

    teacher: [Q] log-probs of its tokens. student: [R] log-probs of the sampler; None where nobody sampled.
    """
    chunks = int(alignment.student.max(initial=-1)) + 1
    of_chunk = np.bincount(alignment.teacher, weights=teacher.astype(np.float64), minlength=chunks)
    own = np.zeros(len(alignment.student)) if student is None else student.astype(np.float64)
    sums = np.bincount(alignment.student, weights=own, minlength=chunks)[alignment.student]
    equal = 1 / np.bincount(alignment.student, minlength=chunks)[alignment.student]
    share = np.divide(own, sums, out=equal, where=sums < 0)
    return (of_chunk[alignment.student] * share).astype(np.float32)


@dataclass(frozen=True)
class OwnTokens:
    """One sample in the tokens of the student and in those of a teacher with another tokenizer."""

    sample: Scorable
    """In the student's tokens."""
    teacher_sample: Scorable
    """In the teacher's tokens; every token of the response is scored."""
    alignment: Alignment

    def signal(self) -> Signal:
        """Return the record of the alignment, as the store keeps it."""
        return Signal(
            uid=self.sample.uid, sample_row=self.sample.sample_row, kind=ALIGNMENT,
            student_chunk_ends=chunk_ends(self.alignment.student),
            teacher_tokens=self.teacher_sample.tokens[self.teacher_sample.prompt_len :],
            teacher_chunk_ends=chunk_ends(self.alignment.teacher),
        )  # fmt: skip


class OwnTokenizer:
    """Turns samples of a student into the tokens of one teacher."""

    def __init__(self, student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, *, name: str) -> None:
        """name: of the teacher. Raises MismatchError for a tokenizer whose tokens have no bytes."""
        self.tokenizer, self._student = teacher, student
        self._name = name
        self._ours, self._theirs = TokenBytes(student), TokenBytes(teacher)
        self._ends = terminators(student) | {student.eos_token_id}
        self._end = _end(teacher)

    @property
    def description(self) -> dict[str, Any]:
        """Content of the teacher's tokenizer.json."""
        described: dict[str, Any] = json.loads(self.tokenizer.backend_tokenizer.to_str())
        return described

    @cached_property
    def pieces(self) -> list[Pieces]:
        """The student's tokens of the text of each of the teacher's tokens, by id; empty where it has none.

        A text that is one token of the student is that token, whatever the student's tokenizer makes of it. The
        teacher's end is the student's.
        """
        ids = sorted(set(self._student.get_vocab().values()) - self._ours.special.keys(), reverse=True)
        student_end = _end(self._student)
        single = {content: (index,) for index, content in zip(ids, self._ours(ids), strict=True) if content}
        theirs = self.tokenizer.get_vocab().values()
        pieces: list[Pieces] = [()] * (max(theirs) + 1)
        for index in set(theirs) - self._theirs.special.keys():
            (content,) = self._theirs([index])
            pieces[index] = single.get(content) or self._pieces_of(content)
        if self._end is not None and student_end is not None:
            pieces[self._end] = (student_end,)
        return pieces

    def _pieces_of(self, content: bytes) -> Pieces:
        """Encode bytes with the student's tokenizer; empty if they are no text, or if it changes them."""
        try:
            text = content.decode()
        except UnicodeDecodeError:
            return ()
        ids = self._student.encode(text, add_special_tokens=False)
        return tuple(ids) if b"".join(self._ours(ids)) == content else ()

    def retokenize(self, sample: Scorable, prompt_ids: Sequence[int]) -> OwnTokens:
        """Convert one sample to the teacher's tokens.

        A last token that ends the student's answers becomes the teacher's end.
        prompt_ids: the prompt in the teacher's tokens. Raises MismatchError naming a sample that cannot be read: with
        text that the policy did not write, with special tokens, with bytes that are not UTF-8, or with a text that the
        teacher's tokenizer changes.
        """
        response = sample.tokens[sample.prompt_len :].tolist()
        if not all(sample.loss_mask):
            raise self._unreadable(sample, "has text of tools or of a prefix between the tokens of the policy")
        is_ended = bool(response) and response[-1] in self._ends
        if is_ended and self._end is None:
            raise self._unreadable(sample, "has an end, and the teacher's tokenizer has no end-of-sequence token")
        if inside := self._ours.special.keys() & set(response[:-1] if is_ended else response):
            raise self._unreadable(sample, f"has the special token {self._ours.special[min(inside)]!r}")
        ours = self._ours(response[:-1] if is_ended else response)
        text = b"".join(ours)
        ids, theirs = self._encoded(sample, text)
        lengths = [len(part) for part in ours], [len(part) for part in theirs]
        if is_ended:  # the ends are one chunk, as if they were a byte of text
            assert self._end is not None
            ids = [*ids, self._end]
            lengths = [*lengths[0], 1], [*lengths[1], 1]
        nothing = np.zeros(0, np.int64)
        alignment = align(*lengths) if response else Alignment(nothing, nothing)
        teacher_sample = replace(
            sample, prompt_len=len(prompt_ids), tokens=np.array([*prompt_ids, *ids], np.int32),
            loss_mask=np.ones(len(ids), np.uint8), logprobs=None, versions=np.zeros(0, np.int32),
        )  # fmt: skip
        return OwnTokens(sample, teacher_sample, alignment)

    def problem(self, sample: Scorable) -> str:
        """Say why a sample cannot be read; empty where it can."""
        try:
            self.retokenize(sample, ())
        except MismatchError as error:
            return str(error)
        return ""

    def _encoded(self, sample: Scorable, content: bytes) -> tuple[list[int], list[bytes]]:
        """Encode a text, and return its tokens with their bytes, which are those of the text."""
        try:
            text = content.decode()
        except UnicodeDecodeError:
            raise self._unreadable(sample, "has bytes that are no UTF-8 text") from None
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        parts = self._theirs(ids)
        if content and b"".join(parts) == b" " + content:  # SentencePiece puts a space before a text
            parts[0] = parts[0][1:]
        if b"".join(parts) != content:
            raise self._unreadable(sample, f"has the text {content[:60]!r}, in its tokens {b''.join(parts)[:60]!r}")
        return ids, parts

    def _unreadable(self, sample: Scorable, why: str) -> MismatchError:
        return MismatchError(
            f'teacher {self._name!r} (tokenizer = "own") cannot read sample {sample.uid}, which {why}; leave such '
            f'samples out with teachers.{self._name}.unknown_tokens = "mask"'
        )


def _end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that ends an answer of a teacher; None without one."""
    end: int | None = tokenizer.eos_token_id
    ends = terminators(tokenizer)
    return end if end in ends else min(ends, default=end)
