"""run_rollout on the toy engine: the same samples whatever interrupts it, and clear refusals."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from decoding import content

from mopd_dataplane.base import fault_points
from mopd_dataplane.base.log.framing import read_segment
from mopd_dataplane.errors import EngineError, MismatchError, PromptError, ResourceError
from mopd_dataplane.job import sections
from mopd_dataplane.records import Prompt, Sample, sample_uid
from mopd_dataplane.rollout.engines.engine import StepOutput
from mopd_dataplane.rollout.log import log_records, recovery
from mopd_dataplane.rollout.runner import RolloutReport
from mopd_dataplane.rollout.tools.sandbox import Turn
from mopd_dataplane.testing.toy_engine import EOS, ToyEngine

Roll = Callable[..., RolloutReport]


class Died(BaseException):
    """Stands for SIGKILL inside one process."""


class Mortal(ToyEngine):
    """A toy engine that dies at its n-th step."""

    def __init__(self, *, dies_at: int, **options: Any) -> None:
        super().__init__(**options)
        self._left = dies_at

    def step(self) -> StepOutput:
        self._left -= 1
        if self._left < 0:
            raise Died
        return super().step()


def test_every_sample_is_there_once_with_its_identity(roll: Roll, shelf: Any, tmp_path: Path) -> None:
    report = roll(shelf, rollout=sections.Rollout(max_new_tokens=40, group_size=3, temperature=0.9, top_k=5))
    assert (report.samples, report.resumed, shelf.offered) == (60, 0, 60)
    assert sum(report.finish_reasons.values()) == 60
    sample = shelf.samples[sample_uid(7, "student", "p4", 2, 1)]
    assert (sample.group_id, sample.group_index, sample.writer_seq) == ("p4#1", 2, 14)
    assert (sample.temperature, sample.top_k, sample.policy, sample.tokenizer) == (0.9, 5, "student", "toy")
    assert sample.tokens[: sample.prompt_len].tolist() == [ord(c) % 12 for c in "4+4"]
    assert sample.loss_tokens == sample.response_len <= 40
    assert sample.versions.tolist() == [0]
    for sample in shelf.samples.values():
        assert (sample.tokens[-1] == EOS) == (sample.finish_reason == "stop")
        assert (sample.response_len == 40) or sample.finish_reason == "stop"
    assert not list((tmp_path / "wal").rglob("*.wal")), "a finished rollout leaves no log behind"


def test_slots_do_not_matter(roll: Roll, shelf: Any, reference: dict[str, Sample]) -> None:
    roll(shelf, slots=1)
    assert content(shelf.samples) == content(reference)


@pytest.mark.parametrize("at", [0, 1, 2, 5, 17, 40])
def test_dying_at_a_step_changes_no_sample(roll: Roll, shelf: Any, reference: dict[str, Sample], at: int) -> None:
    with pytest.raises(Died):
        roll(shelf, engine=Mortal(dies_at=at, slots=8))
    report = roll(shelf)
    assert content(shelf.samples) == content(reference)
    assert report.exact == report.resumed
    assert report.resumed > 0 or at == 0
    assert report.max_drift == 0


def test_dying_again_and_again_changes_no_sample(roll: Roll, shelf: Any, reference: dict[str, Sample]) -> None:
    for slots in (3, 8, 5, 8, 2):
        with pytest.raises(Died):
            roll(shelf, engine=Mortal(dies_at=9, slots=slots))
    roll(shelf)
    assert content(shelf.samples) == content(reference)
    assert max(sample.interruptions for sample in shelf.samples.values()) > 1
    assert {s.resume for s in shelf.samples.values() if s.interruptions} == {"exact"}
    assert {s.resume for s in shelf.samples.values() if not s.interruptions} == {"none"}


POINTS = (
    "wal.epoch.claimed", "wal.epoch", "wal.segment.header", "wal.segment.renamed", "wal.segment.named", "wal.base",
    "wal.base.synced", "wal.retire", "wal.append", "wal.appended", "wal.sync", "wal.synced", "rollout.step",
    "rollout.finish", "rollout.commit", "rollout.committed", "wal.closed",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("point", POINTS)
def test_dying_at_a_named_point_changes_no_sample(
    roll: Roll, shelf: Any, reference: dict[str, Sample], point: str
) -> None:
    """The n-th visit of each point, with small segments so that rotation happens."""
    visits = 0
    for nth in (1, 4):
        left = nth

        def die(name: str) -> None:
            nonlocal left, visits
            if name == point:
                visits += 1
                left -= 1
                if left == 0:
                    raise Died

        fault_points.observe(die)
        try:
            roll(shelf, wal=sections.Wal(segment_bytes=4096, full_disk_wait_s=0))
        except (Died, ResourceError):
            pass
        finally:
            fault_points.observe(None)
    roll(shelf)
    assert visits
    assert content(shelf.samples) == content(reference)


def test_stopping_politely_keeps_the_log_and_says_how_to_go_on(
    roll: Roll, shelf: Any, reference: dict[str, Sample]
) -> None:
    def interrupt(done: int, **facts: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(
        KeyboardInterrupt, match=r"\d+ unfinished ones are kept in the log \(\w+\); run the same command"
    ):
        roll(shelf, progress=interrupt)
    assert signal.getsignal(signal.SIGINT) is handler
    report = roll(shelf)
    assert report.resumed
    assert content(shelf.samples) == content(reference)


class Shot(ToyEngine):
    """An engine whose own process the signal kills too; it answers nothing from then on."""

    left = 9

    def step(self) -> StepOutput:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)
        if self.left <= 0:
            raise EngineError("vLLM failed")
        return super().step()

    def release(self, slot: int) -> None:
        if self.left <= 0:
            raise EngineError("vLLM failed")
        super().release(slot)


def test_an_engine_that_dies_of_the_same_signal_is_a_polite_stop_too(
    roll: Roll, shelf: Any, reference: dict[str, Sample]
) -> None:
    with pytest.raises(KeyboardInterrupt, match="unfinished ones are kept in the log"):
        roll(shelf, engine=Shot(slots=8))
    report = roll(shelf)
    assert report.resumed
    assert content(shelf.samples) == content(reference)


def test_what_the_store_has_is_not_sampled_again(roll: Roll, shelf: Any, reference: dict[str, Sample]) -> None:
    shelf.samples.update(dict(list(reference.items())[:13]))
    report = roll(shelf)
    assert report.samples == shelf.offered == 7
    assert content(shelf.samples) == content(reference)


def test_a_commit_that_got_through_is_not_repeated_after_a_crash(roll: Roll, shelf: Any) -> None:
    """Died between the store's commit and the COMMIT record: the store is asked, nothing is resumed twice."""

    def commit_then_die(samples: list[Sample]) -> None:
        shelf.commit(samples)
        raise Died

    with pytest.raises(Died):
        roll(shelf, commit=commit_then_die)
    offered = shelf.offered
    report = roll(shelf)
    assert shelf.offered == offered + report.samples == 20


