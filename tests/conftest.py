"""A small but complete store, made through the public API: what a two-iteration MOPD run would leave behind."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mopd_dataplane import Prompt, Sample, Signal, Store, create_store
from mopd_dataplane.base.file_checksums import write_checksums
from mopd_dataplane.records import PlanWindow, StepMetrics, Teacher, sample_uid

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the network for a model
sys.path.insert(0, str(Path(__file__).parent))  # objectservers, which several folders of tests use

from objectservers import Server, seaweedfs

DOMAINS = ("chain_sum", "spell_backward", "number_sorting")
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n", "\x1b", "é"]
HOSTILE = "\x1b[31mred\x1b[0m <script>alert(1)</script> [bold]x[/bold] $a_b$ é"
TOKENIZER = "0123456789abcdef"
ITERATIONS = 4
STEPS = 6
"""Training steps of one iteration."""


def encode(text: str) -> list[int]:
    """One token per character."""
    return [CHARACTERS.index(character) for character in text]


def write_tokenizer(folder: Path) -> None:
    """A tokenizer.json with one token per character of CHARACTERS."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({text: token_id for token_id, text in enumerate(CHARACTERS)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch on one thread: a reduction over several may round in another order."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def object_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running SeaweedFS that every test of the session shares; tests that stop servers start one of their own."""
    server = seaweedfs(tmp_path_factory.mktemp("objects") / "seaweedfs")
    try:
        server.start_with_bucket()
        yield server
    finally:
        server.kill()


@pytest.fixture
def s3(object_server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """URI of an empty place on the object store; its credentials are in the environment."""
    for name, value in object_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # what loaders keep of the object store
    return f"s3://bucket/{tmp_path.name}-{tmp_path.parent.name}"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted here; the file size limit test covers the same path")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="session")
def demo_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The demonstration store; tests read it and never write to it."""
    return make_demo(tmp_path_factory.mktemp("stores") / "demo", prompts=8)


@pytest.fixture(scope="session")
def make_store() -> Callable[..., Store]:
    """make_demo, for tests that need a store of their own."""
    return make_demo


def make_demo(root: Path, *, prompts: int, seed: int = 0) -> Store:
    """A store with prompts per domain and split, one specialist per domain, a base and a student that recovers."""
    noise = np.random.default_rng(seed)
    store = create_store(str(root))
    write_tokenizer(root / "policies" / "student" / "v1")
    write_checksums(root / "policies" / "student" / "v1")
    stages = [{"name": "base", "start": "init"}, {"name": "student", "start": "base"}]
    store.write_json("job.json", {"student": {"path": ""}, "stages": stages})
    questions = [_prompt(domain, split, i) for domain in DOMAINS for split in ("train", "eval") for i in range(prompts)]
    store.add_prompts(questions)
    for domain in DOMAINS:
        store.add_teacher(_teacher(root, domain))
    for iteration in range(ITERATIONS):
        _iteration(store, [p for p in questions if p.split == "train"], iteration, noise)
    _evaluate(store, [p for p in questions if p.split == "eval"], noise)
    _exactness(store)
    return store


def _exactness(store: Store) -> None:
    """Self-checks of one stage, and a first window whose sampler was not quite the trainer's policy."""
    allowed = {"model": "Qwen3ForCausalLM (qwen3)", "dtype": "float32", "band": 1e-3}
    for part, teacher, gap in (("sampler", "", 1.5e-7), ("teacher", "chain_sum-expert", 2e-7), ("trainer", "", 1e-7)):
        length = {"tokens": 1048} if part == "trainer" else {}  # earlier stores have none
        detail = {"part": part, "teacher": teacher, **allowed, **length}
        store.add_event(f"self_check/student/{part}/{teacher}", "student", "self_check", -1, gap, detail)
    for window, gap in enumerate((0.004, 2e-7)):
        detail = {
            "p99": 3 * gap, "outside": 0.75 if gap > 1e-3 else 0.0, "tokens": 80, "band": 1e-3, "engine": "hf",
            "sampler_dtype": "float32", "dtype": "float32", "policy_version": window,
            "warning": "the trainer's log-probs differ from the sampler's" if gap > 1e-3 else "",
        }  # fmt: skip
        store.add_event(f"sampler_gap/student/{window}", "student", "sampler_gap", window, gap, detail)


