"""run_rollout: prompts in, samples in the store, every token in the log on the way.

    recover the log -> continue what is unfinished, oldest first -> admit new samples in order -> decode

Nothing leaves the process before it is durable, and a sample is finished only when its FINISH record is: after a crash
every sample is cut at the same point of the log, whatever it says and however long it is, and continues from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from mopd_dataplane import config
from mopd_dataplane.errors import MismatchError, PromptError
from mopd_dataplane.records import Prompt, Sample, sample_uid
from mopd_dataplane.rollout.committer import Committer
from mopd_dataplane.rollout.draft import Draft, Opening
from mopd_dataplane.rollout.engine import Engine
from mopd_dataplane.rollout.interrupt import StopRequest
from mopd_dataplane.rollout.ledger import Ledger
from mopd_dataplane.rollout.loop import Environment, RolloutLoop
from mopd_dataplane.rollout.report import RolloutReport
from mopd_dataplane.rollout.sandbox import Sandbox
from mopd_dataplane.rollout.wal import TokenLog

__all__ = ["Environment", "RolloutReport", "run_rollout"]


def run_rollout(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    stage: str,
    generation: int,
    seed: int,
    rollout: config.Rollout,
    wal: config.Wal,
    wal_dir: Path,
    commit: Callable[[list[Sample]], object],
    render: Callable[[Prompt], list[int]],
    already: Collection[str] = frozenset(),
    progress: Callable[..., None] = lambda done, **facts: None,
    environment: Environment | None = None,
    sandbox: Sandbox | None = None,
    policies: Callable[[int], Path] | None = None,
    writer: str = "engine-0",
) -> RolloutReport:
    """Sample `group_size` responses per prompt and hand them to `commit`; or continue such a call that died.

    commit: gets batches of finished samples, in another thread; returns when they are durable in the store, exactly
    once by uid. already: uids that the store has. progress(done, **facts) is called a few times a second, and with
    `notice=` when something stands still. policies(version): folder of a policy version, to finish samples on the
    policy they began with (`weight_change = "pin"`). environment: what answers when the policy ends a turn; it may run
    commands in the sandbox (see sandbox.py).

    The log lies in wal_dir/stage/writer; its segments are deleted when everything is committed. Samples the log holds
    of an earlier generation are finished and committed too.

    Raises PromptError before anything is written (no prompts, a prompt over the budget), MismatchError (another
    tokenizer; a pinned policy that is gone), EngineError, ResourceError, DamagedError. On Ctrl-C or SIGTERM the log is
    closed cleanly and KeyboardInterrupt says how to go on.
    """
    openings = _openings(engine, prompts, stage, generation, seed, rollout, render, writer)
    report = RolloutReport(stage=stage, generation=generation)
    began = time.monotonic()

    def notice(text: str) -> None:
        progress(report.samples, notice=text)

    with StopRequest() as stop:
        log, recovered = TokenLog.open(wal_dir / stage / writer, wal, notice=notice)
        ledger = recovered.ledger
        report.level, report.filesystem, report.torn_bytes = log.level, log.mount.kind, recovered.torn_bytes
        committer = Committer(log, commit, full_disk_wait_s=wal.full_disk_wait_s, notice=notice)
        loop = RolloutLoop(
            engine, log, ledger, committer, report,
            prompts={prompt.prompt_id: prompt for prompt in prompts},
            environment=environment, sandbox=sandbox, progress=progress, stopping=lambda: stop.asked,
        )  # fmt: skip
        try:
            _check_ledger(engine, ledger)
            stored = frozenset(already)
            loop.settle(stored)
            known = stored | {draft.opening.uid for draft in ledger.drafts.values()}
            if rollout.weight_change == "pin":
                _finish_pinned(engine, loop, ledger, policies)
            loop.run([*ledger.unfinished(), *(opening for opening in openings if opening.uid not in known)])
            committer.drain()
            loop.collect_commits()
        except BaseException:
            committer.stop()
            log.abort()
            raise
        finally:
            loop.let_go()
            report.seconds = time.monotonic() - began
        log.close(forget=not ledger.drafts)
    if stop.asked:
        raise KeyboardInterrupt(
            f"stopped: {report.samples} samples committed, {len(ledger.drafts)} unfinished ones are kept in the log; "
            "run the same command to continue them"
        )
    return report


def _finish_pinned(engine: Engine, loop: RolloutLoop, ledger: Ledger, policies: Callable[[int], Path] | None) -> None:
    """Finish every sample that another policy version began on that version, then load the current one again."""
    current, digest = engine.policy_version, engine.policy_digest
    behind: dict[int, list[int]] = {}
    for handle, draft in ledger.unfinished().items():
        if draft.spans and draft.spans[-1][2] != digest:
            behind.setdefault(draft.spans[-1][1], []).append(handle)
    for version, handles in sorted(behind.items()):
        _load(engine, policies, version)
        _check_pinned(engine, ledger.drafts[handles[0]])
        loop.run(handles)
    if behind:
        _load(engine, policies, current)


def _load(engine: Engine, policies: Callable[[int], Path] | None, version: int) -> None:
    folder = policies(version) if policies is not None else None
    if folder is None or not folder.is_dir():
        raise MismatchError(
            f"the log holds samples begun by policy version {version}, the engine has {engine.policy_version}, and "
            f"version {version} is not at hand ({folder}); bring it back, or finish them on the current policy with "
            'rollout.weight_change = "span"'
        )
    engine.load_policy(folder, version)


def _check_pinned(engine: Engine, draft: Draft) -> None:
    _, version, digest = draft.spans[-1]
    if engine.policy_digest != digest:
        raise MismatchError(
            f"policy version {version} has weights {engine.policy_digest[:16]}, the log's samples were begun by "
            f'{digest[:16]}; bring those weights back, or set rollout.weight_change = "span"'
        )


def _check_ledger(engine: Engine, ledger: Ledger) -> None:
    for draft in ledger.drafts.values():
        if draft.opening.tokenizer != engine.tokenizer_digest:
            raise MismatchError(
                f"the log holds sample {draft.opening.uid} of tokenizer {draft.opening.tokenizer}, the engine has "
                f"{engine.tokenizer_digest}; finish that run with its own tokenizer first"
            )


def _openings(
    engine: Engine,
    prompts: Sequence[Prompt],
    stage: str,
    generation: int,
    seed: int,
    rollout: config.Rollout,
    render: Callable[[Prompt], list[int]],
    writer: str,
) -> list[Opening]:
    """Every sample of the generation in admission order. Raises PromptError."""
    if not prompts:
        raise PromptError(f"stage {stage!r}: no prompts to roll out; check the domains' source and `train` count")
    openings: list[Opening] = []
    for prompt in prompts:
        ids = tuple(render(prompt))
        _check_budget(prompt, len(ids), engine, rollout)
        for index in range(rollout.group_size):
            openings.append(
                Opening(
                    uid=sample_uid(seed, stage, prompt.prompt_id, index, generation),
                    prompt_id=prompt.prompt_id,
                    group_id=f"{prompt.prompt_id}#{generation}",
                    group_index=index,
                    generation=generation,
                    domain=prompt.domain,
                    effort=prompt.effort,
                    run=stage,
                    writer=writer,
                    writer_seq=len(openings),
                    policy=stage if rollout.policy == "self" else rollout.policy,
                    temperature=rollout.temperature,
                    top_p=rollout.top_p,
                    top_k=rollout.top_k,
                    max_new_tokens=rollout.max_new_tokens,
                    stop=rollout.stop,
                    tokenizer=engine.tokenizer_digest,
                    prompt_ids=ids,
                )
            )
    return openings


def _check_budget(prompt: Prompt, length: int, engine: Engine, rollout: config.Rollout) -> None:
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
