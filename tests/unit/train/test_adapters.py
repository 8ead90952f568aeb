"""LoRA students: what is trained, stored and continued is the adapter; its base is only named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from advice import advises
from families import FAMILIES

from mopd_dataplane.base.file_checksums import CHECKSUMS
from mopd_dataplane.errors import MismatchError, UnknownNameError
from mopd_dataplane.job.objectives import CrossEntropyTerm, Objective
from mopd_dataplane.job.sections import Lora, Student, Train
from mopd_dataplane.models import hf
from mopd_dataplane.models.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE, Base, is_adapter
from mopd_dataplane.models.adapters import new_adapter, replace_adapter, save_adapter, trained_tensors
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.records import Pack, StepMetrics
from mopd_dataplane.rollout.engines.hf import HfEngine
from mopd_dataplane.train.metrics import MetricsReader
from mopd_dataplane.train.ranks import Ranks
from mopd_dataplane.train.run import Run
from mopd_dataplane.train.spec import TrainSpec
from mopd_dataplane.train.stop import Stop

ALONE = Ranks(0, 1, torch.device("cpu"))
STEPS = 4
LORA = Lora(r=4)


class StopAfter(Stop):
    """Asks for a stop after so many looks."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self._left = looks

    def __call__(self) -> bool:
        self._left -= 1
        return self._left <= 0


@pytest.fixture
def windows(source: Callable[..., Any], pack: Callable[..., Pack], batch: Callable[..., Any]) -> Callable[[], Any]:
    """Two windows of STEPS batches; a fresh source each time."""

    def make() -> Any:
        return source(
            {w: [batch([pack([9, 6], seed=20 * w + s)], step=s, window=w) for s in range(STEPS)] for w in range(2)}
        )

    return make


def make_spec(start: Path, folder: Path, **changes: Any) -> TrainSpec:
    settings = {"learning_rate": 1e-2, "checkpoint_steps": 2, "lora": LORA, **changes}
    return TrainSpec(
        stage="student", start=str(start), policy_dir=str(folder / "policies" / "student"), socket="unused", seed=7,
        checkpoint_dir=str(folder / "checkpoints"), objective=Objective(cross_entropy=CrossEntropyTerm()),
        train=Train(**settings),
    )  # fmt: skip


def train(spec: TrainSpec, source: Any, stop: Stop | None = None) -> bool:
    run = Run(spec, source, ALONE)
    try:
        return run.train(stop or Stop())
    finally:
        run.close()


def version(spec: TrainSpec, number: int) -> Path:
    return Path(spec.policy_dir) / f"v{number}"


def losses(spec: TrainSpec) -> list[float]:
    return [StepMetrics(**asdict(m)).loss for m in MetricsReader(Path(spec.checkpoint_dir)).steps()]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logprobs: torch.Tensor = model(torch.arange(5, 45)[None]).logits.log_softmax(-1)
    return logprobs


def bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


def test_a_version_and_a_checkpoint_are_the_adapter(policy: Path, windows: Callable[[], Any], tmp_path: Path) -> None:
    spec = make_spec(policy, tmp_path)
    assert train(spec, windows())
    assert losses(spec)[-1] < losses(spec)[0]
    every = hf.load_model(version(spec, 2)).named_parameters()
    factors = sum(weight.numel() for name, weight in every if "lora_" in name)
    assert sorted(file.name for file in version(spec, 2).iterdir()) == [
        ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE, "checksums.json"
    ]  # fmt: skip
    assert bytes_of(version(spec, 2)) < 4 * factors + 10_000
    assert bytes_of(Path(spec.checkpoint_dir) / "step-00000008") < 12 * factors + 100_000
    before, after = hf.load_model(policy).state_dict(), hf.load_model(version(spec, 2)).state_dict()
    for name, weight in before.items():  # the base has not moved
        assert torch.equal(weight, after[name if name in after else name.replace(".weight", ".base_layer.weight")])


def test_an_interrupted_adapter_continues_to_the_same_bits(
    policy: Path, windows: Callable[[], Any], tmp_path: Path
) -> None:
    whole, cut = make_spec(policy, tmp_path / "whole"), make_spec(policy, tmp_path / "cut")
    assert train(whole, windows())
    assert not train(cut, windows(), StopAfter(3))
    assert not train(cut, windows(), StopAfter(2))
    assert train(cut, windows())
    assert losses(cut) == losses(whole)
    mine, theirs = (hf.load_model(version(spec, 2)).state_dict() for spec in (cut, whole))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert hf.weights_digest(version(cut, 2)) == hf.weights_digest(version(whole, 2))


