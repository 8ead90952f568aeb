"""The audit of alignments: a teacher's own tokens have the bytes of the student's, each byte once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mopd_dataplane.fields import ALIGNMENT, BY_NAME
from mopd_dataplane.models.token_chunks import chunk_problem, text_problem
from mopd_dataplane.store.format.row_ids import row_ids
from mopd_dataplane.store.linked.references import is_own
from mopd_dataplane.store.location import StoreLocation
from mopd_dataplane.store.maintain.verify_payload import CHUNK, Arrays, readable, signal_payload, token_payload
from mopd_dataplane.store.maintain.verify_report import Finding
from mopd_dataplane.store.read.decode import KEPT, Decoder, read_tokenizer, tokenizers_of_samples
from mopd_dataplane.store.read.row_reader import take_offsets
from mopd_dataplane.tables import signal_table

if TYPE_CHECKING:
    import lance

    from mopd_dataplane.models.token_bytes import TokenBytes


def audit_alignments(
    location: StoreLocation,
    opened: Mapping[str, lance.LanceDataset],
    teacher: str,
    scores: pa.Table,
    sound: NDArray[np.int64],
) -> Iterator[Finding]:
    """Check the alignments of a teacher to which some rows of `scores` point: their chunks, and the bytes of each.

    sound: indices of these rows. Rows with another checksum are left to the audit of payload. Bytes are compared if the
    store has the payload of the sample and a tokenizer of it.
    """
    name = signal_table(teacher, ALIGNMENT)
    payload = signal_payload(opened[name], ALIGNMENT)
    teachers = opened["teachers"].to_table(columns=["name", "tokenizer_digest"]).to_pylist()
    digest = next((row["tokenizer_digest"] for row in teachers if row["name"] == teacher), "")
    theirs = _token_bytes(read_tokenizer(location, digest))
    if theirs is None and len(sound):
        yield Finding(f"{KEPT}/{digest}.json", -1, "", f"the tokenizer of teacher {teacher!r} is missing")
    ours = cache(partial(_student_bytes, location))
    points, crcs = scores["payload_row"].to_numpy(), scores["payload_crc"].to_numpy()
    for start in range(0, len(sound), CHUNK):
        chunk = sound[start : start + CHUNK]
        responses = _responses(opened, scores["sample_row"].to_numpy()[chunk])
        alignments = readable(payload.arrays_at, points[chunk].tolist())
        for row, arrays, (tokenizer, response) in zip(chunk.tolist(), alignments, responses, strict=True):
            if isinstance(arrays, str) or payload.crc(arrays) != crcs[row]:
                continue
            student = ours(tokenizer) if theirs is not None and response is not None else None
            if problem := _problem(arrays, response, student, theirs):
                yield Finding(name, int(points[row]), scores["uid"][row].as_py(), problem)


def _problem(
    arrays: Arrays, response: NDArray[np.int32] | None, student: TokenBytes | None, teacher: TokenBytes | None
) -> str:
    student_ends, tokens, teacher_ends = (np.asarray(array) for array in arrays)  # no field may be null
    if problem := chunk_problem(student_ends, teacher_ends):
        return problem
    if student is None or teacher is None or response is None or len(response) != len(student_ends):
        return ""
    return text_problem(student, teacher, (response.tolist(), tokens.tolist()), (student_ends, teacher_ends))


def _responses(
    opened: Mapping[str, lance.LanceDataset], sample_rows: NDArray[np.int64]
) -> list[tuple[str, NDArray[np.int32] | None]]:
    """Return the tokenizer's digest and the response [R] of each sample; None for one that cannot be read here."""
    samples, offsets = opened["samples"], row_ids(opened["samples"]).find(sample_rows)
    responses: list[tuple[str, NDArray[np.int32] | None]] = [("", None)] * len(sample_rows)
    if "tokens" not in opened:
        return responses
    there = np.flatnonzero(offsets >= 0)
    metadata = take_offsets(samples, offsets[there], ["payload_row", "prompt_len", "tokenizer"])
    points = metadata["payload_row"].to_numpy()
    inside = np.flatnonzero(is_own(points))
    inside = inside[row_ids(opened["tokens"]).find(points[inside]) >= 0]
    payload = token_payload(opened["tokens"])
    index = payload.fields.index(BY_NAME["tokens"])
    for at, arrays in zip(inside.tolist(), readable(payload.arrays_at, points[inside].tolist()), strict=True):
        if not isinstance(arrays, str) and (tokens := arrays[index]) is not None:
            row = {name: metadata[name][at].as_py() for name in ("prompt_len", "tokenizer")}
            responses[there[at]] = row["tokenizer"], tokens[row["prompt_len"] :]
    return responses


def _student_bytes(location: StoreLocation, digest: str) -> TokenBytes | None:
    """Return the bytes of the tokens of a sample: by its import's tokenizer, else by that of the store's policies."""
    return _token_bytes(read_tokenizer(location, digest) or next(tokenizers_of_samples(location), ""))


def _token_bytes(content: str) -> TokenBytes | None:
    return Decoder(content).token_bytes() if content else None
