"""A job whose teacher is the moving average of its own policy, interrupted between two iterations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mopd_dataplane import open_store
from mopd_dataplane.job.load import load_job
from mopd_dataplane.models.hf import load_model, weights_digest
from mopd_dataplane.run import pipeline
from mopd_dataplane.run.pipeline import run_job

JOB: dict[str, Any] = {
    "name": "follow", "student": {
        "tokenizer": "characters",
        "config": {
            "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256,
            "initializer_range": 0.2, "tie_word_embeddings": False,
        },
    },
    "domains": {"sums": {
        "source": "reasoning-gym", "dataset": "chain_sum", "template": "{question}\n", "train": 64, "eval": 2,
    }},
    "teachers": {"itself": {"source": "student", "follows": 2, "average": 0.25}},
    "routing": {"sums": "itself"},
    "objectives": {"opd": {
        "policy_gradient": {}, "plan": {"batch_samples": 4}, "train": {"learning_rate": 3e-2, "threads": 1},
    }},
    "retain": {"policies": 1},
    "stages": [{
        "name": "student", "objective": "opd", "iterations": 5,
        "rollout": {"prompts_per_iteration": 4, "max_new_tokens": 8},
    }],
}  # fmt: skip


def logprobs(folder: Path, tokens: list[int], response: int) -> torch.Tensor:
    """Log-probs of the last tokens, by transformers' own pass."""
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        rows = load_model(folder)(ids).logits[0].double().log_softmax(-1)
    return rows[:-1].gather(1, ids[0, 1:, None])[-response:, 0]


def test_every_iteration_is_scored_by_the_average_of_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_path = tmp_path / "store"
    (tmp_path / "job.json").write_text(json.dumps(JOB | {"store": str(store_path)}))
    job = load_job(tmp_path / "job.json")
    plain = pipeline.plan_window

    def interrupted(run: Any, stage: Any, window: int, **settings: Any) -> Any:
        if window == 3:
            raise KeyboardInterrupt
        return plain(run, stage, window, **settings)

    with monkeypatch.context() as once:
        once.setattr(pipeline, "plan_window", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_job(job)
    run_job(job)
    store = open_store(str(store_path))
    events = store.sql(
        "select iteration, value::int as version, detail->>'$.weights_digest' as digest from events "
        "where kind = 'followed' order by iteration"
    ).to_pylist()
    assert [row["version"] for row in events] == [0, 0, 2, 2, 4]
    assert len({row["digest"] for row in events}) == 3
    policies = store_path / "policies"
    assert events[0]["digest"] == weights_digest(policies / "init")
    average = policies / "student" / "average-itself-v4"
    assert events[4]["digest"] == weights_digest(average)
    ids = np.concatenate([ids for ids, _ in store.scan_samples(["uid"])])
    iterations = store.take_samples(ids, ["iteration"])["iteration"].to_pylist()
    for iteration, folder in ((0, policies / "init"), (4, average)):
        rows = ids[[own == iteration for own in iterations]]
        stored = store.read_signal("itself", "logprob", rows)
        payload = store.read_tokens(rows, ["tokens", "loss_mask"]).to_pylist()
        assert len(rows) == 4
        for own, row in zip(stored, payload, strict=True):
            expected = logprobs(folder, row["tokens"], len(row["loss_mask"]))
            # float32 sums of other shapes through two layers.
            np.testing.assert_allclose(np.asarray(own, np.float64), expected.numpy(), atol=1e-4)
    assert not store.verify().findings
