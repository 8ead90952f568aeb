"""Readers of each format: they turn its fields into Row, which is the same for all formats.

The files and fields of each are in docs/import_export.md.
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


def _verl(fields: Fields, place: str) -> Iterator[Row]:
    score = number(fields, "score", place)
    answer = fields.get("gts")
    yield Row(
        place=place,
        prompt=text(fields, "input", place),
        response=text(fields, "output", place),
        answer="" if answer is None else text({"gts": str(answer)}, "gts", place),
        iteration=integer(fields, "step", place),
        rewards={} if score is None else {("verl", ""): score},
    )


_TRL = {"step", "prompt", "completion", "advantage", "mode", "images"}


def _trl(fields: Fields, place: str) -> Iterator[Row]:
    rewards = {
        (name, ""): float(value)
        for name, value in fields.items()
        if name not in _TRL and isinstance(value, int | float) and not isinstance(value, bool) and value == value
    }
    yield Row(
        place=place,
        prompt=read_prompt(fields, "prompt", place),
        response=read_response(fields, "completion", place),
        iteration=integer(fields, "step", place),
        rewards=rewards,
    )


def _skyrl(fields: Fields, place: str) -> Iterator[Row]:
    if fields and all(isinstance(value, int | float) for value in fields.values()):
        return  # aggregated_results.jsonl, which lies beside the rollouts
    score = fields.get("score")
    total = sum(floats(score, "score", place)) if isinstance(score, list) else number(fields, "score", place)
    extras = fields.get("env_extras")
    asked = (extras.get("reward_spec") or extras.get("reward_model")) if isinstance(extras, dict) else None
    answer = asked.get("ground_truth") if isinstance(asked, dict) else None
    yield Row(
        place=place,
        prompt=text(fields, "input_prompt", place),
        rendered=True,
        response=text(fields, "output_response", place),
        answer="" if answer is None else text({"ground_truth": str(answer)}, "ground_truth", place),
        domain=text(fields, "data_source", place, default="") or text(fields, "env_class", place, default=""),
        rewards={} if total is None else {("skyrl", ""): total},
        sample=finish_reason(fields.get("stop_reason")),
    )


def _plain(fields: Fields, place: str) -> Iterator[Row]:
    fields = {FORMAT_1_NAMES.get(name, name): value for name, value in fields.items()}
    prompt_ids: list[int] | None = None
    response_ids: list[int] | None = None
    if fields.get("tokens") is not None:
        whole, length = integers(fields["tokens"], "tokens", place), integer(fields, "prompt_len", place, default=-1)
        if not 0 <= length <= len(whole):
            raise InputError(
                f"{place}: prompt_len is {length}, tokens has {len(whole)}; give the number of prompt tokens"
            )
        prompt_ids, response_ids = whole[:length], whole[length:]
    elif fields.get("prompt_ids") is not None or fields.get("response_ids") is not None:
        prompt_ids, response_ids = (integers(fields.get(name), name, place) for name in ("prompt_ids", "response_ids"))
    given = fields.get("logprobs")
    mask = fields.get("loss_mask")
    reward = number(fields, "reward", place)
    rewards = {("reward", ""): reward} if reward is not None else {}
    verdicts: dict[str, dict[str, Any]] = {}
    for entry in objects(fields, "rewards", place):
        value = number(entry, "reward", place)
        if value is not None:
            verifier = text(entry, "verifier", place)
            rewards[verifier, text(entry, "verifier_version", place, default="")] = value
            detail = text(entry, "detail", place, default="") or None
            verdicts[verifier] = {"detail": detail, "correct": _truth(entry, "correct", place)}
    known_question = part(fields, "question_fields", place)
    yield Row(
        place=place,
        ignored=tuple(name for name in fields if name not in _PLAIN),
        prompt=read_prompt(fields, "prompt", place, optional=prompt_ids is not None),
        response=None if response_ids is not None else read_response(fields, "response", place),
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        logprobs=None if given is None else floats(given, "logprobs", place),
        loss_mask=None if mask is None else integers(mask, "loss_mask", place),
        answer=text(fields, "answer", place, default=""),
        domain=text(fields, "domain", place, default=""),
        iteration=integer(fields, "iteration", place),
        turns=integer(fields, "turns", place, default=1),
        rewards=rewards,
        verdicts=verdicts,
        signals=signals_in(fields, place),
        sample=_stated(fields, place),
        question={
            name: text(known_question, name, place) for name in QUESTION_FIELDS if known_question.get(name) is not None
        },
    )


STATED = (
    "uid", "prompt_id", "group_id", "effort", "stage", "writer", "policy", "finish_reason", "resume", "tokenizer",
    "sampler", "group_index", "writer_seq", "top_k", "interruptions", "temperature", "top_p",
)  # fmt: skip
"""Columns of `samples` that a plain row may state as they are."""
_LISTS = (*(field for field in PAYLOAD if field.axis == "span"), *RECORDED)
SAMPLE_FIELDS = (*STATED, *(field.name for field in _LISTS))
"""Fields of a sample that a plain row may have besides PLAIN_FIELDS, domain, iteration and turns."""
PLAIN_FIELDS = tuple(field.name for field in PAYLOAD if field.axis != "span")
"""Fields that it says with the length of its prompt."""
_PLAIN = {
    *SAMPLE_FIELDS, *PLAIN_FIELDS, "prompt", "response", "tokens", "prompt_len", "prompt_ids", "response_ids", "reward",
    "rewards", "question_fields", "answer", "domain", "iteration", "turns", "signals",
}  # fmt: skip
"""Every field of a plain row that is read."""
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


def _truth(fields: Fields, name: str, place: str) -> bool | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise InputError(f"{place}: field {name!r} is {value!r:.60}, expected true, false or null")
    return value


def _stated(fields: Fields, place: str) -> dict[str, Any]:
    """Fields of Sample that a plain row states, checked."""
    there = (name for name in STATED if fields.get(name) is not None)
    stated = {name: stored(fields, SAMPLES.schema.field(name), place) for name in there}
    for listed in _LISTS:
        if (given := fields.get(listed.name)) is not None:
            stated[listed.name] = (floats if listed.is_float else integers)(given, listed.name, place)
    return stated
