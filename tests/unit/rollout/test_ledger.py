"""The ledger: what a checkpoint carries, and messages that contradict what came before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mopd_dataplane.rollout.engines.engine import STOP
from mopd_dataplane.rollout.log import log_records, ownership
from mopd_dataplane.rollout.log.ledger import Ledger
from mopd_dataplane.rollout.partial_sample import SampleSpec
from mopd_dataplane.rollout.tools.sandbox import Call, Command, Result

OPENING = SampleSpec(
    uid="0" * 32, prompt_id="p", group_id="g", group_index=0, iteration=0, domain="d", effort="", stage="r", writer="w",
    writer_seq=0, policy="p", temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=9, stop=("#",), tokenizer="t",
    prompt_ids=(1,),
)  # fmt: skip
ASKED = Call(1, Command(("ls",), 1.0))
ANSWERED = Call(1, ASKED.command, Result(0, "out", ""))


def step(position: int, ended: int = 0) -> log_records.Step:
    one = np.ones(1, np.uint32)
    return log_records.Step(
        0 * one, position * one, 7 * one, np.full(1, -0.5, np.float32), np.full(1, ended, np.uint8)
    )  # fmt: skip


@pytest.fixture
def ledger() -> Ledger:
    """One sample of two policies that ran a command, was interrupted, and is given up and finished."""
    sample_ledger = Ledger()
    told = [
        log_records.Open(0, OPENING), log_records.Span(0, 0, 3, "a"), step(0), log_records.Tool(0, 0, ASKED),
        log_records.Tool(0, 0, ANSWERED), log_records.Resume(0, False, 0.1), log_records.Resume(0, True, 0.0),
        log_records.Span(0, 1, 4, "b"), step(1, STOP), log_records.Abandon(0, "tool_in_doubt"),
    ]  # fmt: skip
    for message in told:
        sample_ledger.apply(message)
    return sample_ledger


def finish(ledger: Ledger) -> log_records.Finish:
    return log_records.Finish(0, 2, ledger.partials[0].digest(), "abandoned")


def test_a_checkpoint_carries_everything(ledger: Ledger) -> None:
    ledger.apply(finish(ledger))
    assert (list(ledger.partials), list(ledger.unfinished())) == ([0], [])
    copy = Ledger()
    for message in ledger.checkpoint():
        copy.apply(log_records.decode(message.kind, message.encode()))
    assert copy.partials == ledger.partials
    assert copy.next_handle == ledger.next_handle == 1
    partial = copy.partials[0]
    assert (partial.interruptions, partial.resume, partial.abandoned) == (2, "statistical", "tool_in_doubt")
    assert partial.calls == [ANSWERED]
    copy.apply(log_records.Commit((0,)))
    assert not copy.partials


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (log_records.Open(0, OPENING), "opened twice"),
        (log_records.Span(0, 9, 3, "a"), "position 9, 2 tokens so far"),
        (step(2), "token 2 follows token 1"),
        (log_records.Finish(0, 2, 1, "stop"), "FINISH says 1"),
        (log_records.Tool(0, 0, ANSWERED), "has its result already"),
        (log_records.Tool(0, 2, ASKED), "call 2 follows call 0"),
        (log_records.Base(5, 0), "checkpoint carries 1 samples, BASE says 5"),
    ],
)
def test_a_contradiction_is_refused(ledger: Ledger, message: log_records.LogRecord, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ledger.apply(message)


def test_nothing_follows_a_finish(ledger: Ledger) -> None:
    ledger.apply(finish(ledger))
    with pytest.raises(ValueError, match="goes on after its FINISH"):
        ledger.apply(log_records.Abandon(0, "tool_in_doubt"))


def test_an_epoch_claimed_in_between_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where locks do not hold, another writer may claim the epoch between the look and the claim."""
    assert ownership.claim_epoch(tmp_path) == 1
    claimed_epochs, before = ownership.claimed_epochs, iter([[0]])
    monkeypatch.setattr(ownership, "claimed_epochs", lambda folder: next(before, None) or claimed_epochs(folder))
    assert ownership.claim_epoch(tmp_path) == 2
