"""Trajectories with token ids: consecutive steps become one sample if each prompt continues all tokens before it."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mopd_dataplane.errors import InputError
from mopd_dataplane.interchange.row_files import Fields, floats, integer, integers, number, objects, part, text
from mopd_dataplane.interchange.rows import Row, as_response, drawn, finish_reason, read_messages, read_prompt
from mopd_dataplane.interchange.traces import read_traces

_Turn = tuple[list[int], list[int], list[int], list[float] | None]
"""Prompt ids, the policy's token ids, their mask and their log-probs."""


def read_prime_rl(fields: Fields, location: str) -> Iterator[Row]:
    """Read the responses of an episode: of a message graph, or of a list of steps."""
    yield from read_traces(fields, location) if {"traces", "nodes"} & fields.keys() else _trajectory(fields, location)


def _trajectory(fields: Fields, location: str) -> Iterator[Row]:
    trajectory = fields.get("trajectory")
    if not isinstance(trajectory, list) or not trajectory:
        raise InputError(f"{location}: field 'trajectory' is {trajectory!r:.60}, expected a list of steps with tokens")
    reward = number(fields, "reward", location)
    answer = fields.get("answer")
    common: dict[str, Any] = {
        "location": location,
        "prompt": read_prompt(fields, "prompt", location, optional=True),
        "answer": text(fields, "answer", location, default="") if isinstance(answer, str) else "",
        "domain": text(fields, "env_name", location, default="") or text(fields, "task", location, default=""),
        "iteration": integer(fields, "step", location),
    }
    rewards = {} if reward is None else {("prime-rl", ""): reward}
    yield from _responses(_steps(trajectory, location), lambda: Row(**common, rewards=dict(rewards)))


def _steps(trajectory: list[Any], location: str) -> Iterator[_Turn]:
    for turn, step in enumerate(trajectory):
        tokens = step.get("tokens") if isinstance(step, dict) else None
        if not isinstance(tokens, dict):
            raise InputError(
                f"{location}: trajectory[{turn}] has no tokens; save rollouts with their trajectory tokens"
            )
        name = f"trajectory[{turn}].tokens"
        prompt = integers(tokens.get("prompt_ids"), f"{name}.prompt_ids", location)
        completion_ids = integers(tokens.get("completion_ids"), f"{name}.completion_ids", location)
        mask = integers(tokens.get("completion_mask") or [1] * len(completion_ids), f"{name}.completion_mask", location)
        raw_logprobs = tokens.get("completion_logprobs")
        logprobs = None if raw_logprobs is None else floats(raw_logprobs, f"{name}.completion_logprobs", location)
        if len(mask) != len(completion_ids) or (logprobs is not None and len(logprobs) != len(completion_ids)):
            counts = f"{len(completion_ids)} completion_ids, {len(mask)} values of completion_mask"
            if logprobs is not None:
                counts += f" and {len(logprobs)} completion_logprobs"
            raise InputError(f"{location}: {name} has {counts}; expected one value of each for every id")
        yield prompt, completion_ids, mask, logprobs


def read_tinker(fields: Fields, location: str) -> Iterator[Row]:
    """Read the responses of a sampling call, of an evaluated conversation or of a trajectory."""
    if "kind" in fields:
        return _capture(fields, location)
    return _evaluated(fields, location) if "turns" in fields else _transitions(fields, location)


def _capture(fields: Fields, location: str) -> Iterator[Row]:
    """Read each sampled sequence of one call; calls that failed, and training calls, have none."""
    kind = text(fields, "kind", location)
    if kind != "sample" or fields.get("status") not in (None, "ok"):
        return
    scope, sampling = part(fields, "scope", location), part(fields, "sampling_params", location)
    if fields.get("prompt_tokens") is None:
        raise InputError(f"{location}: the call has no prompt_tokens; prompts with images cannot be imported")
    token_fields = drawn(sampling, location)
    for sequence in objects(fields, "samples", location):
        token_ids = integers(sequence.get("tokens"), "samples.tokens", location)
        logprobs = sequence.get("logprobs")
        yield Row(
            location=location,
            prompt_ids=integers(fields["prompt_tokens"], "prompt_tokens", location),
            response_ids=token_ids,
            logprobs=None if logprobs is None else floats(logprobs, "samples.logprobs", location),
            iteration=integer(scope, "iteration", location),
            sample={**token_fields, **finish_reason(sequence.get("stop_reason"))},
        )


