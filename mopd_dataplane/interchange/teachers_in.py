"""Teachers whose signals are imported: one identity for each name, and the LM heads and tokenizers beside the files."""

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from mopd_dataplane.base.file_urls import PathOrUrl, exists, joined, local_copy, read_file
from mopd_dataplane.base.files import file_digest, publish_file
from mopd_dataplane.errors import EngineError, InputError, MismatchError
from mopd_dataplane.fields import ALIGNMENT
from mopd_dataplane.interchange.signal_entries import TeacherSignal
from mopd_dataplane.records import Teacher
from mopd_dataplane.store.commit.signals import check_signal
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.read.decode import Decoder, keep_tokenizer, read_tokenizer

HEADS = ".heads"
"""Suffix of the folder of heads beside an exported file."""
TOKENIZERS = ".tokenizers"
"""Suffix of the folder of tokenizers beside an exported file."""
_OF_OTHER_TOKENIZER = ("logprob", "topk", ALIGNMENT)
"""Kinds of signals of a teacher with another tokenizer than its samples."""


def head_beside(location: PathOrUrl, teacher: str) -> str:
    """Path of a teacher's LM head beside an exported file or folder."""
    return joined(f"{str(location).rstrip('/')}{HEADS}", f"{teacher}.safetensors")


def tokenizer_beside(location: PathOrUrl, digest: str) -> str:
    """Path of the tokenizer.json of a teacher with its own tokenizer beside an exported file or folder."""
    return joined(f"{str(location).rstrip('/')}{TOKENIZERS}", f"{digest}.json")


class Teachers:
    """The teachers named in the rows of an import."""

    def __init__(self, store: Store | None, places: Sequence[str], vocabulary: tuple[str, int]) -> None:
        """Prepare an import. store: its target, if it exists. places: files beside which heads and tokenizers may be.

        vocabulary: digest and size of the tokenizer that the samples are imported with.
        """
        self._store = store
        self._stored = store.teachers() if store is not None else {}
        self._places = places
        self._digest, self._size = vocabulary
        self._new: dict[str, Teacher] = {}
        self._heads: dict[str, str] = {}
        self._tokenizers: dict[str, str] = {}
        """Digest → file of the tokenizers that the store lacks."""

    def check(
        self,
        said: TeacherSignal,
        location: str,
        response_len: int,
        loss_tokens: int,
        *,
        aligned: Collection[str] = (),
    ) -> None:
        """Check a signal against its sample, the tokenizer, and what is recorded of its teacher. Raises InputError with
        the location if it does not fit.

        aligned: teachers whose own tokens of this sample come with it; only they may have another tokenizer.
        """
        teacher, signal = said.teacher, said.signal
        has_own = teacher.name in aligned and signal.kind in _OF_OTHER_TOKENIZER
        if teacher.tokenizer_digest != self._digest and not has_own:
            raise InputError(
                f"{location}: teacher {teacher.name!r} reads a tokenizer with digest {teacher.tokenizer_digest!r:.40}, "
                f"and --tokenizer names one with digest {self._digest}; give the tokenizer that made the ids, or for a "
                f"teacher with another tokenizer export its {ALIGNMENT!r} signals too"
            )
        if signal.kind == ALIGNMENT:
            self._find_tokenizer(teacher, location)
        self._check_identity(teacher, location, needs_head=signal.kind == "hidden")
        try:
            check_signal(signal, signal.kind, response_len, loss_tokens)
        except (MismatchError, EngineError) as error:
            raise InputError(f"{location}: {error}") from None
        if signal.topk_ids is not None and signal.topk_ids.max(initial=0) >= self._size:
            raise InputError(
                f"{location}: topk_ids holds token id {signal.topk_ids.max()}, and the ids of the tokenizer end at "
                f"{self._size - 1}"
            )

    def bring(self, store: Store) -> None:
        """Write the heads, tokenizers and teachers to the store."""
        for digest, tokenizer_file in self._tokenizers.items():
            keep_tokenizer(store, digest, json.loads(read_file(tokenizer_file)), of_teacher=True)
        for name, teacher in self._new.items():
            if name in self._heads:
                target = f"heads/{name}.safetensors"
                with local_copy(self._heads[name]) as file:
                    _put_file(store, target, file)
                teacher = replace(teacher, head_file=target)
            else:
                teacher = replace(teacher, head_digest="")
            store.add_teacher(teacher)

    def _check_identity(self, teacher: Teacher, location: str, *, needs_head: bool) -> None:
        earlier = self._stored.get(teacher.name) or self._new.get(teacher.name)
        if earlier is not None and earlier.weights_digest != teacher.weights_digest:
            raise InputError(
                f"{location}: teacher {teacher.name!r} has weights with digest {teacher.weights_digest!r:.20}, but a "
                f"teacher of the same name in the store or in an earlier row has {earlier.weights_digest!r:.20}; "
                "rename one of them"
            )
        if teacher.name not in self._stored:
            self._new.setdefault(teacher.name, teacher)
            if needs_head and teacher.name not in self._heads:
                self._heads[teacher.name] = self._head(teacher, location)
        elif needs_head and not self._stored[teacher.name].head_file:
            raise InputError(
                f"{location}: teacher {teacher.name!r} is in the store without its LM head, which its hidden states "
                "need; import into another store, or export without hidden states"
            )

    def _find_tokenizer(self, teacher: Teacher, location: str) -> None:
        digest = teacher.tokenizer_digest
        if digest in self._tokenizers or (self._store and read_tokenizer(self._store.location, digest)):
            return
        files = [tokenizer_beside(beside, digest) for beside in self._places]
        file = next((file for file in files if exists(file)), None)
        if file is None:
            raise InputError(
                f"{location}: the tokens of teacher {teacher.name!r} are read with its own tokenizer, and "
                f"{files[-1] if files else digest} is missing; keep the folder that was exported beside the file"
            )
        try:
            Decoder(read_file(file).decode(errors="replace"))
        except InputError as error:
            raise InputError(f"{file}: {error}") from None
        self._tokenizers[digest] = file

    def _head(self, teacher: Teacher, location: str) -> str:
        files = [head_beside(beside, teacher.name) for beside in self._places]
        for head in files:
            if exists(head):
                with local_copy(head) as file:
                    digest = file_digest(file)
                if digest != teacher.head_digest:
                    raise InputError(
                        f"{head} has sha256 {digest[:16]}…, but the rows of {location} name "
                        f"{teacher.head_digest[:16]}…; export again"
                    )
                return head
        raise InputError(
            f"{location}: hidden states of teacher {teacher.name!r} are read with its LM head, and {files[-1]} is "
            "missing; keep the folder that was exported beside the file"
        )


def _put_file(store: Store, name: str, file: Path) -> None:
    if store.files is not None:
        store.files.upload(name, file)
    else:
        publish_file(store.path(name), file.read_bytes())
