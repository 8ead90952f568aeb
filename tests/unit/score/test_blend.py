"""Several teachers blended into one: every stored signal is that of the weighted product of the teachers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mopd_kernels import Head, divergence
from safetensors import safe_open

from mopd_dataplane.errors import JobFileError, MismatchError
from mopd_dataplane.job import sections
from mopd_dataplane.job.load import check_job
from mopd_dataplane.job.sections import Student
from mopd_dataplane.models import hf
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.score.readers import Scorable, TeacherForward
from mopd_dataplane.score.scorer import score_samples
from mopd_dataplane.score.teacher_pool import TeacherPool, TeacherSpec

CONFIG = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128,
    "initializer_range": 0.2,
}  # fmt: skip
WEIGHTS = {"math": 0.7, "code": 0.3}
BEYOND = {"math": 1.5, "code": -0.5}
"""Past a teacher, away from a reference: ExOPD at lambda = 1.5."""
SETTINGS = sections.Score(hidden_codec="fp32", topk=4, max_resident=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("members")
    narrow = CONFIG | {"hidden_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
    capped = CONFIG | {"model_type": "gemma2", "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 32}
    configs = {"math": CONFIG, "code": narrow, "capped": capped}
    return {n: make_student(Student(config=c), root / n, seed=seed) for seed, (n, c) in enumerate(configs.items())}


def make_pool(folders: dict[str, Path], blend: dict[str, float], *, max_resident: int = 2) -> TeacherPool:
    specs = {name: TeacherSpec(folder, sections.Teacher(source=name)) for name, folder in folders.items()}
    specs["both"] = TeacherSpec(None, sections.Teacher(blend=blend))
    tokenizer = hf.load_tokenizer(folders["math"])
    return TeacherPool(specs, student_tokenizer=tokenizer, max_resident=max_resident)


def sample(seed: int = 0) -> Scorable:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, 90, (14,), generator=generator).to(torch.int32).numpy()
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 1, 1, 1], dtype=torch.uint8).numpy()
    return Scorable(uid=f"{seed:032x}", sample_row=seed, prompt_id="p", prompt_len=5, tokens=tokens, loss_mask=mask)


def member_logits(folder: Path, item: Scorable) -> torch.Tensor:
    """[M, V] a member's own logits, from one plain forward pass."""
    ids = torch.from_numpy(item.tokens.astype("int64"))[None]
    with torch.no_grad():
        logits = hf.load_model(folder)(ids).logits[0, item.prompt_len - 1 : -1]
    return logits[torch.from_numpy(item.loss_mask.astype(bool))]


