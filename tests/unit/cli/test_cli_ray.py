"""`--ray` takes an address, or none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import typer

from mopd_dataplane.cli.app import app
from mopd_dataplane.errors import InputError
from mopd_dataplane.job.job import check_job
from mopd_dataplane.run.context import open_run
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


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.jsonl").write_text('{"text": "1 + 1 = ", "answer": "2"}\n')
    job = check_job(
        {
            "name": "j", "store": str(tmp_path / "store"),
            "student": {"config": {"model_type": "qwen3", "hidden_size": 8, "num_attention_heads": 1}},
            "domains": {"d": {"source": str(tmp_path / "p.jsonl"), "train": 1, "reward": "exact"}},
            "stages": [{"name": "s", "data": "reference", "plan": {"batch_samples": 1}}],
        },
        where="job",
    )  # fmt: skip
    run = open_run(job, Progress(quiet=True))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'mopd-dataplane\[ray\]'"), ray_fleet("", run):
        pass
