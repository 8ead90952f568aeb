"""Hugging Face's Trainer and a plain loop on a store: the loss is ours, and that of the formula; the weights are those
of mopd train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from advice import advises
from safetensors.torch import load_file
from scored_store import PACKS, STEPS, TEACHER, add_teacher, tiny_student
from transformers import AutoModelForCausalLM, TrainingArguments

from mopd_dataplane import BatchStream, LoadSpec, Store
from mopd_dataplane.errors import InputError
from mopd_dataplane.integrations.hf_trainer import StoreTrainer
from mopd_dataplane.job.objectives import Objective
from mopd_dataplane.job.sections import Train
from mopd_dataplane.load.client import LoaderClient
from mopd_dataplane.load.launch import start_server
from mopd_dataplane.train.heads import TeacherHeads
from mopd_dataplane.train.loop import Trainer as OwnTrainer
from mopd_dataplane.train.objective import ObjectiveLoss
from mopd_dataplane.train.ranks import Ranks
from mopd_dataplane.train.spec import HeadFile, Window
from mopd_dataplane.train.student import Student

VOCABULARY = 98
REVERSE = {"divergence": {"kind": "reverse"}}
RATE = 1e-3


@pytest.fixture(scope="module")
def scored(make_store: Callable[..., Store], tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, dict[str, Any]]:
    store = make_store(tmp_path_factory.mktemp("scored") / "store", prompts=2)
    return store, add_teacher(store, VOCABULARY)


@pytest.fixture(scope="module")
def policy(scored: tuple[Store, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_student(tmp_path_factory.mktemp("policy") / "start", VOCABULARY, scored[0])


def settings(folder: Path, **others: Any) -> TrainingArguments:
    return TrainingArguments(
        str(folder), learning_rate=RATE, lr_scheduler_type="constant", num_train_epochs=1, max_grad_norm=1.0,
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, adam_beta2=0.95, weight_decay=0.0, **others,
    )  # fmt: skip


def trained(policy: Path, store: Store, folder: Path, **others: Any) -> StoreTrainer:
    model = AutoModelForCausalLM.from_pretrained(policy)
    trainer = StoreTrainer(
        model, settings(folder), store=store.uri, stage="student", windows=[90], **{"objective": REVERSE, **others}
    )
    trainer.train()
    return trainer


def losses(trainer: StoreTrainer, name: str = "loss") -> list[float]:
    return [line[name] for line in trainer.state.log_history if name in line]


def formula(policy: Path, store: Store, said: dict[str, Any]) -> float:
    """Mean exact reverse KL over the trained tokens of the first step, from full logits in float64."""
    model = AutoModelForCausalLM.from_pretrained(policy).double()
    plan = store.plan("student", 90)
    assert plan is not None
    rows = plan.sample_rows[: plan.pack_starts[PACKS]]
    divergences = []
    head = torch.from_numpy(said["head"]).double()
    lengths = store.samples(["prompt_len"])["prompt_len"].to_pylist()
    for row, sample in zip(rows.tolist(), store.read_tokens(rows).to_pylist(), strict=True):
        logits = model(torch.tensor([sample["tokens"]])).logits[0, lengths[row] - 1 : -1]
        student = logits[torch.tensor(sample["loss_mask"]) > 0].log_softmax(-1)
        teacher = (torch.from_numpy(said["states"][row]).double() @ head.T).log_softmax(-1)
        divergences.append((student.exp() * (student - teacher)).sum(-1))
    return torch.cat(divergences).mean().item()


def own(policy: Path, store: Store, folder: Path) -> tuple[list[float], Student]:
    """mopd train's own steps over the same window, with the same optimizer."""
    objective = Objective.model_validate(REVERSE)
    student = Student(AutoModelForCausalLM.from_pretrained(policy))
    student.train()
    teacher = store.teachers()[TEACHER]
    heads = TeacherHeads(
        {TEACHER: HeadFile(path=str(store.path(teacher.head_file)), digest=teacher.head_digest)}, torch.device("cpu")
    )
    train = Train(learning_rate=RATE, warmup_steps=0)
    trainer = OwnTrainer(student, ObjectiveLoss(objective), train, Ranks(0, 1, torch.device("cpu")), heads)
    window = Window(window=90, plan_digest="", snapshot_digest="", steps=STEPS, policy_version=1)
    step_losses = []
    spec = LoadSpec(stage="student", signals=("hidden",))
    with start_server(store.uri, folder / "own.sock", spec) as server, LoaderClient(server.socket) as client:
        for step, batch in enumerate(client.batches("student", 90)):
            step_losses.append(trainer.step(batch, window, step).loss)
    heads.close()
    return step_losses, student


