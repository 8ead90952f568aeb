"""Samples, signals and other rows that follow from a number, and the store that every sequence begins with."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tarfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tests" / "unit" / "store"))

import store_builders as build  # noqa: E402

from mopd_dataplane.interchange.exporter import export_samples  # noqa: E402
from mopd_dataplane.job import sections  # noqa: E402
from mopd_dataplane.job.load import check_job  # noqa: E402
from mopd_dataplane.plan.columns import Columns  # noqa: E402
from mopd_dataplane.plan.plan import build_window  # noqa: E402
from mopd_dataplane.records import PlanWindow, Prompt, Sample, Signal, Snapshot, StepMetrics, sample_uid  # noqa: E402
from mopd_dataplane.store.dataset import Store  # noqa: E402
from mopd_dataplane.store.queue.committed import CommittedQueue  # noqa: E402

SAMPLES, GROUP = 10, 2
"""Samples there are, and samples of one prompt."""
TEACHER, STAGE, LATER = "t", "student", "later"
KINDS = ("logprob", "hidden")


_JOB: dict[str, Any] = {
    "name": "simulated", "student": {"config": {"model_type": "qwen3"}},
    "domains": {name: {"source": "store"} for name in ("math", "code")},
    "plan": {"batch_samples": 8},
    "stages": [{"name": STAGE, "data": "reference"}, {"name": LATER, "data": "reference", "start": STAGE}],
}  # fmt: skip


class Letters:
    """The tokenizer of the imported samples, of which only the digest counts."""

    digest, size, end, template = "tok", 1001, None, "{prompt}"

    def file(self) -> None:
        """It has no file."""

    def prompt(self, text: str) -> list[int]:
        """Refuse: the rows have ids."""
        raise AssertionError(f"the rows of an import have ids, and {text!r} was to be encoded")

    response = prompt


@cache
def sample(number: int, variant: int = 0) -> Sample:
    """A sample of a number; its variants have the same uid and other tokens."""
    prompt = prompt_of(number)
    whole = build.sample(
        number,
        response=6,
        uid=sample_uid(0, STAGE, prompt, number % GROUP, 0),
        prompt_id=prompt,
        group_id=f"{prompt}#0",
        group_index=number % GROUP,
        domain=domain_of(prompt),
    )
    return whole if not variant else replace(whole, tokens=(whole.tokens + variant) % 1000)


def prompt_of(number: int) -> str:
    """The name of a sample's prompt."""
    return f"p{number // GROUP}"


def domain_of(prompt: str) -> str:
    """The domain of a prompt and its samples."""
    return ("math", "code")[int(prompt[1:]) % 2]


def prompts(numbers: list[int]) -> list[Prompt]:
    """The prompts of some samples."""
    names = dict.fromkeys(map(prompt_of, numbers))
    return [Prompt(prompt_id=name, domain=domain_of(name), text=f"{name}?", answer="1") for name in names]


@cache
def digest_of(number: int, variant: int = 0) -> str:
    """Digest of a sample's tokens."""
    return digest(sample(number, variant).tokens)


def digest(array: Any) -> str:
    """Digest of the bytes of an array."""
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=6).hexdigest()


@cache
def signal(number: int, kind: str) -> Signal:
    """The signal of a sample; its row in `samples` is to be filled in."""
    return build.signal(sample(number), number, kind)


@cache
def digest_of_signal(number: int, kind: str) -> str:
    """Digest of the payload of a signal."""
    return digest(getattr(signal(number, kind), kind))


def plan(window: int, seed: int, rows: list[int]) -> PlanWindow:
    """A window of a plan over some rows of `samples`."""
    count = len(rows)
    small = np.zeros(count, np.int32)
    columns = Columns(
        sample_rows=np.array(rows, np.int64), total_len=small + 8, loss_tokens=small + 4,
        version_first=small, domains=small.astype(np.int16), groups=np.arange(count),
        teachers=(small - 1).astype(np.int16), has_signals=small == 0, has_reward=small == 0, abandoned=small == 1,
        domain_names=("math",),
    )  # fmt: skip
    return build_window(
        columns, sections.Plan(pack_tokens=16, batch_samples=2), seed=seed, stage=STAGE, window=window,
        snapshot=Snapshot(uri="", versions={}), teachers=[],
    )  # fmt: skip


def step(window: int, plan_digest: str, number: int) -> StepMetrics:
    """The record of a training step."""
    return StepMetrics(
        stage=STAGE, step=number, window=window, plan_digest=plan_digest, policy_version=window, loss=number / 7,
        grad_norm=1.0, learning_rate=1e-3, samples=2, tokens=16, loss_tokens=8, reverse_kl=0.5, staleness_mean=0.0,
        staleness_max=0, step_time_s=0.1, data_wait_s=0.0,
    )  # fmt: skip


def make_store(uri: str) -> None:
    """Make an empty store with a teacher and a queue."""
    store = Store.create(uri)
    store.add_teacher(build.teacher(TEACHER, head_file=""))
    for kind in KINDS:
        store.table_handle(f"signals/{TEACHER}/{kind}").create()
    CommittedQueue(uri, "q")
    store.write_json("job.json", check_job(_JOB | {"store": uri}, where="simulator").model_dump(mode="json"))
    store.add_event(f"done/{STAGE}/v1", STAGE, "stage_done", -1, 1.0, {})


def make_template(folder: Path) -> None:
    """Make what every sequence begins with: an empty store with a teacher, rows to import, a store of format 1."""
    make_store(f"{folder}/home/store")
    source = Store.create(folder / "source")
    source.add_prompts(prompts(list(range(SAMPLES))))
    source.commit_samples([sample(number) for number in range(SAMPLES)])
    (folder / "rows").mkdir()
    export_samples(source, folder / "rows" / "all.jsonl")
    for line in (folder / "rows" / "all.jsonl").read_text().splitlines():
        (folder / "rows" / f"{json.loads(line)['uid']}.jsonl").write_text(line + "\n")
    shutil.rmtree(folder / "source")
    _make_old(folder)


def _make_old(folder: Path) -> None:
    """A store of format 1 with a few tables."""
    with tarfile.open(ROOT / "tests" / "data" / "store-format-1.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    (folder / "store").rename(folder / "old")
    for name in ("checkpoints", "policies", "discriminators", "events", "evals", "snapshots", "wal"):
        shutil.rmtree(folder / "old" / name, ignore_errors=True)
