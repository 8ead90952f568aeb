"""Size of a run: bytes, requests, bandwidth, nodes and cost, from the tokens sampled and the signals stored.

Arithmetic on measured constants, which a test compares with the bytes of a real store; nothing is run.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

from mopd_kernels import row_bytes
from typer import Option

from mopd_dataplane.errors import InputError
from mopd_dataplane.store.group_commit.election import REMOTE_GATHER_S

Fidelity = Literal["logprob", "topk", "hidden"]
Codec = Literal["fp32", "bf16", "int8", "fp8", "mxfp4"]
Figures = Mapping[str, float]

TOKEN_BYTES = 4
"""Token id, stored as it is."""
RESPONSE_BYTES = 5
"""Sampler log-prob and loss mask of a response token."""
SAMPLE_BYTES = 100
"""A row of `samples`, compressed."""
SCORE_BYTES = 70
"""A row of `scores`, compressed."""
LIST_OVERHEAD = 1.06
"""Bytes on disk over bytes of the lists: offsets, uid, statistics."""
LOG_BYTES = 17
"""A decoded token in the token log: its share of a step record."""
OBJECTS_PER_COMMIT = 8
"""Data file, transaction, manifest and acknowledgement, of the payload and of the metadata table: one PUT each."""
READS_PER_ROW = 3.1
"""Range reads of one sample's token lists (Lance 2.0 lists, measured)."""
RANGE_BYTES = 4 << 20
"""One read of hidden states."""
COMMIT_WINDOW_S = 0.2
COMMIT_SAMPLES = 64
"""An engine commits what has finished, this often and this much at a time."""
COMMIT_S = 0.1
"""One commit on an object store: twelve round trips of a few milliseconds. Commits of one table come one by one."""
DAY_S = 86_400.0
MONTH_DAYS = 30


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The planned run; its fields are options of `mopd bench size`.

    Example: Workload(tokens_per_day=1e10, student_b=8, teacher_b=32, hidden_size=5120, fidelity="hidden").
    """

    tokens_per_day: Annotated[float, Option("--tokens-per-day", min=1, help="Prompt and response tokens.")] = 1e8
    """Tokens of new samples."""
    prompt_tokens: Annotated[int, Option("--prompt", min=1, help="Mean prompt tokens.")] = 500
    response_tokens: Annotated[int, Option("--response", min=1, help="Mean response tokens.")] = 3500
    student_b: Annotated[float, Option("--student", min=0.001, help="Student parameters, in 10^9.")] = 8.0
    """Parameters that multiply."""
    teacher_b: Annotated[float, Option("--teacher", min=0.001, help="Parameters of a teacher, in 10^9.")] = 32.0
    teachers_per_sample: Annotated[float, Option("--teachers", min=0, help="Teachers that score each sample.")] = 1.0
    """1 when domains are routed."""
    hidden_size: Annotated[int, Option("--hidden-size", min=1, help="Hidden size of the teachers.")] = 5120
    fidelity: Annotated[Fidelity, Option("--fidelity", help="Signal that is stored of a teacher.")] = "hidden"
    codec: Annotated[Codec, Option("--codec", help="Codec of hidden states.")] = "int8"
    topk: Annotated[int, Option("--topk", min=1, help="K of the top-k.")] = 64
    hidden_days: Annotated[float, Option("--hidden-days", min=0, help="Days that hidden states are kept.")] = 1.0
    days: Annotated[float, Option("--days", min=0, help="Days that everything else is kept.")] = 30.0
    passes: Annotated[float, Option("--passes", min=0, help="How often a sample is trained on.")] = 1.0
    gpus_per_node: Annotated[int, Option("--gpus-per-node", min=1, help="GPUs of a node.")] = 8


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware: rates that are reached, not peaks, and prices in US dollars; replace them with your own."""

    gpu_tflops: Annotated[float, Option("--gpu-tflops", min=0.001, help="Dense bf16 peak of a GPU.")] = 990.0
    """An H100 SXM's."""
    decode_share: float = 0.05
    score_share: float = 0.4
    train_share: float = 0.35
    """Share of it that decoding, scoring and training reach."""
    gpu_hour: Annotated[float, Option("--gpu-hour", min=0, help="Price of a GPU, dollars an hour.")] = 2.5
    gb_month: Annotated[float, Option("--gb-month", min=0, help="Price of storage, dollars a GB-month.")] = 0.023
    million_puts: float = 5.0
    million_gets: float = 0.4