def plain(policy: Path, store: Store) -> list[float]:
    """Exact reverse KL of every step in a loop of plain torch, from public names: full logits, no kernels."""
    model = AutoModelForCausalLM.from_pretrained(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    head = load_file(store.path(store.teachers()[TEACHER].head_file))["weight"]
    step_losses = []
    with BatchStream(store.uri, LoadSpec(stage="student", signals=("hidden",)), windows=[90]) as stream:
        for batch in stream:
            step_losses.append(0.0)
            for pack in batch.packs:
                tokens, places = pack.tokens.long()[None], pack.position_ids.long()[None]
                logits = model(input_ids=tokens, position_ids=places, use_cache=False).logits[0, :-1]
                student = logits[pack.loss_mask[1:].bool()].log_softmax(-1)
                teacher = (pack.hidden.view(torch.float32) @ head.T).log_softmax(-1)
                loss = (student.exp() * (student - teacher)).sum() / batch.loss_tokens
                loss.backward()
                step_losses[-1] += float(loss.detach())
                batch.release(pack)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return step_losses


@pytest.mark.slow
def test_the_loss_and_the_weights_are_those_of_mopd_train(
    scored: tuple[Store, dict[str, Any]], policy: Path, tmp_path: Path
) -> None:
    store, said = scored
    theirs = trained(policy, store, tmp_path / "hf")
    ours, student = own(policy, store, tmp_path)
    assert theirs.state.global_step == len(ours) == STEPS
    assert losses(theirs) == pytest.approx(ours, abs=1e-5)
    assert plain(policy, store) == pytest.approx(ours, abs=1e-5)
    assert losses(theirs)[0] == pytest.approx(formula(policy, store, said), abs=1e-5)
    assert losses(theirs, "reverse_kl") == pytest.approx(losses(theirs), abs=1e-5)
    for (name, mine), (_, other) in zip(student.model.named_parameters(), theirs.model.named_parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-5), name
    assert theirs.model.config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_a_trainer_takes_a_condition(scored: tuple[Store, dict[str, Any]], policy: Path, tmp_path: Path) -> None:
    """Every step that has a sample left is trained, on those alone: as a plain loop over its packs counts them."""
    store, _ = scored
    plan = store.plan("student", 90)
    assert plan is not None
    lengths = store.take_samples(plan.sample_rows, ["total_len"])["total_len"].to_numpy()
    where = f"total_len <= {int(np.median(lengths))}"
    steps = np.split(lengths, plan.pack_starts[plan.step_starts[1:-1]])
    left = [int((step <= np.median(lengths)).sum()) for step in steps if (step <= np.median(lengths)).any()]
    assert 0 < sum(left) < len(lengths)
    trainer = trained(policy, store, tmp_path, where=where)
    assert trainer.state.global_step == len(left)
    spec = LoadSpec(stage="student", signals=("hidden",), where=where)
    with BatchStream(store.uri, spec, windows=[90]) as stream:
        assert [sum(len(pack.cu_seqlens) - 1 for pack in batch.packs) for batch in stream] == left


@pytest.mark.slow
def test_cutting_a_step_changes_nothing_and_an_epoch_begins_again(
    scored: tuple[Store, dict[str, Any]], policy: Path, tmp_path: Path
) -> None:
    store, _ = scored
    sampled = {"objective": {"cross_entropy": {}}}
    whole = trained(policy, store, tmp_path / "a", **sampled)
    cut = trained(policy, store, tmp_path / "b", pass_tokens=40, **sampled)
    assert losses(cut) == pytest.approx(losses(whole), abs=1e-5)
    assert len(whole._steps) == STEPS


def test_what_would_be_another_loss_is_refused(
    scored: tuple[Store, dict[str, Any]], policy: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy)

    def make_trainer(arguments: TrainingArguments, **others: Any) -> None:
        StoreTrainer(model, arguments, **{"store": scored[0], "stage": "student", "objective": REVERSE, **others})

    half = settings(tmp_path)
    half.fp16 = True  # which transformers takes on a GPU only
    with advises("fp16 is not supported here; set bf16, or train in float32"):
        make_trainer(half)
    make_trainer(settings(tmp_path, bf16=True))
    make_trainer(settings(tmp_path))
    with pytest.raises(InputError, match="gradient_accumulation_steps must be 1"):
        make_trainer(settings(tmp_path, gradient_accumulation_steps=2))
    with pytest.raises(InputError, match=r"stage 'nobody' has planned windows \[\]"):
        make_trainer(settings(tmp_path), stage="nobody")
    with pytest.raises(InputError, match=r"planned windows \[0, 1, 2, 3, 90\], asked for \[7\]"):
        make_trainer(settings(tmp_path), windows=[7])
    with pytest.raises(InputError, match="divergance"):
        make_trainer(settings(tmp_path), objective={"divergance": {}})
    with pytest.raises(InputError, match="need the log-probs of the policy at the window's start"):
        make_trainer(settings(tmp_path), objective={"policy_gradient": {"clip": [0.8, 1.2], "correction": "icepop"}})
