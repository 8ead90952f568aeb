"""Next steps that messages of sampling name. Where it is to run again, it does, and the samples are those of a run that
nothing went wrong in."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from advice import advises
from decoding import TINY, Shelf, decode, make_requests

from mopd_dataplane.base.sampling_masks import SamplingMasks
from mopd_dataplane.job import sections
from mopd_dataplane.models.hf import load_tokenizer
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.records import Prompt, Sample
from mopd_dataplane.rollout.engines import call_timeout
from mopd_dataplane.rollout.engines.engine import Request, Routes, StepOutput, check_routes
from mopd_dataplane.rollout.engines.hf import HfEngine
from mopd_dataplane.rollout.engines.streaming import Streams
from mopd_dataplane.rollout.log import log_records, ownership, wal
from mopd_dataplane.rollout.runner import RolloutTask, run_rollout
from mopd_dataplane.rollout.tools.sandbox import SubprocessSandbox, Turn
from mopd_dataplane.testing.toy_engine import ToyEngine

Change = Callable[[StepOutput], StepOutput]
EOS = 2
HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "r+")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(600)
"""


class Sick(ToyEngine):
    """A toy engine whose third step is changed."""

    def __init__(self, change: Change) -> None:
        super().__init__(slots=4)
        self._change, self._steps = change, 0

    def step(self) -> StepOutput:
        self._steps += 1
        output = super().step()
        return self._change(output) if self._steps == 3 else output


class Dying(BaseException):
    """Stands for SIGKILL inside one process."""


def die(output: StepOutput) -> StepOutput:
    raise Dying


def roll(home: Path, engine: Any = None, shelf: Shelf | None = None, **changes: Any) -> dict[str, Sample]:
    """Sample eight prompts, or go on where an earlier call stopped; what is in the store then."""
    shelf = shelf or Shelf()
    render = changes.pop("render", lambda prompt: [ord(letter) % 12 for letter in prompt.text])
    options = {name: changes.pop(name) for name in ("policies", "environment", "sandbox") if name in changes}
    prompts = changes.pop("prompts", [Prompt(prompt_id=f"p{i}", domain="toy", text=f"{i}+{i}") for i in range(8)])
    rollout = sections.Rollout(**({"max_new_tokens": 30} | changes))
    task = RolloutTask(
        stage="student", iteration=1, seed=7, rollout=rollout, wal=sections.Wal(full_disk_wait_s=0), wal_dir=home,
        render=render,
    )  # fmt: skip
    skip_uids = set(shelf.samples)
    run_rollout(engine or ToyEngine(slots=4), prompts, task, commit=shelf.commit, skip_uids=skip_uids, **options)
    return shelf.samples


def content(samples: dict[str, Sample]) -> dict[str, tuple[list[int], list[float]]]:
    return {
        uid: (sample.tokens.tolist(), [] if sample.logprobs is None else sample.logprobs.tolist())
        for uid, sample in samples.items()
    }


def columns(output: StepOutput) -> list[Any]:
    return [output.slots, output.positions, output.token_ids, output.logprobs, output.finished]


def no_number(output: StepOutput) -> StepOutput:
    output.logprobs[-1] = np.nan
    return output


def a_list(output: StepOutput) -> StepOutput:
    slots, positions, tokens, logprobs, finished = columns(output)
    return StepOutput(slots, positions, tokens, logprobs.tolist(), finished)


def a_row_too_few(output: StepOutput) -> StepOutput:
    return StepOutput(*(column[1:] for column in columns(output)))


def test_an_engine_that_was_mended_goes_on(tmp_path: Path) -> None:
    sound = content(roll(tmp_path / "sound"))
    shelf = Shelf()
    with advises("mend the engine (mopd_dataplane.testing.check_engine), then run again to continue"):
        roll(tmp_path / "wal", Sick(a_list), shelf)
    with advises("finite log-prob <= 0); "):
        roll(tmp_path / "wal", Sick(no_number), shelf)
    with advises(" samples; slot "):
        roll(tmp_path / "wal", Sick(a_row_too_few), shelf)
    assert content(roll(tmp_path / "wal", shelf=shelf)) == sound


