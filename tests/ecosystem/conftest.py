"""Stores that real packages of the ecosystem are pointed at, and files of theirs; nothing is downloaded."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scored_store import add_teacher, tiny_student

from mopd_dataplane import Store

QUESTIONS = [{"question": f"{n} + 4 =", "choices": [f" {n + 4}", f" {n + 5}", " 99"], "gold": 0} for n in range(12)]
TASK = """
task: sums
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: gold
doc_to_choice: choices
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
"""A task of lm-eval, as a user writes one."""
VOCABULARY = 98
"""Tokens of the demonstration store's tokenizer of characters."""
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("WANDB_MODE", "offline")


@pytest.fixture(scope="session")
def scored_store(make_store: Callable[..., Store], tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with hidden states, log-probs and a planned window (scored_store.py); read only."""
    store: Store = make_store(tmp_path_factory.mktemp("scored") / "store", prompts=2)
    add_teacher(store, VOCABULARY)
    return store


@pytest.fixture(scope="session")
def policy(scored_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny student with the store's tokenizer."""
    return tiny_student(tmp_path_factory.mktemp("policy") / "start", VOCABULARY, scored_store)


@pytest.fixture(scope="session")
def write_lm_eval_task() -> Callable[[Path], list[dict[str, Any]]]:
    """write(folder) makes a folder of the task `sums`, and gives its questions."""

    def write(folder: Path) -> list[dict[str, Any]]:
        folder.mkdir()
        (folder / "q.json").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
        (folder / "sums.yaml").write_text(TASK.format(file=folder / "q.json"))
        return QUESTIONS

    return write


@pytest.fixture(scope="session")
def write_hub_cache() -> Callable[[Path], Path]:
    """write(folder) makes an HF_HOME with the dataset `owner/sums`, as `datasets` leaves one that it downloaded."""

    def write(folder: Path) -> Path:
        import datasets

        cached = folder / "home" / "datasets" / "owner___sums" / "default" / "0.0.0" / ("0" * 40)
        cached.mkdir(parents=True)
        file = folder / "train.parquet"
        datasets.Dataset.from_dict({"problem": ["3 + 4 =", "1 + 1 ="], "answer": ["7", "2"]}).to_parquet(str(file))
        builder = datasets.load_dataset_builder("parquet", data_files=str(file), cache_dir=str(folder / "made"))
        builder.download_and_prepare()
        for part in Path(builder.cache_dir).iterdir():
            shutil.copy(part, cached / part.name.replace("parquet-train", "sums-train"))
        return folder / "home"

    return write
