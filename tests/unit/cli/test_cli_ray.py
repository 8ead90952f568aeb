"""`--ray` takes an address, or none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import typer

from mopd_dataplane.cli.app import app
from mopd_dataplane.errors import InputError, ResourceError
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import check_job
from mopd_dataplane.run.context import open_run
from mopd_dataplane.run.pipeline import run_job
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.ray.cluster import ray_fleet


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (["job"], None),
        (["job", "--ray"], ""),
        (["--ray", "--seed", "3", "job"], ""),
        (["job", "--ray", "auto"], "auto"),
        (["--ray", "10.0.0.1:6379", "job"], "10.0.0.1:6379"),
        (["job", "--ray=auto"], "auto"),
    ],
)
def test_the_address_may_be_left_out(words: list[str], address: str | None) -> None:
    command = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    parameters = command.make_context("run", list(words)).params
    assert parameters["ray"] == address
    assert parameters["job"] == "job"


def small_job(folder: Path) -> Job:
    (folder / "p.jsonl").write_text('{"text": "1 + 1 = ", "answer": "2"}\n')
    return check_job(
        {
            "name": "j", "store": str(folder / "store"),
            "student": {"config": {"model_type": "qwen3", "hidden_size": 8, "num_attention_heads": 1,
                                   "num_key_value_heads": 1}},
            "domains": {"d": {"source": str(folder / "p.jsonl"), "train": 1, "reward": "exact"}},
            "stages": [{"name": "s", "data": "reference", "plan": {"batch_samples": 1}}],
        },
        where="job",
    )  # fmt: skip


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(small_job(tmp_path), Progress(quiet=True))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'mopd-dataplane\[ray\]'"), ray_fleet("", run):
        pass


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_a_cluster_that_does_not_answer_leaves_no_store_behind(address: str, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=f"no Ray cluster answers at {address}"):
        run_job(small_job(tmp_path), ray=address)
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]
