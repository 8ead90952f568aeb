"""Every next step that a refusal of a job file names works: the job that was refused is changed as its message says,
and is accepted then."""

from __future__ import annotations

import ast
import copy
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor

import mopd_dataplane.job
from mopd_dataplane.errors import JobFileError
from mopd_dataplane.job.load import check_job
from mopd_dataplane.job.objectives import Divergence

JOB: dict[str, Any] = {
    "name": "small", "store": "unused", "student": {"config": {"model_type": "qwen3"}},
    "domains": {
        "sums": {"source": "reasoning-gym", "dataset": "chain_sum", "train": 64},
        "words": {"source": "reasoning-gym", "dataset": "letter_counting", "train": 64},
    },
    "teachers": {"expert": {"source": "models/expert"}, "other": {"source": "models/other"}},
    "routing": {"sums": "expert", "words": "other"},
    "objectives": {"opd": {"policy_gradient": {}}, "exact": {"divergence": {}}},
    "plan": {"batch_samples": 8},
    "stages": [{"name": "student", "objective": "opd", "rollout": {}, "plan": {}, "train": {}, "score": {}}],
}  # fmt: skip
GONE: Any = object()
"""Value of an edit that leaves a key out."""
GRADIENT = "objectives.opd.policy_gradient"
OF_HIDDEN = {"stages.student.objective": "exact"}
OF_TOPK = {"objectives.exact.divergence": {"kind": "reverse", "signal": "topk"}, **OF_HIDDEN}
REMOTE = {"source": GONE, "url": "http://127.0.0.1:8000/v1"}


class Own(Divergence):
    """A divergence of another package; it is looked up and never computed."""

    def rows(self, student: Tensor, teacher: Tensor, *, beta: float, alpha: float) -> Tensor:
        return student.sum(-1)


class Refusal(NamedTuple):
    """A job that is refused, and what its message advises."""

    edits: dict[str, Any]
    """Values by dotted key, set in JOB."""
    advised: list[tuple[str, dict[str, Any]]]
    """Words of the message, and the edits that follow them."""


def _at(stage_key: str) -> str:
    return f"stages.student.{stage_key}"


def _remote(teacher: str) -> dict[str, Any]:
    return {f"teachers.{teacher}.{key}": value for key, value in REMOTE.items()}