def test_commits_come_in_admission_order_within_a_batch(roll: Roll) -> None:
    batches: list[list[int]] = []
    shelf = type("Shelf", (), {"samples": {}, "commit": lambda self, s: batches.append([x.writer_seq for x in s])})()
    roll(shelf, count=200, slots=32)
    assert sorted(seq for batch in batches for seq in batch) == list(range(200))
    assert all(batch == sorted(batch) and len(batch) <= 64 for batch in batches)


def test_nothing_is_committed_before_its_finish_is_durable(
    roll: Roll, shelf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mopd_dataplane.rollout.log import wal

    logs: list[wal.TokenLog] = []
    opened = wal.TokenLog.open.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        wal.TokenLog, "open", classmethod(lambda *a, **k: (logs.append((pair := opened(*a, **k))[0]), pair)[1])
    )
    durable: dict[str, bool] = {}

    def commit(samples: list[Sample]) -> None:
        synced = logs[0].synced_lsn
        (segment,) = logs[0].folder.glob("*/*.wal")
        finishes = {}
        for record in read_segment(segment).records:
            if record.kind == log_records.Finish.kind:
                finishes[log_records.Finish.decode(record.body).handle] = record.lsn
        for sample in samples:
            durable[sample.uid] = finishes[sample.writer_seq] <= synced

    roll(shelf, slots=32, commit=commit, wal=sections.Wal(group_commit_ms=10_000))
    assert len(durable) == 20
    assert all(durable.values())


