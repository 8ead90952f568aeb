"""Every module that computes on a device, on the stand-in: same answers as on the CPU, nothing mixed, nothing copied to
the host but what is asked for."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoding import TINY, assert_same, decode, make_requests
from peft import LoraConfig, get_peft_model
from stand_in_device.stand_in import NAME, StandInTensor, active

from mopd_dataplane.errors import InputError
from mopd_dataplane.job import sections
from mopd_dataplane.models import hf
from mopd_dataplane.models.devices import resolve_device
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.records import Signal
from mopd_dataplane.rollout.engines.device_sampling import distribution_of
from mopd_dataplane.rollout.engines.hf import HfEngine, MixedTeacher
from mopd_dataplane.rollout.engines.philox import key_words
from mopd_dataplane.rollout.engines.sampling import SAMPLERS, sample_key
from mopd_dataplane.score.discriminator import Discriminator, Pair
from mopd_dataplane.score.readers import HfReader, Scorable, TeacherForward
from mopd_dataplane.score.scorer import model_input, score_samples
from mopd_dataplane.score.signal_kinds import SIGNALS, StudentTopk
from mopd_dataplane.score.teacher_comparison import Answer, compare, quantisation_effect
from mopd_dataplane.score.teacher_pool import TeacherPool, TeacherSpec

pytestmark = pytest.mark.device

CLOSE = {"rtol": 0, "atol": 2e-5}
"""The stand-in computes attention by torch's plain formula, the CPU by its fused kernel: float32 rounding apart."""

READ_BACK = {
    "models/self_check.py:plain_logits": "of the self-check, once for each model",
    "models/self_check.py:_require_causal": "of the self-check, once for each model",
    "models/self_check.py:require_same_logits": "of the self-check, once for each model",
    "score/signal_kinds.py:split": "what is stored",
    "score/signal_kinds.py:check_finite": "a flag a sample",
    "score/signal_kinds.py:_first_choices": "a flag a token, of samples that keep statistics",
    "codecs.py:encode": "a flag a batch",
    "models/hf.py:hidden_states": "transformers looks whether position ids are packed",
}


@pytest.fixture
def host_copies() -> Iterator[Counter[str]]:
    """The stand-in is the machine's accelerator; what is copied to the host, by function."""
    torch.set_num_threads(1)
    with active() as copies:
        yield copies


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: make_student(sections.Student(config=TINY), root / name, seed=seed)
        for seed, name in enumerate(["policy", "teacher"])
    }


def samples(count: int = 6) -> list[Scorable]:
    rng = np.random.default_rng(1)
    return [
        Scorable(
            uid=f"{number:032x}", sample_row=number, prompt_id=f"p{number}", prompt_len=4,
            tokens=rng.integers(4, 99, 4 + 3 * number + 2).astype(np.int32),
            loss_mask=np.ones(3 * number + 2, np.uint8), versions=np.zeros(3 * number + 2, np.int32),
            logprobs=np.full(3 * number + 2, -1.0, np.float32),
        )
        for number in range(count)
    ]  # fmt: skip


def test_auto_is_the_accelerator_and_a_missing_one_is_named(host_copies: Counter[str]) -> None:
    assert resolve_device("auto") == NAME
    assert resolve_device("cpu") == "cpu"
    with pytest.raises(InputError, match=r'device = "cuda".*finds standin'):
        resolve_device("cuda")
    with pytest.raises(InputError, match="from 0"):
        resolve_device(f"{NAME}:7")


def test_without_an_accelerator_auto_is_the_cpu() -> None:
    assert resolve_device("auto") == "cpu"
    with pytest.raises(InputError, match="no accelerator"):
        resolve_device("cuda:0")


