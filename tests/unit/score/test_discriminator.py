"""The discriminator: what it learns, what it cannot learn, and that a saved version is all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mopd_dataplane.errors import DamagedError, EngineError
from mopd_dataplane.job import sections
from mopd_dataplane.job.sections import Student as StudentSettings
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.score.discriminator import OPTIMIZER, WEIGHTS, Discriminator, Pair

CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64,
    "initializer_range": 0.1,
}  # fmt: skip
SETTINGS = sections.Discriminator(learning_rate=3e-3, batch_pairs=16)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_student(StudentSettings(config=CONFIG), tmp_path_factory.mktemp("policy") / "p", seed=2)


def make_pairs(count: int, seed: int = 0) -> list[Pair]:
    """The teacher ends with an even token, the student with an odd one. Lengths differ."""
    rng = np.random.default_rng(seed)
    pairs = []
    for _ in range(count):
        prompt, right = rng.integers(10, 30, 4), 2 * rng.integers(5, 15)
        pairs.append(Pair(np.append(prompt, right), np.append(prompt, [right + 1] * int(rng.integers(1, 3)))))
    return pairs


def make(policy: Path, **changed: Any) -> Discriminator:
    return Discriminator(policy, SETTINGS.model_copy(update=changed), seed=5)


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in (WEIGHTS, OPTIMIZER)}


def test_it_learns_what_tells_the_teacher_apart_and_scores_answers_it_never_saw(policy: Path) -> None:
    critic = make(policy)
    first = critic.update(make_pairs(200), epochs=1)
    last = critic.update(make_pairs(200), epochs=14)
    assert last["accuracy"] > 0.95 > first["accuracy"]
    assert last["loss"] < 0.3 < first["loss"]
    fresh = make_pairs(60, seed=9)
    better = critic.scores([p.teacher for p in fresh]) > critic.scores([p.student for p in fresh])
    assert better.mean() > 0.85


def test_the_first_loss_is_that_of_bradley_terry(policy: Path) -> None:
    critic, pairs = make(policy), make_pairs(16)
    margin = critic.scores([p.teacher for p in pairs]) - critic.scores([p.student for p in pairs])
    expected_loss = float(np.log1p(np.exp(-margin.astype(np.float64))).mean())
    metrics = critic.update(pairs, epochs=1)
    assert metrics["loss"] == pytest.approx(expected_loss, abs=1e-6)
    assert metrics["accuracy"] == pytest.approx(float((margin > 0).mean()))


def test_equal_texts_teach_nothing(policy: Path, tmp_path: Path) -> None:
    """A student that writes what its teacher writes cannot be told apart: loss log 2, no gradient, no change."""
    critic = make(policy)
    pairs = [Pair(p.teacher, p.teacher) for p in make_pairs(32)]
    before = critic.scores([p.teacher for p in pairs])
    metrics = critic.update(pairs, epochs=2)
    assert metrics == {"loss": pytest.approx(np.log(2)), "accuracy": 0.5}
    np.testing.assert_array_equal(critic.scores([p.teacher for p in pairs]), before)


def test_a_score_depends_on_no_other_text(policy: Path) -> None:
    critic = make(policy)
    critic.update(make_pairs(64), epochs=3)
    texts = [text for pair in make_pairs(20) for text in (pair.teacher, pair.student)]
    together = critic.scores(texts)
    np.testing.assert_allclose(np.concatenate([critic.scores([text]) for text in texts]), together, atol=1e-5)


def test_a_version_on_disk_continues_bit_by_bit(policy: Path, tmp_path: Path) -> None:
    whole = make(policy)
    whole.update(make_pairs(40), epochs=2)
    whole.save(tmp_path / "v1")
    whole.update(make_pairs(40, seed=1), epochs=1)
    whole.save(tmp_path / "v2")

    again = make(policy)
    again.load(tmp_path / "v1")
    assert again.steps == 6
    again.update(make_pairs(40, seed=1), epochs=1)
    again.save(tmp_path / "again")
    assert files(tmp_path / "again") == files(tmp_path / "v2")
    assert files(tmp_path / "v1")[WEIGHTS] != files(tmp_path / "v2")[WEIGHTS]

    without = make(policy)
    without.load(tmp_path / "v1")
    without._optimizer.state.clear()
    without.update(make_pairs(40, seed=1), epochs=1)
    without.save(tmp_path / "without")
    assert files(tmp_path / "without")[WEIGHTS] != files(tmp_path / "v2")[WEIGHTS], "its optimizer's state counts"


def test_a_version_is_written_once_and_a_half_written_one_is_never_named(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mopd_dataplane.base import fault_points

    critic = make(policy)
    critic.update(make_pairs(16), epochs=1)

    def die(name: str) -> None:
        if name == "discriminator.written":
            raise KeyboardInterrupt

    monkeypatch.setattr(fault_points, "_observer", die)
    with pytest.raises(KeyboardInterrupt):
        critic.save(tmp_path / "v1")
    assert not (tmp_path / "v1").exists()
    monkeypatch.setattr(fault_points, "_observer", None)
    critic.save(tmp_path / "v1")
    before = files(tmp_path / "v1")
    critic.update(make_pairs(16), epochs=1)
    critic.save(tmp_path / "v1")
    assert files(tmp_path / "v1") == before
    assert load_file(tmp_path / "v1" / WEIGHTS)["head"].shape == (32,)


@pytest.mark.parametrize("damage", ["torn", "other", "gone"])
def test_a_version_that_is_not_one_is_damaged(policy: Path, tmp_path: Path, damage: str) -> None:
    critic = make(policy)
    critic.update(make_pairs(16), epochs=1)
    critic.save(tmp_path / "v1")
    file = tmp_path / "v1" / WEIGHTS
    if damage == "torn":
        file.write_bytes(file.read_bytes()[:-50])
    elif damage == "gone":
        file.unlink()
    else:
        (tmp_path / "v1" / WEIGHTS).write_bytes((tmp_path / "v1" / OPTIMIZER).read_bytes())
    with pytest.raises(DamagedError, match=r"discriminator\.safetensors .*; restore it from a copy"):
        make(policy).load(tmp_path / "v1")


def test_a_loss_that_is_not_finite_stops_it(policy: Path) -> None:
    critic = make(policy)
    with torch.no_grad():
        critic._critic.head[0] = torch.nan
    with pytest.raises(EngineError, match="loss is nan at update 0"):
        critic.update(make_pairs(16), epochs=1)
