"""Search in responses: a regular expression over decoded text, or a run of token ids. What matches is a condition of
the table of samples, like its filter.

Samples are read a batch at a time, so memory stays small. Expressions are RE2's: time is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mopd_dataplane.base.sql_text import literal
from mopd_dataplane.errors import InputError
from mopd_dataplane.query.text import one_line
from mopd_dataplane.store.format.lance_errors import reading
from mopd_dataplane.store.linked.references import is_own
from mopd_dataplane.store.read.row_reader import check_echo
from mopd_dataplane.store.read.token_scan import find_run, scan_tokens
from mopd_dataplane.view.matches import MOST_MATCHES, Matches
from mopd_dataplane.view.sample import pieces_of

if TYPE_CHECKING:
    import lance

    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.store.read.decode import Decoder, Numbers
    from mopd_dataplane.view.index import Index

BATCH_TOKENS = 4 << 20
"""Tokens read at a time."""
READ_AHEAD_BYTES = 64 << 20
SCAN_SHARE = 0.25
"""Share of the samples from which on all tokens are scanned."""
BEFORE, CONTEXT = 6, 24
"""Tokens of an excerpt before a match and from it on."""
NO_ROWS = np.empty(0, np.int64)


def parse_ids(text: str) -> list[int]:
    """Token ids of a search. Raises InputError.

    >>> parse_ids("12, 7 99")
    [12, 7, 99]
    """
    words = re.split(r"[\s,]+", text.strip(" ,[]"))
    if not all(re.fullmatch(r"\d{1,9}", word) for word in words):
        raise InputError(f"{text!r} is not a list of token ids, such as: 12 7 99")
    return [int(word) for word in words]


class Search:
    """One search over the samples that a filter leaves."""

    def __init__(
        self, store: Store, index: Index, decoder: Decoder | Numbers, *, kind: str, pattern: str, where: str = "",
        among: NDArray[np.int64] | None = None,
    ) -> None:  # fmt: skip
        """kind: text (RE2 over decoded responses) or tokens (ids); among: row ids of samples, none for all.

        Raises InputError, QueryError.
        """
        if kind not in ("text", "tokens"):
            raise InputError(f"search kind {kind!r}; kinds: text, tokens")
        if not pattern:
            raise InputError("nothing to search for")
        self._store, self._index, self._decoder = store, index, decoder
        self._run = parse_ids(pattern) if kind == "tokens" else None
        self._pattern = pattern
        if self._run is None:
            try:
                pc.match_substring_regex(pa.array([""]), pattern)
            except pa.ArrowInvalid as error:
                raise InputError(f"not a regular expression (RE2): {error}") from None
        clause = index.where_clause(where, among)
        columns = "sample_row, payload_row, prompt_len, total_len"
        # in one piece, because taking rows of a table in many copies all of it every time
        self._rows = index.arrow(f"select {columns} from rollouts{clause} order by payload_row").combine_chunks()
        self.total = self._rows.num_rows

    def progress(self) -> Iterator[dict[str, Any]]:
        """{"searched", "total", "hits"} after each batch; the last one has the `matches` too."""
        tokens = self._store.dataset("tokens", self._index.snapshot)
        pieces, hits, searched = [NO_ROWS], 0, 0
        for part, column, searched in self._parts(tokens):
            pieces.append(part["sample_row"].to_numpy()[self._owners(part, column)])
            hits += len(pieces[-1])
            yield {"searched": searched, "total": self.total, "hits": min(hits, MOST_MATCHES)}
            if hits > MOST_MATCHES:
                break
        matches = Matches(np.concatenate(pieces)[:MOST_MATCHES], hits > MOST_MATCHES, self._condition())
        yield {"searched": searched, "total": self.total, "hits": len(matches.sample_rows), "matches": matches}

    def run(self) -> Matches:
        """Search to the end."""
        *_, last = self.progress()
        matches: Matches = last["matches"]
        return matches

    def hits(self) -> dict[str, dict[str, Any]]:
        """By uid of each sample that matches: `position` of the first token, how many `times`, and `text` around it."""
        tokens = self._store.dataset("tokens", self._index.snapshot)
        return {hit.pop("uid"): hit for part, column, _ in self._parts(tokens) for hit in self._batch(part, column)}

    def _condition(self) -> str:
        if self._run is None:
            return f"uid in (select uid from responses where regexp_matches(response, {literal(self._pattern)}))"
        ids = literal(f" {' '.join(map(str, self._run))} ")
        response = "' ' || array_to_string(tokens[prompt_len + 1 :], ' ') || ' '"
        return f"uid in (select uid from tokens join samples using (uid) where contains({response}, {ids}))"

    def _part(self, rows: pa.Table) -> pa.Table:
        """Some of the samples with their uids."""
        return rows.append_column("uid", self._index.take(rows["sample_row"].to_numpy(), ["uid"])["uid"])

    def _parts(self, tokens: lance.LanceDataset) -> Iterator[tuple[pa.Table, pa.Array, int]]:
        """Some samples at a time with their tokens, and how many were looked at so far."""
        few = self.total < SCAN_SHARE * self._index.total or not is_own(self._rows["payload_row"]).all()
        if self._run is not None and self.total and not few:
            samples = self._store.dataset("samples", self._index.snapshot)
            rows, payload_rows, prompts = (
                self._rows[name].to_numpy() for name in ("sample_row", "payload_row", "prompt_len")
            )
            if (scan := scan_tokens(samples, tokens, rows, payload_rows, prompts, self._run)) is not None:
                yield from self._read(scan)
                return
        searched = 0
        for part, column in self._chosen() if few else self._scanned(tokens):
            searched += part.num_rows
            yield part, column, searched

    def _read(self, scan: Iterator[tuple[NDArray[np.int64], int]]) -> Iterator[tuple[pa.Table, pa.Array, int]]:
        """Samples of a scan with their tokens."""
        last = -1
        for places, searched in scan:
            some = places[places != last]  # one that two stretches share is named by both
            last = int(places[-1]) if len(places) else last
            part = self._part(self._rows.take(pa.array(some, pa.int64())))
            if not len(some):
                yield part, pa.array([], pa.list_(pa.int32())), searched
                continue
            read = self._store.read_tokens(part["sample_row"].to_numpy(), ["tokens"], self._index.snapshot)
            yield part, read["tokens"].combine_chunks(), searched

    def _chosen(self) -> Iterator[tuple[pa.Table, pa.Array]]:
        """Some samples at a time with their tokens, each looked up."""
        ends = np.cumsum(self._rows["total_len"].to_numpy().astype(np.int64))
        start = 0
        while start < self.total:
            past = (ends[start - 1] if start else 0) + BATCH_TOKENS
            stop = max(start + 1, int(np.searchsorted(ends, past, "right")))
            part = self._part(self._rows.slice(start, stop - start))
            read = self._store.read_tokens(part["sample_row"].to_numpy(), ["tokens"], self._index.snapshot)
            yield part, read["tokens"].combine_chunks()
            start = stop

    def _scanned(self, tokens: lance.LanceDataset) -> Iterator[tuple[pa.Table, pa.Array]]:
        """Samples with their tokens from one pass over all tokens: a tenth of looking up each. Raises DamagedError."""
        payload_rows = self._rows["payload_row"].to_numpy()
        mean = max(1, int(pc.mean(self._rows["total_len"]).as_py() or 1))
        scan = tokens.scanner(columns=["uid", "tokens"], with_row_id=True, batch_size=max(1, BATCH_TOKENS // mean),
                              batch_readahead=2, fragment_readahead=2, io_buffer_size=READ_AHEAD_BYTES)  # fmt: skip
        with reading(tokens.uri):
            for batch in scan.to_batches():
                ids = batch["_rowid"].to_numpy().astype(np.int64)
                places = np.minimum(np.searchsorted(payload_rows, ids), self.total - 1)
                matches = np.flatnonzero(payload_rows[places] == ids)
                if not len(matches):
                    continue
                first, last = int(places[matches[0]]), int(places[matches[-1]])
                part = self._rows.slice(first, last + 1 - first)
                if part.num_rows != len(matches):
                    part = self._rows.take(pa.array(places[matches]))
                part = self._part(part)
                column = batch
                if len(matches) < batch.num_rows:
                    column = batch.take(pa.array(matches))
                if not pc.all(pc.equal(part["uid"], column["uid"])).as_py():
                    check_echo("tokens", part, column)
                yield part, column["tokens"]

    def _owners(self, part: pa.Table, column: pa.Array) -> NDArray[np.intp]:
        """Places in a part of the samples that match."""
        if self._run is not None:
            return np.unique(self._token_places(part, column)[1])
        texts = pa.array(self._decoder.texts(_responses(part, column)), pa.string())
        return np.flatnonzero(np.asarray(pc.match_substring_regex(texts, self._pattern)))

    def _token_places(self, part: pa.Table, column: pa.Array) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Where the ids begin inside responses, counted over all tokens of the part, and the sample of each."""
        assert self._run is not None
        offsets, prompts = column.offsets.to_numpy(), part["prompt_len"].to_numpy()
        places = find_run(column.values.to_numpy()[: offsets[-1]], self._run)
        owners = np.searchsorted(offsets, places, side="right") - 1
        inside = (places - offsets[owners] >= prompts[owners]) & (places + len(self._run) <= offsets[owners + 1])
        return places[inside], owners[inside]

    def _batch(self, part: pa.Table, column: pa.Array) -> Iterator[dict[str, Any]]:
        responses = _responses(part, column)
        if self._run is not None:
            places, owners = self._token_places(part, column)
            starts = column.offsets.to_numpy()[:-1] + part["prompt_len"].to_numpy()
            owner_rows, first, counts = np.unique(owners, return_index=True, return_counts=True)
            for owner, at, times in zip(owner_rows.tolist(), first.tolist(), counts.tolist(), strict=True):
                yield self._hit(part, owner, responses[owner], int(places[at] - starts[owner]), times)
            return
        texts = pa.array(self._decoder.texts(responses), pa.string())
        matched = np.flatnonzero(np.asarray(pc.match_substring_regex(texts, self._pattern)))
        if not len(matched):
            return
        matches = texts.take(pa.array(matched))
        counts = pc.count_substring_regex(matches, self._pattern).to_pylist()
        offsets = pc.find_substring_regex(matches, self._pattern).to_pylist()
        for owner, times, start, text in zip(matched.tolist(), counts, offsets, matches.to_pylist(), strict=True):
            characters = len(text.encode()[:start].decode(errors="ignore"))
            yield self._hit(part, owner, responses[owner], self._position(responses[owner], characters), times)

    def _position(self, response: NDArray[np.int32], characters: int) -> int:
        """Token in which the character lies."""
        ends = np.cumsum([len(piece) for piece in self._decoder.pieces(response.tolist())])
        return min(int(np.searchsorted(ends, characters, side="right")), max(0, len(response) - 1))

    def _hit(self, part: pa.Table, owner: int, response: Any, position: int, times: int) -> dict[str, Any]:
        low, high = max(0, position - BEFORE), position + CONTEXT
        text = one_line("".join(pieces_of(self._decoder, response[low:high])), limit=160)
        cut = "…" if low else ""
        return {"uid": part["uid"][owner].as_py(), "position": position, "times": times, "text": cut + text}


def _responses(part: pa.Table, column: pa.Array) -> list[Any]:
    """Response tokens of each sample of a part."""
    offsets, prompts = column.offsets.to_numpy(), part["prompt_len"].to_numpy()
    flat = column.values.to_numpy()[: offsets[-1]]
    return [flat[offsets[i] + prompts[i] : offsets[i + 1]] for i in range(part.num_rows)]
