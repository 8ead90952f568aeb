"""A plan is made from metadata alone: no payload file is opened, and none needs to be there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mopd_dataplane.bench.opened import opened_files
from mopd_dataplane.bench.synthetic import lengths_of, make_store
from mopd_dataplane.job import sections
from mopd_dataplane.plan.columns import GROUP_COLUMN, SAMPLE_COLUMNS, collect_columns
from mopd_dataplane.plan.plan import build_window
from mopd_dataplane.records import PlanWindow
from mopd_dataplane.store.dataset import Store

TEACHERS = ["adder", "speller"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_store(tmp_path / "s", lengths_of(300, mean_log=4, longest=256), signals=("logprob", "hidden"), rewards=True)
    return tmp_path / "s"


def plan_of(folder: Path) -> PlanWindow:
    store = Store.open(folder)
    snapshot = store.snapshot()
    columns = collect_columns(
        store.scan_samples([*SAMPLE_COLUMNS, GROUP_COLUMN], snapshot),
        300,
        route=lambda domain, effort: TEACHERS[int(domain[-1])],
        teachers=TEACHERS,
        scores=store.table("scores", ["sample_row", "teacher", "kind"], snapshot=snapshot),
        signals=("logprob", "hidden"),
        rewards=store.table("rewards", ["sample_row"], snapshot=snapshot),
    )
    rule = sections.Plan(pack_tokens=512, batch_samples=50)
    return build_window(columns, rule, seed=0, stage="student", window=0, snapshot=snapshot, teachers=TEACHERS)


def payload_folders(folder: Path) -> list[Path]:
    signals = [folder / "signals" / teacher / kind for teacher in TEACHERS for kind in ("logprob", "hidden")]
    return [table / "data" for table in (folder / "tokens", *signals)]


def test_no_payload_file_is_opened(folder: Path) -> None:
    with opened_files(*payload_folders(folder)) as opened:
        assert plan_of(folder).stats["samples"] == 300
    assert opened == []


def test_a_payload_read_is_seen(folder: Path) -> None:
    with opened_files(*payload_folders(folder)) as opened:
        Store.open(folder).read_tokens([0])
    assert [path.parent for path in opened] == [folder / "tokens" / "data"]


def test_the_same_plan_without_any_payload_on_disk(folder: Path) -> None:
    digest = plan_of(folder).digest
    for data in payload_folders(folder):
        shutil.rmtree(data)
    assert plan_of(folder).digest == digest
