"""Stages that share prompts, stores that share a name, states that were freed, and what a typed statement may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mopd_dataplane import Prompt, Sample, Store, create_store
from mopd_dataplane.errors import DeadlineError, QueryError
from mopd_dataplane.records import sample_uid
from mopd_dataplane.store.read.decode import Numbers
from mopd_dataplane.store.sql.query import Limits, run_sql
from mopd_dataplane.view.export import export_folder
from mopd_dataplane.view.index import Index
from mopd_dataplane.view.labels import LabelledSamples
from mopd_dataplane.view.prompt import answers
from mopd_dataplane.view.sample import PROMPT_CHARACTERS, prompt_shown, score_rows
from mopd_dataplane.view.shown import Shown
from mopd_dataplane.view.stores import ShownStores
from mopd_dataplane.view.topk import candidates

GROUP = "p#0"
LIMITS = Limits(rows=10, seconds=120.0, memory="60MB", spilled="1GB")


def _answer(stage: str, position: int) -> Sample:
    return Sample(
        uid=sample_uid(0, stage, "p", position, 0), prompt_id="p", group_id=GROUP, group_index=position, iteration=0,
        domain="d", stage=stage, writer="w", writer_seq=position, policy=stage, temperature=1.0, top_p=1.0, top_k=0,
        prompt_len=1, tokens=np.array([1, 2, 3 + position], np.int32), logprobs=np.full(2, -0.5, np.float32),
        loss_mask=np.ones(2, np.uint8), version_starts=np.zeros(1, np.int32), versions=np.zeros(1, np.int32),
        finish_reason="stop", tokenizer="t",
    )  # fmt: skip


def test_a_group_is_of_one_stage(tmp_path: Path) -> None:
    store = create_store(str(tmp_path / "two"))
    store.add_prompts([Prompt(prompt_id="p", domain="d", text="?", split="train")])
    samples = [_answer(stage, position) for stage in ("warm", "cold") for position in range(2)]
    rows = store.commit_samples(samples).rows
    store.add_rewards([
        {"uid": sample.uid, "sample_row": int(row), "verifier": "v", "verifier_version": "1", "reward": reward}
        for sample, row, reward in zip(samples, rows, (0.0, 0.0, 0.0, 1.0), strict=True)
    ])  # fmt: skip
    index = Index(store, store.snapshot(), LabelledSamples(store))
    rollouts = index.rows("select stage, group_size, group_spread, advantage from rollouts order by sample_row")
    assert [tuple(row.values()) for row in rollouts] == [
        ("warm", 2, 0.0, 0.0), ("warm", 2, 0.0, 0.0), ("cold", 2, 1.0, -0.5), ("cold", 2, 1.0, 0.5),
    ]  # fmt: skip
    shown = answers(store, index, Numbers(), prompt_id="p", group=GROUP, stage="cold")
    assert [answer["row"]["stage"] for answer in shown["answers"]] == ["cold", "cold"]
    assert shown["total"] == 2
    assert answers(store, index, Numbers(), prompt_id="p")["total"] == 4


def test_a_statement_without_end_is_ended(demo_store: Store) -> None:
    endless = "with recursive t(i) as (select 1 union all select i + 1 from t) select count(*) from t"
    with pytest.raises(DeadlineError, match=r"0\.5 s"):
        run_sql(demo_store, endless, limits=replace(LIMITS, seconds=0.5))


def test_no_more_rows_are_read_than_are_shown(demo_store: Store) -> None:
    assert run_sql(demo_store, "select * from range(1000000000)", limits=LIMITS).num_rows == LIMITS.rows
    assert run_sql(demo_store, "select * from range(3)", limits=LIMITS).num_rows == 3


def test_a_statement_that_wants_too_much_memory_is_refused(demo_store: Store) -> None:
    with pytest.raises(QueryError, match=r"(?i)memory"):
        run_sql(demo_store, "select len(list(i)) from range(200000000) t(i)", limits=LIMITS)


def test_a_long_prompt_says_how_much_of_it_is_left_out() -> None:
    text = "w" * 1_000_000
    shown = prompt_shown({"text": text, "answer": "a"})
    assert len(shown["text"]) == PROMPT_CHARACTERS
    assert PROMPT_CHARACTERS + shown["cut"] == len(text)


@pytest.mark.slow
def test_stores_of_one_name_are_told_apart(make_store: Callable[..., Store], tmp_path: Path) -> None:
    stores = [make_store(tmp_path / run / "demo", prompts=1) for run in ("a", "b")]
    names = [about["name"] for about in ShownStores([Shown(store) for store in stores]).describe()]
    assert names == ["demo in a/demo", "demo in b/demo"]


def test_freed_states_are_said_to_be_freed(make_store: Callable[..., Store], tmp_path: Path) -> None:
    store = make_store(tmp_path / "freed", prompts=1)
    row = store.sql("select sample_row, uid, teacher from scores where kind = 'hidden' limit 1").to_pylist()[0]
    snapshot = store.snapshot()
    scores = score_rows(store, row["sample_row"], snapshot)
    [before] = candidates(store, row, scores, [(0, 0)], snapshot)
    assert "error" not in before[0]
    store.free_hidden(row["teacher"], store.sql("select sample_row from scores")["sample_row"].to_numpy())
    [after] = candidates(store, row, scores, [(0, 0)], store.snapshot())
    assert after[0]["error"] == "its hidden states were freed when they had served"


def test_an_export_has_every_prompt_of_its_samples(tmp_path: Path) -> None:
    store = create_store(str(tmp_path / "named"))
    samples = [replace(_answer("warm", position), prompt_id=f"p{position}") for position in range(2)]
    store.add_prompts([Prompt(prompt_id=sample.prompt_id, domain="d", text="?", split="train") for sample in samples])
    store.commit_samples(samples)  # two prompts, of which a writer named the groups alike
    export_folder(Shown(store), tmp_path / "out", where="", order="", limit=10)
    keys = (tmp_path / "out" / "mopd.js").read_text().partition("\n")[0]
    assert all(f'"prompt/{sample.prompt_id}"' in keys for sample in samples)
