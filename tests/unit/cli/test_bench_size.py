"""`mopd bench size` against bytes of a real store, files of real commits, and the tables of docs/scale.md."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from mopd_kernels import row_bytes
from typer.testing import CliRunner

from mopd_dataplane import Sample, Signal, create_store
from mopd_dataplane.bench.size import OBJECTS_PER_COMMIT, Machine, Workload, ladder, size
from mopd_dataplane.cli.app import app
from mopd_dataplane.records import Teacher, sample_uid

ROOT = Path(__file__).parents[3]
SAMPLES, PROMPT, RESPONSE, WIDTH, TOPK = 1024, 64, 256, 64, 8


def sample(number: int) -> Sample:
    """A response of noise, every token of it the policy's."""
    noise = np.random.default_rng(number)
    return Sample(
        uid=sample_uid(0, "student", f"p{number}", 0, 0), prompt_id=f"p{number}", group_id=f"p{number}#0",
        group_index=0, iteration=0, domain="math", stage="student", writer="engine-0", writer_seq=number,
        policy="student", temperature=1.0, top_p=1.0, top_k=0, prompt_len=PROMPT,
        tokens=noise.integers(0, 150_000, PROMPT + RESPONSE).astype(np.int32),
        logprobs=-noise.random(RESPONSE).astype(np.float32), loss_mask=np.ones(RESPONSE, np.uint8),
        version_starts=np.zeros(1, np.int32), versions=np.zeros(1, np.int32), finish_reason="stop", tokenizer="t",
    )  # fmt: skip


def signal(of: Sample, row: int, kind: str) -> Signal:
    noise = np.random.default_rng(row)
    content = {
        "logprob": {"logprob": -noise.random(RESPONSE).astype(np.float32)},
        "topk": {
            "topk_ids": noise.integers(0, 150_000, (RESPONSE, TOPK)).astype(np.int32),
            "topk_logprobs": -noise.random((RESPONSE, TOPK)).astype(np.float32),
        },
        "hidden": {
            "hidden": noise.integers(0, 256, (RESPONSE, row_bytes("int8", WIDTH)), dtype=np.uint8), "codec": "int8"
        },
    }[kind]  # fmt: skip
    return Signal(uid=of.uid, sample_row=row, kind=kind, **content)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, int], int]:
    """Bytes of data files by table of a store with every fidelity; and the files one commit of samples adds."""
    root = tmp_path_factory.mktemp("size") / "store"
    store = create_store(str(root))
    samples = [sample(number) for number in range(SAMPLES)]
    store.commit_samples(samples[:512])
    before = {path for path in root.rglob("*") if path.is_file()}
    store.commit_samples(samples[512:])
    added = [path for path in root.rglob("*") if path.is_file() and path not in before and "locks" not in path.parts]
    store.add_teacher(Teacher(
        name="t", source="t", weights_digest="w", tokenizer_digest="t", vocab_size=150_000, hidden_size=WIDTH,
        dtype="float32", head_file="heads/t.safetensors", head_digest="h",
    ))  # fmt: skip
    for kind in ("logprob", "topk", "hidden"):
        for start in range(0, SAMPLES, 512):
            some = samples[start : start + 512]
            store.commit_signals("t", kind, [signal(s, start + offset, kind) for offset, s in enumerate(some)])

    def data(table: str) -> int:
        return sum(path.stat().st_size for path in (root / table / "data").rglob("*") if path.is_file())

    sizes = {name: data(name) for name in ("tokens", "samples", "scores")}
    return sizes | {kind: data(f"signals/t/{kind}") for kind in ("logprob", "topk", "hidden")}, len(added)


@pytest.mark.parametrize("fidelity", ["logprob", "topk", "hidden"])
def test_bytes_are_those_of_a_real_store(written: tuple[dict[str, int], int], fidelity: str) -> None:
    measured, _ = written
    workload = Workload(
        tokens_per_day=float(SAMPLES * (PROMPT + RESPONSE)), prompt_tokens=PROMPT, response_tokens=RESPONSE,
        hidden_size=WIDTH, fidelity=fidelity, codec="int8", topk=TOPK,  # type: ignore[arg-type]
    )  # fmt: skip
    predicted = size(workload)["bytes_per_day"]
    assert predicted["tokens"] == pytest.approx(measured["tokens"], rel=0.06)
    assert predicted["logprob"] == pytest.approx(measured["logprob"], rel=0.08)
    assert predicted[fidelity] == pytest.approx(measured[fidelity], rel=0.08)
    assert predicted["samples"] == pytest.approx(measured["samples"], rel=0.3)
    per_score = measured["scores"] / (3 * SAMPLES)
    assert predicted["scores"] / (SAMPLES * (1 if fidelity == "logprob" else 2)) == pytest.approx(per_score, rel=0.3)


def test_a_commit_adds_as_many_objects_as_are_counted(written: tuple[dict[str, int], int]) -> None:
    assert written[1] == OBJECTS_PER_COMMIT


def test_what_doubles_doubles() -> None:
    once, twice = size(Workload(tokens_per_day=1e8)), size(Workload(tokens_per_day=2e8))
    for name in ("bytes_per_day", "bytes_held", "bandwidth"):
        for key, value in once[name].items():
            if key != "train_read_per_node":
                assert twice[name][key] == pytest.approx(2 * value), (name, key)
    assert twice["compute"]["train_gpus"] == pytest.approx(2 * once["compute"]["train_gpus"])
    dear = size(Workload(), Machine(gpu_hour=0.0, gb_month=1.0))
    assert dear["cost"]["data_share"] == pytest.approx(1.0)


@pytest.mark.parametrize("fidelity", ["hidden", "topk"])
def test_the_tables_of_the_page_are_what_the_command_prints(fidelity: str) -> None:
    rows = ladder(fidelity, "int8", 64)  # type: ignore[arg-type]
    lines = [f"| {' | '.join(map(str, row.values()))} |" for row in rows]
    page = (ROOT / "docs" / "scale.md").read_text()
    assert "\n".join([f"| {' | '.join(rows[0])} |", "|" + "---|" * len(rows[0]), *lines]) in page


def test_the_command_answers_and_refuses() -> None:
    answer = CliRunner().invoke(app, ["bench", "size", "--tokens-per-day", "1e10", "--json"])
    estimate = json.loads(answer.stdout)
    assert estimate["inputs"]["tokens_per_day"] == 1e10
    assert estimate["bytes_per_day"]["all"] > 1e12
    assert CliRunner().invoke(app, ["bench", "size", "--codec", "int9"]).exit_code == 2
    assert json.loads(CliRunner().invoke(app, ["bench", "size", "--ladder", "--json"]).stdout)[0]["size"] == "laptop"
