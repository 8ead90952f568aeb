"""Chunks of one text in the tokens of two tokenizers, and the checks that both sides have the same bytes.

    student        | Hel | lo |  wor | ld | <end> |      chunk ends  0 1 0 1 1
    teacher        |  Hello   |  w | orld | <stop>|      chunk ends  1 0 1 1

A chunk ends where a token of each side ends. The last token of each side may be an end of the answer, which has no
text.

Axes: R response tokens of the student, Q of the teacher, C chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.models.token_bytes import TokenBytes


def chunk_ends(chunks: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Mark the last token of each chunk: uint8 of the shape of `chunks`, the index of each token's chunk."""
    return np.diff(chunks, append=chunks[-1:] + 1).astype(np.uint8)


def chunk_spans(ends: NDArray[np.uint8]) -> list[tuple[int, int]]:
    """Return the first token of each chunk and the one after its last: [C]."""
    stops = (np.flatnonzero(ends) + 1).tolist()
    return list(zip([0, *stops], stops, strict=False))


def chunk_problem(student: NDArray[np.uint8], teacher: NDArray[np.uint8]) -> str:
    """Say why two lists of chunk ends, [R] and [Q], do not belong together; empty if they do."""
    counts = np.count_nonzero(student), np.count_nonzero(teacher)
    if counts[0] != counts[1]:
        return f"the student's tokens have {counts[0]} chunks, the teacher's {counts[1]}"
    for name, ends in (("student", student), ("teacher", teacher)):
        if len(ends) and not ends[-1]:
            return f"the last token of the {name} ends no chunk"
    return ""


def text_problem(
    student: TokenBytes,
    teacher: TokenBytes,
    tokens: tuple[Sequence[int], Sequence[int]],
    ends: tuple[NDArray[np.uint8], NDArray[np.uint8]],
) -> str:
    """Say which chunk has other bytes on the two sides; empty if every byte is once on each.

    tokens: ids of the student [R] and of the teacher [Q]. ends: their chunk ends, which fit together. A space that the
    teacher's tokenizer puts before a text is no difference, nor are the ends of the answer.
    """
    spans = [chunk_spans(part) for part in ends]
    for chunk, (ours, theirs) in enumerate(zip(*spans, strict=True)):
        ids = tokens[0][slice(*ours)], tokens[1][slice(*theirs)]
        is_last = chunk == len(spans[0]) - 1
        if is_last and len(ids[0]) == len(ids[1]) == 1 and ids[0][0] in student.added and ids[1][0] in teacher.added:
            continue
        texts = b"".join(student(ids[0])), b"".join(teacher(ids[1]))
        if texts[0] != texts[1] and (chunk or texts[1] != b" " + texts[0]):
            return f"chunk {chunk} is {texts[0][:40]!r} in the student's tokens and {texts[1][:40]!r} in the teacher's"
    return ""
