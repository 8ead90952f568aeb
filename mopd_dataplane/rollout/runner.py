"""run_rollout samples prompts into the store, and logs every token as it is decoded.

    recover the log -> continue what is unfinished, oldest first -> admit new samples in order -> decode

Nothing leaves the process before it is durable, and a sample is finished only when its FINISH record is durable. After
a crash every sample is cut at the same point of the log, whatever its content and length, and continues from there.
"""

import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mopd_dataplane.base.stop_request import StopRequest
from mopd_dataplane.errors import InputError, MismatchError, PromptError
from mopd_dataplane.job import sections
from mopd_dataplane.job.values import NAME
from mopd_dataplane.records import Prompt, Sample, sample_uid
from mopd_dataplane.rollout.committer import Committer
from mopd_dataplane.rollout.engines.engine import Engine
from mopd_dataplane.rollout.engines.sampling import OWN_NOISE
from mopd_dataplane.rollout.log.ledger import Ledger
from mopd_dataplane.rollout.log.wal import LogCopy, TokenLog
from mopd_dataplane.rollout.loop import Environment, RolloutLoop
from mopd_dataplane.rollout.partial_sample import SampleSpec
from mopd_dataplane.rollout.policy_update import Published, WeightChange
from mopd_dataplane.rollout.rollout_report import RolloutReport
from mopd_dataplane.rollout.tools.sandbox import Sandbox

SAVED = "kv.safetensors"
"""File beside the log with keys and values of the samples that a graceful stop interrupted (see engines/kv_file.py)."""

__all__ = ["Environment", "RolloutReport", "RolloutTask", "run_rollout"]


@dataclass(frozen=True, kw_only=True)
class RolloutTask:
    """Work of one call of run_rollout; its log is wal_dir/stage/writer."""

    stage: str
    iteration: int
    seed: int
    """Seed of the job, from which noise and uids of the samples follow."""
    rollout: sections.Rollout
    wal: sections.Wal
    wal_dir: Path
    render: Callable[[Prompt], list[int]]
    """Returns the token ids of a prompt as the policy reads it."""
    writer: str = "engine-0"
    share: Collection[str] | None = None
    """uids that this engine samples, if several engines share an iteration; None means all."""
    copy: LogCopy | None = None
    """Copy of the log, updated at every new segment and at the end, and fetched when another node wrote the log
    last."""


def run_rollout(
    engine: Engine,
    prompts: Sequence[Prompt],
    task: RolloutTask,
    *,
    commit: Callable[[list[Sample]], object],
    skip_uids: Collection[str] = frozenset(),
    progress: Callable[..., None] = lambda done, **facts: None,
    environment: Environment | None = None,
    sandbox: Sandbox | None = None,
    policies: Callable[[int], Path] | None = None,
    published: Published | None = None,
) -> RolloutReport:
    """Sample `group_size` responses per prompt and pass them to `commit`, or continue such a call that died.

    commit: gets batches of finished samples, in another thread; returns when they are durable in the store, exactly
    once by uid. skip_uids: uids of samples that are in the store, or were deleted from it. progress(done, **facts):
    called a few times a second, and with `notice=` when something is blocked. policies(version): returns the folder of
    a policy version, to finish samples on the policy with which they began (`weight_change = "pin"`). published():
    returns the newest policy version and its folder, and is called repeatedly; a newer one than the engine's is loaded
    as `weight_change` says. environment: returns the reply when the policy ends a turn; it may run commands in the
    sandbox (see sandbox.py).

    The log's segments are deleted when everything is committed. Samples of an earlier iteration that it holds are
    finished and committed too.

    Raises before anything is written: InputError (a stage or writer that is no name), PromptError (no prompts, a prompt
    over the budget), MismatchError (another tokenizer). Later: MismatchError (a pinned policy that is gone),
    EngineError, DeadlineError, ResourceError, DamagedError. On Ctrl-C or SIGTERM keys and values are saved
    (`wal.kv_bytes`), the log is closed cleanly, and KeyboardInterrupt says how to continue.
    """
    _check_names(task.stage, task.writer)
    specs = list(_sample_specs(engine, prompts, task))
    report = RolloutReport(stage=task.stage, iteration=task.iteration)
    began = time.monotonic()

    def notice(text: str) -> None:
        progress(report.samples, notice=text)

    with StopRequest() as stop:
        folder = task.wal_dir / task.stage / task.writer
        log, recovered = TokenLog.open(
            folder, task.wal, accept=lambda ledger: _check_ledger(engine, ledger), notice=notice, copy=task.copy
        )
        ledger = recovered.ledger
        report.level, report.filesystem, report.torn_bytes = log.level, log.mount.kind, recovered.torn_bytes
        committer = Committer(log, commit, full_disk_wait_s=task.wal.full_disk_wait_s, notice=notice)
        loop = RolloutLoop(
            engine=engine, log=log, ledger=ledger, committer=committer, report=report,
            prompts={prompt.prompt_id: prompt for prompt in prompts}, environment=environment, sandbox=sandbox,
            weights=WeightChange(task.rollout.weight_change, published, policies), saved=log.folder / SAVED,
            progress=progress, stop=stop,
        )  # fmt: skip
        try:
            alive = loop.sample(specs, frozenset(skip_uids))
            committer.drain()
            loop.collect_commits()
            if stop.is_requested and alive:
                loop.save(task.wal.kv_bytes)
        except BaseException:
            committer.stop()
            log.abort()
            raise
        finally:
            loop.let_go()
            report.seconds = time.monotonic() - began
        log.close(forget=not ledger.partials)
        log.ship()
    if stop.is_requested:
        raise KeyboardInterrupt(
            f"stopped: {report.samples} samples committed, {len(ledger.partials)} unfinished ones are kept in the log "
            f"({report.level}); run the same command to continue them"
        )
    return report


