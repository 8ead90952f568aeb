"""Contract of an engine (rollout/engines/engine.py) with the runner, checked on an open one."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mopd_dataplane.rollout.engines.engine import LENGTH, RESCORED, STOP, Engine, Request, check_step
from mopd_dataplane.rollout.engines.sampling import OWN_NOISE, SAMPLERS, sample_key

Answer = tuple[list[int], list[float], int]
"""Tokens, log-probs, and how it ended."""
TOLERANCE = 1e-3
"""Largest difference between two computations of one log-prob: batches of another size round differently."""


def check_engine(engine: Engine, *, budget: int = 12, stochastic: bool = False) -> None:
    """Decode on an engine whose slots are free, and raise AssertionError for what breaks its protocol.

    budget: tokens of each response. stochastic: the engine draws with noise of its own, so that repeats differ; then
    `samplers` must be empty, and only position and budget of a resumed sample are checked.
    """
    for name, kind in (("slots", int), ("vocab_size", int), ("context_length", int), ("policy_version", int)):
        assert isinstance(getattr(engine, name), kind), f"{name} is {getattr(engine, name)!r}, expected {kind.__name__}"
    for name in ("policy_digest", "tokenizer_digest"):
        assert getattr(engine, name), f"{name} is empty: nobody could tell two apart"
    assert engine.slots >= 1
    strange = set(engine.samplers) - set(SAMPLERS)
    assert not strange, f"samplers {sorted(strange)} are unknown; known: {', '.join(SAMPLERS)}"
    assert stochastic == (not engine.samplers), f"samplers are {engine.samplers}, stochastic is {stochastic}"
    requests = _requests(engine, 2 * engine.slots + 1, budget)
    answers = _decode(engine, requests)
    for request in requests:
        tokens, _, ended = answers[request.uid]
        assert 1 <= len(tokens) <= budget, f"{len(tokens)} tokens, budget {budget}"
        assert (ended == LENGTH) == (len(tokens) == budget and ended != STOP), f"ended as {ended} at {len(tokens)}"
    if not stochastic:
        _check_noise(engine, requests, answers)
    _check_resume(engine, requests, answers, stochastic=stochastic)
    engine.admit([(0, requests[0])])
    engine.step()
    engine.release(0)
    engine.release(0)
    again = _decode(engine, requests[:1])
    assert stochastic or _same(again, answers, requests[:1]), "a released slot left something behind"


def _requests(engine: Engine, count: int, budget: int) -> list[Request]:
    draw = np.random.default_rng(11)
    sampler = engine.samplers[0] if engine.samplers else OWN_NOISE
    return [
        Request(
            uid=f"contract-{index}", prompt_ids=draw.integers(0, engine.vocab_size, 1 + index % 5).astype(np.int32),
            key=sample_key(f"contract-{index}"), max_new_tokens=budget, sampler=sampler,
        )
        for index in range(count)
    ]  # fmt: skip


def _check_noise(engine: Engine, requests: Sequence[Request], answers: dict[str, Answer]) -> None:
    """A token is a function of its request alone: neither of the slot nor of its neighbours."""
    for request in (requests[0], requests[-1]):
        alone = _decode(engine, [request])
        assert _same(alone, answers, [request]), f"{request.uid} alone differs from {request.uid} among others"
    other = replace(requests[0], uid="contract-other", key=sample_key("contract-other"), max_new_tokens=64)
    one = replace(other, key=sample_key("contract-third"))
    drawn = [_decode(engine, [each])["contract-other"][0] for each in (other, one)]
    assert drawn[0] != drawn[1], "another key drew the same tokens: the noise is not keyed"


def _check_resume(engine: Engine, requests: Sequence[Request], answers: dict[str, Answer], *, stochastic: bool) -> None:
    """A prefix continues behind its last token, as if it had never stopped where the noise is keyed."""
    request = max(requests, key=lambda each: len(answers[each.uid][0]))
    tokens, logprobs, _ = answers[request.uid]
    for cut in sorted({1, len(tokens) // 2, len(tokens) - 1} - {0, len(tokens)}):
        prefix = replace(request, prefix_ids=np.array(tokens[:cut], np.int32))
        rescored = engine.admit([(0, prefix)])
        engine.release(0)
        if engine.samplers:
            assert 0 in rescored, "an engine with samplers scores a resumed prefix again (admit)"
            expected = logprobs[:cut][-RESCORED:]
            assert len(rescored[0]) == len(expected), (
                f"{len(rescored[0])} prefix tokens scored, expected {len(expected)}"
            )
            gap = np.abs(rescored[0] - np.array(expected, np.float32)).max()
            assert gap <= TOLERANCE, f"a resumed prefix has log-probs {gap:g} away from those it was sampled with"
        went_on = _decode(engine, [prefix])[request.uid]
        if stochastic:
            assert cut < len(went_on[0]) <= request.max_new_tokens
        else:
            assert went_on[0] == tokens, f"after {cut} tokens it went on as {went_on[0]}, never stopped as {tokens}"


def _decode(engine: Engine, requests: Sequence[Request]) -> dict[str, Answer]:
    """Run requests to their end, refilling each slot as it gets free; answers by uid, prefixes included."""
    waiting, free = list(requests), list(range(engine.slots))
    running: dict[int, Request] = {}
    answers: dict[str, Answer] = {
        request.uid: (request.prefix_ids.tolist(), [0.0] * len(request.prefix_ids), 0) for request in requests
    }
    while waiting or running:
        admitted = [(free.pop(), waiting.pop(0)) for _ in range(min(len(free), len(waiting)))]
        running.update(admitted)
        if admitted:
            engine.admit(admitted)
        output = engine.step()
        check_step(output, engine.vocab_size)
        if engine.lockstep:
            assert sorted(output.slots.tolist()) == sorted(running), "lockstep answers for every live slot"
        columns = (output.slots, output.positions, output.token_ids, output.logprobs, output.finished)
        for slot, position, token, logprob, finished in zip(*(each.tolist() for each in columns), strict=True):
            assert slot in running, f"slot {slot} answers and is not live"
            tokens, logprobs, _ = answers[running[slot].uid]
            assert position == len(tokens), f"slot {slot} answers for position {position}, expected {len(tokens)}"
            tokens.append(token)
            logprobs.append(logprob)
            if finished:
                answers[running[slot].uid] = (tokens, logprobs, finished)
                del running[slot]
                free.append(slot)
    return answers


def _same(answers: dict[str, Answer], expected: dict[str, Answer], requests: Sequence[Request]) -> bool:
    """Whether requests have the same tokens and endings, and log-probs within TOLERANCE."""
    pairs = [(answers[request.uid], expected[request.uid]) for request in requests]
    return all((a[0], a[2]) == (b[0], b[2]) and np.allclose(a[1], b[1], rtol=0, atol=TOLERANCE) for a, b in pairs)
