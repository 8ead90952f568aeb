"""Stores that real packages of the ecosystem are pointed at; nothing is downloaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from judged_store import add_judge, tiny_student

from mopd_dataplane import Store

VOCABULARY = 98
"""Tokens of the demonstration store's tokenizer of characters."""
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("WANDB_MODE", "offline")


@pytest.fixture(scope="session")
def judged_store(make_store: Callable[..., Store], tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with hidden states, log-probs and a planned window (judged_store.py); read only."""
    store: Store = make_store(tmp_path_factory.mktemp("judged") / "store", prompts=2)
    add_judge(store, VOCABULARY)
    return store


@pytest.fixture(scope="session")
def policy(judged_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny student with the store's tokenizer."""
    return tiny_student(tmp_path_factory.mktemp("policy") / "start", VOCABULARY, judged_store)