def _prompt(domain: str, split: str, index: int) -> Prompt:
    text = {"chain_sum": f"{index} + 4 =", "spell_backward": f"reverse: word{index}"}.get(domain, f"sort: {index} 3 1")
    return Prompt(prompt_id=f"{domain}-{split}-{index}", domain=domain, text=text, answer=str(index + 4), split=split)


def _teacher(root: Path, domain: str) -> Teacher:
    head = root / "heads" / f"{domain}-expert.safetensors"
    head.parent.mkdir(exist_ok=True)
    save_file({"weight": np.zeros((len(CHARACTERS), 8), np.float32)}, head)
    return Teacher(
        name=f"{domain}-expert", source=f"stage:sft-{domain}", weights_digest="0" * 64, tokenizer_digest=TOKENIZER,
        vocab_size=len(CHARACTERS), hidden_size=8, dtype="float32",
        head_file=f"heads/{domain}-expert.safetensors", head_digest=hashlib.sha256(head.read_bytes()).hexdigest(),
    )  # fmt: skip


def _iteration(store: Store, questions: list[Prompt], iteration: int, noise: np.random.Generator) -> None:
    samples = [_sample(question, iteration, noise) for question in questions]
    receipt = store.commit_samples(samples)
    rows = dict(zip((s.uid for s in samples), (int(row) for row in receipt.rows), strict=True))
    for domain in DOMAINS:
        own = [sample for sample in samples if sample.domain == domain]
        store.commit_signals(f"{domain}-expert", "logprob", [_logprobs(s, rows[s.uid], iteration, noise) for s in own])
        store.commit_signals(f"{domain}-expert", "hidden", [_hidden(s, rows[s.uid], noise) for s in own])
    store.add_rewards([
        {"uid": s.uid, "sample_row": rows[s.uid], "verifier": "reasoning-gym", "verifier_version": "0.1",
         "reward": float(right := noise.random() < 0.3 + 0.2 * iteration), "correct": right}
        for s in samples
    ])  # fmt: skip
    plan = _plan(store, list(rows.values()), iteration)
    store.add_plan(plan)
    store.add_steps([_step(plan, iteration, i, noise) for i in range(STEPS)])
    for action, seconds in (("rollout", 31.0), ("score", 12.5), ("plan", 0.2), ("train", 22.0)):
        store.add_event(
            f"time/student/{iteration}/{action}", "student", "stage_time", iteration, seconds, {"action": action}
        )


def _sample(question: Prompt, iteration: int, noise: np.random.Generator) -> Sample:
    prompt = encode(question.text)
    first = question.prompt_id.endswith("-0")
    text = HOSTILE if first else "the answer is " + "9" * int(noise.integers(1, 30))
    response = encode(text)
    mask = np.ones(len(response), np.uint8)
    mask[3:5] = 0 if first else 1
    logprobs = (-noise.exponential(0.4, len(response))).astype(np.float32) * mask
    middle = len(response) // 2
    return Sample(
        uid=sample_uid(0, "student", question.prompt_id, 0, iteration), prompt_id=question.prompt_id,
        group_id=f"{question.prompt_id}#{iteration}", group_index=0, iteration=iteration, domain=question.domain,
        stage="student", writer="engine-0", writer_seq=0, policy="student", temperature=1.0, top_p=1.0, top_k=0,
        prompt_len=len(prompt), tokens=np.array(prompt + response, np.int32), logprobs=logprobs, loss_mask=mask,
        version_starts=np.array([0, middle] if first else [0], np.int32),
        versions=np.array([iteration, iteration + 1] if first else [iteration], np.int32),
        finish_reason="stop", interruptions=int(first), resume="exact" if first else "none", tokenizer=TOKENIZER,
    )  # fmt: skip


