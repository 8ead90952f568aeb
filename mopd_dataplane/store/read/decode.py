"""Token ids as text, by the tokenizer.json of a policy of the store or of an import; without one, as numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd_dataplane.base.file_checksums import CHECKSUMS, read_recorded
from mopd_dataplane.errors import InputError, UnknownNameError
from mopd_dataplane.models.token_bytes import TokenBytes

if TYPE_CHECKING:
    from mopd_dataplane.store.location import StoreLocation
    from mopd_dataplane.store.open_store import OpenStore

KEPT = "tokenizers"
"""Folder of the tokenizers of imports, and of teachers with one of their own: one sealed JSON file each, by digest."""
_OF_TEACHER = "of_teacher"
"""Key of the file of a teacher's tokenizer, with which no sample is shown."""


class Decoder:
    """Converts token ids to text, one piece per token."""

    def __init__(self, text: str) -> None:
        """Load a tokenizer. text: content of a tokenizer.json. Raises InputError when it is invalid."""
        from tokenizers import Tokenizer

        try:
            self._tokenizer: Any = Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise InputError(f"not a tokenizer.json ({error!s:.120}): {text[:60]!r}…; give another one") from None

    def token_bytes(self) -> TokenBytes:
        """Return the bytes of its tokens. Raises MismatchError for a tokenizer whose tokens have none."""
        return TokenBytes(self._tokenizer)

    def plain_texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each row of token ids, without special tokens."""
        return list(self._tokenizer.decode_batch([list(row) for row in rows], skip_special_tokens=True))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds. A token that ends inside a character adds nothing; the next one adds
        it."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        pieces = [stream.step(self._tokenizer, int(token)) or "" for token in ids]
        tail = self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)
        if ids and len(tail) > sum(map(len, pieces)):  # the sequence ends inside a character
            pieces[-1] += tail[sum(map(len, pieces)) :]
        return pieces

    def texts(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Return the whole text of each sequence, many at a time."""
        return list(self._tokenizer.decode_batch([list(map(int, ids)) for ids in sequences], skip_special_tokens=False))


class Numbers:
    """Decoder of a store without a tokenizer: every token is shown as its id."""

    def plain_texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return ids in angle brackets, joined."""
        return ["".join(self.pieces(row)) for row in rows]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return ids in angle brackets."""
        return [f"⟨{int(token)}⟩" for token in ids]

    texts = plain_texts


def find_decoder(store: OpenStore, folder: Path | None = None) -> Decoder | Numbers:
    """Return the decoder of a folder, else of the first policy in the store with a tokenizer, else of an import.

    Raises UnknownNameError when `folder` has no tokenizer.json.
    """
    if folder is not None and not (folder / "tokenizer.json").is_file():
        raise UnknownNameError(f"no tokenizer.json in {folder}; give a folder of a Hugging Face tokenizer")
    if folder is not None:
        return Decoder((folder / "tokenizer.json").read_text(errors="replace"))
    content = next(tokenizers_of_samples(store.location), "")
    return Decoder(content) if content else Numbers()


def find_teacher_decoder(store: OpenStore, digest: str) -> Decoder | Numbers:
    """Return the decoder of a teacher with its own tokenizer. digest: `teachers.tokenizer_digest`."""
    content = read_tokenizer(store.location, digest)
    return Decoder(content) if content else Numbers()


def keep_tokenizer(store: OpenStore, digest: str, content: dict[str, Any] | None, *, of_teacher: bool = False) -> None:
    """Store the tokenizer.json of samples that came without a policy, or of a teacher with one of its own.

    digest: that of `samples.tokenizer`, or of `teachers.tokenizer_digest`.
    """
    name = f"{KEPT}/{digest}.json"
    if content is not None and not store.location.has(name):
        store.write_json(name, {"tokenizer": content} | ({_OF_TEACHER: True} if of_teacher else {}))


def read_tokenizer(location: StoreLocation, digest: str) -> str:
    """Return the content of a tokenizer.json that keep_tokenizer stored; empty if there is none."""
    record = location.read_json(f"{KEPT}/{digest}.json")
    return "" if record is None else json.dumps(record["tokenizer"])


def tokenizers_of_samples(location: StoreLocation) -> Iterator[str]:
    """Yield contents of tokenizer.json: of the store's policies, of imports, of the folder its job started from."""
    if location.root is not None:
        yield from map(_of_policy, sorted((location.root / "policies").glob("**/tokenizer.json")))
    elif location.files is not None:
        for name in location.files.under("policies"):
            if name.endswith("/tokenizer.json") and (content := location.files.read(name)):
                yield content.decode()
    for name in location.children(KEPT):
        record = location.read_json(f"{KEPT}/{name}")
        if record is not None and not record.get(_OF_TEACHER):
            yield json.dumps(record["tokenizer"])
    start = ((location.read_json("job.json") or {}).get("student") or {}).get("path", "")
    if start and (file := Path(start) / "tokenizer.json").is_file():
        yield file.read_text(errors="replace")


def _of_policy(file: Path) -> str:
    """Read the tokenizer.json of a policy folder. Raises DamagedError when it has changed."""
    recorded = (file.parent / CHECKSUMS).is_file()
    return (read_recorded(file.parent, file.name) if recorded else file.read_bytes()).decode(errors="replace")
