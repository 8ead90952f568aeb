"""Next steps that messages of imports and exports name: each is taken, and works."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import store_builders as build
from advice import advises

from mopd_dataplane import Store, create_store
from mopd_dataplane.interchange.conversion import ImportSettings
from mopd_dataplane.interchange.exporter import export_samples
from mopd_dataplane.interchange.importer import ImportReport, import_rollouts
from mopd_dataplane.models.chat_template import AnswerTokens, ChatOptions
from mopd_dataplane.records import Signal

Bring = Callable[..., ImportReport]


class Letters:
    """A tokenizer of one token per character."""

    template = "{prompt}"
    end: int | None = None

    def __init__(self, digest: str = "letters", size: int = 1000) -> None:
        self.digest, self.size = digest, size

    def file(self) -> None:
        return None

    def prompt(self, text: str) -> list[int]:
        return [1, *map(ord, text)]

    def response(self, text: str) -> list[int]:
        return list(map(ord, text))

    def conversation(self, prompt: Any, response: Any, *, options: ChatOptions, is_cut_off: bool) -> AnswerTokens:
        ids = [token for message in response for token in self.response(message["content"])]
        mask = [1] * len(ids)
        return AnswerTokens(prompt_ids=self.prompt("chat"), response_ids=ids, loss_mask=mask, is_terminated=False)


@pytest.fixture
def bring(tmp_path: Path) -> Bring:
    """bring(row, "plain") imports a row of a format into the test's store."""

    def brought(
        row: dict[str, Any], source: str = "plain", vocabulary: Letters | None = None, **settings: str
    ) -> ImportReport:
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps(row) + "\n")
        chosen = ImportSettings(**{"format": source, "stage": "student", "domain": "sums", **settings})
        return import_rollouts(create_store(str(tmp_path / "store")), file, chosen, vocabulary or Letters())

    return brought


IDS = {"prompt_ids": [1, 2], "response_ids": [3, 4]}


def test_rows_of_token_ids(bring: Bring) -> None:
    with advises("; give the number of prompt tokens"):
        bring({"tokens": [1, 2, 3], "prompt_len": 4})
    assert bring({"tokens": [1, 2, 3], "prompt_len": 2}).samples == 1
    with advises("; give the tokenizer that made them"):
        bring(IDS | {"tokenizer": "another"})
    assert bring(IDS | {"tokenizer": "another"}, vocabulary=Letters("another")).samples == 1
    large = {"prompt_ids": [1, 2], "response_ids": [3, 5000]}
    with advises(": the row has token id "):
        bring(large)
    assert bring(large, vocabulary=Letters(size=6000)).samples == 1
    with advises(" holds token id "):
        bring(IDS | {"sampling_mask_ids": [3, 5000], "sampling_mask_sizes": [1, 1]})
    assert (
        bring(
            {"prompt_ids": [1, 5], "response_ids": [3, 4]}
            | {"sampling_mask_ids": [3, 4], "sampling_mask_sizes": [1, 1]}
        ).samples
        == 1
    )
    with advises(": the row names no "):
        bring(IDS, domain="")
    assert bring({"prompt_ids": [1, 6], "response_ids": [3, 4]}, domain="words").samples == 1


def test_rows_of_text_and_messages(bring: Bring) -> None:
    question, answers = {"role": "user", "content": "2 + 2?"}, [{"role": "assistant", "content": "4"}] * 2
    pair = {"prompt": "2 + 2?", "chosen": answers, "rejected": answers[:1]}
    with advises(": the prompt is text and the response has several messages; give both as messages"):
        bring(pair, "preference")
    assert bring(pair | {"prompt": [question]}, "preference").samples == 2
    row = {"prompt": "2 + 2?", "response": answers}
    with advises("the prompt is text and the response has messages; give both as messages"):
        bring(row)
    assert bring(row | {"prompt": [question]}).samples == 1


def test_signals_of_another_tokenizer(bring: Bring) -> None:
    teacher = asdict(build.teacher("expert", tokenizer_digest="another", head_file="", head_digest=""))
    row = IDS | {"signals": [{"teacher": teacher, "kind": "logprob", "logprob": [-1.0, -1.0]}]}
    with advises(" reads a tokenizer with digest "):
        bring(row)
    assert bring(row, vocabulary=Letters("another")).samples == 1


def test_names_of_exports(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    sample = build.sample(1)
    store.commit_samples([sample])
    with advises(" says no format; end it in .parquet, .jsonl or .arrow"):
        export_samples(store, tmp_path / "out.csv")
    for name, kind in (("a.parquet", ""), ("a.jsonl", ""), ("a.arrow", ""), ("folder", ""), ("out.csv", "jsonl")):
        assert export_samples(store, tmp_path / name, kind) == 1
    for name in ("first", "second"):
        store.add_teacher(build.teacher(name, head_file="", head_digest=""))
        scored = np.where(sample.loss_mask, -1.0, 0.0).astype(np.float32)
        store.commit_signals(name, "logprob", [Signal(uid=sample.uid, sample_row=0, kind="logprob", logprob=scored)])
    with advises(", and a trace holds one reference; give --teacher NAME"):
        export_samples(store, tmp_path / "traces.jsonl", form="traces", signals=["logprob"])
    traces = {"form": "traces", "signals": ["logprob"], "teachers": ["first"]}
    assert export_samples(store, tmp_path / "traces.jsonl", **traces) == 1
