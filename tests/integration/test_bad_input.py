"""Bad input: an error that names it, its own exit code, and nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mopd_dataplane import open_store
from mopd_dataplane.base.file_checksums import write_checksums
from mopd_dataplane.base.sealed_json import seal, unseal

ONE_STAGE = """
[[stages]]
name = "again"
start = "base"
objective = "sampled"
rollout = {{ prompts_per_iteration = 8{rollout} }}
plan = {{ batch_samples = 4 }}
"""


def refused(done, code: int, *words: str) -> None:
    """The run ended with `code`, and its message holds every word (whatever the terminal wrapped)."""
    message = " ".join(done.stderr.split())
    assert done.returncode == code, message
    for word in words:
        assert word in message, message
    assert "Traceback" not in message


def test_unknown_domain(tmp_path: Path, write_job: Callable, mopd: Callable):
    job = write_job(tmp_path)
    job.write_text(job.read_text().replace('domains = ["sums"]', 'domains = ["sms"]'))
    refused(mopd("run", job, check=False), 2, "job.toml", "'sms'", "did you mean 'sums'?")
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_empty_prompt_file(tmp_path: Path, write_job: Callable, mopd: Callable):
    (tmp_path / "none.jsonl").touch()
    job = write_job(tmp_path)
    text = job.read_text().replace(
        'source = "reasoning-gym"\ndataset = "chain_sum"', f'source = "{tmp_path}/none.jsonl"', 1
    )
    job.write_text("\n".join(line for line in text.splitlines() if "max_digits" not in line))
    refused(mopd("run", job, check=False), 2, "none.jsonl has no prompts")
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_a_newer_store_is_not_touched(finished_job: Path, tmp_path: Path, write_job: Callable, mopd: Callable):
    store = copy_of(finished_job, tmp_path)
    mark = unseal((store / "store.json").read_bytes(), "store.json")
    (store / "store.json").write_bytes(seal({**mark, "format_version": 99}))
    before = sorted(store.rglob("*"))
    refused(mopd("run", write_job(tmp_path), check=False), 2, "format version 99", "this version reads 2")
    refused(mopd("store", "info", store, check=False), 2, "format version 99")
    assert sorted(store.rglob("*")) == before


@pytest.mark.slow
def test_prompt_longer_than_the_budget(finished_job: Path, tmp_path: Path, write_job: Callable, mopd: Callable):
    store = copy_of(finished_job, tmp_path)
    job = write_job(tmp_path, extra=ONE_STAGE.replace("{rollout}", ", max_prompt_tokens = 5"))
    refused(
        mopd("run", job, "--stage", "again", check=False),
        2,
        "are longer than 5 tokens",
        "rollout.max_prompt_tokens",
        "or more, or shorten them",
    )
    assert samples_of(store, "again") == 0


@pytest.mark.slow
def test_teacher_with_another_tokenizer(finished_job: Path, tmp_path: Path, write_job: Callable, mopd: Callable):
    store = copy_of(finished_job, tmp_path)
    stranger = tmp_path / "stranger"
    shutil.copytree(store / "policies" / "sums" / "v1", stranger)
    tokenizer = json.loads((stranger / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (stranger / "tokenizer.json").write_text(json.dumps(tokenizer))
    write_checksums(stranger, identities=True)
    job = write_job(tmp_path, extra=ONE_STAGE.replace("{rollout}", ""))
    rule = 'routing = {{ sums = "stranger", words = "words" }}'.format()
    text = job.read_text().replace('name = "again"', f'name = "again"\n{rule}')
    job.write_text(text.replace("[teachers]", f'[teachers]\nstranger = {{ source = "{stranger}" }}'))
    refused(
        mopd("run", job, "--stage", "again", check=False),
        2,
        "teacher 'stranger' has another vocabulary",
        "'a' for the student",
    )
    assert not (store / "heads" / "stranger.safetensors").exists()
    assert not (store / "signals" / "stranger").exists()


@pytest.mark.slow
def test_nan_from_an_engine(finished_job: Path, tmp_path: Path, write_job: Callable, mopd: Callable):
    import torch
    from safetensors.torch import load_file, save_file

    store = copy_of(finished_job, tmp_path)
    weights = store / "policies" / "base" / "v1" / "model.safetensors"
    broken = load_file(weights)
    broken["lm_head.weight"] = torch.full_like(broken["lm_head.weight"], float("nan"))
    save_file(broken, weights, metadata={"format": "pt"})
    write_checksums(weights.parent, identities=True)
    job = write_job(tmp_path, extra=ONE_STAGE.replace("{rollout}", ""))
    refused(mopd("rollout", job, "--stage", "again", check=False), 6, "nothing", "written")
    assert samples_of(store, "again") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [["run", "nowhere.toml"], ["query", "nowhere", "select 1"], ["report", "nowhere", "-o", "r.html"]]
)
def test_missing_files_are_named(command: list[str], mopd: Callable, tmp_path: Path):
    refused(mopd(*command, check=False), 2, "nowhere")


def copy_of(finished: Path, folder: Path) -> Path:
    """A store of one's own."""
    shutil.copytree(finished / "store", folder / "store")
    return folder / "store"


def samples_of(store: Path, stage: str) -> int:
    """Samples a stage has in a store."""
    return open_store(str(store)).dataset("samples").count_rows(f"stage = '{stage}'")