def size(workload: Workload, machine: Machine | None = None) -> dict[str, Any]:
    """Every figure by name; bytes are bytes, rates are per second and averages over a day."""
    rates = machine or Machine()
    for name, value in inputs(workload, rates).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{name} is {value}; a finite number is needed")
    length = workload.prompt_tokens + workload.response_tokens
    samples = workload.tokens_per_day / length
    responses = samples * workload.response_tokens
    payload = LIST_OVERHEAD * (TOKEN_BYTES * workload.tokens_per_day + RESPONSE_BYTES * responses)
    scored = responses * workload.teachers_per_sample
    signals = {"logprob": LIST_OVERHEAD * 4 * scored}
    if workload.fidelity != "logprob":
        signals[workload.fidelity] = scored * signal_bytes(workload)
    scores = SCORE_BYTES * samples * workload.teachers_per_sample * len(signals)
    per_day = {"tokens": payload, "samples": SAMPLE_BYTES * samples, "scores": scores, **signals}
    bytes_held = {
        name: daily * (workload.hidden_days if name == "hidden" else workload.days) for name, daily in per_day.items()
    }
    compute = _compute(workload, rates, responses, scored, length)
    requests = _requests(workload, samples, compute)
    return {
        "samples_per_day": samples,
        "bytes_per_token": {name: daily / workload.tokens_per_day for name, daily in per_day.items()},
        "bytes_per_day": {**per_day, "all": sum(per_day.values())},
        "bytes_held": {**bytes_held, "all": sum(bytes_held.values())},
        "bandwidth": _bandwidth(workload, per_day, responses, compute),
        "requests": requests,
        "compute": compute,
        "cost": _cost(rates, bytes_held, requests, compute),
    }


def signal_bytes(workload: Workload) -> int:
    """Stored bytes of the chosen fidelity for one response token."""
    if workload.fidelity == "logprob":
        return 4
    return 8 * workload.topk if workload.fidelity == "topk" else row_bytes(workload.codec, workload.hidden_size)


def _compute(workload: Workload, rates: Machine, responses: float, scored: float, length: int) -> dict[str, float]:
    """GPUs kept busy all day. 2 N FLOPs a token forwards, 6 N forwards and backwards (attention is left out)."""
    all_day = rates.gpu_tflops * 1e12 * DAY_S
    read = scored * length / workload.response_tokens
    gpus = {
        "rollout": 2e9 * workload.student_b * responses / (all_day * rates.decode_share),
        "score": 2e9 * workload.teacher_b * read / (all_day * rates.score_share),
        "train": 6e9 * workload.student_b * workload.tokens_per_day * workload.passes / (all_day * rates.train_share),
    }
    whole = math.ceil(sum(gpus.values()))
    return {
        **{f"{name}_gpus": share for name, share in gpus.items()},
        "gpus": whole,
        "nodes": math.ceil(whole / workload.gpus_per_node),
    }


def _bandwidth(workload: Workload, per_day: Figures, responses: float, compute: Figures) -> dict[str, float]:
    """Bytes per second of each stage."""
    signal = workload.fidelity
    train_nodes = max(1, math.ceil(compute["train_gpus"] / workload.gpus_per_node))
    read = (per_day["tokens"] + per_day[signal]) * workload.passes / DAY_S
    return {
        "rollout_log": LOG_BYTES * responses / DAY_S,
        "rollout_write": (per_day["tokens"] + per_day["samples"]) / DAY_S,
        "score_read": per_day["tokens"] * workload.teachers_per_sample / DAY_S,
        "score_write": sum(per_day[name] for name in {"logprob", signal, "scores"}) / DAY_S,
        "train_read": read,
        "train_read_per_node": read / train_nodes,
    }


