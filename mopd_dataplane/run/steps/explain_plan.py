"""Content and cost of a recorded plan: `mopd plan JOB --explain`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from safetensors import safe_open

from mopd_dataplane.job.job import Stage
from mopd_dataplane.records import PlanWindow
from mopd_dataplane.run.context import Run

TOKEN_BYTES = 9
"""Token id, sampler log-prob and mask of one token."""


def explain_plan(run: Run, stage: Stage, plan: PlanWindow) -> dict[str, Any]:
    """Batches, mixture, packs by teacher, payload bytes and training FLOPs of a window; counts are in plan.stats."""
    rows, passes = np.unique(plan.sample_rows, return_counts=True)
    samples = run.store.take_samples(rows, ["domain", "total_len"])
    lengths = samples["total_len"].to_numpy().astype(np.int64)
    codes, packs = np.unique(plan.pack_teachers, return_counts=True)
    names = {code: plan.teachers[code] if code >= 0 else "none" for code in codes.tolist()}
    objective = run.job.objective(stage)
    scores = run.store.table("scores", ["sample_row", "kind", "bytes", "rows"], snapshot=plan.snapshot)
    used = np.isin(scores["sample_row"].to_numpy(), rows) & np.isin(scores["kind"].to_pylist(), objective.signals)
    return {
        "batches": _batches(plan, lengths[np.searchsorted(rows, plan.sample_rows)]),
        "mixture": _mixture(samples["domain"], lengths),
        "weights": _weights(plan),
        "packs_by_teacher": {names[code]: int(count) for code, count in zip(codes.tolist(), packs, strict=True)},
        "token_bytes": int((lengths * passes).sum()) * TOKEN_BYTES,
        "signal_bytes": int(scores["bytes"].to_numpy()[used].sum()),
        "bytes_per_scored_token": _per_token(run, plan, scores.filter(pa.array(used))),
        "train_flops": train_flops(run.policies.start(stage), np.repeat(lengths, passes)),
        "snapshot": plan.snapshot.versions,
    }


def train_flops(policy: Path, lengths: NDArray[np.int64]) -> float:
    """FLOPs of forward and backward passes over sequences of these lengths; NaN when the policy is not there yet.

    6 N L + 6 n D L^2 a sequence, N parameters that multiply (all but the embedding table; a tied one counts as the
    head), n layers, D hidden size, causal attention (Kaplan et al. 2020, arXiv 2001.08361, with the causal half).
    """
    files = sorted(policy.glob("*.safetensors"))
    if not files or not (policy / "config.json").is_file():
        return float("nan")
    config = json.loads((policy / "config.json").read_text())
    parameters = 0
    for file in files:
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                embedding = "embed" in name and not config.get("tie_word_embeddings")
                parameters += 0 if embedding else int(np.prod(tensors.get_slice(name).get_shape()))
    attention = 6 * config["num_hidden_layers"] * config["hidden_size"]
    size = lengths.astype(np.float64)
    return float(6 * parameters * size.sum() + attention * (size**2).sum())


def _batches(plan: PlanWindow, lengths: NDArray[np.int64]) -> dict[str, str]:
    """Smallest, mean and largest step in samples, tokens and packs."""
    first_samples = plan.pack_starts[plan.step_starts]
    counts = {
        "samples": np.diff(first_samples),
        "tokens": np.diff(np.concatenate(([0], np.cumsum(lengths)))[first_samples]),
        "packs": np.diff(plan.step_starts),
    }
    return {name: f"{of.min():,} to {of.max():,}, mean {of.mean():,.1f}" for name, of in counts.items()}


def _mixture(domains: pa.ChunkedArray, lengths: NDArray[np.int64]) -> dict[str, dict[str, float]]:
    """Share of each domain in samples and in tokens."""
    found = {}
    for name in sorted(pc.unique(domains).to_pylist()):
        inside = np.asarray(pc.equal(domains, name))
        found[name] = {
            "samples": round(float(inside.mean()), 4),
            "tokens": round(float(lengths[inside].sum() / lengths.sum()), 4),
        }
    return found


def _per_token(run: Run, plan: PlanWindow, scores: pa.Table) -> dict[str, float]:
    """Bytes a token of the objective's signals, and of the teachers' whole logits in float32."""
    scored = pc.sum(scores["rows"]).as_py()
    if not scored:
        return {}
    known = run.store.teachers()
    largest = max(known[name].vocab_size for name in plan.teachers)
    return {"stored": round(pc.sum(scores["bytes"]).as_py() / scored, 1), "as_logits": 4.0 * largest}


def _weights(plan: PlanWindow) -> dict[str, Any]:
    """Mixture and teacher weights in force: fixed ones as they are, others at the first and the last step."""
    fixed = {f"mixture/{name}": weight for name, weight in plan.settings.get("mixture", {}).items()}
    fixed |= {f"teacher/{name}": weight for name, weight in plan.settings.get("teacher_weights", {}).items()}
    moving = plan.settings.get("weights", {})
    return fixed | {name: f"{at[0]:.4g} to {at[-1]:.4g}" for name, at in moving.items()}
