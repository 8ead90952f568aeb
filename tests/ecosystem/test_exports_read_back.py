"""Exports are read by the packages they are made for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from verifiers.v1.episode import WireEpisode

from mopd_dataplane import Store
from mopd_dataplane.interchange.exporter import export_samples

COMMON: dict[str, Any] = {
    "max_steps": 1, "per_device_train_batch_size": 2, "logging_steps": 1, "save_strategy": "no", "report_to": [],
    "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
}  # fmt: skip
CHAT = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"


def test_datasets_read_every_kind(scored_store: Store, tmp_path: Path) -> None:
    rows = scored_store.samples(["uid"])["uid"].to_pylist()
    for kind in ("parquet", "jsonl", "arrow"):
        export_samples(scored_store, tmp_path / f"out.{kind}", signals=["logprob"], teachers=["teacher"])
        reader = {"jsonl": "json"}.get(kind, kind)
        loaded = datasets.load_dataset(
            reader, data_files=str(tmp_path / f"out.{kind}"), cache_dir=str(tmp_path / "cache"), split="train"
        )
        assert loaded["uid"][:] == rows
        said = np.array(loaded[0]["signals"][0]["logprob"], np.float32)
        assert np.array_equal(said, scored_store.read_signal("teacher", "logprob", [0])[0])
    export_samples(scored_store, tmp_path / "folder", signals=["hidden"], teachers=["teacher"])
    folder = datasets.load_from_disk(str(tmp_path / "folder"))
    hidden = scored_store.read_signal("teacher", "hidden", [3])[0]
    assert folder[3]["signals"][0]["hidden"] == hidden.tobytes()


def test_trl_trains_on_exact_tokens(scored_store: Store, policy: Path, tmp_path: Path) -> None:
    export_samples(scored_store, tmp_path / "t.parquet", form="tokens", signals=["logprob"], teachers=["teacher"])
    rows = datasets.Dataset.from_parquet(str(tmp_path / "t.parquet"), cache_dir=str(tmp_path / "cache"))
    trainer = SFTTrainer(
        str(policy), args=SFTConfig(str(tmp_path / "o"), max_length=None, **COMMON), train_dataset=rows
    )
    [batch, *_] = list(trainer.get_train_dataloader())
    uids = {tuple(row["input_ids"]): row for row in rows}
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        row = next(row for key, row in uids.items() if tuple(ids[: len(key)]) == key)
        assert labels[: len(row["labels"])] == row["labels"]
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 0


@pytest.mark.parametrize("form", ["sft", "messages"])
def test_trl_trains_on_text(scored_store: Store, policy: Path, tmp_path: Path, form: str) -> None:
    export_samples(scored_store, tmp_path / "s.jsonl", form=form)
    rows = datasets.load_dataset("json", data_files=str(tmp_path / "s.jsonl"), cache_dir=str(tmp_path), split="train")
    trainer = SFTTrainer(
        str(policy), args=SFTConfig(str(tmp_path / "o"), **COMMON), train_dataset=rows.select(range(4)),
        processing_class=_tokenizer(policy),
    )  # fmt: skip
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 0


def test_trls_distillation_trainer_reads_conversations(scored_store: Store, policy: Path, tmp_path: Path) -> None:
    export_samples(scored_store, tmp_path / "m.parquet", form="messages")
    rows = datasets.Dataset.from_parquet(str(tmp_path / "m.parquet"), cache_dir=str(tmp_path / "cache"))
    trainer = GKDTrainer(
        model=AutoModelForCausalLM.from_pretrained(policy), teacher_model=AutoModelForCausalLM.from_pretrained(policy),
        args=GKDConfig(str(tmp_path / "o"), lmbda=0.0, max_length=200, **COMMON), processing_class=_tokenizer(policy),
        train_dataset=rows.select_columns(["messages"]).select(range(4)),
    )  # fmt: skip
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(0, abs=1e-6), "the teacher is the student"


def test_verifiers_reads_traces_with_every_digit(scored_store: Store, tmp_path: Path) -> None:
    export_samples(scored_store, tmp_path / "t.jsonl", form="traces", signals=["logprob"], teachers=["teacher"])
    lines = (tmp_path / "t.jsonl").read_text().splitlines()
    payload = scored_store.read_tokens(np.arange(len(lines))).to_pylist()
    rewards = {row["uid"]: row["reward"] for row in scored_store.table("rewards").to_pylist()}
    for number, (line, tokens) in enumerate(zip(lines, payload, strict=True)):
        episode = WireEpisode.model_validate_json(line)
        [trace] = episode.traces
        [branch] = trace.branches
        start = len(tokens["tokens"]) - len(tokens["loss_mask"])
        assert branch.token_ids == tokens["tokens"]
        assert branch.sampled_mask == [False] * start + [bool(is_sampled) for is_sampled in tokens["loss_mask"]]
        assert branch.logprobs[start:] == tokens["logprobs"]
        assert branch.reference_logprobs is not None
        assert branch.reference_logprobs[start:] == scored_store.read_signal("teacher", "logprob", [number])[0].tolist()
        assert trace.reward == rewards[episode.id]
        again = WireEpisode.model_validate(episode.to_record(float_decimals=None))
        assert again.traces[0].nodes[-1].logprobs == trace.nodes[-1].logprobs


def _tokenizer(policy: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.chat_template = CHAT
    return tokenizer
