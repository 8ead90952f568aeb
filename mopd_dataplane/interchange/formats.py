"""Readers of each format: they turn its fields into Row, which is the same for all formats.

docs/import_export.md lists the files and fields of each format.
"""

from collections.abc import Iterator
from typing import Any

from mopd_dataplane.errors import InputError
from mopd_dataplane.fields import PAYLOAD, RECORDED
from mopd_dataplane.interchange.chats import read_openai, read_preference, read_sft
from mopd_dataplane.interchange.row_files import Fields, floats, integer, integers, number, objects, part, stored, text
from mopd_dataplane.interchange.rows import Reader, Row, finish_reason, read_prompt, read_response
from mopd_dataplane.interchange.signal_entries import signals_in
from mopd_dataplane.interchange.trajectories import read_prime_rl, read_tinker
from mopd_dataplane.records import FORMAT_1_NAMES
from mopd_dataplane.tables import SAMPLES


def _verl(fields: Fields, location: str) -> Iterator[Row]:
    score = number(fields, "score", location)
    answer = fields.get("gts")
    yield Row(
        location=location,
        prompt=text(fields, "input", location),
        response=text(fields, "output", location),
        answer="" if answer is None else text({"gts": str(answer)}, "gts", location),
        iteration=integer(fields, "step", location),
        rewards={} if score is None else {("verl", ""): score},
    )


_TRL = {"step", "prompt", "completion", "advantage", "mode", "images"}


def _trl(fields: Fields, location: str) -> Iterator[Row]:
    rewards = {
        (name, ""): float(value)
        for name, value in fields.items()
        if name not in _TRL and isinstance(value, int | float) and not isinstance(value, bool) and value == value
    }
    yield Row(
        location=location,
        prompt=read_prompt(fields, "prompt", location),
        response=read_response(fields, "completion", location),
        iteration=integer(fields, "step", location),
        rewards=rewards,
    )


def _skyrl(fields: Fields, location: str) -> Iterator[Row]:
    if fields and all(isinstance(value, int | float) for value in fields.values()):
        return  # aggregated_results.jsonl, which is beside the rollouts
    score = fields.get("score")
    total = sum(floats(score, "score", location)) if isinstance(score, list) else number(fields, "score", location)
    extras = fields.get("env_extras")
    reward_spec = (extras.get("reward_spec") or extras.get("reward_model")) if isinstance(extras, dict) else None
    answer = reward_spec.get("ground_truth") if isinstance(reward_spec, dict) else None
    yield Row(
        location=location,
        prompt=text(fields, "input_prompt", location),
        rendered=True,
        response=text(fields, "output_response", location),
        answer="" if answer is None else text({"ground_truth": str(answer)}, "ground_truth", location),
        domain=text(fields, "data_source", location, default="") or text(fields, "env_class", location, default=""),
        rewards={} if total is None else {("skyrl", ""): total},
        sample=finish_reason(fields.get("stop_reason")),
    )


def _plain(fields: Fields, location: str) -> Iterator[Row]:
    fields = {FORMAT_1_NAMES.get(name, name): value for name, value in fields.items()}
    prompt_ids: list[int] | None = None
    response_ids: list[int] | None = None
    if fields.get("tokens") is not None:
        whole, length = (
            integers(fields["tokens"], "tokens", location),
            integer(fields, "prompt_len", location, default=-1),
        )
        if not 0 <= length <= len(whole):
            raise InputError(
                f"{location}: prompt_len is {length}, tokens has {len(whole)}; give the number of prompt tokens"
            )
        prompt_ids, response_ids = whole[:length], whole[length:]
    elif fields.get("prompt_ids") is not None or fields.get("response_ids") is not None:
        prompt_ids, response_ids = (
            integers(fields.get(name), name, location) for name in ("prompt_ids", "response_ids")
        )
    values = fields.get("logprobs")
    mask = fields.get("loss_mask")
    reward = number(fields, "reward", location)
    rewards = {("reward", ""): reward} if reward is not None else {}
    verdicts: dict[str, dict[str, Any]] = {}
    for entry in objects(fields, "rewards", location):
        value = number(entry, "reward", location)
        if value is not None:
            verifier = text(entry, "verifier", location)
            rewards[verifier, text(entry, "verifier_version", location, default="")] = value
            detail = text(entry, "detail", location, default="") or None
            verdicts[verifier] = {"detail": detail, "correct": _truth(entry, "correct", location)}
    known_question = part(fields, "question_fields", location)
    yield Row(
        location=location,
        ignored=tuple(name for name in fields if name not in _PLAIN),
        prompt=read_prompt(fields, "prompt", location, optional=prompt_ids is not None),
        response=None if response_ids is not None else read_response(fields, "response", location),
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        logprobs=None if values is None else floats(values, "logprobs", location),
        loss_mask=None if mask is None else integers(mask, "loss_mask", location),
        answer=text(fields, "answer", location, default=""),
        domain=text(fields, "domain", location, default=""),
        iteration=integer(fields, "iteration", location),
        turns=integer(fields, "turns", location, default=1),
        rewards=rewards,
        verdicts=verdicts,
        signals=signals_in(fields, location),
        sample=_stated(fields, location),
        question={
            name: text(known_question, name, location)
            for name in QUESTION_FIELDS
            if known_question.get(name) is not None
        },
    )


STATED = (
    "uid", "prompt_id", "group_id", "effort", "stage", "writer", "policy", "finish_reason", "resume", "tokenizer",
    "sampler", "group_index", "writer_seq", "top_k", "interruptions", "temperature", "top_p",
)  # fmt: skip
"""Columns of `samples` that a plain row may contain as they are."""
_LISTS = (*(field for field in PAYLOAD if field.axis == "span"), *RECORDED)
SAMPLE_FIELDS = (*STATED, *(field.name for field in _LISTS))
"""Fields of a sample that a plain row may have besides PLAIN_FIELDS, domain, iteration and turns."""
PLAIN_FIELDS = tuple(field.name for field in PAYLOAD if field.axis != "span")
"""Fields of a plain row with one value per token, beside the length of its prompt."""
_PLAIN = {
    *SAMPLE_FIELDS, *PLAIN_FIELDS, "prompt", "response", "tokens", "prompt_len", "prompt_ids", "response_ids", "reward",
    "rewards", "question_fields", "answer", "domain", "iteration", "turns", "signals",
}  # fmt: skip
"""All fields of a plain row that are read."""
QUESTION_FIELDS = ("split", "effort", "source", "teacher_context", "verifier_data", "messages")
"""Fields of a prompt that a plain row may have besides text, answer and domain."""

FORMATS: dict[str, Reader] = {
    "verl": _verl,
    "trl": _trl,
    "skyrl": _skyrl,
    "prime-rl": read_prime_rl,
    "verifiers": read_prime_rl,
    "tinker": read_tinker,
    "openai": read_openai,
    "sft": read_sft,
    "preference": read_preference,
    "plain": _plain,
}


def _truth(fields: Fields, name: str, location: str) -> bool | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise InputError(f"{location}: field {name!r} is {value!r:.60}, expected true, false or null")
    return value


def _stated(fields: Fields, location: str) -> dict[str, Any]:
    """Check the fields of Sample in a plain row, and return them."""
    there = (name for name in STATED if fields.get(name) is not None)
    stated = {name: stored(fields, SAMPLES.schema.field(name), location) for name in there}
    for listed in _LISTS:
        if (value := fields.get(listed.name)) is not None:
            stated[listed.name] = (floats if listed.is_float else integers)(value, listed.name, location)
    return stated