def test_sampling_masks_that_an_engine_does_not_give(tmp_path: Path) -> None:
    record: dict[str, Any] = {"top_k": 6, "record": ("sampling_mask",)}

    def without(output: StepOutput) -> StepOutput:
        return StepOutput(*columns(output))

    def others(output: StepOutput) -> StepOutput:
        assert output.masks is not None
        return StepOutput(*columns(output), SamplingMasks(output.masks.sizes, output.masks.ids + 50))

    sound = content(roll(tmp_path / "sound", **record))
    for name in ("engine", "record"):
        with advises('set engine.kind = "hf", or take "sampling_mask" out of rollout.record'):
            roll(tmp_path / name, Sick(without), **record)
    with advises("which its sampling mask does not hold; nothing of this step was written; run again to continue with"):
        roll(tmp_path / "engine", Sick(others), **record)
    assert content(roll(tmp_path / "engine", **record)) == sound
    assert content(roll(tmp_path / "record", top_k=6)).keys() == sound.keys()


def test_expert_ids_of_a_mended_engine_are_taken() -> None:
    def check(ids: Any) -> Routes:
        step = [np.zeros(1, np.int32) for _ in range(5)]
        output = StepOutput(*step, routes=Routes(np.array([2], np.int32), ids))
        return check_routes(output, np.array([True]), np.array([2]))

    with advises("mend the engine, then run again to continue"):
        check(np.full((2, 4), 1 << 20))
    assert check(np.ones((2, 4), np.int16)).ids.shape == (2, 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_student(sections.Student(config=TINY), tmp_path_factory.mktemp("models") / "tiny", seed=3)


def test_weights_that_compute_nothing_are_replaced(model: Path) -> None:
    requests = make_requests(3, max_new_tokens=8)
    sound = decode(HfEngine(model, slots=2), requests)
    engine = HfEngine(model, slots=2)
    for weight in engine._decoders[0].model.parameters():
        weight.data.fill_(float("nan"))
    with advises(" gives non-finite logits for sample "):
        decode(engine, requests)
    assert decode(HfEngine(model, slots=2), requests) == sound


def test_a_model_whose_code_fails_in_the_sampler(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = HfEngine(model, slots=2)

    def fail(*positional: Any, **options: Any) -> Any:
        raise AttributeError("this cache has no such layer")

    with monkeypatch.context() as broken:
        broken.setattr(type(engine._decoders[0].model.model), "forward", fail)
        with advises(") cannot be decoded by the built-in "):
            decode(engine, make_requests(1, max_new_tokens=2))
    assert decode(HfEngine(model, slots=2), make_requests(1, max_new_tokens=2))


def request(*prefix: int) -> Request:
    ids = np.array(prefix, np.int32)
    return Request(uid="a", prompt_ids=np.array([5, 6], np.int32), prefix_ids=ids, key=7, max_new_tokens=10)


@pytest.fixture
def opened(model: Path) -> Callable[..., tuple[Streams, Any]]:
    """opened(20, 21, again=2): new streams, and one that begins with these tokens and has two of them repeated."""
    tokenizer = load_tokenizer(model)

    def make(*prefix: int, again: int = 0) -> tuple[Streams, Any]:
        streams = Streams(3, tokenizer, [EOS])
        return streams, streams.open(1, request(*prefix), again=again)

    return make


def test_streams_of_a_server_that_was_mended_go_on(
    opened: Callable[..., tuple[Streams, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was logged is the prefix of the next request, which a new engine repeats."""
    streams, stream = opened(20, 21, again=2)
    with advises("not run this package's sampler; see docs/engines.md, then run again to continue"):
        streams.arrive(stream.name, [9], [-1.0])
    with advises("its prefix; run again to continue with a new engine"):
        streams.end(stream.name)
    streams, stream = opened()
    with advises("sign for an impossible token; nothing of it was written: look at the engine's logits "):
        streams.arrive(stream.name, [9], [-9999.0])
    streams.end(stream.name)
    with advises(", and not with an end-of-sequence token; run again to continue"):
        _ = streams.ready
    streams, stream = opened()
    with monkeypatch.context() as impatient:
        impatient.setattr(call_timeout, "DEADLINE_S", -1.0)
        with advises("the engine has said nothing about slot "):
            _ = streams.ready
    for _ in range(5):
        stream = streams.begin_again(stream.name, again=0)
    with advises(" times; every logged token is "):
        for _ in range(5):
            stream = streams.begin_again(stream.name, again=0)
    streams, stream = opened(20, 21, again=2)
    streams.arrive(stream.name, [20, 21, 30], [-1.0, -1.0, -1.0])
    output, _ = streams.step()
    assert (output.positions.tolist(), output.token_ids.tolist()) == ([2], [30])


def test_logs_that_another_process_writes(tmp_path: Path) -> None:
    sound = content(roll(tmp_path / "sound"))
    shelf = Shelf()
    with contextlib.suppress(Dying):
        roll(tmp_path / "wal", Sick(die), shelf)
    [folder] = {path.parent for path in (tmp_path / "wal").rglob(ownership.LOCK)}
    with holding(folder / ownership.LOCK), advises("; wait for it to end, or stop it, then run again"):
        roll(tmp_path / "wal", shelf=shelf)
    assert content(roll(tmp_path / "wal", shelf=shelf)) == sound


@contextlib.contextmanager
def holding(lock: Path) -> Iterator[None]:
    """Another process has the lock until the block ends."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_log_whose_disk_failed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = content(roll(tmp_path / "sound"))
    shelf = Shelf()
    with contextlib.suppress(Dying):
        roll(tmp_path / "wal", Sick(die), shelf)

    def fail(*positional: Any, **options: Any) -> Any:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(wal, "recover", fail)
        with advises("; every logged token is kept, run again to continue"):
            roll(tmp_path / "wal", shelf=shelf)
    assert content(roll(tmp_path / "wal", shelf=shelf)) == sound


def test_rows_of_a_log_have_one_length() -> None:
    with advises("and one length are needed; mend the engine or the environment, then run again to continue"):
        log_records._packed_rows(["<i4", "<f4"], np.zeros(2, np.int32), np.zeros(3, np.float32))
    assert log_records._packed_rows(["<i4", "<f4"], np.zeros(3, np.int32), np.zeros(3, np.float32))


def test_samples_of_other_weights(tmp_path: Path) -> None:
    def interrupted(home: str) -> Shelf:
        shelf = Shelf()
        with contextlib.suppress(Dying):
            roll(tmp_path / home, Sick(die), shelf)
        return shelf

    class Retrained(ToyEngine):
        """The versions have other weights than they had."""

        def load_policy(self, folder: Path, version: int) -> None:
            super().load_policy(folder, version + 50)
            self.policy_version = version

    def newer(kind: type[ToyEngine]) -> ToyEngine:
        engine = kind(slots=4)
        engine.load_policy(Path(), 3)
        return engine

    sound = content(roll(tmp_path / "sound"))
    for home, settings in (("back", {}), ("span", {"weight_change": "span"})):
        shelf = interrupted(home)
        with advises("; bring those weights back, or set "):
            roll(tmp_path / home, newer(Retrained), shelf, policies=lambda version: tmp_path)
        engine = newer(ToyEngine)
        samples = roll(tmp_path / home, engine, shelf, policies=lambda version: tmp_path, **settings)
        assert samples.keys() == sound.keys()


def test_budgets_of_prompts(tmp_path: Path) -> None:
    text = [Prompt(prompt_id="p", domain="toy", text="12345")]
    with advises(" has no tokens; give it text, or a prompt template that adds some"):
        roll(tmp_path / "wal", prompts=[Prompt(prompt_id="p", domain="toy", text="")])
    assert roll(tmp_path / "text", prompts=text)
    assert roll(tmp_path / "template", prompts=text, render=lambda prompt: [1])
    with advises("shorten it or raise rollout.max_prompt_tokens"):
        roll(tmp_path / "wal", prompts=text, max_prompt_tokens=3)
    assert roll(tmp_path / "raised", prompts=text, max_prompt_tokens=5)
    small = ToyEngine(slots=4)
    small.context_length = 20
    with advises("; shorten it or lower rollout.max_new_tokens"):
        roll(tmp_path / "wal", small, prompts=text, max_new_tokens=16)
    assert roll(tmp_path / "lowered", small, prompts=text, max_new_tokens=15)


def test_a_sandbox_for_commands(tmp_path: Path) -> None:
    def environment(turn: Turn) -> None:
        turn.run(["true"])

    with advises("this rollout has no sandbox; give run_rollout(sandbox=SubprocessSandbox(folder))"):
        roll(tmp_path / "wal", environment=environment)
    assert len(roll(tmp_path / "wal", environment=environment, sandbox=SubprocessSandbox(tmp_path / "box"))) == 8
