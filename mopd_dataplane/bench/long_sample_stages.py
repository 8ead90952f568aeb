"""Stages of one long sample, each run in a process of its own, which returns peak memory beyond what it had before.

Every stage handles a short sample first, so that what a process loads once does not count. Stages pass their results on
in a folder: the store, and files beside it.
"""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from mopd_dataplane.bench.peak import Peak, peak_of
from mopd_dataplane.fields import PAYLOAD
from mopd_dataplane.records import Sample, Signal, Snapshot, sample_uid

if TYPE_CHECKING:
    from mopd_dataplane.job.objectives import Objective
    from mopd_dataplane.rollout.engines.engine import StepOutput

STAGE, TEACHER, DOMAIN = "student", "teacher", "long"
PROMPT = tuple(range(4, 20))
"""Token ids of the prompt."""
SHORT = 512
"""Response tokens of the short sample."""
NAMES = ("short", "long")
"""The two samples: also their prompts, their rows in the store, and the windows in which they are trained."""
CHARACTERS = 95
"""Token ids of the response, from 4 on: the characters of the tokenizer."""
HIDDEN, VOCABULARY = 32, 1000
MODEL: dict[str, Any] = {
    "model_type": "mistral", "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY,
}  # fmt: skip
RANKS = 2
MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(128 << 10)}
"""Environment of a rank: glibc then keeps its first threshold for memory that it gives back. It would raise it to twice
the largest tensor that was freed, and keep as much freed memory again as is in use."""
DEADLINE_S = 3600.0
KINDS = ("logprob", "hidden")
TOKEN_FIELDS = tuple(field.name for field in PAYLOAD if field.axis in ("token", "response"))
"""Fields of a sample with a value for each token or response token."""


def uid_of(name: str) -> str:
    return sample_uid(0, STAGE, name, 0, 0)


