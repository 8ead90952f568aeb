"""Does an interruption make samples shorter? Eight ways to treat one (ARMS), on a deterministic engine.

B and D must equal A token for token; C, E and G must come out short, and F long; H is another draw from A's
distribution. docs/durability.md (Length bias) says what theory predicts for C, and what was measured.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.base.files import publish_figure
from mopd_dataplane.bench.length_stats import equivalence, permutation_p, tilt
from mopd_dataplane.errors import EngineError
from mopd_dataplane.job import sections
from mopd_dataplane.records import Prompt, Sample, sample_uid
from mopd_dataplane.rollout.engines.engine import Engine, Request, StepOutput
from mopd_dataplane.rollout.engines.sampling import sample_key
from mopd_dataplane.rollout.runner import RolloutTask, run_rollout
from mopd_dataplane.testing.toy_engine import ToyEngine

ARMS = {
    "A": "uninterrupted",
    "B": "log resume",  # what this project does: the product's own run_rollout, killed and run again
    "C": "naive restart",  # from the prompt, with fresh noise
    "D": "restart, equal noise",  # from the prompt, with the sample's own noise
    "E": "drop and replace",  # a new sample of another prompt takes the slot
    "F": "resume, replayed noise",  # a stateful generator seeded again: the same noise from its beginning
    "G": "first finished",  # a batch takes whoever ends first and drops the rest
    "H": "resume, fresh noise",  # from the prefix, with noise that no token has met
}
DOSES = (0.1, 0.25, 0.5)
"""Interruptions per sample of mean length (h times the mean) at which arm C is measured."""
MAX_NEW = 2000
SLOTS = 64
_FIRST_OF = 1.25
"""Arm G admits this many times what it takes."""


@dataclass(frozen=True)
class Response:
    """An arm's accepted response to one prompt."""

    tokens: tuple[int, ...]
    bits: bytes
    """log-probs as float32 bytes"""

    def __add__(self, later: Response) -> Response:
        return Response(self.tokens + later.tokens, self.bits + later.bits)


def measure(
    samples: int = 10_000, *, dose: float = 0.25, seed: int = 0, plot: Path | None = None, resume_kills: int = 40
) -> dict[str, Any]:
    """Run every arm on `samples` prompts. dose: interruptions per sample of mean length in the interrupted arms.

    plot: where to write a PNG of the length distributions. Returns one entry per arm: mean length, difference from A
    in percent, one-sided permutation p-value, pairs identical to A, prompts lost, and for arms that lose none the
    equivalence test of their mean with A's; for C also the estimated tilt over h, and the same at each of DOSES.
    """
    bench = _Bench(samples, seed)
    whole = bench.uninterrupted()
    lengths = _lengths(whole)
    hazard = dose / lengths.mean()
    arms: dict[str, list[Response | None]] = {
        "A": list(whole),
        "B": list(bench.log_resume(resume_kills)),
        "C": list(bench.interrupted(hazard, restart=True, fresh=True)),
        "D": list(bench.interrupted(hazard, restart=True, fresh=False)),
        "E": bench.dropped(whole, hazard),
        "F": list(bench.interrupted(hazard, restart=False, fresh=False)),
        "G": bench.first_finished(whole),
    }
    doses = {}
    for each in DOSES:
        rate = each / lengths.mean()
        verdict = _verdict("C", bench.interrupted(rate, restart=True, fresh=True), whole, rate, seed)
        doses[str(each)] = {name: verdict[name] for name in ("difference_percent", "p_value", "tilt_over_hazard")}
    arms["H"] = list(bench.interrupted(hazard, restart=False, fresh=True))
    if plot is not None:
        draw_plot(arms, plot)
    return {
        "samples": samples,
        "dose": dose,
        "seed": seed,
        "mean_length": float(lengths.mean()),
        "arms": {name: _verdict(name, arm, whole, hazard, seed) for name, arm in arms.items()},
        "doses": doses,
    }


