"""An import keeps its tokenizer, so that a store that no job ran in shows text; the file is audited and copied."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mopd_dataplane import Store, create_store, open_store
from mopd_dataplane.base.file_checksums import write_checksums
from mopd_dataplane.errors import DamagedError, InputError
from mopd_dataplane.interchange.conversion import ImportSettings
from mopd_dataplane.interchange.importer import import_rollouts
from mopd_dataplane.interchange.vocabulary import TokenizerVocabulary
from mopd_dataplane.models.hf import tokenizer_digest
from mopd_dataplane.models.initial_weights import character_tokenizer
from mopd_dataplane.query.show import read_sample
from mopd_dataplane.store.maintain.copy_samples import copy_samples
from mopd_dataplane.store.read.decode import KEPT, find_decoder, keep_tokenizer


@pytest.fixture
def imported(tmp_path: Path) -> Store:
    tokenizer = character_tokenizer()
    rows = [{"input": f"{n} + 1 =", "output": f" it is {n + 1}", "score": 1.0, "step": 0} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    import_rollouts(
        str(tmp_path / "store"),
        tmp_path / "rows.jsonl",
        ImportSettings(format="verl", stage="student", domain="sums"),
        TokenizerVocabulary(tokenizer, tokenizer_digest(tokenizer)),
    )
    return open_store(str(tmp_path / "store"))


def test_imported_rollouts_are_text_to_query_and_show(imported: Store) -> None:
    texts = imported.sql("select response from responses order by response")["response"].to_pylist()
    assert texts == [f" it is {n}" for n in (1, 2, 3)]
    uid = imported.samples(["uid"])["uid"][0].as_py()
    assert "it is" in "".join(token.text for token in read_sample(imported, uid).tokens)
    assert [name.removesuffix(".json") for name in imported.location.children(KEPT)] == imported.sql(
        "select distinct tokenizer from samples"
    )["tokenizer"].to_pylist()


def test_a_copy_brings_the_tokenizer_along(imported: Store, tmp_path: Path) -> None:
    list(copy_samples(imported, str(tmp_path / "copy"), "domain = 'sums'"))
    ids = imported.read_tokens([0], columns=["tokens"])["tokens"].to_pylist()
    assert find_decoder(open_store(str(tmp_path / "copy"))).texts(ids) == find_decoder(imported).texts(ids)


def test_a_damaged_tokenizer_is_found(imported: Store) -> None:
    assert imported.verify().ok
    (name,) = imported.location.children(KEPT)
    file = imported.path(f"{KEPT}/{name}")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert [finding.table for finding in imported.verify().findings] == [f"{KEPT}/{name}"]


def test_text_is_shown_only_by_a_tokenizer_that_is_as_it_was_written(imported: Store) -> None:
    """A policy's tokenizer.json is read for text alone, so nothing else would notice."""
    folder = imported.path("policies/student/v1")
    folder.mkdir(parents=True)
    file = folder / "tokenizer.json"
    character_tokenizer().save_pretrained(folder)
    write_checksums(folder, identities=True)
    before = find_decoder(imported).texts([[5, 6, 7]])
    content = file.read_bytes()
    offset = content.index(json.dumps(before[0][0]).encode()[1:-1])
    file.write_bytes(content[:offset] + b"\xff" + content[offset + 1 :])
    with pytest.raises(DamagedError, match=r"policies/student/v1/tokenizer\.json has crc32c"):
        find_decoder(imported)
    (folder / "checksums.json").unlink()
    file.write_text("{}")
    with pytest.raises(InputError, match=r"not a tokenizer\.json"):
        find_decoder(imported)


def test_on_an_object_store_too(s3: str) -> None:
    store = create_store(s3)
    tokenizer = character_tokenizer()
    keep_tokenizer(store, "d", TokenizerVocabulary(tokenizer, "d").file())
    assert find_decoder(store).texts([tokenizer.encode("3 + 4")]) == ["<s>3 + 4"]