def _logprobs(sample: Sample, row: int, iteration: int, noise: np.random.Generator) -> Signal:
    gap = noise.normal(-0.6 / (iteration + 1), 0.5, sample.response_len)
    scored = (np.minimum(sample.logprobs + gap, -1e-3) * sample.loss_mask).astype(np.float32)
    mask = sample.loss_mask.astype(bool)
    mean = float(np.mean(sample.logprobs[mask] - scored[mask]))
    return Signal(uid=sample.uid, sample_row=row, kind="logprob", logprob=scored, mean_reverse_kl=mean)


def _hidden(sample: Sample, row: int, noise: np.random.Generator) -> Signal:
    payload = noise.integers(0, 256, (sample.loss_tokens, 16), dtype=np.uint8)
    return Signal(uid=sample.uid, sample_row=row, kind="hidden", codec="bf16", hidden=payload)


def _plan(store: Store, rows: list[int], iteration: int) -> PlanWindow:
    packs = np.linspace(0, len(rows), 2 * STEPS + 1).astype(np.int64)
    return PlanWindow(
        stage="student", window=iteration, seed=0, settings={"pack_tokens": 256}, snapshot=store.snapshot(),
        sample_rows=np.array(rows[::-1], np.int64), pack_starts=packs,
        pack_teachers=np.array([i % 3 for i in range(2 * STEPS)], np.int16),
        step_starts=np.arange(0, 2 * STEPS + 1, 2, dtype=np.int64),
        teachers=[f"{domain}-expert" for domain in DOMAINS], stats={"density": 0.97}, digest=f"plan{iteration:028d}",
    )  # fmt: skip


def _step(plan: PlanWindow, iteration: int, order: int, noise: np.random.Generator) -> StepMetrics:
    step = iteration * STEPS + order
    return StepMetrics(
        stage="student", step=step, window=iteration, plan_digest=plan.digest, policy_version=iteration,
        loss=1.0 / (step + 1), grad_norm=0.5, learning_rate=1e-3, samples=4, tokens=160, loss_tokens=80,
        reverse_kl=0.5 / (step + 1) + 0.01 * noise.random(), staleness_mean=0.25 * (order % 2), staleness_max=order % 2,
        step_time_s=0.4, data_wait_s=0.002,
    )  # fmt: skip


def _evaluate(store: Store, questions: list[Prompt], noise: np.random.Generator) -> None:
    """Forgetting: the base is weak, a specialist knows its domain only, the student comes close to each of them."""
    rates = {("base", version): dict.fromkeys(DOMAINS, 0.25) for version in (0, 1)}
    for domain in DOMAINS:
        rates[f"sft-{domain}", 1] = {other: 0.97 if other == domain else 0.1 for other in DOMAINS}
    for version in range(1, ITERATIONS + 1):
        rates["student", version] = dict.fromkeys(DOMAINS, 0.25 + 0.17 * version)
    for (policy, version), rate in rates.items():
        store.add_evals([_answer(q, policy, version, rate[q.domain], noise) for q in questions])


def _answer(question: Prompt, policy: str, version: int, rate: float, noise: np.random.Generator) -> dict[str, Any]:
    kl = 0.6 / (version + 1) + 0.05 * noise.random()
    share = (int(question.prompt_id.rpartition("-")[2]) + 0.5) / 8
    return {
        "policy": policy, "policy_version": version, "prompt_id": question.prompt_id, "domain": question.domain,
        "reward": float(share % 1 < rate) or 0.5, "correct": share % 1 < rate,
        "reverse_kl": None if policy.startswith("sft") else kl, "response": HOSTILE,
        "response_len": len(HOSTILE), "finish_reason": "stop",
    }  # fmt: skip
