"""Sealed JSON and recorded folders: whatever bit of them changes, it is said; what nobody changed is read once."""

from __future__ import annotations

import contextlib
import json
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_dataplane.base import file_checksums
from mopd_dataplane.base.file_checksums import check_folder, find_damage, read_recorded, write_checksums
from mopd_dataplane.base.sealed_json import seal, seal_line, unseal
from mopd_dataplane.errors import DamagedError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3), max_leaves=6,
)  # fmt: skip
OBJECTS = st.dictionaries(st.text(max_size=8), VALUES, max_size=4).filter(lambda value: "crc32c" not in value)


@settings(deadline=None)
@given(OBJECTS)
def test_what_was_sealed_is_read_again(value: dict) -> None:
    assert unseal(seal(value), "f") == value
    assert unseal(seal_line(value), "f") == value


@settings(deadline=None)
@given(OBJECTS, st.data())
def test_a_flipped_bit_changes_nothing_that_is_read_or_is_damage(value: dict, data: st.DataObject) -> None:
    content = bytearray(seal(value))
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(DamagedError):
        assert unseal(bytes(content), "f") == value


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "not JSON"), (b"[]", "a list"), (b"null", "holds null"), (b"{}", "lacks its checksum"),
     (b"[" * 9999, "JSON"), (b'{"crc32c": 7}', "7 was recorded"), (b"\xff", "not JSON")],
)  # fmt: skip
def test_other_files_are_damage(content: bytes, said: str) -> None:
    with pytest.raises(DamagedError, match=said):
        unseal(content, "store.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recorded folder with a folder in it."""
    root = tmp_path / "v1"
    (root / "sub").mkdir(parents=True)
    (root / "model.safetensors").write_bytes(random.Random(0).randbytes(70_000))
    (root / "sub" / "config.json").write_text(json.dumps({"a": 1}))
    write_checksums(root, identities=True)
    return root


def test_any_bit_of_any_file_is_noticed(folder: Path) -> None:
    chance = random.Random(3)
    assert list(find_damage(folder)) == []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        for _ in range(40):
            before = path.read_bytes()
            content = bytearray(before)
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            path.write_bytes(content)
            named = [name for name, _ in find_damage(folder)]
            meant = path.name == "checksums.json" and json.loads(before) == _parsed(bytes(content))
            assert meant or named == [path.relative_to(folder).as_posix()]
            path.write_bytes(before)
    assert list(find_damage(folder)) == []


def _parsed(content: bytes) -> object:
    try:
        return json.loads(content)
    except ValueError:
        return None


def test_a_file_that_is_gone_shorter_or_new_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"short")
    (folder / "sub" / "config.json").unlink()
    (folder / "extra.bin").write_bytes(b"x")
    assert dict(find_damage(folder)) == {
        "model.safetensors": "has 5 bytes, but 70,000 were written",
        "sub/config.json": "cannot be read (No such file or directory)",
        "extra.bin": "was not there when checksums.json was written",
    }
    with pytest.raises(DamagedError, match=r"sub/config\.json"):
        check_folder(folder)


def test_a_folder_is_read_once_per_process_and_again_when_it_is_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = file_checksums.measure_file
    monkeypatch.setattr(file_checksums, "measure_file", lambda path, **how: read.append(path.name) or real(path, **how))
    assert check_folder(folder) == check_folder(str(folder))
    assert sorted(read) == ["config.json", "model.safetensors"]
    other = folder.with_name("other")
    os.rename(folder, other)
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"new")
    write_checksums(folder)
    (folder / "model.safetensors").write_bytes(b"now")
    with pytest.raises(DamagedError, match=r"model.safetensors has crc32c"):
        check_folder(folder)


def test_a_folder_without_a_record_is_not_checked(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"from elsewhere")
    assert check_folder(tmp_path) is None
    with pytest.raises(DamagedError, match=r"has no checksum in checksums\.json"):
        read_recorded(tmp_path, "model.safetensors")