LEARNT = {"student.path": "models/student", "student.config": GONE}
TWO_RANKS = {"scale.ranks": 2, "scale.context_parallel": 2}
OWN_TOKENS = {"teachers.expert.tokenizer": "own"}
FOLLOWING = {"teachers.expert": {"source": "student", "follows": 2}}
STAYS = ("set teachers.expert.follows = 0", {"teachers.expert.follows": 0})
CONCURRENT = {_at("concurrent"): True}
UNTIL: dict[str, Any] = {
    f"{GRADIENT}.reward_coef": 1.0, _at("rollout.group_size"): 4, _at("rollout.prompts_per_iteration"): 8,
    _at("rollout.until"): {"groups": 4, "at_most": 2}, _at("plan.groups"): "spread",
}  # fmt: skip
HIDDEN = ("hidden_passes", "hidden_versions")
REFUSALS = [
    Refusal(
        {"teachers.expert.follows": 2},
        [("set source", {"teachers.expert.source": "student"}), ("follows = 0", {"teachers.expert.follows": 0})],
    ),
    Refusal(
        {"teachers.expert": {"source": "student", "average": 0.5}},
        [("set follows", {"teachers.expert.follows": 1}), ("average = 1", {"teachers.expert.average": 1})],
    ),
    Refusal(
        {**FOLLOWING, "teachers.mix": {"blend": {"expert": 0.5, "other": 0.5}}, "routing.words": "mix"}, [STAYS]
    ),
    Refusal(
        {**FOLLOWING, _at("rollout.policy"): "routed"},
        [("let the student answer", {_at("rollout.policy"): "self"}), STAYS],
    ),
    Refusal({**FOLLOWING, _at("data"): "reference"}, [STAYS]),
    Refusal({**FOLLOWING, **CONCURRENT}, [("set concurrent = false", {_at("concurrent"): False}), STAYS]),
    Refusal(
        {**FOLLOWING, _at("score.engine"): "vllm"},
        [('set score.engine = "hf"', {_at("score.engine"): "hf"}), STAYS],
    ),
    Refusal(
        {**FOLLOWING, **OF_HIDDEN},
        [
            ("take an objective of log-probs (policy_gradient)", {_at("objective"): "opd"}),
            ('or of a top-k (divergence, signal = "topk")', OF_TOPK),
            STAYS,
        ],
    ),
    Refusal(
        {"teachers.expert": {"source": "student", "follows": 1, "average": 0.5}, _at("train.lora"): {"r": 4}},
        [("set teachers.expert.average = 1", {"teachers.expert.average": 1}),
         ("set teachers.expert.follows = 0", {"teachers.expert.follows": 0, "teachers.expert.average": 1})],
    ),
    Refusal(
        {"single_writer": True, "group_commit": True},
        [("set group_commit = false", {"group_commit": False}), ("leave single_writer out", {"single_writer": GONE})],
    ),
    Refusal(
        {"teachers.both": {"blend": {"expert": 0.5, "other": 0.5}, "end": "map"}},
        [("give end to its members", {"teachers.both.end": GONE, "teachers.expert.end": "map"})],
    ),
    Refusal(
        {**OF_HIDDEN, "retain.hidden_versions": 2, _at("plan.max_staleness"): 3},
        [("set it above 3", {"retain.hidden_versions": 4}), ("or 0", {"retain.hidden_versions": 0})],
    ),
    Refusal(
        {**OF_HIDDEN, _at("data"): "reference", _at("iterations"): 3, "retain.hidden_passes": 2},
        [("set it to at least 3", {"retain.hidden_passes": 3}), ("or 0", {"retain.hidden_passes": 0})],
    ),
    Refusal(
        {
            **OF_HIDDEN, _at("iterations"): 4, _at("plan.replay"): {"iterations": 2, "share": 0.5},
            "retain.hidden_passes": 1, "retain.hidden_versions": 1,
        },
        [
            ("set hidden_passes = 0 and hidden_versions to 0", {f"retain.{key}": 0 for key in HIDDEN}),
            ("or above 2", {"retain.hidden_passes": 0, "retain.hidden_versions": 3}),
        ],
    ),
    Refusal(
        {**TWO_RANKS, f"{GRADIENT}.correction": "mis", f"{GRADIENT}.band": [0.5, 2.0]},
        [
            ("set scale.context_parallel = 1", {"scale.context_parallel": 1}),
            ('correction = "icepop"', {f"{GRADIENT}.correction": "icepop"}),
        ],
    ),
    Refusal(
        {**TWO_RANKS, f"{GRADIENT}.discount": 0.9},
        [
            ("set scale.context_parallel = 1", {"scale.context_parallel": 1}),
            ("discount = 0", {f"{GRADIENT}.discount": 0}),
        ],
    ),
    Refusal(
        {**TWO_RANKS, f"{GRADIENT}.early_weight": 0.5},
        [
            ("set scale.context_parallel = 1", {"scale.context_parallel": 1}),
            ("early_weight = 0", {f"{GRADIENT}.early_weight": 0}),
        ],
    ),
    *(
        Refusal(
            {**TWO_RANKS, f"{GRADIENT}.{key}": 0.5},
            [
                ("set scale.context_parallel = 1", {"scale.context_parallel": 1}),
                (f"{key} = 1", {f"{GRADIENT}.{key}": 1}),
            ],
        )
        for key in ("entropy_share", "disagreement_share")
    ),
    Refusal(
        {**TWO_RANKS, "objectives.opd.teacher_parts": {"expert": "after_tool"}},
        [
            ("set scale.context_parallel = 1", {"scale.context_parallel": 1}),
            ("leave teacher_parts out", {"objectives.opd.teacher_parts": {}}),
        ],
    ),
    Refusal(
        {
            f"{GRADIENT}.disagreement_share": 0.5, f"{GRADIENT}.teacher_coef": 0.0, f"{GRADIENT}.reward_coef": 1.0,
            _at("rollout.group_size"): 2,
        },
        [
            ("leave disagreement_share out", {f"{GRADIENT}.disagreement_share": 1.0}),
            ("set teacher_coef to another value", {f"{GRADIENT}.teacher_coef": 1.0}),
        ],
    ),
    Refusal(
        {f"{GRADIENT}.early_weight": 0.5, f"{GRADIENT}.reward_coef": 1.0, _at("rollout.group_size"): 2},
        [
            ("set reward_coef = 0", {f"{GRADIENT}.reward_coef": 0}),
            ("early_weight = 0", {f"{GRADIENT}.early_weight": 0}),
        ],
    ),
    Refusal(
        {**OWN_TOKENS, "teachers.mix": {"blend": {"expert": 0.5, "other": 0.5}}, "routing.words": "mix"},
        [
            ("leave it out", {"teachers.mix.blend": {"other": 1.0}}),
            ('set teachers.expert.tokenizer = "student"', {"teachers.expert.tokenizer": "student"}),
        ],
    ),
    Refusal(
        {**OWN_TOKENS, "teachers.expert.end": "map", "teachers.expert.quantisation": "int8"},
        [
            ("leave them out", {"teachers.expert.end": GONE, "teachers.expert.quantisation": GONE}),
            ('set tokenizer = "student"', {"teachers.expert.tokenizer": "student"}),
        ],
    ),
    Refusal(
        {**OWN_TOKENS, _at("rollout.policy"): "routed"},
        [
            ("let another one answer", {_at("rollout.policy"): "other"}),
            ('set teachers.expert.tokenizer = "student"', {"teachers.expert.tokenizer": "student"}),
        ],
    ),
    Refusal(
        {**OWN_TOKENS, "routing.sums": "other", f"{GRADIENT}.kl_coef": 0.1, f"{GRADIENT}.reference": "expert"},
        [
            ("name another teacher there", {f"{GRADIENT}.reference": "other"}),
            ('set teachers.expert.tokenizer = "student"', {"teachers.expert.tokenizer": "student"}),
        ],
    ),
    Refusal(
        {**OWN_TOKENS, **OF_HIDDEN},
        [
            ("take an objective of log-probs", {_at("objective"): "opd"}),
            ('or of a top-k (divergence, signal = "topk")', OF_TOPK),
            ('set teachers.expert.tokenizer = "student"', {"teachers.expert.tokenizer": "student"}),
        ],
    ),
    Refusal(
        {**OWN_TOKENS, f"{GRADIENT}.baseline": "topk"},
        [
            ("leave baseline out", {f"{GRADIENT}.baseline": GONE}),
            ('set teachers.expert.tokenizer = "student"', {"teachers.expert.tokenizer": "student"}),
        ],
    ),
    Refusal(
        {**OWN_TOKENS, **OF_TOPK, _at("score.topk_source"): "student"},
        [
            ('set score.topk_source = "teacher"', {_at("score.topk_source"): "teacher"}),
            ('teachers.expert.tokenizer = "student"', {"teachers.expert.tokenizer": "student"}),
        ],
    ),
    Refusal(
        {**OWN_TOKENS, _at("score.engine"): "vllm"},
        [
            ('set score.engine = "hf"', {_at("score.engine"): "hf"}),
            ('teachers.expert.tokenizer = "student"', {"teachers.expert.tokenizer": "student"}),
        ],
    ),
    Refusal(
        {**CONCURRENT, _at("data"): "reference"},
        [('set data = "rollout"', {_at("data"): "rollout"}), ("or false", {_at("concurrent"): False})],
    ),
    Refusal(
        {**CONCURRENT, _at("train.collapse_factor"): 4.0},
        [
            ("set concurrent = false", {_at("concurrent"): False}),
            ("leave collapse_factor out", {_at("train.collapse_factor"): GONE}),
        ],
    ),
    Refusal(
        {"retain.best_checkpoints": 1, "eval.every": 0},
        [
            ("set eval.every = 1", {"eval.every": 1}),
            ("leave best_checkpoints out", {"retain.best_checkpoints": GONE}),
        ],
    ),
    Refusal(
        {**CONCURRENT, "retain.best_checkpoints": 1},
        [
            ("set concurrent = false", {_at("concurrent"): False}),
            ("leave best_checkpoints out", {"retain.best_checkpoints": GONE}),
        ],
    ),
    Refusal(
        {**CONCURRENT, _at("plan.where"): "reward > 0"},
        [("set concurrent = false", {_at("concurrent"): False}), ("leave where out", {_at("plan.where"): GONE})],
    ),
    Refusal(
        {_at("plan.weight"): "1.0"},
        [
            ("set plan.limit to that number", {_at("plan.limit"): 8}),
            ("or plan.replay", {_at("plan.replay"): {"iterations": 1, "share": 0.25}}),
        ],
    ),
    Refusal(
        {_at("window_samples"): 16},
        [
            ('set data = "stored"', {_at("data"): "stored"}),
            ("leave window_samples out", {_at("window_samples"): GONE}),
        ],
    ),
    Refusal(
        {
            _at("window_samples"): 16, _at("data"): "stored",
            _at("plan.replay"): {"iterations": 2, "share": 0.5},
        },
        [("leave replay out", {_at("plan.replay"): GONE})],
    ),
    Refusal(
        {_at("plan.order"): "reward", _at("plan.strict_batches"): False, _at("rollout.group_size"): 1},
        [
            ("set strict_batches = true", {_at("plan.strict_batches"): True}),
            ("leave order out", {_at("plan.order"): GONE}),
        ],
    ),
    Refusal(
        {_at("train.lora.alpha"): 8.0},
        [("set r", {_at("train.lora.r"): 4}), ("leave the other keys out", {_at("train.lora"): {}})],
    ),
    Refusal(
        {_at("plan.strict_batches"): False, _at("rollout.group_size"): 2},
        [
            ("set plan.strict_batches = true", {_at("plan.strict_batches"): True}),
            ("rollout.group_size = 1", {_at("rollout.group_size"): 1}),
        ],
    ),
    Refusal(
        {_at("rollout.top_k"): 50},
        [
            ('set record = ["sampling_mask"]', {_at("rollout.record"): ["sampling_mask"]}),
            ("or top_p = 1 and top_k = 0", {_at("rollout.top_k"): 0}),
            ("give objective 'opd' a divergence instead", {"objectives.opd": {"divergence": {}}}),
        ],
    ),
    Refusal(
        {
            _at("rollout.top_k"): 50, _at("rollout.record"): ["sampling_mask"], _at("rollout.teacher_mix"): 0.2,
            f"{GRADIENT}.student_logprob": "current",
        },
        [("set teacher_mix = 0", {_at("rollout.teacher_mix"): 0.0})],
    ),
    Refusal(
        {**OF_HIDDEN, "engine.kind": "vllm", _at("rollout.record"): ["experts"]},
        [('set engine.kind = "hf"', {"engine.kind": "hf"}), ("record = []", {_at("rollout.record"): []})],
    ),
    Refusal(
        {**OF_HIDDEN, _at("rollout.teacher_mix"): 0.2, _at("rollout.policy"): "expert"},
        [('set rollout.policy = "self"', {_at("rollout.policy"): "self"})],
    ),
    Refusal(
        {**OF_HIDDEN, _at("rollout.teacher_mix"): 0.2, "engine.kind": "vllm"},
        [
            ('set engine.kind = "hf"', {"engine.kind": "hf"}),
            ("rollout.teacher_mix = 0", {_at("rollout.teacher_mix"): 0.0}),
        ],
    ),
    Refusal(
        {_at("rollout.teacher_mix"): 0.2},
        [('student_logprob = "current"', {f"{GRADIENT}.student_logprob": "current"})],
    ),
    Refusal(
        {_at("rollout.student_share"): 0.5},
        [
            ("set rollout.student_share = 1", {_at("rollout.student_share"): 1.0}),
            ("rollout.rest to a teacher", {_at("rollout.rest"): "expert"}),
        ],
    ),
    Refusal(
        {**OF_HIDDEN, _at("rollout.student_share"): 0.5, _at("rollout.group_size"): 2},
        [("set group_size = 1", {_at("rollout.group_size"): 1})],
    ),
    Refusal(
        {
            "objectives.exact.divergence": {"kind": "reverse", "signal": "topk"}, **OF_HIDDEN,
            _at("score.engine"): "vllm", _at("score.reads"): "extract_hidden_states",
            "teachers.expert.url": "http://127.0.0.1:8000/v1",
        },
        [
            ('set reads = "states"', {_at("score.reads"): "states"}),
            ("leave the url out", {"teachers.expert.url": GONE}),
        ],
    ),
    Refusal(
        {**OF_HIDDEN, _at("score.engine"): "vllm", _at("score.reads"): "prompt_logprobs"},
        [
            ('set score.reads = "states"', {_at("score.reads"): "states"}),
            ('or in the objective signal = "topk"', OF_TOPK),
        ],
    ),
    Refusal(
        {
            **OF_TOPK, _at("score.topk_source"): "student", _at("score.engine"): "vllm", _at("score.reads"): "echo",
            "teachers.expert.url": REMOTE["url"], "teachers.other.url": REMOTE["url"],
        },
        [
            ('set score.reads = "states"', {_at("score.reads"): "states"}),
            ('"sglang" (teachers behind SGLang servers)', {_at("score.reads"): "sglang"}),
            ('or score.topk_source = "teacher"', {_at("score.topk_source"): "teacher"}),
        ],
    ),
    Refusal(
        {**UNTIL, **CONCURRENT, _at("plan.groups"): "all"},
        [
            ("set concurrent = false", {_at("concurrent"): False, _at("plan.groups"): "spread"}),
            ("leave until out", {_at("rollout.until"): GONE}),
        ],
    ),
    Refusal(
        {**UNTIL, f"{GRADIENT}.reward_coef": 0.0},
        [
            ("give its policy_gradient a reward_coef", {f"{GRADIENT}.reward_coef": 1.0}),
            ("leave until out", {_at("rollout.until"): GONE}),
        ],
    ),
    Refusal({**UNTIL, _at("plan.groups"): "all"}, [('set plan.groups = "spread"', {_at("plan.groups"): "spread"})]),
    Refusal(
        {**UNTIL, _at("rollout.group_size"): 1}, [("set it to 2 or more", {_at("rollout.group_size"): 2})]
    ),
    Refusal(
        {**UNTIL, _at("rollout.prompts_per_iteration"): 60, _at("rollout.until.at_most"): 3},
        [
            ("lower prompts_per_iteration", {_at("rollout.prompts_per_iteration"): 42}),
            ("or at_most", {_at("rollout.until.at_most"): 2}),
            ("raise domains.*.train", {"domains.sums.train": 116}),
        ],
    ),
    Refusal(
        {**UNTIL, _at("rollout.prompts_per_iteration"): 100},
        [("lower prompts_per_iteration, or raise domains.*.train", {"domains.sums.train": 136})],
    ),
    Refusal(
        {**CONCURRENT, _at("discriminator"): {}, f"{GRADIENT}.reward_coef": 1.0, _at("rollout.group_size"): 2},
        [("set concurrent = false", {_at("concurrent"): False})],
    ),
    Refusal(
        {_at("data"): "reference", _at("discriminator"): {}, **OF_HIDDEN},
        [
            (
                'set data = "rollout", and reward_coef in objective',
                {
                    _at("data"): "rollout", "objectives.exact.policy_gradient": {"reward_coef": 1.0},
                    _at("rollout.group_size"): 2,
                },
            )
        ],
    ),
    Refusal({_at("plan.mixture"): {"sums": 1.0}}, [("give one (0 leaves it out)", {_at("plan.mixture.words"): 0.0})]),
    Refusal(
        {f"{GRADIENT}.teacher_coef": 0.0},
        [
            ("give a term another weight", {"objectives.opd.divergence": {}}),
            ("policy_gradient a teacher_coef", {f"{GRADIENT}.teacher_coef": 1.0}),
            ("reward_coef", {f"{GRADIENT}.reward_coef": 1.0, _at("rollout.group_size"): 2}),
            ("kl_coef other than 0", {f"{GRADIENT}.kl_coef": 0.1, f"{GRADIENT}.reference": "other"}),
        ],
    ),
    Refusal(
        {"objectives.opd.teacher_weights": {"expert": 0.0, "other": 0.0}},
        [("give one a weight above 0", {"objectives.opd.teacher_weights.other": 0.5})],
    ),
    Refusal(
        {f"{GRADIENT}.reward_coef": 1.0, _at("rollout.group_size"): 1},
        [
            ("set rollout.group_size to 2 or more", {_at("rollout.group_size"): 2}),
            ("reward_coef = 0", {f"{GRADIENT}.reward_coef": 0.0}),
        ],
    ),
    Refusal(
        {**_remote("expert"), "teachers.expert.revision": "main", _at("score.engine"): "vllm",
         _at("score.reads"): "prompt_logprobs"},
        [
            ("leave them out", {"teachers.expert.revision": GONE}),
            ("give source", {"teachers.expert.source": "models/expert"}),
        ],
    ),
    Refusal(
        {**_remote("expert"), "teachers.both": {"blend": {"expert": 0.5, "other": 0.5}}, "routing.sums": "both",
         **OF_HIDDEN},
        [("give teachers.expert.source", {"teachers.expert.source": "models/expert", "teachers.expert.url": GONE})],
    ),
    Refusal(
        {**_remote("expert"), _at("rollout.policy"): "routed", _at("score.engine"): "vllm",
         _at("score.reads"): "prompt_logprobs"},
        [
            ("give teachers.expert.source", {"teachers.expert.source": "models/expert"}),
            ("let another teacher", {_at("rollout.policy"): "other"}),
            ("or the student answer", {_at("rollout.policy"): "self"}),
        ],
    ),
    Refusal(
        _remote("expert"),
        [
            (
                'set score.engine = "vllm" and score.reads = "prompt_logprobs"',
                {_at("score.engine"): "vllm", _at("score.reads"): "prompt_logprobs"},
            ),
            (
                '(or "echo")',
                {_at("score.engine"): "vllm", _at("score.reads"): "echo", "teachers.other.url": REMOTE["url"]},
            ),
            ("give teachers.expert.source", {"teachers.expert.source": "models/expert"}),
        ],
    ),
    Refusal(
        {_at("score.engine"): "vllm", _at("score.reads"): "echo", "teachers.other.url": REMOTE["url"]},
        [
            ("give teachers.expert.url", {"teachers.expert.url": REMOTE["url"]}),
            ('set reads = "prompt_logprobs"', {_at("score.reads"): "prompt_logprobs"}),
        ],
    ),
    Refusal(
        {"teachers.expert.quantisation": "int8", _at("score.engine"): "vllm"},
        [
            ('set score.engine = "hf"', {_at("score.engine"): "hf"}),
            ('quantisation = "none"', {"teachers.expert.quantisation": "none"}),
        ],
    ),
    Refusal(
        {_at("train.master_weights"): True},
        [
            ('set student.dtype = "bfloat16"', {"student.dtype": "bfloat16"}),
            ("leave it out", {_at("train.master_weights"): GONE}),
        ],
    ),
    Refusal(
        {f"{GRADIENT}.own_token": False}, [("give a discount above 0", {f"{GRADIENT}.discount": 0.5})]
    ),
    Refusal(
        {"objectives.exact.divergence": {"kind": f"{__name__}:Own", "signal": "topk"}, **OF_HIDDEN},
        [("set signal = 'hidden'", {"objectives.exact.divergence.signal": "hidden"})],
    ),
    Refusal(
        {"objectives.opd": {}},
        [("give at least one of policy_gradient", {"objectives.opd.policy_gradient": {}})],
    ),
    Refusal(
        {"teachers.both": {"blend": {"expert": 0.5, "other": 0.5}, "quantisation": "int8"}},
        [
            (
                "give quantisation = 'int8' to members",
                {"teachers.both.quantisation": GONE, "teachers.expert.quantisation": "int8",
                 "teachers.other.quantisation": "int8"},
            )
        ],
    ),
    Refusal(
        {"engine.kind": "vllm", "engine.reload": True}, [("give its url", {"engine.url": "http://127.0.0.1:8000/v1"})]
    ),
    Refusal(
        {_at("rollout.record"): ["sampling_mask"]},
        [("set top_k to 1 ..", {_at("rollout.top_k"): 1000})],
    ),
    Refusal(
        {_at("score.engine"): "vllm", _at("score.options"): {"quantization": "fp8"}},
        [("give vLLM a quantised checkpoint as the teacher's source", {_at("score.options"): GONE})],
    ),
    Refusal(
        {"objectives.opd.teacher_weights": {"expert": [[5, 1.0], [3, 0.5]]}},
        [("with rising steps from 0 on", {"objectives.opd.teacher_weights.expert": [[3, 1.0], [5, 0.5]]})],
    ),
    Refusal(
        {"student.path": "models/student"},
        [("give exactly one of", {"student.config": GONE})],
    ),
]  # fmt: skip
ADVICE = re.compile(r"\b(?:lower|raise|set|give|run)\b")
NOT_HERE = {
    "learning_rate.py": "raised while training, for a plan of unknown length",
    "read.py": "what --set takes: tests/integration/test_bad_input.py",
    "recipes.py": "which job file there is: tests/integration/test_first_hour.py",
    "sweep.py": "values of a sweep: test_sweep_plan.py",
}
"""Files of the package whose messages are about something else than the values of a job, and where they are tried."""