def _check_names(*names: str) -> None:
    """Check that stage and writer can name folders. Raises InputError."""
    for name in names:
        if not re.fullmatch(NAME.strip("^$"), name):
            raise InputError(
                f"name {name!r:.80}: a stage or writer is 1 to 64 of a-z, 0-9, '_', '.', '-', a letter or digit first"
            )


def _check_ledger(engine: Engine, ledger: Ledger) -> None:
    for partial in ledger.partials.values():
        if partial.spec.tokenizer != engine.tokenizer_digest:
            raise MismatchError(
                f"the log holds sample {partial.spec.uid} of tokenizer {partial.spec.tokenizer}, the engine has "
                f"{engine.tokenizer_digest}; finish that run with its own tokenizer first"
            )


def _sample_specs(engine: Engine, prompts: Sequence[Prompt], task: RolloutTask) -> Iterator[SampleSpec]:
    """Yield the samples of the iteration, or of this engine's share, numbered in admission order. Raises
    PromptError."""
    rollout = task.rollout
    if not prompts:
        raise PromptError(f"stage {task.stage!r}: no prompts to roll out; check the domains' source and `train` count")
    if len({prompt.prompt_id for prompt in prompts}) < len(prompts):
        raise PromptError(
            f"stage {task.stage!r}: a prompt comes twice; use rollout.group_size to sample it several times"
        )
    for prompt_index, prompt in enumerate(prompts):
        uids = [
            sample_uid(task.seed, task.stage, prompt.prompt_id, index, task.iteration)
            for index in range(rollout.group_size)
        ]
        mine = [index for index, uid in enumerate(uids) if task.share is None or uid in task.share]
        if not mine:
            continue
        ids = tuple(task.render(prompt))
        _check_budget(prompt, len(ids), engine, rollout)
        for index in mine:
            yield SampleSpec(
                uid=uids[index],
                prompt_id=prompt.prompt_id,
                group_id=f"{prompt.prompt_id}#{task.iteration}",
                group_index=index,
                iteration=task.iteration,
                domain=prompt.domain,
                effort=prompt.effort,
                stage=task.stage,
                writer=task.writer,
                writer_seq=prompt_index * rollout.group_size + index,
                policy=task.stage if rollout.policy == "self" else rollout.policy,
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                max_new_tokens=rollout.max_new_tokens,
                stop=rollout.stop,
                sampler=engine.samplers[0] if engine.samplers else OWN_NOISE,
                tokenizer=engine.tokenizer_digest,
                prompt_ids=ids,
                sampling_mask="sampling_mask" in rollout.record,
                experts="experts" in rollout.record,
            )


def _check_budget(prompt: Prompt, length: int, engine: Engine, rollout: sections.Rollout) -> None:
    name = f"prompt {prompt.prompt_id!r} of domain {prompt.domain!r}"
    if length == 0:
        raise PromptError(f"{name} has no tokens; give it text, or a prompt template that adds some")
    if length > rollout.max_prompt_tokens:
        raise PromptError(
            f"{name} has {length} tokens, the budget is {rollout.max_prompt_tokens}; "
            "shorten it or raise rollout.max_prompt_tokens"
        )
    if length + rollout.max_new_tokens > engine.context_length:
        raise PromptError(
            f"{name} has {length} tokens and may get {rollout.max_new_tokens} more, the model holds "
            f"{engine.context_length}; shorten it or lower rollout.max_new_tokens"
        )