def test_peft_and_transformers_read_the_version_and_its_merged_form_alike(
    policy: Path, windows: Callable[[], Any], tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    spec = make_spec(policy, tmp_path)
    assert train(spec, windows())
    ours = logits(hf.load_model(version(spec, 2)))
    base = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    assert (logits(base) - ours).abs().max() > 0.01
    theirs = PeftModel.from_pretrained(base, version(spec, 2))
    torch.testing.assert_close(logits(theirs), ours, rtol=0, atol=0)
    # W x + s B (A x) and (W + s B A) x round at other places: some 1e-7 a product, a few layers deep.
    hf.save_policy(hf.load_merged(version(spec, 2)), version(spec, 2), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), ours, rtol=0, atol=2e-5)
    torch.testing.assert_close(logits(merged), logits(theirs.merge_and_unload()), rtol=0, atol=0)
    assert not is_adapter(tmp_path / "merged")
    assert hf.tokenizer_digest(hf.load_tokenizer(tmp_path / "merged")) == hf.tokenizer_digest(
        hf.load_tokenizer(version(spec, 2))
    )


def test_a_stage_continues_the_adapter_it_starts_from(policy: Path, windows: Callable[[], Any], tmp_path: Path) -> None:
    first = make_spec(policy, tmp_path)
    assert train(first, windows())
    spec = make_spec(version(first, 2), tmp_path / "next")
    assert train(spec, windows())
    assert losses(spec)[0] < losses(first)[0]
    assert json.loads((version(spec, 2) / BASE).read_text())["digest"] == hf.weights_digest(policy)
    torch.testing.assert_close(logits(hf.load_model(version(first, 2))), logits(hf.load_model(Path(spec.start))))
    with advises(", or have the stage that it comes from merge its adapter") as refused:
        train(make_spec(version(first, 2), tmp_path / "other", lora=Lora(r=8)), windows())
    assert "adapter of rank 4, train.lora.r = 8; set it to 4" in str(refused.value)
    assert train(make_spec(version(first, 2), tmp_path / "same", lora=Lora(r=4)), windows())
    hf.save_policy(hf.load_merged(version(first, 2)), version(first, 2), tmp_path / "merged")
    assert train(make_spec(tmp_path / "merged", tmp_path / "new", lora=Lora(r=8)), windows())


def test_weights_are_trained_from_the_merged_form_of_an_adapter(
    policy: Path, windows: Callable[[], Any], tmp_path: Path
) -> None:
    first = make_spec(policy, tmp_path)
    assert train(first, windows())
    spec = make_spec(version(first, 2), tmp_path / "whole", lora=Lora())
    assert train(spec, windows())
    assert losses(spec)[0] < losses(first)[0]
    assert not is_adapter(version(spec, 1))


