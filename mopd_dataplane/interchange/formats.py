"""What each format calls things: its fields, as rows that no longer say where they come from.

verl       rollout_data_dir/<step>.jsonl: input, output, gts, score, step (text only)
trl        completions/completions_<step>.parquet: prompt, completion, step, one column a reward (text or messages)
prime-rl   one verifiers rollout a line: trajectory[].tokens with ids, masks and sampler log-probs
tinker     one tinker-cookbook trajectory a line: transitions[].ob, .ac.tokens, .ac.maybe_logprobs, .reward
plain      this project's own names, as `mopd export` writes them; or just prompt and response
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mopd_dataplane.errors import InputError
from mopd_dataplane.fields import PAYLOAD, RECORDED
from mopd_dataplane.interchange.row_files import Fields, check_unicode, floats, integer, integers, number, objects, text
from mopd_dataplane.interchange.signal_entries import Said, signals_in
from mopd_dataplane.records import FORMAT_1_NAMES

Messages = list[dict[str, Any]]


@dataclass(kw_only=True)
class Row:
    """One response, in whatever detail its source has it; what is None was not recorded.

    Example: Row(place="7.jsonl:1", prompt="3 + 4 =", response=" 7", iteration=7, rewards={"score": 1.0}).
    """

    place: str
    """File and line or row number."""
    prompt: str | Messages | None = None
    response: str | None = None
    prompt_ids: list[int] | None = None
    response_ids: list[int] | None = None
    """Both or neither; without them the text is tokenised."""
    logprobs: list[float] | None = None
    """Sampler log-prob of each response token."""
    loss_mask: list[int] | None = None
    """1 on response tokens that the policy wrote; None: on all."""
    answer: str = ""
    domain: str = ""
    iteration: int = 0
    """Training step that asked for it."""
    turns: int = 1
    rewards: dict[tuple[str, str], float] = field(default_factory=dict)
    """By verifier and its version."""
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What a verifier said besides, by its name: `detail`, and `correct` where it judges right and wrong."""
    signals: list[Said] = field(default_factory=list)
    """What teachers said of the response."""
    sample: dict[str, Any] = field(default_factory=dict)
    """Fields of records.Sample that the source states."""
    question: dict[str, Any] = field(default_factory=dict)
    """Fields of records.Prompt that the source states."""


Reader = Callable[[Fields, str], Iterator[Row]]
"""(fields of one line or row, its place) -> the responses in it. Another package offers one as an entry point of
`mopd.importers`, or it is named as `package.module:function`."""


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
        prompt=_prompt(fields, "prompt", place),
        response=_response(fields, "completion", place),
        iteration=integer(fields, "step", place),
        rewards=rewards,
    )


def _prime_rl(fields: Fields, place: str) -> Iterator[Row]:
    """Steps whose prompt continues all that came before are one sample; where that breaks, the next one begins."""
    trajectory = fields.get("trajectory")
    if not isinstance(trajectory, list) or not trajectory:
        raise InputError(f"{place}: field 'trajectory' is {trajectory!r:.60}, expected a list of steps with tokens")
    reward = number(fields, "reward", place)
    domain = text(fields, "env_name", place, default="") or text(fields, "task", place, default="")
    answer = fields.get("answer")
    open_row: Row | None = None
    for turn, step in enumerate(trajectory):
        tokens = step.get("tokens") if isinstance(step, dict) else None
        if not isinstance(tokens, dict):
            raise InputError(f"{place}: trajectory[{turn}] has no tokens; save rollouts with their trajectory tokens")
        name = f"trajectory[{turn}].tokens"
        prompt = integers(tokens.get("prompt_ids"), f"{name}.prompt_ids", place)
        said = integers(tokens.get("completion_ids"), f"{name}.completion_ids", place)
        mask = integers(tokens.get("completion_mask") or [1] * len(said), f"{name}.completion_mask", place)
        given = tokens.get("completion_logprobs")
        logprobs = None if given is None else floats(given, f"{name}.completion_logprobs", place)
        if len(mask) != len(said) or (logprobs is not None and len(logprobs) != len(said)):
            raise InputError(f"{place}: {name}: completion ids, mask and log-probs differ in length")
        if open_row is not None and _continues(open_row, prompt):
            _extend(open_row, prompt, said, mask, logprobs)
            continue
        if open_row is not None:
            yield open_row
        open_row = Row(
            place=place,
            prompt=_prompt(fields, "prompt", place, optional=True),
            prompt_ids=prompt,
            response_ids=said,
            logprobs=logprobs,
            loss_mask=mask,
            answer=text(fields, "answer", place, default="") if isinstance(answer, str) else "",
            domain=domain,
            iteration=integer(fields, "step", place),
            rewards={} if reward is None else {("prime-rl", ""): reward},
        )
    if open_row is not None:
        yield open_row