def response_of(name: str, tokens: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return token ids and log-probs of the response that is replayed, both [tokens]."""
    from mopd_dataplane.bench.replay import replay_key, tokens_at

    ids, logprobs = tokens_at(np.array([replay_key(uid_of(name))], np.uint64), np.arange(tokens))
    return characters(ids), logprobs


def characters(ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return token ids that are characters of the tokenizer."""
    return (4 + ids % CHARACTERS).astype(np.int32)


@contextmanager
def measured(figures: dict[str, Any], pid: int | None = None) -> Iterator[None]:
    """Add seconds and peak memory of a block to a stage's figures."""
    started = time.perf_counter()
    with peak_of(pid) as peak:
        yield
        figures["seconds"] = time.perf_counter() - started
    figures["peak_bytes"] = peak.bytes


def log_until_killed(home: str, tokens: int) -> dict[str, Any]:
    """Log the first half of the long sample, and kill this process with SIGKILL; its figures are in a file."""
    _roll_out(Path(home), "short", SHORT)
    started = time.perf_counter()

    def die() -> None:
        figures = {"seconds": time.perf_counter() - started}
        stop(peak)
        (Path(home) / "killed.json").write_text(json.dumps(figures | {"peak_bytes": peak.bytes}))
        os.kill(os.getpid(), signal.SIGKILL)

    measuring = peak_of()
    peak = measuring.__enter__()

    def stop(_: Peak) -> None:
        measuring.__exit__(None, None, None)

    _roll_out(Path(home), "long", tokens, at=tokens // 2, then=die)
    raise AssertionError("the process was to be killed")


def recover_and_finish(home: str, tokens: int) -> dict[str, Any]:
    """Continue the long sample from its log, and hand it to the store's side, which is a file here."""
    figures: dict[str, Any] = {}
    _roll_out(Path(home), "again", SHORT)
    segments = list(Path(home).glob("wal/**/*.wal"))
    figures["log_bytes"] = sum(segment.stat().st_size for segment in segments)
    with measured(figures):
        figures["resumed"] = _roll_out(Path(home), "long", tokens)
    arrays = load_file(Path(home) / "long.safetensors")
    ids, logprobs = response_of("long", tokens)
    figures["equal"] = bool(
        np.array_equal(arrays["tokens"][len(PROMPT) :], ids) and np.array_equal(arrays["logprobs"], logprobs)
    )
    return figures


def _roll_out(home: Path, name: str, tokens: int, *, at: int = -1, then: Callable[[], None] = lambda: None) -> bool:
    """Sample one response through the token log; `then` is called at a position. Returns whether it was resumed."""
    from mopd_dataplane.bench.fleet_settings import Lengths
    from mopd_dataplane.bench.replay import ReplayEngine
    from mopd_dataplane.job import sections
    from mopd_dataplane.records import Prompt
    from mopd_dataplane.rollout.runner import RolloutTask, run_rollout

    class CharacterEngine(ReplayEngine):
        def step(self) -> StepOutput:
            output = super().step()
            if output.positions[0] == at:
                then()
            output.token_ids[:] = characters(output.token_ids)
            return output

    # No length that is drawn with this mean is below the longest, at which the response ends.
    lengths = Lengths(mean_tokens=1000 * tokens, longest=tokens, multi_turn=0)
    engine = CharacterEngine(slots=1, rate=1e9, pause_s=0, lengths=lengths, version=0)
    task = RolloutTask(
        stage=STAGE, iteration=0, seed=0, rollout=sections.Rollout(max_new_tokens=tokens), wal=sections.Wal(),
        wal_dir=home / "wal", render=lambda prompt: list(PROMPT), writer=name,
    )  # fmt: skip

    def commit(samples: list[Sample]) -> None:
        [sample] = samples
        save_file({field: getattr(sample, field) for field in TOKEN_FIELDS}, home / f"{name}.safetensors")

    report = run_rollout(engine, [Prompt(prompt_id=name, domain=DOMAIN, text=name)], task, commit=commit)
    return report.resumed == report.exact == 1


def _sample(home: Path, name: str) -> Sample:
    """Return a sample as its rollout handed it over."""
    arrays = load_file(home / f"{name}.safetensors")
    return Sample(
        uid=uid_of(name), prompt_id=name, group_id=f"{name}#0", group_index=0, iteration=0, domain=DOMAIN, stage=STAGE,
        writer="bench", writer_seq=NAMES.index(name), policy=STAGE, temperature=1.0, top_p=1.0, top_k=0,
        prompt_len=len(PROMPT), finish_reason="length", version_starts=np.zeros(1, np.int32),
        versions=np.zeros(1, np.int32), tokenizer="0" * 16, tokens=arrays["tokens"], logprobs=arrays["logprobs"],
        loss_mask=arrays["loss_mask"],
    )  # fmt: skip


def store_sample(home: str, tokens: int) -> dict[str, Any]:
    """Commit both samples to a new store."""
    from mopd_dataplane.records import Prompt
    from mopd_dataplane.store.dataset import Store

    figures: dict[str, Any] = {}
    store = Store.create(str(Path(home) / "store"))
    store.add_prompts([Prompt(prompt_id=name, domain=DOMAIN, text=name) for name in NAMES])
    store.commit_samples([_sample(Path(home), "short")])
    sample = _sample(Path(home), "long")
    assert sample.logprobs is not None
    with measured(figures):
        store.commit_samples([sample])
    [row] = store.read_tokens([1]).to_pylist()
    figures["equal"] = row["tokens"] == sample.tokens.tolist() and row["logprobs"] == sample.logprobs.tolist()
    return figures


def make_model(home: str, context: int, window: int) -> None:
    """Make the two-layer model that is teacher and student. window: tokens that a token sees; 0 means all."""
    from mopd_dataplane.job import sections
    from mopd_dataplane.models.initial_weights import make_student

    config = MODEL | {"max_position_embeddings": context, "sliding_window": window or None}
    make_student(sections.Student(config=config), Path(home) / "model", seed=0)


def score_sample(home: str, tokens: int) -> dict[str, Any]:
    """Compute the teacher's log-probs and hidden states of both samples."""
    import torch

    from mopd_dataplane.job import sections
    from mopd_dataplane.models.hf import load_tokenizer
    from mopd_dataplane.score.readers import Scorable
    from mopd_dataplane.score.scorer import score_samples
    from mopd_dataplane.score.teacher_pool import TeacherPool, TeacherSpec
    from mopd_dataplane.store.dataset import Store

    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    model, store = Path(home) / "model", Store.open(str(Path(home) / "store"))
    spec = TeacherSpec(model, sections.Teacher(source=str(model), dtype="float32"))
    pool = TeacherPool({TEACHER: spec}, student_tokenizer=load_tokenizer(model))
    assert store.root is not None
    store.add_teacher(pool.register(TEACHER, store.root))
    settings = sections.Score(hidden_codec="int8")

    def scored(name: str) -> list[Signal]:
        sample = _sample(Path(home), name)
        assert sample.logprobs is not None
        scorable = Scorable(
            uid=sample.uid, sample_row=NAMES.index(name), prompt_id=name, prompt_len=sample.prompt_len,
            tokens=sample.tokens, loss_mask=sample.loss_mask, logprobs=sample.logprobs,
        )  # fmt: skip
        return list(score_samples(pool, TEACHER, KINDS, [scorable], settings))

    for name in NAMES:
        with measured(figures):
            logprob, hidden = scored(name)
        assert logprob.logprob is not None
        assert hidden.hidden is not None
        save_file({"logprob": logprob.logprob, "hidden": hidden.hidden}, Path(home) / f"{name}-signals.safetensors")
        figures["equal"] = len(hidden.hidden) == len(logprob.logprob) == tokens
    return figures


def store_signals(home: str, tokens: int) -> dict[str, Any]:
    """Commit the signals of both samples."""
    from mopd_dataplane.store.dataset import Store

    figures: dict[str, Any] = {}
    store = Store.open(str(Path(home) / "store"))
    for row, name in enumerate(NAMES):
        arrays = load_file(Path(home) / f"{name}-signals.safetensors")
        about: dict[str, Any] = {"uid": uid_of(name), "sample_row": row}
        with measured(figures):
            store.commit_signals(TEACHER, "logprob", [Signal(kind="logprob", logprob=arrays["logprob"], **about)])
            store.commit_signals(
                TEACHER, "hidden", [Signal(kind="hidden", codec="int8", hidden=arrays["hidden"], **about)]
            )
    figures["equal"] = bool(np.array_equal(store.read_signal(TEACHER, "logprob", [1])[0], arrays["logprob"]))
    return figures


def plan_sample(home: str, tokens: int) -> dict[str, Any]:
    """Plan a window for each sample, from metadata alone."""
    from mopd_dataplane.job import sections
    from mopd_dataplane.plan.columns import SAMPLE_COLUMNS, collect_columns
    from mopd_dataplane.plan.plan import Training, build_window
    from mopd_dataplane.store.dataset import Store

    figures: dict[str, Any] = {}
    store = Store.open(str(Path(home) / "store"))
    snapshot: Snapshot = store.snapshot()
    for row, total in enumerate((SHORT, tokens)):
        with measured(figures):
            columns = collect_columns(
                [(np.array([row]), store.take_samples([row], list(SAMPLE_COLUMNS), snapshot))], 1,
                route=lambda domain, effort: TEACHER, teachers=[TEACHER],
                scores=store.table("scores", columns=["sample_row", "teacher", "kind"]), signals=KINDS,
            )  # fmt: skip
            plan = build_window(
                columns, sections.Plan(pack_tokens=len(PROMPT) + total, batch_samples=1), seed=0, stage=STAGE,
                window=row, snapshot=snapshot, teachers=[TEACHER], training=Training(ranks=1),
            )  # fmt: skip
            store.add_plan(plan)
    figures["equal"] = plan.stats["tokens"] == len(PROMPT) + tokens
    figures["straggler_ratio"] = plan.stats["straggler_ratio"]
    return figures


def load_sample(home: str, tokens: int) -> list[dict[str, Any]]:
    """Read the packs of both windows from a loader process: figures of the loader, and of this process."""
    from mopd_dataplane.load.client import LoaderClient

    loaded: dict[str, Any] = {}
    read: dict[str, Any] = {}
    signals = load_file(Path(home) / "long-signals.safetensors")
    ids, logprobs = response_of("long", tokens)
    with _loader(home, tokens) as (socket, pid), LoaderClient(socket, views="numpy", deadline_s=DEADLINE_S) as client:
        for window in range(len(NAMES)):
            batches = client.batches(STAGE, window)
            with measured(loaded, pid), measured(read):
                batch = next(batches)
                [pack] = batch.packs
                equal = window > 0 and _is_pack(pack, ids, logprobs, signals)
            batch.release()
        ring = client.stats()["bytes"]
    read["equal"] = loaded["equal"] = equal
    return [loaded | {"ring_bytes": ring}, read]


def _is_pack(pack: Any, ids: NDArray[Any], logprobs: NDArray[Any], signals: dict[str, NDArray[Any]]) -> bool:
    """Compare the arrays of a pack with those that were stored."""
    first = len(PROMPT)
    return (
        np.array_equal(pack.tokens[first:], ids)
        and np.array_equal(pack.sampler_logprobs[first:], logprobs)
        and np.array_equal(pack.hidden, signals["hidden"])
        and np.array_equal(pack.teacher_logprobs[first:], signals["logprob"])
    )


def ring_bytes(tokens: int) -> int:
    """Return the bytes of a slot with the long sample: token, log-prob and mask of each token, and its signals."""
    from mopd_kernels import row_bytes

    page = 4096  # header, field table, and the bounds of fields, each rounded up
    return (tokens + len(PROMPT)) * (4 + 4 + 1 + 4) + tokens * row_bytes("int8", HIDDEN) + page


@contextmanager
def _loader(home: str, tokens: int) -> Iterator[tuple[Path, int]]:
    """Start a loader whose ring has room for one slot with the long sample."""
    import tempfile

    from mopd_dataplane.load.launch import start_server
    from mopd_dataplane.load.spec import LoadSpec

    room = ring_bytes(tokens) + ring_bytes(SHORT)
    spec = LoadSpec(stage=STAGE, signals=KINDS, ring_bytes=room + (1 << 16), deadline_s=DEADLINE_S)
    with tempfile.TemporaryDirectory(prefix="mopd-") as scratch:  # the path of a socket must be short
        socket = Path(scratch) / "loader.sock"
        with start_server(str(Path(home) / "store"), socket, spec) as loader:
            yield socket, loader.pid


def objective() -> Objective:
    """Return the exact reverse KL over the vocabulary beside a policy gradient."""
    from mopd_dataplane.job.objectives import DivergenceTerm, Objective, PolicyGradientTerm

    return Objective(
        divergence=DivergenceTerm(kind="reverse", signal="hidden"),
        policy_gradient=PolicyGradientTerm(student_logprob="current", correction="icepop", band=(0.5, 2.0)),
    )


def train_sample(home: str, tokens: int) -> list[dict[str, Any]]:
    """Train one step on each sample with ranks that share its pack: figures of each rank."""
    import subprocess
    import sys

    from mopd_dataplane.bench import calls

    with _loader(home, tokens) as (socket, _):
        work = f"{__name__}:{train_rank.__name__}"
        commands = [
            [sys.executable, "-m", calls.__name__, work, json.dumps([home, str(socket), rank])] for rank in range(RANKS)
        ]
        environment = {**os.environ, **MALLOC}
        ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for command in commands]
        try:
            outputs = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    figures = [json.loads(output) for output in outputs]
    for one in figures:
        one["equal"] = (one["tokens"], one["loss_tokens"]) == (len(PROMPT) + tokens, tokens)
    return figures


def train_rank(home: str, socket: str, rank: int) -> dict[str, Any]:
    """Train one step on each window, as one of the ranks that share a pack."""
    import torch

    from mopd_dataplane.base.files import file_digest
    from mopd_dataplane.job.sections import Train
    from mopd_dataplane.load.client import LoaderClient
    from mopd_dataplane.train.heads import TeacherHeads
    from mopd_dataplane.train.loop import Trainer
    from mopd_dataplane.train.objective import ObjectiveLoss
    from mopd_dataplane.train.ranks import Ranks
    from mopd_dataplane.train.spec import HeadFile, Window
    from mopd_dataplane.train.student import load_student

    torch.set_num_threads(1)
    own, all_ranks = str(rank), str(RANKS)
    environment = {"WORLD_SIZE": all_ranks, "RANK": own, "LOCAL_RANK": own, "LOCAL_WORLD_SIZE": all_ranks}
    ranks = Ranks.join(
        "cpu", members=RANKS, rendezvous=f"{socket}.rendezvous", deadline_s=DEADLINE_S, environment=environment
    )
    settings = Train(gradient_checkpointing=True)
    student = load_student(Path(home) / "model", ranks, settings)
    [head] = (Path(home) / "store" / "heads").glob("*.safetensors")
    heads = TeacherHeads({TEACHER: HeadFile(path=str(head), digest=file_digest(head))}, ranks.device)
    trainer = Trainer(student, ObjectiveLoss(objective()), settings, ranks, heads, (TEACHER,))
    figures: dict[str, Any] = {}
    with LoaderClient(socket, member=rank, members=RANKS, deadline_s=DEADLINE_S) as client:
        for number in range(len(NAMES)):
            about = Window(window=number, plan_digest="", snapshot_digest="", steps=1, policy_version=0)
            with measured(figures):
                for batch in client.batches(STAGE, number):
                    metrics = trainer.step(batch, about, number)
    ranks.leave()
    return figures | {
        "tokens": metrics.tokens, "loss_tokens": metrics.loss_tokens, "loss": metrics.loss,
        "grad_norm": metrics.grad_norm,
    }  # fmt: skip


def show_sample(home: str, tokens: int) -> dict[str, Any]:
    """Read and render both samples as `mopd show` does."""
    from rich.console import Console

    from mopd_dataplane.query.show import read_sample
    from mopd_dataplane.query.show_terminal import render
    from mopd_dataplane.store.dataset import Store

    figures: dict[str, Any] = {}
    store = Store.open(str(Path(home) / "store"))
    for name in NAMES:
        output = io.StringIO()
        with measured(figures):
            view = read_sample(store, uid_of(name), tokenizer=Path(home) / "model")
            Console(file=output, width=100).print(render(view))
    figures["page_bytes"] = len(output.getvalue().encode())
    ids = [token.id for token in view.tokens]
    expected, _ = response_of("long", tokens)
    figures["equal"] = ids == expected[: len(ids)].tolist()
    return figures