def test_a_full_store_disk_pauses_and_goes_on(roll: Roll, shelf: Any) -> None:
    failures = iter(
        [OSError(28, "No space left on device"), OSError("lance error: No space left on device (os error 28)")]
    )
    said: list[str] = []

    def commit(samples: list[Sample]) -> None:
        for error in failures:
            raise error
        shelf.commit(samples)

    wal = sections.Wal(full_disk_wait_s=30)
    roll(shelf, commit=commit, wal=wal, progress=lambda done, **facts: said.extend(facts.get("notice", "").split(":")))
    assert len(shelf.samples) == 20
    assert said.count("the store's disk is full") == said.count("the store's disk has space again") == 1


def test_a_store_disk_that_stays_full_is_an_error_and_keeps_everything(
    roll: Roll, shelf: Any, reference: dict[str, Sample]
) -> None:
    def commit(samples: list[Sample]) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ResourceError, match="every finished sample is in the token log"):
        roll(shelf, commit=commit)
    roll(shelf)
    assert content(shelf.samples) == content(reference)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"prompts": []}, "no prompts to roll out"),
        ({"prompts": [Prompt(prompt_id="p0", domain="toy", text="0")] * 2}, "a prompt comes twice"),
        (
            {"rollout": sections.Rollout(max_prompt_tokens=3)},
            r"prompt 'p10' of domain .* 5 tokens, the budget is 3",
        ),
        ({"rollout": sections.Rollout(max_new_tokens=1 << 20)}, "the model holds 1048576"),
        ({"render": lambda prompt: []}, "prompt 'p0' of domain 'toy' has no tokens"),
    ],
)
def test_prompts_that_cannot_be_used_are_refused_before_anything_is_written(
    roll: Roll, shelf: Any, tmp_path: Path, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(PromptError, match=message):
        roll(shelf, **overrides)
    assert not (tmp_path / "wal").exists()


def test_a_log_of_another_tokenizer_is_refused(roll: Roll, shelf: Any) -> None:
    with pytest.raises(Died):
        roll(shelf, engine=Mortal(dies_at=5, slots=8))
    other = ToyEngine(slots=8)
    other.tokenizer_digest = "other"
    with pytest.raises(MismatchError, match="of tokenizer toy, the engine has other"):
        roll(shelf, engine=other)


def test_pinned_samples_finish_on_the_policy_they_began_with(
    roll: Roll, shelf: Any, reference: dict[str, Sample], tmp_path: Path
) -> None:
    with pytest.raises(Died):
        roll(shelf, engine=Mortal(dies_at=12, slots=8))
    newer = ToyEngine(slots=8)
    newer.load_policy(Path(), 3)
    report = roll(shelf, engine=newer, policies=lambda version: tmp_path)
    pinned = {uid: s for uid, s in shelf.samples.items() if s.versions.tolist() == [0]}
    assert report.resumed
    assert content(pinned) == {uid: content(reference)[uid] for uid in pinned}
    assert {tuple(s.versions.tolist()) for s in shelf.samples.values()} == {(0,), (3,)}
    assert newer.policy_version == 3


def test_a_pinned_policy_that_is_gone_is_named(roll: Roll, shelf: Any, tmp_path: Path) -> None:
    with pytest.raises(Died):
        roll(shelf, engine=Mortal(dies_at=12, slots=8))
    newer = ToyEngine(slots=8)
    newer.load_policy(Path(), 3)
    with pytest.raises(MismatchError, match="begun by policy version 0, the engine has 3"):
        roll(shelf, engine=newer, policies=lambda version: tmp_path / "gone")


def test_spans_say_which_policy_wrote_which_tokens(roll: Roll, shelf: Any, reference: dict[str, Sample]) -> None:
    with pytest.raises(Died):
        roll(shelf, engine=Mortal(dies_at=12, slots=8))
    newer = ToyEngine(slots=8)
    newer.load_policy(Path(), 3)
    roll(shelf, engine=newer, rollout=sections.Rollout(max_new_tokens=60, weight_change="span"))
    mixed = {uid: s for uid, s in shelf.samples.items() if s.versions.tolist() == [0, 3]}
    assert mixed
    for uid, sample in mixed.items():
        cut = sample.prompt_len + sample.version_starts[1]
        assert sample.tokens[:cut].tolist() == reference[uid].tokens[:cut].tolist()
        assert sample.resume == "statistical"


def test_an_environment_answers_between_turns(roll: Roll, shelf: Any, tmp_path: Path) -> None:
    """Tool tokens have mask 0 and log-prob 0; an interrupted conversation ends like an uninterrupted one."""

    def environment(turn: Turn) -> list[int] | None:
        turns = turn.response.count(EOS)
        return [9, 9, turns] if turns < 3 else None

    def talk(home: str, *deaths: int) -> dict[str, Sample]:
        samples: dict[str, Sample] = {}
        shelf.samples = samples
        settings = {"environment": environment, "home": tmp_path / home}
        for at in deaths:
            with pytest.raises(Died):
                roll(shelf, engine=Mortal(dies_at=at, slots=8), **settings)
        roll(shelf, **settings)
        return samples

    whole, broken = talk("whole"), talk("broken", 3, 20, 20)
    assert content(broken) == content(whole)
    assert {s.turns for s in whole.values()} >= {2, 3}
    for sample in whole.values():
        response = sample.tokens[sample.prompt_len :]
        silent = sample.loss_mask == 0
        assert silent.sum() == 3 * (sample.turns - 1)
        assert (sample.logprobs[silent] == 0).all()
        assert set(response[silent].tolist()) <= {9, 1, 2}
        assert sample.response_len <= 60


def test_an_environment_sees_only_durable_tokens(roll: Roll, shelf: Any, tmp_path: Path) -> None:
    seen: list[bool] = []

    def environment(turn: Turn) -> None:
        ledger = recovery.recover(tmp_path / "wal" / "student" / "engine-0").ledger
        partials = {partial.spec.prompt_id: partial for partial in ledger.partials.values()}
        seen.append(list(partials[turn.prompt.prompt_id].tokens) == turn.response)

    roll(shelf, environment=environment)
    assert seen
    assert all(seen)


def test_an_environment_waits_for_the_disk(roll: Roll, shelf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovery in the same machine sees the page cache, so the wait itself is observed too."""
    from mopd_dataplane.rollout import loop

    newest: list[int] = []
    waited: list[int] = []
    real = loop.TokenLog.wait_durable

    def wait(log: loop.TokenLog, lsn: int) -> None:
        real(log, lsn)
        if threading.current_thread() is threading.main_thread():
            waited.append(lsn)
            newest.append(log.appended_lsn)

    monkeypatch.setattr(loop.TokenLog, "wait_durable", wait)
    wait_counts: list[int] = []
    roll(shelf, environment=lambda turn: wait_counts.append(len(waited)))
    assert wait_counts == list(range(1, len(wait_counts) + 1))
    assert wait_counts
    assert waited == newest


def test_no_thread_outlives_a_rollout(roll: Roll, shelf: Any) -> None:
    before = threading.active_count()
    with pytest.raises(Died):
        roll(shelf, engine=Mortal(dies_at=12, slots=8))
    roll(shelf)
    assert threading.active_count() == before
