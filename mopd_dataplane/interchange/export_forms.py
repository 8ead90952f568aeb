"""The forms of an exported row, each for certain tools.

plain     all stored columns of a sample; `mopd import plain` reads it back
sft       prompt and completion as text: TRL, Unsloth, Axolotl
messages  a conversation of one question and its answer: TRL, Unsloth, Axolotl's chat_template
tokens    input_ids, labels and completion_mask, with one column a teacher: the exact tokens
traces    an episode of verifiers and prime-rl a line, with one teacher's reference_logprobs (export_traces.py)
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from mopd_dataplane.fields import ALIGNMENT, PLUGIN_COLUMN
from mopd_dataplane.interchange.export_traces import Traces
from mopd_dataplane.interchange.formats import PLAIN_FIELDS, QUESTION_FIELDS, SAMPLE_FIELDS
from mopd_dataplane.interchange.signal_entries import ENTRY, SignalsOut
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.read.decode import find_decoder
from mopd_dataplane.tables import SAMPLES, TOKENS

_REWARD = pa.struct(
    [
        ("verifier", pa.string()), ("verifier_version", pa.string()), ("reward", pa.float64()),
        ("detail", pa.string()), ("correct", pa.bool_()),
    ]
)  # fmt: skip
IGNORED = -100
"""Label of a token that is not trained, in Hugging Face's losses."""

Sampled = dict[str, Any]
"""A sample: its columns of `samples` and `tokens`, `question` (its row of `prompts`), `rewards` and `signals`."""


class Form(Protocol):
    """Converts samples to the rows of an export."""

    schema: pa.Schema | None
    """Columns of the rows; None if rows are nested documents, which are written as JSONL only."""

    def rows(self, samples: list[Sampled]) -> list[dict[str, Any]]:
        """Return one row per sample."""


def _type_of(name: str) -> pa.DataType:
    """Return the Arrow type of a field of an exported row, which is the store's own."""
    stored = SAMPLES if name in SAMPLES.schema.names else TOKENS
    return stored.schema.field(name).type


PAYLOAD_FIELDS = ("domain", "iteration", "turns", "prompt_len", *PLAIN_FIELDS)
SCHEMA = pa.schema(
    [
        *((name, _type_of(name)) for name in SAMPLE_FIELDS),
        *((name, _type_of(name)) for name in PAYLOAD_FIELDS),
        ("prompt", pa.string()), ("answer", pa.string()),
        ("question_fields", pa.struct([(name, pa.string()) for name in QUESTION_FIELDS])),
        ("rewards", pa.list_(_REWARD)),
        ("signals", pa.list_(ENTRY)),
    ]
)  # fmt: skip
"""Columns of the plain form."""


class _Plain:
    schema = SCHEMA

    def __init__(self, store: Store, said: SignalsOut, kind: str) -> None:
        pass

    def rows(self, samples: list[Sampled]) -> list[dict[str, Any]]:
        return [self._row(sample) for sample in samples]

    def _row(self, sample: Sampled) -> dict[str, Any]:
        row = {name: sample[name] for name in SCHEMA.names if name in sample}
        question = sample["question"]
        return row | {
            "prompt": question.get("text"), "answer": question.get("answer"),
            "question_fields": {name: question.get(name) for name in QUESTION_FIELDS},
        }  # fmt: skip


_ABOUT = [("uid", pa.string()), ("domain", pa.string()), ("reward", pa.float64())]
"""Columns for filters in the other forms; reward is the mean over verifiers."""


def _about(sample: Sampled) -> dict[str, Any]:
    rewards = [entry["reward"] for entry in sample["rewards"] if entry["reward"] is not None]
    return {
        "uid": sample["uid"], "domain": sample["domain"], "reward": float(np.mean(rewards)) if rewards else None
    }  # fmt: skip


class _Text:
    """Forms of decoded text. A trainer's tokeniser may encode the text to other tokens than the sampled ones."""

    schema: pa.Schema | None = None

    def __init__(self, store: Store, said: SignalsOut, kind: str) -> None:
        self._decoder = find_decoder(store)

    def decoded(self, samples: list[Sampled]) -> list[tuple[str, str]]:
        """Return (prompt, response) as the student read and wrote them, without special tokens."""
        lengths = [sample["prompt_len"] for sample in samples]
        prompts = [sample["tokens"][:length] for sample, length in zip(samples, lengths, strict=True)]
        responses = [sample["tokens"][length:] for sample, length in zip(samples, lengths, strict=True)]
        texts = self._decoder.plain_texts
        return list(zip(texts(prompts), texts(responses), strict=True))


class _Sft(_Text):
    schema = pa.schema([("prompt", pa.string()), ("completion", pa.string()), *_ABOUT])

    def rows(self, samples: list[Sampled]) -> list[dict[str, Any]]:
        return [
            {"prompt": prompt, "completion": response, **_about(sample)}
            for sample, (prompt, response) in zip(samples, self.decoded(samples), strict=True)
        ]


