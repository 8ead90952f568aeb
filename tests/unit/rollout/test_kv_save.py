"""Keys and values saved at a graceful stop: the resume is exact, and nothing that does not fit is believed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoding import Preempted

from mopd_dataplane.job import sections
from mopd_dataplane.records import Sample
from mopd_dataplane.rollout.engines.hf import HfEngine
from mopd_dataplane.rollout.runner import SAVED, RolloutReport

Roll = Callable[..., RolloutReport]
COUNT = 40

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def rolled(roll: Roll, tiny_model: Path, tmp_path: Path) -> Callable[..., Any]:
    """rolled(shelf, name, at=…): a rollout of the tiny model, stopped at a step, or run to its end."""

    def rolling(shelf: Any, name: str, *, at: int = 0, kv_bytes: int = 1 << 30) -> RolloutReport | None:
        engine = Preempted(tiny_model, at=at, slots=16)
        settings: dict[str, Any] = {
            "engine": engine, "count": COUNT, "home": tmp_path / name, "wal": sections.Wal(kv_bytes=kv_bytes),
            "render": lambda prompt: engine.tokenizer.encode(prompt.text),
        }  # fmt: skip
        if not at:
            return roll(shelf, **settings)
        with pytest.raises(KeyboardInterrupt):
            roll(shelf, **settings)
        return None

    return rolling


@pytest.fixture
def cache_file(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: tmp_path / name / "student" / "engine-0" / SAVED


def bits(samples: dict[str, Sample]) -> dict[str, tuple[bytes, bytes]]:
    return {uid: (s.tokens.tobytes(), s.logprobs.tobytes()) for uid, s in samples.items() if s.logprobs is not None}


def new_shelf(shelf: Any) -> Any:
    return type(shelf)()


def test_a_saved_resume_gives_every_bit_of_the_uninterrupted_run(rolled: Any, shelf: Any, cache_file: Any) -> None:
    """Three graceful stops. Without the file they cost log-prob bits, and only then is a sample statistical."""
    whole, prefilled = new_shelf(shelf), new_shelf(shelf)
    rolled(whole, "whole")
    for store, name, kv_bytes in ((shelf, "saved", 1 << 30), (prefilled, "prefilled", 0)):
        reports = []
        for at in (9, 14, 25, 0):
            reports.append(rolled(store, name, at=at, kv_bytes=kv_bytes))
            assert cache_file(name).exists() == (at > 0 and kv_bytes > 0)
    assert bits(shelf.samples) == bits(whole.samples)
    interrupted = [sample for sample in shelf.samples.values() if sample.interruptions]
    assert len(interrupted) >= 16
    assert {sample.resume for sample in interrupted} == {"exact"}

    statistical = [sample for sample in prefilled.samples.values() if sample.resume == "statistical"]
    assert statistical, "prefill and decode round differently here: else this test compares nothing"
    assert bits(prefilled.samples) != bits(whole.samples)
    assert {uid: tokens for uid, (tokens, _) in bits(prefilled.samples).items()} == {
        uid: tokens for uid, (tokens, _) in bits(whole.samples).items()
    }


def damage_one_value(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 16
    file.write_bytes(content)


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def other_metadata(old: str, new: str) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        from safetensors import safe_open
        from safetensors.torch import save_file

        from mopd_dataplane.rollout.engines import kv_file

        with safe_open(file, framework="pt") as content:
            about = content.metadata()["about"]
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        assert old in about
        about = about.replace(old, new)
        save_file(tensors, file, {"about": about, "crc32c": kv_file._crc(tensors, about)})

    return change


@pytest.mark.parametrize(
    "spoil",
    [
        damage_one_value,
        cut_off,
        lambda file: file.write_bytes(b""),
        other_metadata('"weights": "', '"weights": "0'),
        other_metadata('"tokenizer": "', '"tokenizer": "0'),
        other_metadata('"build": "torch', '"build": "other'),
        other_metadata("threads", "cores"),
        other_metadata('"rows": ["', '"rows": ["0'),
    ],
    ids=["one bit", "cut off", "empty", "weights", "tokenizer", "build", "device", "samples"],
)
def test_a_file_that_does_not_fit_is_deleted_and_the_log_goes_on(
    rolled: Any, shelf: Any, cache_file: Any, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    rolled(shelf, "log", at=6)
    spoil(cache_file("log"))
    (cache_file("log").parent / "kv.tmp").write_bytes(b"half a save")
    report = rolled(shelf, "log")
    assert report.resumed > 10
    assert report.restored == 0
    assert len(shelf.samples) == COUNT
    assert not list(cache_file("log").parent.glob("kv.*"))


def test_a_file_of_an_earlier_moment_is_not_believed(rolled: Any, shelf: Any, cache_file: Any, tmp_path: Path) -> None:
    """The log has gone on since: the same samples, more tokens."""
    rolled(shelf, "log", at=6)
    shutil.copy(cache_file("log"), tmp_path / "old")
    rolled(shelf, "log", at=3)
    shutil.copy(tmp_path / "old", cache_file("log"))
    assert rolled(shelf, "log").restored == 0


def test_a_cache_over_the_limit_is_not_saved(rolled: Any, shelf: Any, cache_file: Any) -> None:
    rolled(shelf, "log", at=6, kv_bytes=10_000)
    assert not list(cache_file("log").parent.glob("kv.*"))
    assert rolled(shelf, "log").restored == 0


def test_a_disk_that_does_not_take_the_file_costs_only_the_file(
    rolled: Any, shelf: Any, cache_file: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError

    from mopd_dataplane.rollout.engines import kv_file

    def full(tensors: Any, file: Path, metadata: Any) -> None:
        file.write_bytes(b"part")
        raise SafetensorError("No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr(kv_file, "save_file", full)
        rolled(shelf, "log", at=6)
    assert not list(cache_file("log").parent.glob("kv.*"))
    assert rolled(shelf, "log").resumed > 10


def test_only_the_owner_may_read_the_file(rolled: Any, shelf: Any, cache_file: Any) -> None:
    rolled(shelf, "log", at=6)
    assert cache_file("log").stat().st_mode & 0o077 == 0


def test_rows_of_different_lengths_go_through_the_file(tiny_model: Path, tmp_path: Path) -> None:
    """Engine to engine: the next tokens and their log-prob bits are those of the engine that went on."""
    from mopd_dataplane.rollout.engines.engine import Request
    from mopd_dataplane.rollout.engines.sampling import sample_key

    first, second = HfEngine(tiny_model, slots=8), HfEngine(tiny_model, slots=5)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(4, 90, length).astype(np.int32) for length in (1, 30, 7, 64, 2)]
    requests = {
        slot: Request(uid=str(slot), prompt_ids=prompt, key=sample_key(str(slot)), max_new_tokens=99)
        for slot, prompt in zip((6, 1, 4, 0, 3), prompts, strict=True)
    }
    first.admit(list(requests.items()))
    grown: dict[int, list[int]] = {slot: [] for slot in requests}
    for _ in range(11):
        output = first.step()
        for slot, token in zip(output.slots.tolist(), output.token_ids.tolist(), strict=True):
            grown[slot].append(token)
    from dataclasses import replace

    now = {slot: replace(r, prefix_ids=np.array(grown[slot], np.int32)) for slot, r in requests.items()}
    live = [(slot, now[slot]) for slot in output.slots[output.finished == 0].tolist()]
    assert first.save(tmp_path / "kv.safetensors", live, limit_bytes=1 << 30) > 0
    restored = second.restore(tmp_path / "kv.safetensors", list(now.values()))
    assert [gap for _, gap in restored] == [0.0] * len(live)
    for _ in range(20):
        ours, theirs = second.step(), first.step()
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.logprobs.tobytes() == theirs.logprobs.tobytes()
        assert [restored[slot][0] for slot in ours.slots] == [str(slot) for slot in theirs.slots]
        if theirs.finished.any():
            break
