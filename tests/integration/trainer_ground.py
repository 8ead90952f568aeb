"""What the trainer tests stand on: a store with samples, two teachers' signals and a planned window."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pausing import GO_ON, PAUSED_AFTER

from mopd_dataplane import Store, create_store
from mopd_dataplane.job import sections
from mopd_dataplane.job.objectives import DivergenceTerm, Objective, PolicyGradientTerm
from mopd_dataplane.job.sections import Train
from mopd_dataplane.load.launch import start_server
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.models import hf
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.plan.columns import SAMPLE_COLUMNS, collect_columns
from mopd_dataplane.plan.follow import end_window
from mopd_dataplane.plan.plan import Training, build_window
from mopd_dataplane.records import PlanWindow, Sample, sample_uid
from mopd_dataplane.score.readers import Scorable
from mopd_dataplane.score.scorer import score_samples
from mopd_dataplane.score.teacher_pool import TeacherPool, TeacherSpec
from mopd_dataplane.train.metrics import MetricsReader
from mopd_dataplane.train.spec import HeadFile, TrainSpec

CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256,
}  # fmt: skip
DOMAINS = ("math", "code")
SAMPLES = 48
START_S = 600.0
"""Longest wait for something that happens once a trainer has started, on a machine that does other work too."""
OBJECTIVE = Objective(
    policy_gradient=PolicyGradientTerm(student_logprob="current", correction="icepop", band=(0, 99), clip=(0.2, 0.28)),
    divergence=DivergenceTerm(weight=0.5),
)


class Ground:
    """A store with samples, both teachers' signals and one planned window; the teachers' models are gone."""

    def __init__(self, root: Path, *, epochs: int = 2) -> None:
        self.root = root
        self._epochs = epochs
        self.start = make_student(sections.Student(config=CONFIG), root / "start", seed=0)
        self.store: Store = create_store(str(root / "store"))
        samples = [self._sample(number) for number in range(SAMPLES)]
        rows = self.store.commit_samples(samples).rows
        self._score(samples, rows)
        self.plan = self._plan(rows)
        self.store.add_plan(self.plan)
        self.store.add_plan(end_window("student", 1, 3, self.plan.snapshot))

    def _sample(self, number: int) -> Sample:
        rng = np.random.default_rng(number)
        prompt, response = int(rng.integers(2, 8)), int(rng.integers(4, 40))
        return Sample(
            uid=sample_uid(0, "student", f"p{number}", 0, 0), prompt_id=f"p{number}", group_id=f"p{number}#0",
            group_index=0, iteration=0, domain=DOMAINS[number % 2], stage="student", writer="test", writer_seq=number,
            policy="student", temperature=1.0, top_p=1.0, top_k=0, prompt_len=prompt, finish_reason="stop",
            tokens=rng.integers(4, 99, prompt + response).astype(np.int32),
            logprobs=(-rng.gamma(2.0, 1.0, response)).astype(np.float32), loss_mask=np.ones(response, np.uint8),
            version_starts=np.zeros(1, np.int32), versions=np.zeros(1, np.int32), tokenizer="0" * 16,
        )  # fmt: skip

    def _score(self, samples: list[Sample], rows: Any) -> None:
        folders = {
            name: make_student(
                sections.Student(config=CONFIG | {"intermediate_size": 128}), self.root / name, seed=seed
            )
            for seed, name in enumerate(DOMAINS, start=1)
        }
        pool = TeacherPool(
            {name: TeacherSpec(folder, sections.Teacher(source=str(folder))) for name, folder in folders.items()},
            student_tokenizer=hf.load_tokenizer(self.start),
        )
        assert self.store.root is not None
        for name, folder in folders.items():
            self.store.add_teacher(pool.register(name, self.store.root))
            own = [
                Scorable(
                    uid=s.uid, sample_row=int(row), prompt_id=s.prompt_id, prompt_len=s.prompt_len, tokens=s.tokens,
                    loss_mask=s.loss_mask, logprobs=s.logprobs,
                )
                for s, row in zip(samples, rows, strict=True)
                if s.domain == name
            ]  # fmt: skip
            for kind in ("logprob", "hidden"):
                self.store.commit_signals(name, kind, list(score_samples(pool, name, (kind,), own, sections.Score())))
            folder.rename(folder.with_name(f"{name}-moved-away"))

    def _plan(self, rows: Any) -> PlanWindow:
        snapshot = self.store.snapshot()
        columns = collect_columns(
            [(np.asarray(rows), self.store.samples(columns=list(SAMPLE_COLUMNS)))],
            len(rows),
            route=lambda domain, effort: domain,
            teachers=DOMAINS,
            scores=self.store.table("scores", columns=["sample_row", "teacher", "kind"]),
            signals=OBJECTIVE.signals,
        )
        settings = sections.Plan(pack_tokens=64, batch_samples=8)
        return build_window(
            columns, settings, seed=3, stage="student", window=0, snapshot=snapshot, teachers=list(DOMAINS),
            training=Training(epochs=self._epochs),
        )  # fmt: skip

    @property
    def steps(self) -> int:
        return len(self.plan.step_starts) - 1

    def spec(self, run_dir: Path, socket: Path) -> TrainSpec:
        """Train into `run_dir`; a checkpoint at every second step."""
        assert self.store.root is not None
        heads = {
            name: HeadFile(path=str(self.store.root / teacher.head_file), digest=teacher.head_digest)
            for name, teacher in self.store.teachers().items()
        }
        return TrainSpec(
            stage="student", start=str(self.start), policy_dir=str(run_dir / "policies"), socket=str(socket),
            checkpoint_dir=str(run_dir / "checkpoints"), objective=OBJECTIVE, heads=heads,
            teachers=DOMAINS,
            train=Train(
                learning_rate=1e-3, checkpoint_steps=2, micro_batch_packs=2, micro_batch_tokens=80, threads=1
            ),
        )  # fmt: skip

    @contextmanager
    def loader(
        self, run_dir: Path, *, members: int = 1, rank_deadline_s: float = START_S, **train: Any
    ) -> Iterator[Path]:
        """A running loader, and the spec of trainers that it serves. train: keys of [train] that differ."""
        run_dir.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="mopd-") as scratch:
            socket, file = Path(scratch) / "loader.sock", Path(scratch) / "spec.json"
            spec = self.spec(run_dir, socket)
            spec = spec.model_copy(
                update={
                    "train": spec.train.model_copy(update=train),
                    "context_parallel": members,
                    "rendezvous": f"{scratch}/rendezvous",
                    "rank_deadline_s": rank_deadline_s,
                }
            )
            file.write_text(spec.model_dump_json())
            with start_server(self.store.uri, socket, LoadSpec.for_stage("student", sections.Load(), OBJECTIVE)):
                yield file

    @contextmanager
    def training(self, run_dir: Path, **train: Any) -> Iterator[subprocess.Popen[str]]:
        """A loader and the one trainer process it serves. train: keys of [train] that differ."""
        code = (
            "import sys; from mopd_dataplane.train.__main__ import main; code = main(sys.argv[1:]);"
            "heavy = {'lance', 'pyarrow.dataset'} & set(sys.modules); print('loaded', sorted(heavy)); sys.exit(code)"
        )
        with self.loader(run_dir, **train) as spec, started([sys.executable, "-c", code, str(spec)]) as trainer:
            yield trainer


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process whose messages are kept; ended with the block."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))  # for pausing.py
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until_paused(run_dir: Path, trainer: subprocess.Popen[str] | None = None) -> None:
    """Until a trainer with `track = PAUSE` stands still in the middle of its window."""
    until = time.monotonic() + START_S
    while len(MetricsReader(run_dir / "checkpoints").steps()) < PAUSED_AFTER:
        assert trainer is None or trainer.poll() is None, trainer.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.005)


def go_on(run_dir: Path) -> None:
    """Let it continue."""
    (run_dir / "checkpoints" / GO_ON).touch()


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal: a trainer from its start until it is told to stop."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def wait_until_told(pid: int) -> None:
    """Until a trainer has taken the signal that stops it."""
    until = time.monotonic() + START_S
    while handles(pid, signal.SIGTERM):
        assert time.monotonic() < until
        time.sleep(0.005)


def results(run_dir: Path) -> list[dict[str, Any]]:
    """Metrics without wall times."""
    rows = [asdict(metrics) for metrics in MetricsReader(run_dir / "checkpoints").steps()]
    return [{k: v for k, v in row.items() if k not in ("step_time_s", "data_wait_s")} for row in rows]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return dict(hf.load_model(run_dir / "policies" / "v1").state_dict())