@pytest.mark.usefixtures("host_copies")
def test_the_stand_in_refuses_to_mix() -> None:
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.ones(3, device=NAME) + torch.ones(3)
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.nn.Linear(2, 2).to(NAME)(torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.zeros(2)[0] += torch.ones((), device=NAME)  # a host scalar may be read, not written
    assert isinstance(torch.ones(3, device=NAME) * torch.tensor(2.0), StandInTensor), "a host scalar is no tensor"


@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "with a teacher"])
def test_the_engine_decodes_on_a_device_as_on_the_cpu(
    mixed: bool, folders: dict[str, Path], host_copies: Counter[str], tmp_path: Path
) -> None:
    mixed_teacher = MixedTeacher(folders["teacher"], 0.3) if mixed else None
    work = make_requests(7, top_k=20, top_p=0.9, sampling_mask=True)
    ours = HfEngine(folders["policy"], slots=3, device=NAME, mixed_teacher=mixed_teacher)
    assert [decoder.model.device.type for decoder in ours._decoders] == [NAME] * (1 + mixed)
    host_copies.clear()  # the self-check of the models, once when they are opened
    reference = HfEngine(folders["policy"], slots=3, device="cpu", mixed_teacher=mixed_teacher)
    assert_same(decode(ours, work), decode(reference, work))
    drawn = "rollout/engines/device_sampling.py:"  # sums of groups, one group's logits, what the cut left
    assert host_copies.keys() == {drawn + "draw", drawn + "logprobs", drawn + "kept", "rollout/engines/hf.py:step"}


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (30, 1.0), (0, 0.9), (2000, 0.97), (1, 0.5)])
def test_a_device_draws_what_the_host_draws(top_k: int, top_p: float, host_copies: Counter[str]) -> None:
    """Peaked and flat rows, ties, greedy ones, behind the likeliest thousand too; no logits come to the host."""
    rng = np.random.default_rng(2)
    logits = (rng.normal(0, 1, (40, 3000)) * rng.uniform(0.05, 5, (40, 1))).astype(np.float32)
    logits[::5] = np.round(logits[::5])
    temperature = np.where(np.arange(40) % 7 == 0, 0.0, rng.uniform(0.5, 1.5, 40))
    settings = temperature, np.full(40, top_k), np.full(40, top_p)
    keys = np.stack([key_words(sample_key(str(row))) for row in range(40)])
    kind = SAMPLERS["grouped-gumbel/1"]
    ours = distribution_of(kind, torch.from_numpy(logits).to(NAME), *settings)
    theirs = distribution_of(kind, torch.from_numpy(logits), *settings)
    for position in range(20):
        drawn = [one.draw(keys, np.full(40, position), temperature) for one in (ours, theirs)]
        np.testing.assert_array_equal(*drawn)
        np.testing.assert_allclose(*(one.logprobs(drawn[0]) for one in (ours, theirs)), rtol=0, atol=2e-6)
    copies = dict(host_copies)
    assert {name.rpartition(":")[2] for name in copies} <= {"draw", "logprobs", "_floors"}, copies
    assert (ours.kept() != theirs.kept()).sum() <= 1  # a boundary that float32 sums move
    np.testing.assert_allclose(np.exp(ours.log_q()).sum(1), 1, atol=1e-5)


def test_an_older_sampler_draws_on_the_host(folders: dict[str, Path], host_copies: Counter[str]) -> None:
    work = make_requests(3, sampler="gumbel/1")
    ours, theirs = (HfEngine(folders["policy"], slots=3, device=device) for device in (NAME, "cpu"))
    assert_same(decode(ours, work), decode(theirs, work))
    assert "rollout/engines/device_sampling.py:distribution_of" in host_copies


def test_keys_and_values_survive_a_save_from_a_device(
    folders: dict[str, Path], host_copies: Counter[str], tmp_path: Path
) -> None:
    engine = HfEngine(folders["policy"], slots=4, device=NAME)
    requests = make_requests(4, max_new_tokens=8)
    engine.admit(list(enumerate(requests)))
    assert engine.save(tmp_path / "kv", list(enumerate(requests)), limit_bytes=1 << 30)
    again = HfEngine(folders["policy"], slots=4, device=NAME)
    assert [gap for _, gap in again.restore(tmp_path / "kv", requests)] == [0.0] * 4
    assert again._decoders[0].cache._attention[0].keys.device.type == NAME
    assert not HfEngine(folders["policy"], slots=4).restore(tmp_path / "kv", requests), "another device's bits"


