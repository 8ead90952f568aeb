"""Samples as episodes of verifiers and prime-rl: one trace each, its messages as nodes with tokens and log-probs.

The format is that of verifiers/v1/trace.py (TRACE_VERSION 1) and episode.py. A node holds the tokens that its message
adds, a mask of those that the policy sampled, and log-probs for these only. Log-probs are written with every digit.
"""

from itertools import groupby, pairwise
from typing import Any

import pyarrow as pa

from mopd_dataplane.errors import InputError
from mopd_dataplane.interchange.signal_entries import SignalsOut
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.read.decode import find_decoder

TRACE_VERSION = 1
_FINISH = {"stop": "stop", "length": "length"}
"""Finish reasons that a trace can express; others are left out."""


class Traces:
    """Rows that `verifiers.v1.episode.WireEpisode` reads."""

    schema: pa.Schema | None = None

    def __init__(self, store: Store, said: SignalsOut, kind: str) -> None:
        """Prepare to write episodes. Raises InputError for another kind than jsonl."""
        if kind != "jsonl":
            raise InputError(f"traces are written as jsonl, not as {kind}; end the name in .jsonl")
        self._decoder = find_decoder(store)

    def rows(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return one episode per sample. Raises InputError for a sample with log-probs of several teachers."""
        return [self._episode(sample) for sample in samples]

    def _episode(self, sample: dict[str, Any]) -> dict[str, Any]:
        question = sample["question"]
        prompt_fields = {
            "prompt": question.get("text"), "answer": question.get("answer"), "name": sample["prompt_id"]
        }  # fmt: skip
        task = {"type": sample["domain"] or "task", "data": {k: v for k, v in prompt_fields.items() if v is not None}}
        versions = {"start": sample["policy_version_first"], "end": sample["policy_version_last"]}
        teacher, reference = self._reference(sample)
        nodes = self._nodes(sample, reference)
        last = max((index for index, node in enumerate(nodes) if node["sampled"]), default=None)
        finish = _FINISH.get(sample["finish_reason"])
        call = {"node": last, "model": sample["policy"], "sampling": {}, "finish_reason": finish}
        trace = {
            "version": TRACE_VERSION, "id": sample["uid"], "task": task,
            "agent": {"config": {"model": sample["policy"]}, "name": sample["policy"], "trainable": True},
            "nodes": nodes, "calls": [] if last is None else [call],
            "rewards": {
                entry["verifier"]: {"score": entry["reward"], "weight": 1.0} for entry in sample["rewards"]
            },
            "info": {"stage": sample["stage"], "reference": teacher}, "is_completed": True, "ok": True,
            "stop_condition": sample["finish_reason"],
        }  # fmt: skip
        return {
            "id": sample["uid"], "env": {"id": sample["domain"], "name": sample["domain"]}, "task": task,
            "group": {"id": sample["group_id"]},
            "run": {
                "type": "train", "id": sample["stage"],
                "work": {"type": "train", "step": sample["iteration"], "policy": versions},
            },
            "ok": True, "traces": [trace],
        }  # fmt: skip

    def _reference(self, sample: dict[str, Any]) -> tuple[str | None, list[float] | None]:
        """Return name and [R] log-probs of the one teacher that is exported, or (None, None) without log-probs."""
        entries = [entry for entry in sample["signals"] if entry["kind"] == "logprob"]
        if len(entries) > 1:
            names = ", ".join(entry["teacher"]["name"] for entry in entries)
            raise InputError(
                f"sample {sample['uid']} has log-probs of {names}, and a trace holds one reference; give --teacher NAME"
            )
        return (entries[0]["teacher"]["name"], entries[0]["logprob"]) if entries else (None, None)

    def _nodes(self, sample: dict[str, Any], reference: list[float] | None) -> list[dict[str, Any]]:
        start, tokens, mask = sample["prompt_len"], sample["tokens"], sample["loss_mask"]
        sizes = [len(list(group)) for _, group in groupby(mask)]
        bounds = [0, start]
        for size in sizes:
            bounds.append(bounds[-1] + size)
        nodes: list[dict[str, Any]] = []
        for first, last in pairwise(bounds):
            sampled = first >= start and mask[first - start] == 1
            at = slice(first - start, last - start)
            [text] = self._decoder.plain_texts([tokens[first:last]])
            node: dict[str, Any] = {
                "parent": len(nodes) - 1 if nodes else None,
                "message": {"role": "assistant" if sampled else "user", "content": text},
                "sampled": sampled, "token_ids": tokens[first:last], "mask": [sampled] * (last - first),
                "logprobs": sample["logprobs"][at] if sampled and sample["logprobs"] is not None else [],
            }  # fmt: skip
            if sampled and reference is not None:
                node["reference_logprobs"] = reference[at]
            nodes.append(node)
        return nodes
