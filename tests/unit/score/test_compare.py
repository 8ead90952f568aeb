"""Teachers on the same answers: each figure where it is known by construction."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from mopd_dataplane.job.sections import Student
from mopd_dataplane.models import hf
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.score.readers import HfReader, Scorable, TeacherForward
from mopd_dataplane.score.scorer import model_input
from mopd_dataplane.score.teacher_comparison import Answer, auroc, calibration_error, compare

CONFIG = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128,
    "initializer_range": 0.2,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_student(Student(config=CONFIG), tmp_path_factory.mktemp("student") / "policy", seed=0)


@pytest.fixture
def student(folder: Path) -> TeacherForward:
    return TeacherForward((HfReader(hf.load_model(folder)),))


def answers(count: int = 24, *, shift: int = 0) -> list[Answer]:
    """Answers of mixed lengths behind prompts; those with an even number are right. shift: longer teacher prompts."""
    rng = np.random.default_rng(0)
    answer_list = []
    for number in range(count):
        length = int(rng.integers(2, 9))
        tokens = rng.integers(4, 90, 5 + length)
        before = rng.integers(4, 90, shift)
        mask = (rng.random(length) < 0.8).astype(np.uint8)
        mask[0] |= not mask.any()
        answer_list.append(answer(tokens, mask, 1.0 - number % 2, told=[*before, *tokens[:5]]))
    return answer_list


def answer(tokens: NDArray[np.int64], mask: NDArray[np.uint8], reward: float, *, told: list[int]) -> Answer:
    """A response behind a prompt of 5 tokens, and behind the teacher's."""
    sample = Scorable(
        uid="0", sample_row=0, prompt_id="p", prompt_len=5, tokens=tokens.astype(np.int32), loss_mask=mask
    )
    return Answer(student=model_input(sample, None), teacher=model_input(sample, lambda _: told), reward=reward)


def logprobs(model: PreTrainedModel, answer: Answer) -> torch.Tensor:
    """[M, V] from one plain forward pass."""
    with torch.no_grad():
        logits = model(torch.from_numpy(answer.teacher.tokens)[None]).logits[0]
    return logits[torch.from_numpy(answer.teacher.loss_positions) - 1].log_softmax(-1)


def test_the_student_itself_has_nothing_to_teach(student: TeacherForward) -> None:
    comparison = compare(student, student, answers(), k=8)
    assert comparison.answers == 24
    assert comparison.tokens == sum(len(answer.student.loss_positions) for answer in answers())
    assert comparison.reverse_kl == pytest.approx(0, abs=1e-5)
    assert (comparison.overlap, comparison.top1_agreement) == (1.0, 1.0)
    assert compare(student, student, answers(2), k=10**6).overlap == 1.0, "more than the vocabulary"


def test_figures_are_those_of_the_teachers_own_logits(student: TeacherForward, folder: Path) -> None:
    model = hf.load_model(folder)
    with torch.no_grad():
        hf.head_weight(model).add_(0.05 * torch.randn_like(hf.head_weight(model)))
    teacher = TeacherForward((HfReader(model),))
    shifted_answers = answers(shift=3)
    comparison = compare(student, teacher, shifted_answers, k=8, batch=7)
    teacher_logprobs = [logprobs(model, answer) for answer in shifted_answers]
    written = [torch.from_numpy(answer.student.tokens[answer.student.loss_positions]) for answer in shifted_answers]
    support = [rows.gather(1, ids[:, None])[:, 0] for rows, ids in zip(teacher_logprobs, written, strict=True)]
    assert comparison.mean_logprob == pytest.approx(float(torch.cat(support).mean()), abs=1e-5)
    entropy = torch.cat([-(rows.exp() * rows).sum(1) for rows in teacher_logprobs])
    assert comparison.entropy == pytest.approx(float(entropy.mean()), abs=1e-5)
    means = np.array([float(values.mean()) for values in support])
    assert comparison.discrimination == pytest.approx(
        auroc(means, np.array([answer.reward >= 1 for answer in shifted_answers]))
    )
    assert 0 < comparison.overlap < 1


def test_a_teacher_that_prefers_right_answers_pushes_with_the_verifier(student: TeacherForward, folder: Path) -> None:
    """Right answers end in token 7, wrong ones in 8; one teacher raises 7 and lowers 8, the other does the opposite."""

    def leaning(sign: float) -> TeacherForward:
        model = hf.load_model(folder)
        weight = hf.head_weight(model)
        with torch.no_grad():
            direction = weight[7] - weight[8]
            weight[7] += sign * direction
            weight[8] -= sign * direction
        return TeacherForward((HfReader(model),))

    one_token_answers = []
    for number, each in enumerate(answers()):
        tokens = each.student.tokens.copy()
        tokens[-1] = 8 if number % 2 else 7
        mask = np.zeros(len(tokens) - 5, np.uint8)
        mask[-1] = 1
        one_token_answers.append(answer(tokens, mask, each.reward, told=tokens[:5].tolist()))
    with_it, against_it = (
        compare(student, leaning(sign), one_token_answers, k=4).gradient_agreement for sign in (0.5, -0.5)
    )
    assert with_it > 0.1
    assert against_it < with_it


def test_calibration_error_is_the_gap_between_confidence_and_hits() -> None:
    sure = torch.tensor([0.95, 0.95, 0.95, 0.95, 0.15, 0.15])
    hit = torch.tensor([True, True, True, False, False, False])
    assert calibration_error(sure, hit) == pytest.approx((4 * 0.2 + 2 * 0.15) / 6, abs=1e-6)
    assert np.isnan(calibration_error(torch.zeros(0), torch.zeros(0)))
    assert np.isnan(auroc(np.array([1.0]), np.array([True])))