def _tinker(fields: Fields, place: str) -> Iterator[Row]:
    transitions = fields.get("transitions")
    if not isinstance(transitions, list) or not transitions:
        raise InputError(f"{place}: field 'transitions' is {transitions!r:.60}, expected a list of transitions")
    rewards = [number(step, "reward", place) or 0.0 for step in transitions if isinstance(step, dict)]
    total = sum(rewards) + (number(fields, "final_reward", place) or 0.0)
    open_row: Row | None = None
    for turn, step in enumerate(transitions):
        action = step.get("ac") if isinstance(step, dict) else None
        if not isinstance(action, dict):
            raise InputError(f"{place}: transitions[{turn}] has no 'ac' with tokens")
        seen = _observation(step.get("ob"), f"transitions[{turn}].ob", place)
        said = integers(action.get("tokens"), f"transitions[{turn}].ac.tokens", place)
        given = action.get("maybe_logprobs")
        logprobs = None if given is None else floats(given, f"transitions[{turn}].ac.maybe_logprobs", place)
        if logprobs is not None and len(logprobs) != len(said):
            raise InputError(f"{place}: transitions[{turn}].ac has {len(said)} tokens and {len(logprobs)} log-probs")
        if open_row is not None and _continues(open_row, seen):
            _extend(open_row, seen, said, [1] * len(said), logprobs)
            continue
        if open_row is not None:
            yield open_row
        open_row = Row(
            place=place,
            prompt_ids=seen,
            response_ids=said,
            logprobs=logprobs,
            loss_mask=[1] * len(said),
            iteration=integer(fields, "sampling_client_step", place),
            rewards={("tinker", ""): total},
        )
    if open_row is not None:
        yield open_row