def edited(*changes: dict[str, Any]) -> dict[str, Any]:
    """JOB with some values."""
    job = copy.deepcopy(JOB)
    for key, value in (item for edits in changes for item in edits.items()):
        *path, last = key.split(".")
        node: Any = job
        for part in path:
            stages = {one["name"]: one for one in node} if isinstance(node, list) else node
            node = stages.setdefault(part, {})
        if value is GONE:
            node.pop(last, None)
        else:
            node[last] = copy.deepcopy(value)
    return job


def message_of(edits: dict[str, Any]) -> str:
    with pytest.raises(JobFileError) as refused:
        check_job(edited(edits), where="job")
    return str(refused.value)


def test_the_job_is_sound() -> None:
    check_job(edited(), where="job")


@pytest.mark.parametrize("refusal", REFUSALS, ids=[", ".join(refusal.edits)[:60] for refusal in REFUSALS])
def test_what_a_refusal_advises_is_accepted(refusal: Refusal) -> None:
    message = message_of(refusal.edits)
    for words, edits in refusal.advised:
        assert words in message
        check_job(edited(refusal.edits, edits), where="job")


def test_every_message_with_advice_is_tried() -> None:
    """A new message in the checks of a job file needs a job here that brings it up."""
    messages = " ".join(message_of(refusal.edits) for refusal in REFUSALS)
    untried = []
    for file in sorted(Path(mopd_dataplane.job.__file__).parent.glob("*.py")):
        if file.name in NOT_HERE:
            continue
        for statement in ast.walk(ast.parse(file.read_text())):
            parts = _texts(statement)
            if ADVICE.search(" ".join(parts)) and max(parts, key=len) not in messages:
                untried.append(f"{file.name}:{statement.lineno}: {max(parts, key=len)}")
    assert untried == []


def _texts(statement: ast.AST) -> list[str]:
    """Fixed parts of a message that is raised, or of one that `problem` names."""
    is_named = isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "problem"
    if not (is_named or isinstance(statement, ast.Raise)):
        return []
    value = statement.value if isinstance(statement, ast.Assign) else statement.exc
    if value is None:
        return []
    return [one.value for one in ast.walk(value) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