class _Bench:
    """The prompts and the ways to answer them."""

    def __init__(self, samples: int, seed: int) -> None:
        self._seed = seed
        self._samples = samples
        self._draw = np.random.Generator(np.random.Philox(key=seed, counter=1 << 64))
        self._prompts = [Prompt(prompt_id=f"p{i}", domain="toy", text=str(i)) for i in range(samples)]

    def uninterrupted(self) -> list[Response]:
        """Arm A."""
        return _decode([self._request(i, self._key(i)) for i in range(self._samples)])

    def log_resume(self, kills: int) -> list[Response]:
        """Arm B: the product's rollout with a log on disk, killed again and again in the middle of a step."""
        committed: dict[str, Sample] = {}
        with tempfile.TemporaryDirectory(prefix="length-bias-") as scratch:
            for steps in [*self._draw.integers(20, 400, kills).tolist(), -1]:
                engine = _Mortal(slots=SLOTS)
                engine.left = steps + 1
                with suppress(Killed):
                    live(
                        engine, self._prompts, committed, Path(scratch), stage="bias", seed=self._seed,
                        max_new_tokens=MAX_NEW, render=lambda prompt: _ids(prompt.text).tolist(),
                    )  # fmt: skip
        if committed.keys() != {self._uid(i) for i in range(self._samples)}:
            raise EngineError(f"{len(committed)} samples were committed for {self._samples} admitted prompts")
        ordered = [committed[self._uid(i)] for i in range(self._samples)]
        return [_response(s.tokens[s.prompt_len :], s.logprobs) for s in ordered if s.logprobs is not None]

    def interrupted(self, hazard: float, *, restart: bool, fresh: bool) -> list[Response]:
        """Arms C, D, F, H: an interruption may follow every token; the sample then starts over, or its noise does."""
        answers: dict[int, Response] = {}
        attempts = [self._request(i, self._key(i)) for i in range(self._samples)]
        prefixes = [Response((), b"")] * self._samples
        todo = list(range(self._samples))
        round_ = 0
        while todo:
            round_ += 1
            done = _decode([attempts[i] for i in todo])
            cuts = self._draw.geometric(hazard, len(todo))
            again = []
            for i, response, cut in zip(todo, done, cuts, strict=True):
                if cut >= len(response.tokens):
                    answers[i] = prefixes[i] + response
                    continue
                again.append(i)
                key = self._key(i) + round_ if fresh else self._key(i)
                if not restart:
                    prefixes[i] += Response(response.tokens[:cut], response.bits[: 4 * cut])
                attempts[i] = self._request(i, key, prefixes[i].tokens)
            todo = again
        return [answers[i] for i in range(self._samples)]

    def dropped(self, whole: Sequence[Response], hazard: float) -> list[Response | None]:
        """Arm E: an interrupted sample is lost (None) and another prompt is asked instead."""
        cuts = self._draw.geometric(hazard, len(whole))
        return [r if cut >= len(r.tokens) else None for r, cut in zip(whole, cuts, strict=True)]

    def first_finished(self, whole: Sequence[Response]) -> list[Response | None]:
        """Arm G: of every group admitted together, the first to end are taken."""
        admitted = round(_FIRST_OF * SLOTS)
        chosen: list[Response | None] = []
        for first in range(0, len(whole), admitted):
            group = whole[first : first + admitted]
            order = np.argsort([len(response.tokens) for response in group], kind="stable")
            taken = set(order[: round(len(group) / _FIRST_OF)].tolist())
            chosen += [response if i in taken else None for i, response in enumerate(group)]
        return chosen

    def _uid(self, ordinal: int) -> str:
        return sample_uid(self._seed, "bias", f"p{ordinal}", 0, 0)

    def _key(self, ordinal: int) -> int:
        return sample_key(self._uid(ordinal))

    def _request(self, ordinal: int, key: int, so_far: tuple[int, ...] = ()) -> Request:
        """Go on with the key's noise from position 0: the tokens so far move into the prompt, whose last two are all
        that the chain looks at."""
        prompt = np.concatenate([_ids(str(ordinal)), np.array(so_far, np.int32)])
        return Request(uid=str(ordinal), prompt_ids=prompt, key=key, max_new_tokens=MAX_NEW - len(so_far))


class Killed(BaseException):
    """Simulated SIGKILL; not an Exception, so that no handler catches it."""


def live(
    engine: Engine, prompts: list[Prompt], committed: dict[str, Sample], folder: Path, *, stage: str, seed: int,
    max_new_tokens: int, render: Callable[[Prompt], list[int]],
) -> None:  # fmt: skip
    """Begin a rollout, or go on with it, until it ends or its engine is interrupted, and raise what interrupted it.

    kept: what was committed by uid, to which it adds. folder: of the token log.
    """
    task = RolloutTask(
        stage=stage, iteration=0, seed=seed, rollout=sections.Rollout(max_new_tokens=max_new_tokens),
        wal=sections.Wal(), wal_dir=folder, render=render,
    )  # fmt: skip
    run_rollout(
        engine, prompts, task, commit=lambda batch: committed.update({sample.uid: sample for sample in batch}),
        skip_uids=frozenset(committed),
    )  # fmt: skip


