"""A store with every signal and two windows, what reads it, and what a pack of it must hold."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np

from mopd_dataplane.bench.synthetic import STAGE, lengths_of, make_store, plan_columns
from mopd_dataplane.job import sections
from mopd_dataplane.load.client import LoaderClient
from mopd_dataplane.load.launch import LoaderProcess
from mopd_dataplane.load.source import WindowSource
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.plan.plan import build_window
from mopd_dataplane.records import Pack, PlanWindow, Signal
from mopd_dataplane.store.dataset import Store

TEACHERS = ["adder", "speller"]
RULE = sections.Plan(pack_tokens=512, batch_samples=16)
SPEC = LoadSpec(
    stage=STAGE,
    signals=("logprob", "topk", "hidden"),
    rewards=True,
    slots=2,
    deadline_s=20,
    others={"reference_logprobs": "adder", "helped_logprobs": "speller"},
)


def add_window(store: Store, window: int, seed: int = 0) -> PlanWindow:
    plan = build_window(
        plan_columns(store, TEACHERS), RULE, seed=seed, stage=STAGE, window=window, snapshot=store.snapshot(),
        teachers=TEACHERS,
    )  # fmt: skip
    store.add_plan(plan)
    return plan


def small_store(root: Path) -> Store:
    """Sixty short samples with every signal, and two windows."""
    lengths = lengths_of(60, mean_log=4.5, shortest=4, longest=400)
    store = make_store(
        root, lengths, teachers=TEACHERS, signals=("logprob", "topk", "hidden"), group_size=4, rewards=True
    )
    rows = np.arange(60)
    for teacher, others in (("adder", rows[rows % 2 == 1]), ("speller", rows[rows % 2 == 0])):
        tokens = store.read_tokens(others, ["loss_mask"]).to_pylist()
        uids = store.take_samples(others, ["uid"])["uid"].to_pylist()
        store.commit_signals(teacher, "logprob", [
            Signal(uid=uid, sample_row=int(row), kind="logprob", logprob=-0.25 * np.float32(t["loss_mask"]))
            for uid, row, t in zip(uids, others, tokens, strict=True)
        ])  # fmt: skip
    add_window(store, 0)
    add_window(store, 1, seed=1)
    return store


def connect(loader: LoaderProcess, rank: int = 0, world_size: int = 1, **options) -> LoaderClient:
    return LoaderClient(loader.socket, rank, world_size, views="numpy", deadline_s=20, **options)


def expect_pack(store: Store, plan: PlanWindow, pack: Pack) -> None:
    """Compare every field of a pack with the store, sample by sample."""
    rows = plan.sample_rows[plan.pack_starts[pack.index] : plan.pack_starts[pack.index + 1]]
    teacher = TEACHERS[plan.pack_teachers[pack.index]]
    payload = store.read_tokens(rows).to_pylist()
    logprobs = store.read_signal(teacher, "logprob", rows)
    reference, helped = (store.read_signal(other, "logprob", rows) for other in ("adder", "speller"))
    topk = store.read_signal(teacher, "topk", rows)
    hidden = store.read_signal(teacher, "hidden", rows)
    assert (pack.teacher, pack.hidden_codec) == (teacher, "bf16")
    assert pack.sample_rows.tolist() == rows.tolist()
    assert pack.cu_seqlens.tolist() == np.cumsum([0] + [len(p["tokens"]) for p in payload]).tolist()
    for i, (first, last) in enumerate(pairwise(pack.cu_seqlens.tolist())):
        sample = payload[i]
        prompt = len(sample["tokens"]) - len(sample["loss_mask"])
        response = slice(first + prompt, last)
        assert pack.tokens[first:last].tolist() == sample["tokens"]
        assert pack.position_ids[first:last].tolist() == list(range(last - first))
        assert pack.loss_mask[first:last].tolist() == [0] * prompt + sample["loss_mask"]
        assert np.array_equal(pack.sampler_logprobs[response], np.float32(sample["logprobs"]))
        assert np.array_equal(pack.teacher_logprobs[response], logprobs[i])
        assert np.array_equal(pack.reference_logprobs[response], reference[i])
        assert np.array_equal(pack.helped_logprobs[response], helped[i])
        spans = [*sample["version_starts"], last - first - prompt]
        versions = [v for v, (a, b) in zip(sample["versions"], pairwise(spans), strict=True) for _ in range(b - a)]
        trained = [v if m else -1 for v, m in zip(versions, sample["loss_mask"], strict=True)]
        assert pack.policy_versions[first:last].tolist() == [-1] * prompt + trained
        for field in (pack.sampler_logprobs, pack.teacher_logprobs, pack.reference_logprobs, pack.helped_logprobs):
            assert not field[first : first + prompt].any()
    assert np.array_equal(pack.topk_ids, np.concatenate([ids for ids, _ in topk]))
    assert np.array_equal(pack.topk_logprobs, np.concatenate([values for _, values in topk]))
    assert np.array_equal(pack.hidden, np.concatenate(hidden))
    assert len(pack.hidden) == pack.loss_mask.sum()


def pack_bytes(store: Store, window: int = 0) -> list[int]:
    """Bytes in a slot of every pack of a window."""
    source = WindowSource(store, store.plan(STAGE, window), SPEC)
    return [source.fields(pack)[1] for pack in range(len(source.plan.pack_teachers))]
