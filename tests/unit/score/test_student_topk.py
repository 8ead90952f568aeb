"""A teacher asked about the student's likeliest tokens: whose ids, whose log-probs, at which position."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mopd_dataplane.errors import MismatchError, UnknownNameError
from mopd_dataplane.job import sections
from mopd_dataplane.job.sections import Student as StudentSettings
from mopd_dataplane.models import hf
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.score.readers import Scorable
from mopd_dataplane.score.scorer import score_samples
from mopd_dataplane.score.signal_kinds import StudentTopk
from mopd_dataplane.score.teacher_pool import TeacherPool, TeacherSpec

CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256,
    "initializer_range": 0.2,
}  # fmt: skip
K = 4
SETTINGS = sections.Score(batch_tokens=64, topk=K, topk_source="student")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two versions of a policy, and a teacher."""
    root = tmp_path_factory.mktemp("support")
    names = ("v0", "v1", "teacher")
    return {n: make_student(StudentSettings(config=CONFIG), root / n, seed=i) for i, n in enumerate(names)}


@pytest.fixture
def pool(folders: dict[str, Path]) -> TeacherPool:
    torch.set_num_threads(1)
    tokenizer = hf.load_tokenizer(folders["teacher"])
    spec = TeacherSpec(folders["teacher"], sections.Teacher(source="x"))
    return TeacherPool({"teacher": spec}, student_tokenizer=tokenizer)


def make_samples() -> list[Scorable]:
    """Samples of mixed lengths: by version 0, by version 1, and begun by 0 and finished by 1; some with tool tokens."""
    rng = np.random.default_rng(1)
    samples = []
    for number in range(6):
        prompt, response = int(rng.integers(2, 9)), int(rng.integers(4, 20))
        mask = np.ones(response, np.uint8)
        mask[1:3] = number % 2
        versions = np.repeat([[0, 0], [1, 1], [0, 1]][number % 3], [response // 2, response - response // 2])
        samples.append(
            Scorable(
                uid=f"{number:032x}", sample_row=number, prompt_id=f"p{number}", prompt_len=prompt, loss_mask=mask,
                tokens=rng.integers(4, 99, prompt + response).astype(np.int32), versions=versions.astype(np.int32),
            )
        )  # fmt: skip
    return samples


def distribution(folder: Path, prompt: NDArray[Any], response: NDArray[Any]) -> torch.Tensor:
    """[R, V] log-probs before each response token, from one plain forward pass."""
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
    with torch.no_grad():
        return hf.load_model(folder)(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("told", [False, True])
def test_ids_are_the_writers_and_log_probs_the_teachers(
    told: bool, pool: TeacherPool, folders: dict[str, Path]
) -> None:
    """The teacher may read another prompt; the policy always reads its own."""
    samples = make_samples()

    def privileged(sample: Scorable) -> NDArray[Any]:
        return np.concatenate([np.arange(20, 27), sample.tokens[: sample.prompt_len]])

    student = StudentTopk(lambda version: folders[f"v{version}"])
    render = privileged if told else None
    signals = score_samples(pool, "teacher", ("topk",), samples, SETTINGS, render_prompt=render, student=student)
    signal_by_uid = {signal.uid: signal for signal in signals}
    assert len(signal_by_uid) == len(samples)
    for sample in samples:
        signal = signal_by_uid[sample.uid]
        assert signal.topk_source == "student"
        prompt, response = np.split(sample.tokens, [sample.prompt_len])
        own = torch.stack([distribution(folders[f"v{version}"], prompt, response) for version in (0, 1)])
        own = own[torch.from_numpy(sample.versions.astype(np.int64)), torch.arange(len(response))]
        teacher = distribution(folders["teacher"], privileged(sample) if told else prompt, response)
        mask = torch.from_numpy(sample.loss_mask.astype(bool))
        best = own[mask].topk(K).indices
        np.testing.assert_array_equal(signal.topk_ids, best.numpy())
        np.testing.assert_allclose(signal.topk_logprobs, teacher[mask].gather(1, best).numpy(), atol=2e-5)


def test_a_support_wider_than_the_vocabulary_is_the_vocabulary(pool: TeacherPool, folders: dict[str, Path]) -> None:
    student = StudentTopk(lambda version: folders[f"v{version}"])
    wide = SETTINGS.model_copy(update={"topk": 10_000})
    (signal,) = score_samples(pool, "teacher", ("topk",), make_samples()[:1], wide, student=student)
    assert signal.topk_ids is not None
    assert signal.topk_logprobs is not None
    np.testing.assert_allclose(np.exp(signal.topk_logprobs).sum(1), 1.0, atol=1e-5)


def test_weights_that_are_gone_are_named(pool: TeacherPool, tmp_path: Path) -> None:
    student = StudentTopk(lambda version: tmp_path / f"v{version}")
    with pytest.raises(UnknownNameError, match="v0"):
        list(score_samples(pool, "teacher", ("topk",), make_samples()[:1], SETTINGS, student=student))


def test_a_support_without_a_student_is_refused(pool: TeacherPool) -> None:
    with pytest.raises(MismatchError, match="pass `student`"):
        list(score_samples(pool, "teacher", ("topk",), [replace(make_samples()[0])], SETTINGS))