class Interrupted:
    """Beside an engine's class: a rollout on it is interrupted after a number of steps, in one of two ways."""

    how: str | None = "killed"
    """killed, or stopped by SIGTERM; None: not at all."""
    left = 0
    """Steps until then; 0: it lives on."""

    def step(self) -> StepOutput:
        self.left -= 1
        if self.left == 0 and self.how == "killed":
            raise Killed
        if self.left == 0 and self.how == "stopped":
            signal.raise_signal(signal.SIGTERM)
        output: StepOutput = super().step()  # type: ignore[misc]  # the engine's
        return output


class _Mortal(Interrupted, ToyEngine):
    """The toy engine, which may be killed."""


def _decode(requests: Sequence[Request]) -> list[Response]:
    """Run requests to their end, all together; each response without the prefix its request came with."""
    engine = ToyEngine(slots=len(requests))
    engine.admit(list(enumerate(requests)))
    tokens: list[list[int]] = [[] for _ in requests]
    logprobs: list[list[float]] = [[] for _ in requests]
    running = len(requests)
    while running:
        output = engine.step()
        columns = (output.slots, output.token_ids, output.logprobs)
        for slot, token, logprob in zip(*(column.tolist() for column in columns), strict=True):
            tokens[slot].append(token)
            logprobs[slot].append(logprob)
        running -= int(np.count_nonzero(output.finished))
    return [_response(t, np.array(p, np.float32)) for t, p in zip(tokens, logprobs, strict=True)]


def _verdict(
    name: str, arm: Sequence[Response | None], whole: Sequence[Response], hazard: float, seed: int
) -> dict[str, Any]:
    is_kept = np.array([response is not None for response in arm])
    strata = np.array([_ids(str(i))[0] for i in range(len(whole))])
    lengths = _lengths([response for response in arm if response is not None])
    reference = _lengths(whole)
    verdict: dict[str, Any] = {
        "arm": ARMS[name],
        "accepted": len(lengths),
        "mean_length": float(lengths.mean()),
        "difference_percent": float(100 * (lengths.mean() / reference.mean() - 1)),
        "prompts_lost": int(len(is_kept) - is_kept.sum()),
        "identical": sum(ours == theirs for ours, theirs in zip(arm, whole, strict=True)),
        "p_value": permutation_p(lengths, strata[is_kept], reference, strata, seed=seed, longer=name == "F"),
    }
    if is_kept.all() and name != "A":
        verdict["equivalence"] = asdict(equivalence(lengths, reference))
    if name == "C":
        verdict["tilt_over_hazard"] = tilt(lengths, strata[is_kept], reference, strata) / hazard
    return verdict


def draw_plot(arms: dict[str, list[Response | None]], file: Path) -> None:
    """Empirical length distributions of all arms, and their means."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    means = {}
    for name, arm in arms.items():
        lengths = np.sort(_lengths([response for response in arm if response is not None]))
        means[name] = lengths.mean()
        style = {"A": "-", "B": "--"}.get(name, ":")
        left.plot(lengths, 1 - np.arange(len(lengths)) / len(lengths), style, label=f"{name} {ARMS[name]}")
    left.set(xscale="log", yscale="log", xlabel="response tokens", ylabel="share of samples at least this long")
    left.legend(fontsize=7)
    names = list(means)
    right.bar(names, [100 * (means[name] / means["A"] - 1) for name in names])
    right.axhline(0, color="black", linewidth=0.8)
    right.set(ylabel="mean length against uninterrupted, %")
    publish_figure(figure, file, dpi=150)


def _ids(text: str) -> NDArray[np.int32]:
    return np.array([int(text) * 7919 % 12, *(ord(c) % 12 for c in text)], np.int32)


def _response(tokens: Sequence[int] | NDArray[np.int32], logprobs: NDArray[np.float32]) -> Response:
    return Response(tuple(int(token) for token in tokens), logprobs.tobytes())


def _lengths(responses: Sequence[Response]) -> NDArray[np.int64]:
    return np.array([len(response.tokens) for response in responses], np.int64)
