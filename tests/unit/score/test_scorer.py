"""Signals against a teacher's own logits, and the teacher pool."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mopd_kernels import decode
from numpy.typing import NDArray
from safetensors import safe_open
from tokenizers_apart import exchanged_letters
from torch import Tensor

from mopd_dataplane.base.files import file_digest
from mopd_dataplane.errors import DamagedError, EngineError, MismatchError, UnknownNameError
from mopd_dataplane.job import sections
from mopd_dataplane.job.sections import Student as StudentSettings
from mopd_dataplane.models import hf
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.records import Signal
from mopd_dataplane.score.readers import Scorable
from mopd_dataplane.score.scorer import score_samples
from mopd_dataplane.score.teacher_pool import TeacherPool, TeacherSpec

CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256,
}  # fmt: skip
KINDS = ("logprob", "topk", "hidden")
SETTINGS = sections.Score(batch_tokens=64, hidden_codec="fp32", topk=5)


@pytest.fixture(scope="session")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three teachers of one family: plain, tied, and one that caps and scales nothing away (Gemma 2)."""
    root = tmp_path_factory.mktemp("teachers")
    configs = {
        "math": CONFIG,
        "code": CONFIG | {"tie_word_embeddings": True},
        "capped": CONFIG | {"model_type": "gemma2", "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 32},
    }
    return {
        name: make_student(StudentSettings(config=config), root / name, seed=seed)
        for seed, (name, config) in enumerate(configs.items())
    }


@pytest.fixture
def pool(teachers: dict[str, Path]) -> TeacherPool:
    torch.set_num_threads(1)
    return make_pool(teachers)


def make_pool(teachers: dict[str, Path], **settings: Any) -> TeacherPool:
    specs = {n: TeacherSpec(folder, sections.Teacher(source=f"stage:{n}")) for n, folder in teachers.items()}
    tokenizer = hf.load_tokenizer(teachers["math"])
    return TeacherPool(specs, student_tokenizer=tokenizer, **settings)


def make_samples(count: int, *, temperature: float = 1.0, seed: int = 0) -> list[Scorable]:
    """Samples of mixed lengths with tool tokens in the middle of some responses."""
    rng = np.random.default_rng(seed)
    samples = []
    for number in range(count):
        prompt, response = int(rng.integers(2, 9)), int(rng.integers(1, 24))
        mask = np.ones(response, np.uint8)
        if number % 2:
            mask[response // 3 : response // 2] = 0
        samples.append(
            Scorable(
                uid=f"{number:032x}", sample_row=10 + number, prompt_id=f"p{number}", prompt_len=prompt,
                tokens=rng.integers(4, 99, prompt + response).astype(np.int32), loss_mask=mask,
                logprobs=(-rng.gamma(2, 0.5, response) * mask).astype(np.float32), temperature=temperature,
            )
        )  # fmt: skip
    return samples


def by_uid(signals: Any) -> dict[tuple[str, str], Signal]:
    signal_by_key = {}
    for signal in signals:
        assert (signal.uid, signal.kind) not in signal_by_key
        signal_by_key[signal.uid, signal.kind] = signal
    return signal_by_key


def logits_of(folder: Path, prompt: NDArray[Any], response: NDArray[Any]) -> Tensor:
    """[R, V] the model's own logits before each response token, one sample in one plain forward pass."""
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
    with torch.no_grad():
        logits: Tensor = hf.load_model(folder)(ids).logits[0, len(prompt) - 1 : -1]
    return logits


@pytest.mark.parametrize("name", ["math", "code", "capped"])
def test_every_kind_agrees_with_the_models_own_logits(name: str, pool: TeacherPool, teachers: dict[str, Path]) -> None:
    samples = make_samples(9)
    signals = by_uid(score_samples(pool, name, KINDS, samples, SETTINGS))
    assert len(signals) == len(samples) * len(KINDS)
    head = hf.lm_head(hf.load_model(teachers[name]))
    for sample in samples:
        mask = sample.loss_mask.astype(bool)
        response = sample.tokens[sample.prompt_len :]
        direct = logits_of(teachers[name], sample.tokens[: sample.prompt_len], response).log_softmax(-1)
        expected = direct.gather(1, torch.from_numpy(response.astype(np.int64))[:, None])[:, 0].numpy()

        logprob = signals[sample.uid, "logprob"]
        assert logprob.sample_row == sample.sample_row
        assert logprob.logprob is not None
        np.testing.assert_allclose(logprob.logprob[mask], expected[mask], atol=2e-5)
        assert not logprob.logprob[~mask].any()
        assert logprob.mean_reverse_kl == pytest.approx(float((sample.logprobs - expected)[mask].mean()), abs=2e-5)

        topk = signals[sample.uid, "topk"]
        best = direct[mask].topk(5)
        np.testing.assert_array_equal(topk.topk_ids, best.indices.numpy())
        np.testing.assert_allclose(topk.topk_logprobs, best.values.numpy(), atol=2e-5)

        hidden = signals[sample.uid, "hidden"]
        assert hidden.codec == "fp32"
        states = decode(torch.from_numpy(hidden.hidden), "fp32", 64, torch.float32)
        logits = head.epilogue(len(head.weight), 1.0).apply(states @ head.weight.detach().T)
        torch.testing.assert_close(logits.log_softmax(-1), direct[mask], atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["math", "code", "capped"])
def test_the_final_norm_stands_between_the_last_layer_and_the_head(name: str, teachers: dict[str, Path]) -> None:
    model = hf.load_model(teachers[name])
    before: list[Tensor] = []
    last_layer = model.get_submodule("model.layers.1")
    last_layer.register_forward_hook(lambda _module, _input, output: before.append(output))
    states = hf.hidden_states(model, torch.arange(4, 20)[None])
    after = hf.load_final_norm(teachers[name], dtype="float32")(before[0])
    assert not torch.allclose(before[0], states, atol=0.1)
    torch.testing.assert_close(after, states, rtol=0, atol=0)


def test_a_model_without_a_module_before_its_head_is_named(
    teachers: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "hidden_states", lambda model, ids: model.base_model(ids).last_hidden_state * 2)
    with pytest.raises(MismatchError, match=r"Qwen3ForCausalLM.*score\.reads = \"states\""):
        hf.load_final_norm(teachers["math"], dtype="float32")


def test_batching_changes_nothing(pool: TeacherPool) -> None:
    samples = make_samples(12)
    alone = by_uid(score_samples(pool, "math", KINDS, samples, SETTINGS.model_copy(update={"batch_tokens": 1})))
    together = by_uid(score_samples(pool, "math", KINDS, samples, SETTINGS.model_copy(update={"batch_tokens": 4096})))
    assert alone.keys() == together.keys()
    for key, signal in alone.items():
        if signal.kind == "logprob":
            np.testing.assert_allclose(signal.logprob, together[key].logprob, atol=1e-5)
        elif signal.kind == "topk":
            np.testing.assert_array_equal(signal.topk_ids, together[key].topk_ids)
        else:
            a, b = (x.hidden.view(np.float32) for x in (signal, together[key]))
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_privileged_prompt_shifts_the_prompt_and_not_the_response(
    pool: TeacherPool, teachers: dict[str, Path]
) -> None:
    samples = make_samples(5)
    context = np.arange(20, 31)

    def render(sample: Scorable) -> NDArray[Any]:
        return np.concatenate([context, sample.tokens[: sample.prompt_len]])

    signals = by_uid(score_samples(pool, "math", ("logprob",), samples, SETTINGS, render_prompt=render))
    for sample in samples:
        response, mask = sample.tokens[sample.prompt_len :], sample.loss_mask.astype(bool)
        direct = logits_of(teachers["math"], render(sample), response).log_softmax(-1)
        expected = direct.gather(1, torch.from_numpy(response.astype(np.int64))[:, None])[:, 0].numpy()
        np.testing.assert_allclose(signals[sample.uid, "logprob"].logprob[mask], expected[mask], atol=2e-5)


def test_log_probs_are_taken_at_the_sampling_temperature(pool: TeacherPool, teachers: dict[str, Path]) -> None:
    (sample,) = make_samples(1, temperature=0.7)
    (signal,) = score_samples(pool, "math", ("logprob",), [sample], SETTINGS)
    response = sample.tokens[sample.prompt_len :]
    direct = (logits_of(teachers["math"], sample.tokens[: sample.prompt_len], response) / 0.7).log_softmax(-1)
    expected = direct.gather(1, torch.from_numpy(response.astype(np.int64))[:, None])[:, 0].numpy()
    np.testing.assert_allclose(signal.logprob, expected, atol=2e-5)
    (greedy,) = score_samples(pool, "math", ("logprob",), [replace(sample, temperature=0.0)], SETTINGS)
    (plain,) = score_samples(pool, "math", ("logprob",), [replace(sample, temperature=1.0)], SETTINGS)
    np.testing.assert_array_equal(greedy.logprob, plain.logprob)


def test_text_that_was_not_sampled_has_no_reverse_kl(pool: TeacherPool) -> None:
    (signal,) = score_samples(pool, "math", ("logprob",), [replace(make_samples(1)[0], logprobs=None)], SETTINGS)
    assert signal.mean_reverse_kl is None


def test_a_broken_teacher_is_named_with_the_sample(pool: TeacherPool) -> None:
    head = hf.head_weight(pool.model("math"))
    with torch.no_grad():
        head[50] = torch.nan
    with pytest.raises(EngineError, match=r"teacher 'math' answered with NaN.* 0{32}"):
        list(score_samples(pool, "math", ("logprob",), make_samples(1), SETTINGS))
    with torch.no_grad():
        head[50] = 0.0
        hf.embedding_weight(pool.model("math"))[:] = torch.inf
    with pytest.raises(EngineError, match="NaN or infinity"):
        list(score_samples(pool, "math", ("hidden",), make_samples(1), SETTINGS))


def test_a_token_outside_the_teachers_vocabulary_is_refused(pool: TeacherPool) -> None:
    (sample,) = make_samples(1)
    tokens = sample.tokens.copy()
    tokens[-1] = 5000
    with pytest.raises(MismatchError, match="token id 5000"):
        list(score_samples(pool, "math", ("logprob",), [replace(sample, tokens=tokens)], SETTINGS))


def test_the_pool_loads_each_teacher_once_and_holds_no_more_than_it_may(teachers: dict[str, Path]) -> None:
    pool = make_pool(teachers, max_resident=1)
    for name in ("math", "math", "code", "code"):
        list(score_samples(pool, name, ("logprob",), make_samples(2), SETTINGS))
    assert pool.loads == {"math": 1, "code": 1}
    assert pool.resident == ("code",)
    wide = make_pool(teachers, max_resident=2)
    for name in ("math", "code", "math", "capped"):
        wide.model(name)
    assert wide.resident == ("math", "capped")
    with pytest.raises(UnknownNameError, match="did you mean 'math'"):
        pool.model("maths")


def test_registering_writes_the_head_once(pool: TeacherPool, teachers: dict[str, Path], tmp_path: Path) -> None:
    record = pool.register("capped", tmp_path)
    assert (record.vocab_size, record.hidden_size) == (len(hf.load_tokenizer(teachers["capped"])), 64)
    assert (record.logit_softcap, record.logit_scale, record.norm_placement) == (3.0, 1.0, "post")
    assert record.source == "stage:capped"
    file = tmp_path / record.head_file
    assert record.head_digest == file_digest(file)
    with safe_open(file, framework="pt") as stored:
        torch.testing.assert_close(stored.get_tensor("weight"), hf.head_weight(hf.load_model(teachers["capped"])))
    before = file.stat().st_mtime_ns
    fresh = make_pool(teachers)
    assert fresh.register("capped", tmp_path) == record
    assert file.stat().st_mtime_ns == before
    assert fresh.resident == ()  # a head that is there needs no model


def test_another_tokenizer_is_refused_before_anything_is_written(teachers: dict[str, Path], tmp_path: Path) -> None:
    pool = TeacherPool(
        {"math": TeacherSpec(teachers["math"], sections.Teacher(source="x"))},
        student_tokenizer=exchanged_letters(hf.load_tokenizer(teachers["math"])),
    )
    with pytest.raises(MismatchError, match="stand for other texts"):
        pool.register("math", tmp_path)
    with pytest.raises(MismatchError, match="teacher 'math'"):
        list(score_samples(pool, "math", ("logprob",), make_samples(1), SETTINGS))
    assert list(tmp_path.iterdir()) == []


def test_other_weights_under_a_known_name_are_refused(teachers: dict[str, Path], tmp_path: Path) -> None:
    make_pool(teachers).register("math", tmp_path)
    swapped = make_pool(teachers | {"math": teachers["code"]})
    # both pools share the student's tokenizer, so only the weights differ
    with pytest.raises(MismatchError, match="give the new teacher another name"):
        swapped.register("math", tmp_path)


def test_a_torn_head_file_is_damaged_not_read(pool: TeacherPool, tmp_path: Path) -> None:
    record = pool.register("math", tmp_path)
    file = tmp_path / record.head_file
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DamagedError, match="delete it and score again"):
        pool.register("math", tmp_path)


def test_pickled_weights_are_refused(teachers: dict[str, Path], tmp_path: Path, make_copy: Callable[..., Path]) -> None:
    folder = make_copy(teachers["math"], tmp_path / "pickled")
    state = hf.load_model(folder).state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    pool = make_pool(teachers | {"math": teachers["math"], "bad": folder})
    with pytest.raises(UnknownNameError, match="safetensors"):
        pool.register("bad", tmp_path / "store")


@pytest.fixture
def make_copy() -> Callable[..., Path]:
    import shutil

    def copy(source: Path, target: Path) -> Path:
        shutil.copytree(source, target)
        assert json.loads((target / "config.json").read_text())
        return target

    return copy