def _requests(workload: Workload, samples: float, compute: Figures) -> dict[str, float]:
    """Object-store requests per second, and how busy the commits of `samples` keep their table."""
    writers = max(1.0, math.ceil(compute["rollout_gpus"]))
    per_s = samples / DAY_S
    finished = per_s / writers
    rollout = writers * min(finished, max(1 / COMMIT_WINDOW_S, finished / COMMIT_SAMPLES))
    kinds = 1 if workload.fidelity == "logprob" else 2
    scored = per_s * workload.teachers_per_sample * kinds / 512
    ranges = math.ceil(workload.response_tokens * signal_bytes(workload) / RANGE_BYTES)
    reads = per_s * (READS_PER_ROW * workload.teachers_per_sample + workload.passes * (READS_PER_ROW + ranges))
    return {
        "puts_per_s": OBJECTS_PER_COMMIT * (rollout + scored),
        "gets_per_s": reads + 6 * (rollout + scored),
        "commits_per_s": rollout,
        "commit_load": rollout * COMMIT_S,
        "commit_load_grouped": min(rollout, 1 / (REMOTE_GATHER_S + COMMIT_S)) * COMMIT_S,
        "samples_per_commit": per_s / rollout,
        "samples_per_commit_needed": max(1.0, 2 * COMMIT_S * samples / DAY_S),
    }


def _cost(rates: Machine, bytes_held: Figures, requests: Figures, compute: Figures) -> dict[str, float]:
    """Dollars a day."""
    storage = sum(bytes_held.values()) / 1e9 * rates.gb_month / MONTH_DAYS
    request_cost = (
        (requests["puts_per_s"] * rates.million_puts + requests["gets_per_s"] * rates.million_gets) * DAY_S / 1e6
    )
    gpus = compute["gpus"] * 24 * rates.gpu_hour
    return {
        "gpus_per_day": gpus,
        "storage_per_day": storage,
        "requests_per_day": request_cost,
        "data_share": (storage + request_cost) / max(gpus + storage + request_cost, 1e-12),
    }


_LADDER: dict[str, Workload] = {
    "laptop": Workload(tokens_per_day=1e6, prompt_tokens=100, response_tokens=400, student_b=0.1, teacher_b=0.1,
                       hidden_size=576, gpus_per_node=1),
    "one node": Workload(tokens_per_day=1e8, student_b=70, teacher_b=70, hidden_size=8192),
    "64 GPUs": Workload(tokens_per_day=1e9, student_b=70, teacher_b=200, hidden_size=8192),
    "1,000 GPUs": Workload(tokens_per_day=1e10, student_b=100, teacher_b=400, hidden_size=12288),
}  # fmt: skip
"""From one laptop to ten billion tokens a day."""


def ladder(fidelity: Fidelity, codec: Codec, topk: int) -> list[dict[str, Any]]:
    """One row for each size of a run, from a laptop to 1,000 GPUs, at one fidelity."""
    sized = {name: replace(rung, fidelity=fidelity, codec=codec, topk=topk) for name, rung in _LADDER.items()}
    return [_rung(name, workload) for name, workload in sized.items()]


def _rung(name: str, workload: Workload) -> dict[str, Any]:
    sized = size(workload)
    return {
        "size": name,
        "tokens/day": f"{workload.tokens_per_day:.0e}",
        "signal B/token": signal_bytes(workload),
        "written/day": human(sized["bytes_per_day"]["all"]),
        "held": human(sized["bytes_held"]["all"]),
        "read by a training node": human(sized["bandwidth"]["train_read_per_node"]) + "/s",
        "PUT/s": round(sized["requests"]["puts_per_s"], 2),
        "GET/s": round(sized["requests"]["gets_per_s"], 2),
        "commit load": round(sized["requests"]["commit_load"], 3),
        "grouped": round(sized["requests"]["commit_load_grouped"], 3),
        "GPUs": int(sized["compute"]["gpus"]),
        "data share of cost": f"{100 * sized['cost']['data_share']:.1f} %",
    }


def human(count: float) -> str:
    """A number of bytes with a unit, in powers of ten.

    >>> human(3.2e12)
    '3.2 TB'
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PB"


def readable(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of `size` with units."""
    shown = {
        name: {key: human(item) + ("/s" if name == "bandwidth" else "") for key, item in figures[name].items()}
        for name in ("bytes_per_day", "bytes_held", "bandwidth")
    }
    return {**figures, **shown}


def inputs(workload: Workload, machine: Machine) -> dict[str, Any]:
    return {**asdict(workload), **asdict(machine)}
