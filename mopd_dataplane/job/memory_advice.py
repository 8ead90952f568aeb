"""What to set when memory ran out: the key that lowers what sampling, scoring or training needs, and a value for it.

Each function returns a clause for a message. The keys are free to change in the middle of a run; results stay the same.
"""

from mopd_dataplane.job.job import Stage
from mopd_dataplane.job.sections import Engine

AGAIN = "run the same command again with"


def for_rollout(engine: Engine) -> str:
    """Advice for sampling: half the sequences decoded together, whose keys and values are what grows."""
    if engine.slots > 1:
        return _half("engine.slots", "engine.slots", engine.slots, "sequences decoded together")
    return (
        "engine.slots is 1, one sequence at a time: a device with more memory (engine.device) or a shorter "
        "rollout.max_new_tokens is left"
    )


def for_scoring(stage: Stage) -> str:
    """Advice for scoring: half the tokens of a pass. A sample is never cut, so a smaller pass would change nothing."""
    tokens, longest = stage.score.batch_tokens, _longest(stage)
    if tokens > longest:
        smaller = max(tokens // 2, longest)
        return _set(
            f"stages.{stage.name}.score.batch_tokens", "score.batch_tokens", tokens, smaller, "tokens of one pass"
        )
    return (
        f"score.batch_tokens is {tokens}, and one sample of up to {longest} tokens fills a pass: a device with more "
        "memory (score.device) or a smaller teacher is left"
    )


def for_training(stage: Stage) -> str:
    """Advice for training: fewer packs in a pass, then fewer tokens, then activations that are computed again, then
    state on the host."""
    train, longest = stage.train, _longest(stage)
    key, tokens = f"stages.{stage.name}.train.", train.micro_batch_tokens or stage.plan.pack_tokens
    if train.micro_batch_packs > 1:
        packs = train.micro_batch_packs
        return _half(f"{key}micro_batch_packs", "train.micro_batch_packs", packs, "packs of one pass")
    if tokens > longest:
        smaller = max(tokens // 2, longest)
        return _set(f"{key}micro_batch_tokens", "train.micro_batch_tokens", tokens, smaller, "tokens of one pass")
    if not train.gradient_checkpointing:
        return _turn_on(f"{key}gradient_checkpointing", "train.gradient_checkpointing", "a third slower")
    if not train.offload and train.device != "cpu":
        return _turn_on(f"{key}offload", "train.offload", "the optimizer's state goes to the host")
    return "no key lowers it further: a device with more memory, an adapter (train.lora) or a smaller student is left"


def _longest(stage: Stage) -> int:
    """Most tokens of a sample that the student answers."""
    return stage.rollout.max_prompt_tokens + stage.rollout.max_new_tokens


def _half(key: str, name: str, value: int, meaning: str) -> str:
    return _set(key, name, value, value // 2, meaning)


def _set(key: str, name: str, value: int, smaller: int, meaning: str) -> str:
    return f"{name} is {value} ({meaning}): {AGAIN} --set {key}={smaller}"


def _turn_on(key: str, name: str, cost: str) -> str:
    return f"{name} is off: {AGAIN} --set {key}=true ({cost})"