def _plain(fields: Fields, place: str) -> Iterator[Row]:
    fields = {FORMAT_1_NAMES.get(name, name): value for name, value in fields.items()}
    ids: tuple[list[int] | None, list[int] | None] = (None, None)
    if fields.get("tokens") is not None:
        whole, length = integers(fields["tokens"], "tokens", place), integer(fields, "prompt_len", place, default=-1)
        if not 0 <= length <= len(whole):
            raise InputError(
                f"{place}: prompt_len is {length}, tokens has {len(whole)}; give how many are the prompt's"
            )
        ids = whole[:length], whole[length:]
    elif fields.get("prompt_ids") is not None or fields.get("response_ids") is not None:
        ids = tuple(integers(fields.get(name), name, place) for name in ("prompt_ids", "response_ids"))  # type: ignore[assignment]
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
    known_question = fields.get("question_fields") or {}
    if not isinstance(known_question, dict):
        raise InputError(f"{place}: field 'question_fields' is {known_question!r:.60}, expected an object")
    yield Row(
        place=place,
        prompt=_prompt(fields, "prompt", place, optional=ids[0] is not None),
        response=None if ids[1] is not None else _response(fields, "response", place),
        prompt_ids=ids[0],
        response_ids=ids[1],
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


_TEXTS = (
    "uid", "prompt_id", "group_id", "effort", "stage", "writer", "policy", "finish_reason", "resume", "tokenizer",
    "sampler",
)  # fmt: skip
_WHOLES = ("group_index", "writer_seq", "top_k", "interruptions")
_REALS = ("temperature", "top_p")
_LISTS = (*(field for field in PAYLOAD if field.axis == "span"), *RECORDED)
SAMPLE_FIELDS = (*_TEXTS, *_WHOLES, *_REALS, *(field.name for field in _LISTS))
"""What a plain row may say of its sample besides PLAIN_FIELDS, domain, iteration and turns."""
PLAIN_FIELDS = tuple(field.name for field in PAYLOAD if field.axis != "span")
"""Fields that it says with the length of its prompt."""
QUESTION_FIELDS = ("split", "effort", "source", "teacher_context", "verifier_data")
"""What a plain row may say of its prompt besides text, answer and domain."""

FORMATS: dict[str, Reader] = {
    "verl": _verl,
    "trl": _trl,
    "prime-rl": _prime_rl,
    "tinker": _tinker,
    "plain": _plain,
}


def _truth(fields: Fields, name: str, place: str) -> bool | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise InputError(f"{place}: field {name!r} is {value!r:.60}, expected true, false or null")
    return value


def _stated(fields: Fields, place: str) -> dict[str, Any]:
    """Fields of Sample that a plain row states, checked."""
    readers: tuple[tuple[tuple[str, ...], Callable[[str], Any]], ...] = (
        (_TEXTS, lambda name: text(fields, name, place)),
        (_WHOLES, lambda name: integer(fields, name, place)),
        (_REALS, lambda name: number(fields, name, place)),
    )
    stated = {name: read(name) for names, read in readers for name in names if fields.get(name) is not None}
    for listed in _LISTS:
        if (given := fields.get(listed.name)) is not None:
            stated[listed.name] = (floats if listed.is_float else integers)(given, listed.name, place)
    return stated


def _prompt(fields: Fields, name: str, place: str, *, optional: bool = False) -> str | Messages | None:
    value = fields.get(name)
    if value is None and optional:
        return None
    if isinstance(value, str):
        return text(fields, name, place)
    if isinstance(value, list) and value and all(map(_is_message, value)):
        for message in value:
            check_unicode(message["content"], name, place)
        return value
    raise InputError(f"{place}: field {name!r} is {value!r:.60}, expected text or a list of messages")


def _response(fields: Fields, name: str, place: str) -> str:
    """Text of a response; of messages, the only assistant message."""
    value = fields.get(name)
    if isinstance(value, list) and value and all(map(_is_message, value)):
        if len(value) == 1 and value[0]["role"] == "assistant":
            return text(value[0], "content", place)
        raise InputError(f"{place}: field {name!r} has {len(value)} messages; several turns need token ids")
    if isinstance(value, str):
        return text(fields, name, place)
    raise InputError(f"{place}: field {name!r} is {value!r:.60}, expected text, or one message of the assistant")


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _observation(value: Any, name: str, place: str) -> list[int]:
    """Token ids of an observation: a list, or a ModelInput of text chunks."""
    if isinstance(value, dict) and isinstance(value.get("chunks"), list):
        parts = [chunk.get("tokens") if isinstance(chunk, dict) else None for chunk in value["chunks"]]
        return [token for part in parts for token in integers(part, f"{name}.chunks", place)]
    return integers(value, name, place)


def _continues(row: Row, prompt: list[int]) -> bool:
    """Whether a step's prompt begins with all the tokens so far."""
    before = [*(row.prompt_ids or []), *(row.response_ids or [])]
    return prompt[: len(before)] == before


def _extend(row: Row, prompt: list[int], said: list[int], mask: list[int], logprobs: list[float] | None) -> None:
    """Append a turn: what the environment said since, unmasked, then the policy's tokens."""
    assert row.prompt_ids is not None
    assert row.response_ids is not None
    assert row.loss_mask is not None
    heard = prompt[len(row.prompt_ids) + len(row.response_ids) :]
    row.response_ids += [*heard, *said]
    row.loss_mask += [*([0] * len(heard)), *mask]
    if row.logprobs is not None and logprobs is not None:
        row.logprobs += [*([0.0] * len(heard)), *logprobs]
    else:
        row.logprobs = None
    row.turns += 1
