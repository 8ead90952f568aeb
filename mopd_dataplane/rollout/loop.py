"""The decode loop: keep the slots busy, log every step, pass finished samples on.

    a step:  engine.step -> append to the log -> apply to the ledger -> finished samples to the committer

The ledger is the only state of a sample; the loop itself only stores which slot works for which sample.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.base.sampling_masks import SamplingMasks
from mopd_dataplane.base.stop_request import StopRequest
from mopd_dataplane.errors import EngineError
from mopd_dataplane.records import Prompt
from mopd_dataplane.rollout.committer import Committer, Finished
from mopd_dataplane.rollout.engines.call_timeout import CallTimeout
from mopd_dataplane.rollout.engines.engine import (
    FINISH_REASON,
    LENGTH,
    STOP,
    Engine,
    Request,
    StepOutput,
    check_answered,
    check_columns,
    check_kept,
    check_routes,
    check_step,
)
from mopd_dataplane.rollout.log import log_records
from mopd_dataplane.rollout.log.ledger import Ledger
from mopd_dataplane.rollout.log.wal import TokenLog
from mopd_dataplane.rollout.partial_sample import PartialSample, SampleSpec
from mopd_dataplane.rollout.policy_update import WeightChange
from mopd_dataplane.rollout.rollout_report import RolloutReport
from mopd_dataplane.rollout.tools.sandbox import Abandoned, Call, Sandbox, Turn

Environment = Callable[[Turn], list[int] | None]
"""Called when the policy ends a turn. Returns the environment's tokens, or None when the conversation is over. It must
be a function of the conversation and of the output of its commands: a turn may be replayed after a crash."""

_REFILL = 8
"""New samples are admitted when a share 1/_REFILL of the slots is free: one prefill for many samples."""
_PROGRESS_S = 0.2
_FREE = -1
"""Response position of a free slot."""


@dataclass(kw_only=True)
class RolloutLoop:
    """Decodes until its work is done or a stop is requested."""

    engine: Engine
    log: TokenLog
    ledger: Ledger
    committer: Committer
    report: RolloutReport
    prompts: Mapping[str, Prompt]
    environment: Environment | None
    sandbox: Sandbox | None
    weights: WeightChange
    saved: Path
    """File for the keys and values of the samples that a graceful stop interrupts."""
    progress: Callable[..., None]
    stop: StopRequest

    def __post_init__(self) -> None:
        self._watch = CallTimeout()
        self._free = list(range(self.engine.slots))[::-1]
        self._handle = np.zeros(self.engine.slots, np.uint32)
        self._due = np.full(self.engine.slots, _FREE, np.int32)
        self._asks = np.zeros(self.engine.slots, np.bool_)
        """Slots whose sample records its sampling masks."""
        self._asks_experts = np.zeros(self.engine.slots, np.bool_)
        """Slots whose sample records its experts."""
        self._work: deque[int | SampleSpec] = deque()
        self._interrupted: set[int] = set()
        self._began = time.monotonic()
        self._shown = 0.0

    def sample(self, specs: Iterable[SampleSpec], stored_uids: Collection[str]) -> bool:
        """Continue unfinished samples, then admit new ones. Returns False if a stop ended the engine too."""
        self._settle(stored_uids)
        seen = {*stored_uids, *(partial.spec.uid for partial in self.ledger.partials.values())}
        try:
            if self.weights.pins:
                for handles in self.weights.pinned(self.engine, self.ledger):
                    self._restore(handles)
                    self._run(handles)
                    if self.stop.is_requested:
                        break
            if not self.stop.is_requested:
                self._restore(self.ledger.unfinished())
                # No file is used twice; the others of that name are left by an interrupted save.
                for file in self.saved.parent.glob(f"{self.saved.stem}.*"):
                    file.unlink()
                self._run([*self.ledger.unfinished(), *(spec for spec in specs if spec.uid not in seen)])
        except EngineError:
            if not self.stop.is_requested:
                raise
            return False  # Ctrl-C also goes to the engine's own process
        return True

    def _settle(self, skip_uids: Collection[str]) -> None:
        """Handle recovered samples that need no engine: already in the store, finished, or at the end of a turn."""
        partials = self.ledger.partials
        stored = tuple(handle for handle, partial in partials.items() if partial.spec.uid in skip_uids)
        if stored:
            self._say(log_records.Commit(stored))
        for handle, partial in list(partials.items()):
            if partial.finish_reason:
                self._hand_over(handle, self.log.synced_lsn)
            else:
                self._interrupted.add(handle)
                if partial.ended:
                    self._turn_ended(handle)
        self._work.clear()  # sample() lists unfinished ones, these included

    def _run(self, work: Iterable[int | SampleSpec]) -> None:
        """Decode samples of the ledger (by handle) and new ones, admitted in this order; those in a slot stay there."""
        in_slots = {int(self._handle[slot]) for slot in self._live()}
        self._work.extend(item for item in work if item not in in_slots)
        refill = max(1, self.engine.slots // _REFILL)
        while not self.stop.is_requested:
            live = len(self._live())
            if not live and not self._work:
                return
            if self.weights.look(self.engine.policy_version):
                self._change_policy()
            if self._admissible() and (len(self._free) >= refill or not live):
                self._admit()
            self._step()
            self.collect_commits()
            if self.log.full:
                self.log.rotate(self.ledger)
                self.log.ship()
            self._show()

    def let_go(self) -> None:
        """Free the engine's slots, if it still answers."""
        self._watch.stop()
        with contextlib.suppress(EngineError):
            for slot in self._live():
                self.engine.release(slot)

    def save(self, limit_bytes: int) -> None:
        """Save the engine's state of the samples in its slots."""
        partials = self.ledger.partials
        requests = [(slot, partials[int(self._handle[slot])].request()) for slot in self._live()]
        self._watch.call(lambda: self.engine.save(self.saved, requests, limit_bytes=limit_bytes))

    def _restore(self, handles: Iterable[int]) -> None:
        """Put samples back into the slots from which `save` took them; none if the file does not match them."""
        partials = {self.ledger.partials[handle].spec.uid: handle for handle in handles}
        requests = [self.ledger.partials[handle].request() for handle in partials.values()]
        restored = self._watch.call(lambda: self.engine.restore(self.saved, requests))
        for slot, (uid, gap) in enumerate(restored):
            self._free.remove(slot)
            self._take(slot, partials[uid])
            self._resume(partials[uid], exact=gap == 0, drift=gap)
            self.report.restored += 1

    def collect_commits(self) -> None:
        """Log the commits since the last call."""
        for handles in self.committer.committed():
            for handle in handles:
                self.report.committed(self.ledger.partials[handle].finish_reason)
            self._say(log_records.Commit(tuple(handles)))

    def _live(self) -> list[int]:
        return np.flatnonzero(self._due != _FREE).tolist()

    def _admissible(self) -> bool:
        """Check if the next sample may be admitted. A new one may not while others finish on a policy that is
        replaced."""
        return bool(self._work) and not (self.weights.awaited and isinstance(self._work[0], SampleSpec))

    def _admit(self) -> None:
        admitted: list[tuple[int, Request]] = []
        while self._admissible() and self._free:
            item = self._work.popleft()
            handle = self._open(item) if isinstance(item, SampleSpec) else item
            slot = self._free.pop()
            self._take(slot, handle)
            admitted.append((slot, self.ledger.partials[handle].request()))
        rescored = self._watch.call(lambda: self.engine.admit(admitted))
        for slot, _ in admitted:
            handle = int(self._handle[slot])
            if handle in self._interrupted:
                self._resume(handle, *self._compare(handle, rescored.get(slot, np.zeros(0, np.float32))))
            self._say_policy(handle)

    def _take(self, slot: int, handle: int) -> None:
        """Assign a slot to a sample."""
        partial = self.ledger.partials[handle]
        self._handle[slot], self._due[slot] = handle, len(partial)
        self._asks[slot], self._asks_experts[slot] = partial.spec.sampling_mask, partial.spec.experts

    def _open(self, spec: SampleSpec) -> int:
        handle = self.ledger.next_handle
        self._say(log_records.Open(handle, spec))
        self._say_policy(handle)
        return handle

    def _change_policy(self) -> None:
        """Load the newer policy when `pin` or `span` allows it: drop every key and value, read every prefix again."""
        live = self._live()
        in_flight = live or any(isinstance(item, int) for item in self._work)
        if self.weights.pins and in_flight:
            return
        for slot in live:
            self.engine.release(slot)
        self._watch.call(lambda: self.weights.take_up(self.engine))
        again = [(slot, self.ledger.partials[int(self._handle[slot])].request()) for slot in live]
        self._watch.call(lambda: self.engine.admit(again))
        for slot in live:
            self._say_policy(int(self._handle[slot]))
            fault_point("rollout.span")
        self.report.weight_changes += 1

    def _say_policy(self, handle: int) -> None:
        """Record the position at which a sample changes to the engine's policy, unless it has that policy already."""
        partial = self.ledger.partials[handle]
        if not partial.is_by(self.engine.policy_digest):
            self._say(log_records.Span(handle, len(partial), self.engine.policy_version, self.engine.policy_digest))

    def _compare(self, handle: int, rescored: NDArray[np.float32]) -> tuple[bool, float]:
        """Compare the log-probs of a resumed sample. Returns whether its resume is exact, and the largest difference.

        It is exact if the engine's policy gives its newest tokens the logged log-prob bits, and the engine draws with
        its noise.
        """
        partial = self.ledger.partials[handle]
        if not partial.is_by(self.engine.policy_digest):
            return False, 0.0
        first = len(partial) - len(rescored)
        logged = np.array(partial.logprobs, np.float32)[first:]
        own = np.array(partial.loss_mask, bool)[first:] & (np.arange(first, len(partial)) >= partial.spans[-1][0])
        same = np.array_equal(logged[own], rescored[own]) and partial.spec.sampler in self.engine.samplers
        return same, float(np.abs(logged[own] - rescored[own]).max(initial=0.0))

    def _resume(self, handle: int, exact: bool, drift: float) -> None:
        """Record how an interrupted sample continues."""
        self._interrupted.discard(handle)
        self._say(log_records.Resume(handle, exact, drift))
        self.report.resumed += 1
        self.report.exact += exact
        self.report.max_drift = max(self.report.max_drift, drift)

    def _step(self) -> None:
        output = self._watch.call(self.engine.step)
        check_columns(output)
        check_answered(output, self._due, lockstep=self.engine.lockstep)
        check_step(output, self.engine.vocab_size)
        handles = self._handle[output.slots]
        self._say_kept(output, handles)
        self._say_routes(output, handles)
        columns = (output.positions.astype(np.uint32), output.token_ids.astype(np.uint32))
        self._say(log_records.Step(handles, *columns, output.logprobs, output.finished))
        fault_point("rollout.step")
        self._due[output.slots] += 1
        self.report.tokens += len(handles)
        for row in np.flatnonzero(output.finished):
            slot = int(output.slots[row])
            self._free.append(slot)
            self._due[slot] = _FREE
            self._turn_ended(int(handles[row]))

    def _say_kept(self, output: StepOutput, handles: NDArray[np.uint32]) -> None:
        """Record the sampling masks of the step's tokens, for the samples that ask."""
        needs_mask = self._asks[output.slots]
        if not needs_mask.any():
            return
        masks = check_kept(output, needs_mask)
        ordinals = [self.ledger.partials[handle].masks.drawn for handle in handles[needs_mask].tolist()]
        own = SamplingMasks(masks.sizes[needs_mask], masks.ids)
        for message in log_records.SamplingMask.records(handles[needs_mask], np.array(ordinals, np.uint32), own):
            self._say(message)

    def _say_routes(self, output: StepOutput, handles: NDArray[np.uint32]) -> None:
        """Record the experts of the tokens read for the step, if the log does not have them yet."""
        needs_routes = self._asks_experts[output.slots]
        if not needs_routes.any():
            return
        partials = [self.ledger.partials[handle] for handle in handles.tolist()]
        # The token at response position p is drawn when P + p tokens have been read.
        read = np.array([len(partial.spec.prompt_ids) for partial in partials]) + output.positions
        lacking = np.where(needs_routes, read - [partial.routed for partial in partials], 0)
        routes = check_routes(output, needs_routes, lacking)
        ends = np.cumsum(routes.counts)
        fresh = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, lacking, strict=True)])
        places = np.concatenate([np.arange(last - n, last) for last, n in zip(read, lacking, strict=True)])
        owners = np.repeat(handles, lacking)
        for message in log_records.Routed.records(owners, places.astype(np.uint32), routes.ids[fresh]):
            self._say(message)

    def _turn_ended(self, handle: int) -> None:
        """Ask the environment for a reply after the policy's turn, or finish the sample."""
        partial = self.ledger.partials[handle]
        try:
            said = self._ask_environment(handle, partial) if partial.ended == STOP else None
        except Abandoned as abandoned:
            self._say(log_records.Abandon(handle, abandoned.reason))
            self.report.abandoned[abandoned.reason] = self.report.abandoned.get(abandoned.reason, 0) + 1
            self._finish(handle, partial, "abandoned")
            return
        if said and len(partial) + len(said) < partial.spec.max_new_tokens:
            ids = np.array(said, np.int32)
            silent = np.zeros(len(ids))
            self._say(log_records.Tokens(handle, len(partial), ids, silent.astype(np.float32), silent.astype(np.uint8)))
            self._work.appendleft(handle)
            return
        self._finish(handle, partial, FINISH_REASON[LENGTH if said else partial.ended])

    def _finish(self, handle: int, partial: PartialSample, reason: str) -> None:
        lsn = self._say(log_records.Finish(handle, len(partial), partial.digest(), reason))
        self._interrupted.discard(handle)
        fault_point("rollout.finish")
        self._hand_over(handle, lsn)

    def _ask_environment(self, handle: int, partial: PartialSample) -> list[int] | None:
        if self.environment is None:
            return None
        self.log.wait_durable(self.log.appended_lsn)

        def say(call: Call, ordinal: int) -> None:
            self.log.wait_durable(self._say(log_records.Tool(handle, ordinal, call)))

        prompt = self.prompts[partial.spec.prompt_id]
        turn = Turn(
            prompt, list(partial.tokens), loss_mask=list(partial.loss_mask), uid=partial.spec.uid, calls=partial.calls,
            sandbox=self.sandbox, say=say,
        )  # fmt: skip
        return self.environment(turn)

    def _hand_over(self, handle: int, lsn: int) -> None:
        self.committer.hand_over(Finished(handle, lsn, self.ledger.partials[handle].sample()))

    def _say(self, message: log_records.LogRecord) -> int:
        """Log a message, then apply it, as recovery does."""
        lsn = self.log.append(message)
        self.ledger.apply(message)
        return lsn

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._shown >= _PROGRESS_S:
            self._shown = now
            rate = self.report.tokens / max(now - self._began, 1e-9)
            self.progress(self.report.samples, rate=f"{rate:,.0f} tok/s")