@pytest.mark.parametrize("weights", [WEIGHTS, BEYOND], ids=["between", "beyond"])
def test_every_signal_is_that_of_the_weighted_product(folders: dict[str, Path], weights: dict[str, float]) -> None:
    item = sample()
    pool = make_pool(folders, weights)
    kinds = ("logprob", "topk", "hidden")
    signals = {signal.kind: signal for signal in score_samples(pool, "both", kinds, [item], SETTINGS)}
    expected = sum(w * member_logits(folders[n], item) for n, w in weights.items()).log_softmax(-1)
    masked = item.loss_mask.astype(bool)
    targets = torch.from_numpy(item.tokens[item.prompt_len :][masked].astype("int64"))
    torch.testing.assert_close(
        torch.from_numpy(signals["logprob"].logprob[masked]),
        expected.gather(1, targets[:, None])[:, 0],
        atol=2e-5,
        rtol=0,
    )
    torch.testing.assert_close(
        torch.from_numpy(signals["topk"].topk_logprobs), expected.topk(4).values, atol=2e-5, rtol=0
    )
    states = torch.from_numpy(signals["hidden"].hidden).view(torch.float32)
    logits = states @ pool.teacher("both").head.weight.T
    torch.testing.assert_close(logits.log_softmax(-1), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("weights", [WEIGHTS, BEYOND], ids=["between", "beyond"])
def test_reverse_kl_to_the_blend_has_the_gradient_of_the_weighted_sum(
    folders: dict[str, Path], weights: dict[str, float]
) -> None:
    """The identity that the blend rests on, for a student far from both."""
    item = sample(1)
    pool = make_pool(folders, weights)
    forward = pool.teacher("both")
    positions = torch.from_numpy(item.loss_mask).nonzero()[:, 0].numpy() + item.prompt_len
    hidden = torch.randn(len(positions), 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(len(forward.head.weight), 16, dtype=torch.float64)

    def loss(teacher: TeacherForward) -> torch.Tensor:
        states = teacher.states([item.tokens.astype("int64")], [positions]).double()
        return divergence(hidden, Head(weight), states, Head(teacher.head.weight.double())).sum()

    (blended,) = torch.autograd.grad(loss(forward), hidden)
    (summed,) = torch.autograd.grad(sum(w * loss(pool.teacher(n)) for n, w in weights.items()), hidden)
    torch.testing.assert_close(blended, summed, atol=1e-6, rtol=1e-5)


def test_a_blend_is_registered_like_any_teacher(folders: dict[str, Path], tmp_path: Path) -> None:
    record = make_pool(folders, WEIGHTS).register("both", tmp_path)
    assert (record.source, record.hidden_size) == ("0.7 math + 0.3 code", 64 + 32)
    with safe_open(tmp_path / record.head_file, framework="pt") as stored:
        head = stored.get_tensor("weight")
    torch.testing.assert_close(head[:, :64], 0.7 * hf.head_weight(hf.load_model(folders["math"])))
    assert make_pool(folders, BEYOND).register("both", tmp_path / "beyond").source == "1.5 math - 0.5 code"
    with pytest.raises(MismatchError, match="give the new teacher another name"):
        make_pool(folders, {"math": 0.6, "code": 0.4}).register("both", tmp_path)


def test_what_cannot_be_blended_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(MismatchError, match="set it to at least 2"):
        make_pool(folders, WEIGHTS, max_resident=1).teacher("both")
    with pytest.raises(MismatchError, match="no softcap"):
        _ = make_pool(folders, {"math": 0.5, "capped": 0.5}).teacher("both").head


@pytest.mark.parametrize(
    ("teacher", "words"),
    [
        ({"blend": {"a": 0.5, "b": 0.4}}, "weights of a blend sum to 1; these sum to 0.9"),
        ({"blend": {"a": 1.0, "b": 0.0}}, "gives b weight 0, which has no effect; leave it out"),
        ({"blend": {"a": float("nan"), "b": 0.5}}, "blend.a`: Input should be a finite number, found nan"),
        ({"blend": {"a": 1.0}, "source": "x"}, "give exactly one of source, blend"),
        ({}, "give exactly one of source, blend"),
        ({"blend": {"a": 0.5, "c": 0.5}}, "blend names no teacher 'c'"),
        ({"blend": {"a": 0.5, "twice": 0.5}}, "'twice' is a blend itself"),
    ],
)
def test_a_mistaken_blend_is_named(teacher: dict[str, object], words: str) -> None:
    teachers = {"a": {"source": "a"}, "b": {"source": "b"}, "twice": {"blend": {"a": 0.5, "b": 0.5}}, "both": teacher}
    raw = {
        "name": "x", "store": "x", "student": {"path": "x"}, "domains": {"d": {"source": "reasoning-gym"}},
        "teachers": teachers, "routing": {"d": "both"},
        "stages": [{"name": "s", "plan": {"batch_samples": 1}}],
    }  # fmt: skip
    with pytest.raises(JobFileError, match=words):
        check_job(raw, where="job.toml")


def test_a_blend_scores_and_does_not_answer() -> None:
    teachers = {"a": {"source": "a"}, "b": {"source": "b"}, "both": {"blend": {"a": 0.5, "b": 0.5}}}
    raw = {
        "name": "x", "store": "x", "student": {"path": "x"}, "domains": {"d": {"source": "reasoning-gym"}},
        "teachers": teachers, "routing": {"d": "both"},
        "stages": [{"name": "s", "plan": {"batch_samples": 1}, "rollout": {"policy": "routed"}}],
    }  # fmt: skip
    with pytest.raises(JobFileError, match="'both' is a blend and cannot answer"):
        check_job(raw, where="job.toml")
