"""Which fields of a queue are what of a rollout: the fields of one sample -> Row."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.errors import DamagedError, InputError, nearest
from mopd_dataplane.interchange.rows import Row, read_messages
from mopd_dataplane.job.values import NAME
from mopd_dataplane.store.queue.values import TAGS, Write


@dataclass(frozen=True, kw_only=True)
class QueueMapping:
    """Names of a framework's fields; an empty one means that it has none.

    `a.b` is the entry `b` of a field `a` that holds a dict; `tags.b` and `partition` are what the put said of the
    sample. P, R and L = P + R are the tokens of prompt, response and both.

    Example: QueueMapping(prompt="prompts", response="responses", mask="response_mask").
    """

    prompt: str = ""
    """[P] token ids"""
    response: str = ""
    """[R] token ids"""
    tokens: str = ""
    """Instead of these two: [L] token ids, of which the response begins with the first one of mask 1."""
    length: str = ""
    """L; what follows in `tokens` and beside it is padding."""
    mask: str = ""
    """[R] or [L]: 1 on tokens that the policy wrote"""
    logprobs: str = ""
    """[R] or [L]: sampler log-prob of each token, nat"""
    reward: str = ""
    """A number, or [R] whose sum it is."""
    reward_detail: str = ""
    """A dict, stored with the reward as JSON."""
    reference_logprobs: str = ""
    """[R] or [L]: log-prob of each token under a reference model, nat; a signal of the teacher `reference`"""
    teacher_logprobs: str = ""
    """[L, K], whose row t is of the token t + 1: log-prob of that token (K = 1) or of K tokens, nat"""
    teacher_ids: str = ""
    """[L, K]: the tokens of `teacher_logprobs`; needed for K > 1"""
    teacher: str = ""
    """Name of the teacher, per sample; without one it is called `teacher`."""
    teacher_hidden: str = ""
    """[R, d] hidden states of the teacher, which `mopd score --queue` puts; they are not read from the queue."""
    messages: str = ""
    """Chat messages of the prompt"""
    answer: str = ""
    domain: str = ""
    group: str = ""
    """Name that all samples of one prompt share"""
    member: str = ""
    """Number within the group"""
    iteration: str = ""
    first_version: str = ""
    """Version of the policy with which generation began, and"""
    last_version: str = ""
    """with which it ended."""
    repeated: str = ""
    """Fields that only repeat others, separated by spaces"""

    @property
    def key_field(self) -> str:
        """Field whose arrival makes a sample a rollout."""
        return _field(self.response or self.tokens)

    def field_names(self) -> set[str]:
        """Fields of the queue that are read."""
        parts = (getattr(self, item.name) for item in fields(self) if item.name not in ("repeated", "teacher_hidden"))
        return {_field(name) for name in parts if name} | {TAGS}

    def ignored_fields(self) -> set[str]:
        """Fields of the queue that are not read because the store has their content anyway."""
        return {*self.repeated.split(), self.teacher_hidden} - {""}


MAPPINGS = {
    "verl": QueueMapping(
        prompt="prompts", response="responses", mask="response_mask", logprobs="rollout_log_probs", reward="rm_scores",
        reward_detail="extra_fields.reward_extra_info", reference_logprobs="ref_log_prob",
        teacher_logprobs="teacher_logprobs", teacher_ids="teacher_ids", teacher="teacher_name",
        teacher_hidden="teacher_hidden", messages="raw_prompt", answer="reward_model.ground_truth",
        domain="data_source", group="uid", member="session_id",
        iteration="global_steps", first_version="extra_fields.min_global_steps",
        last_version="extra_fields.max_global_steps", repeated="input_ids loss_mask position_ids attention_mask",
    ),
    "nemo-rl": QueueMapping(
        tokens="input_ids", length="input_lengths", mask="token_mask", logprobs="generation_logprobs",
        reward="total_reward", reference_logprobs="reference_policy_logprobs", iteration="tags.weight_version",
        first_version="tags.weight_version",
    ),
}  # fmt: skip
"""Mappings of frameworks by name. verl: the keys of `AgentLoopOutput.as_dict()` and of `agent_loop_tq.py` in 0.9.1.
nemo-rl: `DP_TRAIN_FIELDS` of `nemo_rl/data_plane/schema.py` at 7ea279a."""


def read_mapping(value: str | Mapping[str, str]) -> QueueMapping:
    """Return a mapping by its name, or of a table of names. Raises InputError naming what is unknown or missing."""
    if isinstance(value, str):
        if value not in MAPPINGS:
            raise InputError(f"no mapping {value!r:.40}: {nearest(value, MAPPINGS)}; or give a table of field names")
        return MAPPINGS[value]
    known = [item.name for item in fields(QueueMapping)]
    if unknown := next((name for name in value if name not in known), None):
        raise InputError(f"mapping.{unknown}: no such part of a rollout; {nearest(str(unknown), known)}")
    for name, text in value.items():
        if not isinstance(text, str):
            raise InputError(f"mapping.{name} = {text!r:.60}; give the name of a field as text")
    mapping = QueueMapping(**value)
    if not (mapping.prompt and mapping.response) and not (mapping.tokens and mapping.mask):
        raise InputError("a mapping needs the token ids: give prompt and response, or tokens and mask")
    return mapping


@dataclass(frozen=True, kw_only=True)
class QueueRollouts:
    """How the values of a queue are rollouts, as the file beside its logs says it."""

    mapping: QueueMapping
    tokenizer: str
    """Digest of the tokenizer of the token ids"""
    vocabulary_size: int
    domain: str = "queue"
    """Domain of samples without one"""
    policy: str = "policy"
    """Name of the policy that samples"""


def read_settings(settings: Path) -> QueueRollouts:
    """Return how the values of a queue are rollouts, of its settings file.

    Raises DamagedError for a file that `record_rollouts` did not write.
    """
    try:
        content = json.loads(settings.read_text())
        return QueueRollouts(**content | {"mapping": QueueMapping(**content["mapping"])})
    except (ValueError, TypeError, LookupError) as error:
        raise DamagedError(f"{settings} cannot be read: {error}; start the framework again, which writes it") from None


def uid_of(queue: str, number: int, write: Write) -> str:
    """Return the uid of a sample of a queue. write: that of its token ids, since its number is used again."""
    name = f"{queue}\0{number}\0{write}"
    return hashlib.blake2b(name.encode(), digest_size=16, person=b"mopd-queue").hexdigest()


def row_of(mapping: QueueMapping, content: Mapping[str, Any], location: str) -> Row:
    """Return the rollout of one sample. content: its values by field, numpy arrays and plain objects.

    Its signals come as `teacher_logprobs` of the reference; those of the teacher are `signal_arrays`. Raises InputError
    for what does not fit together.
    """
    prompt, response, mask = _tokens(mapping, content, location)
    reader = _Reader(mapping, content, location, len(prompt), len(response))
    reward = reader.array("reward", np.float64)
    detail = reader.get("reward_detail")
    logprobs = reader.of_response("logprobs")
    reference = reader.of_response("reference_logprobs")
    group = reader.text("group")
    member = reader.number("member", -1)
    row = Row(
        location=location,
        prompt=_messages(reader.get("messages"), location),
        prompt_ids=prompt.tolist(),
        response_ids=response.tolist(),
        loss_mask=mask.tolist(),
        logprobs=None if logprobs is None else logprobs.tolist(),
        teacher_logprobs=None if reference is None else reference.tolist(),
        answer=reader.text("answer"),
        domain=reader.text("domain"),
        iteration=reader.number("iteration", 0),
        turns=max(1, int((np.diff(mask, prepend=0) == 1).sum())),
        rewards={} if reward is None else {("queue", ""): float(reward.sum())},
        verdicts={"queue": {"detail": _json(detail)}} if isinstance(detail, dict) and detail else {},
    )
    if group:
        row.sample["group_id"] = group
    if member >= 0:
        row.sample["group_index"] = member
    first, last = reader.number("first_version", -1), reader.number("last_version", -1)
    if first >= 0:
        changes = last > first and len(response) > 1
        row.sample["versions"] = [first, last] if changes else [first]
        # Where the policy changed is not said: the last token is the latest place.
        row.sample["version_starts"] = [0, len(response) - 1] if changes else [0]
    return row


def teacher_arrays(
    mapping: QueueMapping, content: Mapping[str, Any], row: Row
) -> tuple[str, NDArray[np.int64] | None, NDArray[np.float64]] | None:
    """Return (name, ids [R, K] or None for K = 1, log-probs [R, K]) of a sample's teacher; None if it has none."""
    assert row.prompt_ids is not None
    assert row.response_ids is not None
    begin, count = len(row.prompt_ids) - 1, len(row.response_ids)
    reader = _Reader(mapping, content, row.location, begin + 1, count)
    logprobs, ids = reader.array("teacher_logprobs", np.float64), reader.array("teacher_ids", np.int64)
    if logprobs is None:
        return None
    logprobs = logprobs.reshape(len(logprobs), -1)
    if len(logprobs) != begin + 1 + count:
        raise InputError(
            f"{row.location}: {mapping.teacher_logprobs} has {len(logprobs)} rows, the sample {begin + 1 + count} "
            "tokens; expected one each"
        )
    name = re.sub(r"[^a-z0-9_.-]+", "-", reader.text("teacher").lower()).strip("-._")[:64] or "teacher"
    if logprobs.shape[1] == 1:
        return name, None, logprobs[begin : begin + count]
    if ids is None or ids.size != logprobs.size:
        raise InputError(
            f"{row.location}: the teacher has {logprobs.shape[1]} log-probs for each token, and no token ids that go "
            "with them"
        )
    return name, ids.reshape(logprobs.shape)[begin : begin + count], logprobs[begin : begin + count]