def signals(folders: dict[str, Path], device: str, **changed: Any) -> dict[tuple[str, str], Signal]:
    settings = sections.Score(**({"batch_tokens": 64, "hidden_codec": "int8", "topk": 5} | changed))
    spec = TeacherSpec(folders["teacher"], sections.Teacher(source="stage:x"))
    tokenizer = hf.load_tokenizer(folders["teacher"])
    pool = TeacherPool({"teacher": spec}, student_tokenizer=tokenizer, device=device)
    student = StudentTopk(lambda version: folders["policy"], device=device)
    scored_signals = score_samples(pool, "teacher", list(SIGNALS), samples(), settings, student=student)
    return {(signal.uid, signal.kind): signal for signal in scored_signals}


@pytest.mark.parametrize("source", ["teacher", "student"])
def test_signals_are_those_of_the_cpu(source: str, folders: dict[str, Path], host_copies: Counter[str]) -> None:
    ours = signals(folders, NAME, topk_source=source)
    copied = dict(host_copies)
    theirs = signals(folders, "cpu", topk_source=source)
    assert ours.keys() == theirs.keys()
    for key, signal in ours.items():
        if signal.logprob is not None:
            np.testing.assert_allclose(signal.logprob, theirs[key].logprob, **CLOSE)
        if signal.topk_logprobs is not None:
            np.testing.assert_array_equal(signal.topk_ids, theirs[key].topk_ids)
            np.testing.assert_allclose(signal.topk_logprobs, theirs[key].topk_logprobs, **CLOSE)
    assert copied.keys() <= READ_BACK.keys(), copied


