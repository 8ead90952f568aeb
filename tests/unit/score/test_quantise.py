"""Teachers with quantised weights: what is rounded and how far, what it does to the signals, and who they are."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mopd_kernels import LossyCodecWarning, decode, encode
from torch import Tensor, nn

from mopd_dataplane.errors import JobFileError, MismatchError
from mopd_dataplane.job import sections
from mopd_dataplane.job.load import check_job
from mopd_dataplane.job.sections import Student
from mopd_dataplane.models import hf
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.score.quantise import quantise
from mopd_dataplane.score.readers import Scorable
from mopd_dataplane.score.scorer import score_samples
from mopd_dataplane.score.teacher_comparison import quantisation_effect
from mopd_dataplane.score.teacher_pool import TeacherPool, TeacherSpec

pytestmark = pytest.mark.quantise

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64,
    "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip
FORMS = ("int8", "fp8", "mxfp4")
SETTINGS = sections.Score(hidden_codec="fp32", batch_tokens=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts with a tied head: everything that rounding must tell apart."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("moe")
    return make_student(Student(config=CONFIG | {"tie_word_embeddings": True}), root / "moe", seed=0)


def make_pool(folder: Path, quantisation: str = "none", **settings: Any) -> TeacherPool:
    teachers = {"t": {"source": "x", "quantisation": quantisation}, "plain": {"source": "x"}}
    specs = {n: TeacherSpec(folder, sections.Teacher.model_validate(t)) for n, t in teachers.items()}
    specs["both"] = TeacherSpec(None, sections.Teacher(blend={"t": 0.5, "plain": 0.5}))
    tokenizer = hf.load_tokenizer(folder)
    return TeacherPool(specs, student_tokenizer=tokenizer, **settings)


def samples(count: int = 6) -> list[Scorable]:
    rng = np.random.default_rng(0)
    return [
        Scorable(
            uid=f"{i:032x}", sample_row=i, prompt_id="p", prompt_len=4, loss_mask=np.ones(9 + i, np.uint8),
            tokens=rng.integers(4, 99, 13 + i).astype(np.int32),
        )
        for i in range(count)
    ]  # fmt: skip


def reference(weight: Tensor, form: str) -> Tensor:
    """[out, in] float64 weight rounded by the definition of the form, without torchao."""
    if form == "mxfp4":
        warnings.simplefilter("ignore", LossyCodecWarning)
        return decode(encode(weight.float(), "mxfp4"), "mxfp4", weight.shape[1], torch.float32).double()
    largest = 127.5 if form == "int8" else torch.finfo(torch.float8_e4m3fn).max
    scale = weight.double().abs().amax(1, keepdim=True) / largest
    scaled = weight.double() / scale
    rounded = scaled.round().clamp(-128, 127) if form == "int8" else scaled.float().to(torch.float8_e4m3fn).double()
    return rounded * scale


def matrices(model: Any) -> dict[str, Tensor]:
    """Every weight that rounding may touch, as [rows, in]."""
    weights = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and path != "lm_head":
            weight: Any = module.weight.detach()
            weights[path] = weight if type(weight) is Tensor else weight.dequantize()
    weights |= {name: weight.detach().flatten(0, 1) for name, weight in model.named_parameters() if "experts." in name}
    return weights


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_rounded_as_the_form_says_and_nothing_else_is(folder: Path, form: Any) -> None:
    stored, rounded = hf.load_model(folder), hf.load_model(folder)
    quantise(rounded, form)
    before, after = matrices(stored), matrices(rounded)
    assert len(before) == 2 * 4 + 2 * 2, "attention and experts of two layers"
    for name, weight in before.items():
        expected = reference(weight, form)
        # A value on the midpoint of two codes may go to either after float32 arithmetic; one code is the most.
        step = (expected - weight.double()).abs().max() * 2
        different = (after[name].double() - expected).abs()
        assert float(different.max()) <= float(step) * 1.01
        assert float((different > 1e-5).double().mean()) < 0.01, name
        assert float((expected - weight.double()).norm() / weight.norm()) > 1e-3
    untouched = {n: p for n, p in stored.named_parameters() if "norm" in n or "embed" in n or "gate.weight" in n}
    assert len(untouched) > 8
    for name, weight in untouched.items():
        assert torch.equal(rounded.get_parameter(name), weight), name
    head = hf.lm_head(rounded).weight
    assert type(head) is nn.Parameter
    assert torch.equal(head, hf.head_weight(stored))


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_linear_layers_are_held_in_one_byte_a_weight(folder: Path, form: Any) -> None:
    model = hf.load_model(folder)
    quantise(model, form)
    weight: Any = model.get_submodule("model.layers.0.self_attn.q_proj").weight
    assert weight.qdata.element_size() == 1


@pytest.mark.parametrize("form", FORMS)
def test_signals_are_those_of_the_rounded_weights(folder: Path, form: Any) -> None:
    """Hidden states and log-probs against a plain model whose weights are the rounded ones, dequantised."""
    rounded, plain = hf.load_model(folder), hf.load_model(folder)
    quantise(rounded, form)
    with torch.no_grad():
        for name, weight in matrices(rounded).items():
            target = plain.get_parameter(name if "experts." in name else f"{name}.weight")
            target.copy_(weight.reshape(target.shape))
    pool = make_pool(folder, form)
    for item in samples():
        signals = {s.kind: s for s in score_samples(pool, "t", ["logprob", "hidden"], [item], SETTINGS)}
        ids = torch.from_numpy(item.tokens.astype(np.int64))[None]
        with torch.no_grad():
            expected = plain(ids).logits[0, item.prompt_len - 1 : -1].log_softmax(-1)
        targets = ids[0, item.prompt_len :, None]
        got = torch.from_numpy(signals["logprob"].logprob)
        # Both take products in float32; torchao scales after the product, which rounds once more (measured 2e-5).
        torch.testing.assert_close(got, expected.gather(1, targets)[:, 0], atol=5e-4, rtol=0)
        states = torch.from_numpy(signals["hidden"].hidden).view(torch.float32)
        logits = states @ hf.head_weight(plain).T
        torch.testing.assert_close(logits.log_softmax(-1), expected, atol=2e-3, rtol=0)


def test_the_effect_is_measured_against_the_stored_weights(folder: Path) -> None:
    """By hand from plain logits; coarser forms say less of what the teacher said."""
    effects = {form: quantisation_effect(make_pool(folder, form), "t", samples(), SETTINGS) for form in FORMS}
    assert effects["int8"].kl < effects["fp8"].kl < effects["mxfp4"].kl
    assert effects["int8"].top1_agreement > effects["mxfp4"].top1_agreement
    rounded = hf.load_model(folder)
    quantise(rounded, "fp8")
    kl, gap, agreed = [], [], []
    for item in samples():
        ids = torch.from_numpy(item.tokens.astype(np.int64))[None]
        with torch.no_grad():
            q, p = (m(ids).logits[0, 3:-1].double().log_softmax(-1) for m in (hf.load_model(folder), rounded))
        kl.append((q.exp() * (q - p)).sum(-1))
        gap.append((q - p).gather(1, ids[0, 4:, None])[:, 0].abs())
        agreed.append((q.argmax(-1) == p.argmax(-1)).double())
    assert effects["fp8"].tokens == sum(map(len, kl))
    assert effects["fp8"].kl == pytest.approx(float(torch.cat(kl).mean()), rel=1e-3)
    assert effects["fp8"].logprob_gap == pytest.approx(float(torch.cat(gap).mean()), rel=1e-3)
    assert effects["fp8"].top1_agreement == pytest.approx(float(torch.cat(agreed).mean()))


def test_measuring_holds_one_model_at_a_time(folder: Path) -> None:
    pool = make_pool(folder, "int8")
    pool.reader("plain")
    pool.as_stored("t")
    assert pool.resident == ()
    quantisation_effect(pool, "t", samples(1), SETTINGS)
    assert pool.resident == ("t",)


def test_a_teacher_of_another_precision_is_another_teacher(folder: Path, tmp_path: Path) -> None:
    record = make_pool(folder, "int8").register("t", tmp_path)
    assert record.quantisation == "int8"
    assert make_pool(folder, "int8").register("t", tmp_path) == record
    plain = make_pool(folder, "int8").register("plain", tmp_path)
    assert (plain.quantisation, plain.weights_digest) == ("none", hf.weights_digest(folder))
    for other in ("none", "fp8", "mxfp4"):
        with pytest.raises(MismatchError, match="give the new teacher another name"):
            make_pool(folder, other).register("t", tmp_path)
    blends = [make_pool(folder, form, max_resident=2).register("both", tmp_path / form) for form in ("int8", "fp8")]
    assert [blend.quantisation for blend in blends] == ["int8 + none", "fp8 + none"]
    assert blends[0].weights_digest != blends[1].weights_digest


def test_what_cannot_be_rounded_is_refused(folder: Path, tmp_path: Path) -> None:
    odd = make_student(Student(config=CONFIG | {"moe_intermediate_size": 40}), tmp_path / "odd", seed=0)
    with pytest.raises(MismatchError, match=r"experts.down_proj has rows of 40.*use 'int8' or 'fp8'"):
        quantise(hf.load_model(odd), "mxfp4")
    with pytest.raises(MismatchError, match=r"'t' has quantisation = 'fp8'.*set score.engine = \"hf\""):
        make_pool(folder, "fp8", engine="vllm")


@pytest.mark.parametrize(
    ("teacher", "score", "words"),
    [
        ({"source": "a", "quantisation": "int4"}, {}, "teachers.t.quantisation.*'int8', 'fp8' or 'mxfp4'.*'int4'"),
        ({"blend": {"a": 1.0}, "quantisation": "int8"}, {}, "a blend has no weights of its own"),
        ({"source": "a", "quantisation": "int8"}, {"engine": "vllm"}, "teachers.t.quantisation = 'int8'.*score.engine"),
        ({"source": "a"}, {"engine": "vllm", "options": {"quantization": "fp8"}}, "options.quantization"),
    ],
)
def test_a_mistaken_setting_is_named(teacher: dict[str, Any], score: dict[str, Any], words: str) -> None:
    raw = {
        "name": "x", "store": "x", "student": {"path": "x"}, "domains": {"d": {"source": "reasoning-gym"}},
        "teachers": {"a": {"source": "a"}, "t": teacher}, "routing": {"d": "t"},
        "objectives": {"o": {"divergence": {}}}, "score": score,
        "stages": [{"name": "s", "objective": "o", "plan": {"batch_samples": 1}}],
    }  # fmt: skip
    with pytest.raises(JobFileError, match=words):
        check_job(raw, where="job.toml")