_ROLES = {"environment": "user", "user": "user", "assistant": "assistant", "system": "system"}


def _evaluated(fields: Fields, location: str) -> Iterator[Row]:
    turns = [turn for turn in objects(fields, "turns", location) if turn.get("role") != "grader"]
    messages = read_messages([{**turn, "role": _ROLES.get(str(turn.get("role")))} for turn in turns], "turns", location)
    first = next((number_ for number_, message in enumerate(messages) if message["role"] == "assistant"), 0)
    if not first:
        raise InputError(f"{location}: field 'turns' has no turn of the assistant after a prompt")
    reward = number(fields, "reward", location)
    yield Row(
        location=location,
        prompt=messages[:first],
        response=as_response(messages[first:], "turns", location),
        domain=text(fields, "benchmark", location, default=""),
        turns=sum(message["role"] == "assistant" for message in messages),
        rewards={} if reward is None else {("tinker", ""): reward},
    )


def _transitions(fields: Fields, location: str) -> Iterator[Row]:
    transitions = fields.get("transitions")
    if not isinstance(transitions, list) or not transitions:
        raise InputError(f"{location}: field 'transitions' is {transitions!r:.60}, expected a list of transitions")
    rewards = [number(step, "reward", location) or 0.0 for step in transitions if isinstance(step, dict)]
    total = sum(rewards) + (number(fields, "final_reward", location) or 0.0)
    iteration = integer(fields, "sampling_client_step", location)
    turns = _actions(transitions, location)
    yield from _responses(turns, lambda: Row(location=location, iteration=iteration, rewards={("tinker", ""): total}))


def _actions(transitions: list[Any], location: str) -> Iterator[_Turn]:
    for turn, step in enumerate(transitions):
        action = step.get("ac") if isinstance(step, dict) else None
        if not isinstance(action, dict):
            raise InputError(f"{location}: transitions[{turn}] has no 'ac' with tokens")
        seen = _observation(step.get("ob"), f"transitions[{turn}].ob", location)
        action_ids = integers(action.get("tokens"), f"transitions[{turn}].ac.tokens", location)
        raw_logprobs = action.get("maybe_logprobs")
        logprobs = (
            None if raw_logprobs is None else floats(raw_logprobs, f"transitions[{turn}].ac.maybe_logprobs", location)
        )
        if logprobs is not None and len(logprobs) != len(action_ids):
            raise InputError(
                f"{location}: transitions[{turn}].ac has {len(action_ids)} tokens and {len(logprobs)} log-probs"
            )
        yield seen, action_ids, [1] * len(action_ids), logprobs


def _observation(value: Any, name: str, location: str) -> list[int]:
    """Return the token ids of an observation: a list, or a ModelInput of text chunks."""
    if isinstance(value, dict) and isinstance(value.get("chunks"), list):
        parts = [chunk.get("tokens") if isinstance(chunk, dict) else None for chunk in value["chunks"]]
        return [token for part in parts for token in integers(part, f"{name}.chunks", location)]
    return integers(value, name, location)


def _responses(turns: Iterable[_Turn], begin: Callable[[], Row]) -> Iterator[Row]:
    """Join turns into responses: a turn continues a response if its prompt continues all the tokens so far.

    The environment's tokens since the last turn are appended with mask 0, then the policy's tokens. begin: returns a
    row without tokens.
    """
    row: Row | None = None
    before: list[int] = []
    for prompt, response_ids, mask, logprobs in turns:
        if row is None or prompt[: len(before)] != before:
            if row is not None:
                yield row
            row, before = begin(), prompt
            row.prompt_ids, row.response_ids, row.loss_mask, row.turns = prompt, [], [], 0
            row.logprobs = []  # None from the first turn without log-probs on
        heard = prompt[len(before) :]
        row.response_ids = [*(row.response_ids or []), *heard, *response_ids]
        row.loss_mask = [*(row.loss_mask or []), *([0] * len(heard)), *mask]
        if row.logprobs is not None:
            row.logprobs = None if logprobs is None else [*row.logprobs, *([0.0] * len(heard)), *logprobs]
        row.turns += 1
        before = [*prompt, *response_ids]
    if row is not None:
        yield row