@pytest.mark.usefixtures("host_copies")
def test_a_head_without_its_model_and_the_students_support_lie_on_the_device(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    config = {
        "model_type": "phi", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    biased = make_student(sections.Student(config=config), tmp_path / "biased", seed=2)
    head = hf.load_head(biased, dtype="float32", device=NAME)
    assert head.bias is not None
    assert (head.weight.device.type, head.bias.device.type) == (NAME, NAME)
    silent = samples(1)
    silent[0].loss_mask[:] = 0
    for read in (silent, samples(2)):
        assert StudentTopk(lambda version: folders["policy"], device=NAME).ids(read, 3).device.type == NAME


@pytest.fixture(scope="module")
def adapters(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two on the policy, as peft writes them."""
    root = tmp_path_factory.mktemp("adapters")
    config = LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    for seed in range(2):
        torch.manual_seed(seed)
        model = get_peft_model(hf.load_model(folders["policy"]), config)
        model.peft_config["default"].base_model_name_or_path = str(folders["policy"])
        model.save_pretrained(root / str(seed))
    return [root / "0", root / "1"]


def test_adapters_score_and_sample_on_the_device_of_their_base(
    adapters: list[Path], folders: dict[str, Path], host_copies: Counter[str]
) -> None:
    tokenizer = hf.load_tokenizer(folders["policy"])
    outputs = []
    for device in (NAME, "cpu"):
        specs = {one.name: TeacherSpec(one, sections.Teacher(source=str(one))) for one in adapters}
        pool = TeacherPool(specs, student_tokenizer=tokenizer, device=device)
        settings = sections.Score(batch_tokens=64)
        said = [score_samples(pool, one.name, ["logprob"], samples(3), settings) for one in adapters]
        assert {weight.device.type for weight in pool.model("1").parameters()} == {device}
        engine = HfEngine(adapters[0], slots=3, device=device)
        engine.load_policy(adapters[1], 1)
        assert {weight.device.type for weight in engine._decoders[0].model.parameters()} == {device}
        outputs.append(
            (
                np.concatenate([one.logprob for part in said for one in part]),
                decode(engine, make_requests(2, max_new_tokens=5)),
            )
        )
    (ours, our_samples), (theirs, their_samples) = outputs
    np.testing.assert_allclose(ours, theirs, **CLOSE)
    assert_same(our_samples, their_samples)


def test_a_discriminator_learns_on_a_device_as_on_the_cpu(
    folders: dict[str, Path], host_copies: Counter[str], tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    pairs = [Pair(rng.integers(4, 50, 6), rng.integers(50, 99, 5)) for _ in range(12)]
    values_by_device = {}
    for device in (NAME, "cpu"):
        critic = Discriminator(folders["policy"], sections.Discriminator(batch_pairs=4), seed=3, device=device)
        assert {weight.device.type for weight in critic._critic.parameters()} == {device}
        facts = critic.update(pairs, epochs=2)
        critic.save(tmp_path / device)
        other = Discriminator(folders["policy"], sections.Discriminator(batch_pairs=4), seed=4, device=device)
        other.load(tmp_path / device)
        scores = critic.scores([pair.teacher for pair in pairs])
        np.testing.assert_array_equal(other.scores([pair.teacher for pair in pairs]), scores)
        again = other.update(pairs, epochs=1)  # the optimizer's moments, as they were read back
        values_by_device[device] = np.array([*facts.values(), *scores, *again.values()])
    np.testing.assert_allclose(values_by_device[NAME], values_by_device["cpu"], rtol=0, atol=1e-3)


@pytest.mark.usefixtures("host_copies")
def test_teachers_are_compared_on_a_device_as_on_the_cpu(folders: dict[str, Path]) -> None:
    read = [
        Answer(student=model_input(one, None), teacher=model_input(one, None), reward=float(index % 2))
        for index, one in enumerate(samples())
    ]
    ours, theirs = (
        vars(
            compare(
                *(TeacherForward((HfReader(hf.load_model(folders[name], device=device)),)) for name in folders),
                read,
                k=4,
            )
        )
        for device in (NAME, "cpu")
    )
    assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.usefixtures("host_copies")
def test_what_rounding_does_is_measured_on_a_device_as_on_the_cpu(folders: dict[str, Path]) -> None:
    tokenizer = hf.load_tokenizer(folders["teacher"])
    effects = []
    for device in (NAME, "cpu"):
        spec = TeacherSpec(folders["teacher"], sections.Teacher(source="stage:x"))
        pool = TeacherPool({"teacher": spec}, student_tokenizer=tokenizer, device=device)
        effects.append(vars(quantisation_effect(pool, "teacher", samples(), sections.Score(batch_tokens=64))))
    assert effects[0] == pytest.approx(effects[1], abs=1e-4)


PLACED = {"HfEngine", "TeacherPool", "StudentTopk", "Discriminator", "load_model", "load_merged"}
"""What computes where its `device` says."""
DECIDES = {"rollout", "score", "run", "integrations"}
"""Packages in which that is never a device by name, nor left out."""
HOST = {
    "score/discriminator.py": "moves the critic as a whole",
    "run/policies.py": "merges weights to write them",
    "score/scorer_check.py": "compares on the host, since the teacher's process has the device",
    "rollout/engines/engine_check.py": "compares on the host, since the engine's process has the device",
}


def test_whoever_opens_a_model_hands_on_the_device_of_the_job() -> None:
    """By reading the sources: the steps of a run open models that no unit test sees; each must pass a device on."""
    root = Path(hf.__file__).parents[1]
    seen: Counter[str] = Counter()
    for file in (file for package in sorted(DECIDES) for file in sorted((root / package).rglob("*.py"))):
        for call in ast.walk(ast.parse(file.read_text())):
            if not isinstance(call, ast.Call):
                continue
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name not in PLACED:
                continue
            seen[name] += 1
            device = next((keyword.value for keyword in call.keywords if keyword.arg == "device"), None)
            module_path = file.relative_to(root).as_posix()
            where = f"{module_path}:{call.lineno}: {name}"
            assert device is not None or module_path in HOST, f"{where} takes no device"
            assert not isinstance(device, ast.Constant), f"{where} names a device itself"
    assert seen.keys() == PLACED, "a name that nobody calls any more guards nothing"