def stage_of(partition: str) -> str:
    """Return the stage of the samples of a partition: its name, as far as a stage may have it."""
    name = re.sub(r"[^a-z0-9_.-]+", "-", partition.lower()).strip("-._")[:64]
    return name if re.fullmatch(NAME, name) else "queue"


def _tokens(
    mapping: QueueMapping, content: Mapping[str, Any], location: str
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Prompt [P], response [R], and loss mask [R]."""
    reader = _Reader(mapping, content, location, 0, 0)
    mask = reader.array("mask", np.int64)
    if mapping.response:
        prompt, response = reader.array("prompt", np.int64), reader.array("response", np.int64)
        if prompt is None or response is None:
            missing = mapping.prompt if prompt is None else mapping.response
            raise InputError(f"{location} has no field {missing!r}")
        prompt, response = prompt.reshape(-1), response.reshape(-1)
        mask = np.ones(len(response), np.int64) if mask is None else mask.reshape(-1)[-len(response) :]
        if len(mask) != len(response):
            raise InputError(
                f"{location}: {len(mask)} values of {mapping.mask} for {len(response)} tokens; expected one each"
            )
        return prompt, response, mask
    tokens = reader.array("tokens", np.int64)
    if tokens is None or mask is None:
        raise InputError(f"{location} has no field {mapping.tokens if tokens is None else mapping.mask!r}")
    length = reader.number("length", tokens.size)
    tokens, mask = tokens.reshape(-1)[:length], mask.reshape(-1)[:length]
    if len(mask) != len(tokens):
        raise InputError(
            f"{location}: {len(mask)} values of {mapping.mask} for {len(tokens)} tokens; expected one each"
        )
    if not mask.any():
        raise InputError(f"{location}: {mapping.mask} is 0 everywhere, so no token is the policy's")
    begin = int(mask.argmax())
    return tokens[:begin], tokens[begin:], mask[begin:]


@dataclass(frozen=True)
class _Reader:
    """Reads parts of one sample by their names in the mapping."""

    mapping: QueueMapping
    content: Mapping[str, Any]
    location: str
    prompt_len: int
    response_len: int

    def get(self, part: str) -> Any:
        """The value of a part, None without one."""
        name = getattr(self.mapping, part)
        if not name:
            return None
        if name == "partition" or name.startswith("tags."):
            name = f"{TAGS}.{name}"
        first, *path = name.split(".")
        value = self.content.get(first)
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def text(self, part: str) -> str:
        """A part as text."""
        value = self.get(part)
        return "" if value is None else str(value)

    def number(self, part: str, default: int) -> int:
        """A part as an integer."""
        value = self.get(part)
        if value is None:
            return default
        try:
            return int(np.asarray(value).reshape(-1)[0]) if np.size(value) else default
        except (TypeError, ValueError):
            raise InputError(f"{self.location}: {getattr(self.mapping, part)} is {value!r:.40}, no number") from None

    def array(self, part: str, dtype: type[np.number[Any]]) -> NDArray[Any] | None:
        """A part as an array."""
        value = self.get(part)
        if value is None:
            return None
        try:
            return np.asarray(value).astype(dtype)
        except (TypeError, ValueError):
            raise InputError(f"{self.location}: {getattr(self.mapping, part)} is {value!r:.40}, no numbers") from None

    def of_response(self, part: str) -> NDArray[Any] | None:
        """A part with one value for each response token, or for each token: [R]."""
        array = self.array(part, np.float64)
        if array is None:
            return None
        array = array.reshape(-1)
        if len(array) == self.response_len:
            return array
        if len(array) < self.prompt_len + self.response_len:
            raise InputError(
                f"{self.location}: {len(array)} values of {getattr(self.mapping, part)} for {self.response_len} tokens"
            )
        return array[self.prompt_len : self.prompt_len + self.response_len]


def _messages(value: Any, location: str) -> Any:
    """Messages of a prompt, None for what holds more than text: its token ids are there anyway."""
    try:
        return read_messages(list(value), "messages", location) if isinstance(value, list | tuple) and value else None
    except InputError:
        return None


def _json(value: Any) -> str:
    """JSON of a value that may hold arrays; what JSON does not have is written as text."""
    return json.dumps(value, sort_keys=True, default=lambda one: one.tolist() if hasattr(one, "tolist") else str(one))


def _field(name: str) -> str:
    """The field of a part's name."""
    return TAGS if name == "partition" or name.startswith("tags.") else name.partition(".")[0]
