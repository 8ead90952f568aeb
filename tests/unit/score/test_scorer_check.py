"""The self-check of a teacher that another process runs, with the built-in scorer in its place."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoding import TINY

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job import sections
from mopd_dataplane.models import self_check
from mopd_dataplane.models.hf import load_tokenizer
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.models.self_check import texts_to_check
from mopd_dataplane.score import scorer_check
from mopd_dataplane.score.readers import Scorable
from mopd_dataplane.score.scorer import score_samples
from mopd_dataplane.score.scorer_check import check_scorer
from mopd_dataplane.score.teacher_pool import TeacherPool, TeacherSpec

TEXTS = texts_to_check([np.arange(length) % 40 + 5 for length in (6, 23, 11)], 120)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two versions of a random two-layer Qwen3."""
    home = tmp_path_factory.mktemp("models")
    first, second = (make_student(sections.Student(config=TINY), home / f"v{i}", seed=3 + i) for i in range(2))
    return first, second


def pool_of(folder: Path) -> TeacherPool:
    """A pool of one teacher."""
    spec = TeacherSpec(folder, sections.Teacher(source=str(folder)))
    return TeacherPool({"t": spec}, student_tokenizer=load_tokenizer(folder))


def test_the_folders_own_weights_pass(folders: tuple[Path, Path]) -> None:
    with closing(pool_of(folders[0])) as pool:
        passed = check_scorer(pool, "t", folders[0], TEXTS, sections.Score(), dtype="float32")
    assert passed.gap is not None
    assert passed.gap < 1e-5
    assert passed.band == 1e-3
    assert passed.tokens == 120


def test_other_weights_are_refused(folders: tuple[Path, Path]) -> None:
    with closing(pool_of(folders[1])) as pool, pytest.raises(MismatchError) as refused:
        check_scorer(pool, "t", folders[0], TEXTS, sections.Score(), dtype="float32")
    text = str(refused.value)
    assert "teacher 't' does not give the log-probs of" in text
    assert "first at position 1, and 0.001 is allowed in float32. Nothing was sampled" in text


def test_tokens_that_the_teacher_does_not_know_or_exchanges_are_not_read(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Scorable] = []
    monkeypatch.setattr(TeacherPool, "unknown_tokens", lambda pool, name: {7: "seven"})
    monkeypatch.setattr(TeacherPool, "exchanged_tokens", lambda pool, name: (0, 9))

    def scored(pool: TeacherPool, name: str, kinds: Sequence[str], samples: Sequence[Scorable], settings: Any) -> Any:
        read.extend(samples)
        return score_samples(pool, name, kinds, samples, settings)

    monkeypatch.setattr(scorer_check, "score_samples", scored)
    with closing(pool_of(folders[0])) as pool:
        passed = check_scorer(pool, "t", folders[0], TEXTS, sections.Score(), dtype="float32")
    assert passed.gap is not None
    assert passed.gap < 1e-5
    assert any({0, 7, 9} & set(text.tolist()) for text in TEXTS)
    assert not any({0, 7, 9} & set(sample.tokens.tolist()) for sample in read)


def test_without_a_text_nothing_is_compared(folders: tuple[Path, Path]) -> None:
    with closing(pool_of(folders[1])) as pool:
        passed = check_scorer(pool, "t", folders[0], [], sections.Score(), dtype="float32")
    assert (passed.gap, passed.tokens) == (None, 0)


def test_weights_that_do_not_fit_are_not_compared(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "available_memory", lambda: 1000)
    with closing(pool_of(folders[0])) as pool:
        passed = check_scorer(pool, "t", folders[0], TEXTS, sections.Score(), dtype="float32")
    assert passed.gap is None
    assert pool.loads == {}