_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])


def _opened_thought(prompt: str) -> str:
    """Return the beginning of a thought at the end of a prompt, which belongs to the assistant's answer."""
    start = prompt.rfind("<think>")
    return prompt[start:] if start >= 0 and not prompt[start:].removeprefix("<think>").strip() else ""


class _Messages(_Text):
    schema = pa.schema([("messages", pa.list_(_MESSAGE)), *_ABOUT])

    def rows(self, samples: list[Sampled]) -> list[dict[str, Any]]:
        """Return rows with the question before the student's template, since the reader applies its own chat
        template."""
        return [
            {
                "messages": [
                    {"role": "user", "content": sample["question"].get("text") or prompt},
                    {"role": "assistant", "content": _opened_thought(prompt) + response},
                ],
                **_about(sample),
            }
            for sample, (prompt, response) in zip(samples, self.decoded(samples), strict=True)
        ]


class _Tokens:
    """Form of exact tokens; the columns of a teacher's signals end in its name."""

    def __init__(self, store: Store, said: SignalsOut, kind: str) -> None:
        ids, mask = pa.list_(pa.int32()), pa.list_(pa.int8())
        columns: list[tuple[str, pa.DataType]] = [
            ("input_ids", ids), ("attention_mask", mask), ("completion_mask", mask), ("labels", ids),
            ("sampler_logprobs", pa.list_(pa.float32())), *_ABOUT,
        ]  # fmt: skip
        for name in said.teachers:
            for signal in said.kinds:
                if said.has(name, signal):
                    columns += [(f"{column}/{name}", stored) for column, stored in _teacher_columns(signal).items()]
        self.schema: pa.Schema | None = pa.schema(columns)

    def rows(self, samples: list[Sampled]) -> list[dict[str, Any]]:
        return [self._row(sample) for sample in samples]

    def _row(self, sample: Sampled) -> dict[str, Any]:
        tokens, start = sample["tokens"], sample["prompt_len"]
        mask = [0] * start + sample["loss_mask"]
        before = [0.0] * start
        row = {
            "input_ids": tokens, "attention_mask": [1] * len(tokens), "completion_mask": mask,
            "labels": [token if trained else IGNORED for token, trained in zip(tokens, mask, strict=True)],
            "sampler_logprobs": None if sample["logprobs"] is None else before + sample["logprobs"],
            **_about(sample),
        }  # fmt: skip
        for entry in sample["signals"]:
            teacher, kind, width = entry["teacher"]["name"], entry["kind"], entry["width"]
            if kind == "logprob":
                row[f"logprob/{teacher}"] = before + entry["logprob"]
            elif kind == "topk":
                row[f"topk_ids/{teacher}"] = _in_rows(entry["topk_ids"], width)
                row[f"topk_logprobs/{teacher}"] = _in_rows(entry["topk_logprobs"], width)
            elif kind == ALIGNMENT:
                row[f"chunk_ends/{teacher}"] = [0] * start + entry["student_chunk_ends"]
                row |= {f"{name}/{teacher}": entry[name] for name in ("teacher_tokens", "teacher_chunk_ends")}
            elif kind not in _TEACHER_COLUMNS:
                row[f"{kind}/{teacher}"] = before + entry[PLUGIN_COLUMN]
            else:
                row[f"hidden/{teacher}"] = _in_rows(entry["hidden"], width)
                row[f"hidden_codec/{teacher}"] = entry["codec"]
        return row


_TEACHER_COLUMNS: dict[str, dict[str, pa.DataType]] = {
    "logprob": {"logprob": pa.list_(pa.float32())},
    "topk": {"topk_ids": pa.list_(pa.list_(pa.int32())), "topk_logprobs": pa.list_(pa.list_(pa.float32()))},
    "hidden": {"hidden": pa.list_(pa.binary()), "hidden_codec": pa.string()},
    ALIGNMENT: {
        "chunk_ends": pa.list_(pa.int8()), "teacher_tokens": pa.list_(pa.int32()),
        "teacher_chunk_ends": pa.list_(pa.int8()),
    },
}  # fmt: skip
"""Columns of a teacher: log-probs and chunk ends for every token of input_ids, teacher_tokens and teacher_chunk_ends
for the response in the teacher's own tokens, the others for every token of completion_mask 1."""


def _teacher_columns(kind: str) -> dict[str, pa.DataType]:
    """Return the columns of one kind of signal; another package's has a number for every token of input_ids."""
    return _TEACHER_COLUMNS.get(kind) or {kind: pa.list_(pa.float32())}


def _in_rows(flat: Any, width: int) -> list[Any]:
    return [flat[start : start + width] for start in range(0, len(flat), width)]


FORMS: dict[str, Callable[[Store, SignalsOut, str], Form]] = {
    "plain": _Plain,
    "sft": _Sft,
    "messages": _Messages,
    "tokens": _Tokens,
    "traces": Traces,
}