def test_another_base_is_refused(
    policy: Path, make_policy: Callable[..., Path], windows: Callable[[], Any], tmp_path: Path
) -> None:
    spec = make_spec(policy, tmp_path)
    assert not train(spec, windows(), StopAfter(6))
    other = make_policy(seed=5)
    with pytest.raises(MismatchError, match="base_digest"):
        train(spec.model_copy(update={"start": str(other)}), windows())
    folder = version(spec, 1)
    said = json.loads((folder / BASE).read_text())
    (folder / BASE).write_text(json.dumps({**said, "place": str(other)}))
    (folder / "checksums.json").unlink()
    with pytest.raises(MismatchError, match="was trained on a base with digest"):
        hf.load_model(folder)
    (folder / BASE).unlink()
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": "nowhere"}))
    with pytest.raises(UnknownNameError, match="base_model_name_or_path"):
        hf.load_model(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_modules": ["q_proj", "k_prj"]}, "no module 'k_prj'.*k_proj"),
        ({"target_modules": ["lm_head"]}, "LM head"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(
    policy: Path, windows: Callable[[], Any], tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(MismatchError, match=said):
        Run(make_spec(policy, tmp_path, lora=Lora(r=2, **changes)), windows(), ALONE)


def test_dropout_of_an_adapter_acts_in_training_alone(policy: Path, windows: Callable[[], Any], tmp_path: Path) -> None:
    dry, wet = make_spec(policy, tmp_path / "dry"), make_spec(policy, tmp_path / "wet", lora=Lora(r=4, dropout=0.5))
    assert train(dry, windows())
    assert train(wet, windows())
    assert losses(dry)[1:] != losses(wet)[1:]
    first, second = (logits(hf.load_model(version(wet, 2))) for _ in range(2))
    assert torch.equal(first, second)


def test_a_bfloat16_base_is_held_as_such_and_factors_in_float32(policy: Path) -> None:
    from mopd_dataplane.train.student import load_student

    student = load_student(policy, ALONE, Train(lora=LORA), dtype=torch.bfloat16)
    dtypes = {"lora_" in name: weight.dtype for name, weight in student.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    assert {"lora_" in name for name, weight in student.named_parameters() if weight.requires_grad} == {True}


def test_an_engine_takes_the_next_version_into_the_base_that_it_holds(
    policy: Path, windows: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mopd_dataplane.rollout.engines import decoder

    spec = make_spec(policy, tmp_path)
    train(spec, windows())
    opened: list[Path] = []
    monkeypatch.setattr(
        decoder, "load_model", lambda folder, **how: opened.append(folder) or hf.load_model(folder, **how)
    )

    def drawn(folder: Path) -> torch.Tensor:
        here = decoder.Decoder(folder, rows=1, dtype="float32", device="cpu")
        return here.forward(np.array([5]), np.array([0]))

    expected = [drawn(version(spec, number)) for number in (1, 2)]
    assert not torch.equal(*expected)
    opened.clear()
    engine = HfEngine(version(spec, 1), slots=2)
    with torch.inference_mode():
        for number in (2, 1, 2):
            engine.load_policy(version(spec, number), number)
            assert engine.policy_digest == hf.weights_digest(version(spec, number))
            (here,) = engine._decoders
            said = here.forward(np.array([5]), np.array([0]))
            torch.testing.assert_close(said, expected[number - 1], rtol=0, atol=1e-6)
            here.clear(2)
    assert opened == [version(spec, 1)], "the base was read once"
    engine.load_policy(policy, 3)
    assert len(opened) == 2, "whole weights are another model"


def test_an_adapter_that_does_not_fit_leaves_the_one_before(
    policy: Path, windows: Callable[[], Any], tmp_path: Path
) -> None:
    spec = make_spec(policy, tmp_path)
    train(spec, windows())
    model = hf.load_model(version(spec, 1))
    before = logits(model)
    odd = tmp_path / "odd"
    shutil.copytree(version(spec, 2), odd)
    (odd / CHECKSUMS).unlink()
    config = json.loads((odd / ADAPTER_CONFIG).read_text())
    (odd / ADAPTER_CONFIG).write_text(json.dumps(config | {"r": LORA.r * 2}))
    with pytest.raises(MismatchError, match="another rank"):
        replace_adapter(model, odd)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])
def test_all_linear_leaves_fused_experts_out_and_can_be_read_back(family: str, tmp_path: Path) -> None:
    folder = make_student(Student(config=FAMILIES[family]), tmp_path / "base", seed=0)
    model = hf.load_model(folder)
    new_adapter(model, Lora(r=4))
    tensors = trained_tensors(model)
    assert tensors
    assert not [name for name in tensors if "experts" in name]
    with torch.no_grad():
        for weight in tensors.values():
            weight.normal_(std=0.1)
    ids = torch.arange(5, 25)[None]
    expected = hf.hidden_states(model, ids)
    policy = tmp_path / "policies" / "stage" / "v1"
    base = Base(location=str(folder), digest=hf.weights_digest(folder))
    save_adapter(model, tensors, policy, start=folder, base=base)
    torch.testing.assert_close(hf.hidden_states(hf.load_model(policy), ids), expected, rtol=0, atol=1e-4)


def test_an_expert_named_as_a_target_is_refused(tmp_path: Path) -> None:
    folder = make_student(Student(config=FAMILIES["qwen3-moe"]), tmp_path / "base", seed=0)
    with pytest.raises(MismatchError, match="parts of the experts"):
        new_adapter(hf.load_model(folder), Lora(r=4, target_modules=("q_proj", "gate_proj", "up_proj", "down_proj")))
