"""Jobs that are refused for what they say of stages, objectives, student and store, and what the messages advise."""

from __future__ import annotations

from typing import Any

from refused_job import CONCURRENT, GONE, GRADIENT, OF_HIDDEN, OF_TOPK, Refusal, at
from torch import Tensor

from mopd_dataplane.job.objectives import Divergence


class Own(Divergence):
    """A divergence of another package; it is looked up and never computed."""

    def rows(self, student: Tensor, teacher: Tensor, *, beta: float, alpha: float) -> Tensor:
        return student.sum(-1)


TWO_RANKS = {"scale.ranks": 2, "scale.context_parallel": 2}
UNTIL: dict[str, Any] = {
    f"{GRADIENT}.reward_coef": 1.0, at("rollout.group_size"): 4, at("rollout.prompts_per_iteration"): 8,
    at("rollout.until"): {"groups": 4, "at_most": 2}, at("plan.groups"): "spread",
}  # fmt: skip
HIDDEN = ("hidden_passes", "hidden_versions")
OF_STAGES = [
    Refusal(
        {"single_writer": True, "group_commit": True},
        [("set group_commit = false", {"group_commit": False}), ("leave single_writer out", {"single_writer": GONE})],
    ),
    Refusal(
        {**OF_HIDDEN, "retain.hidden_versions": 2, at("plan.max_staleness"): 3},
        [("set it above 3", {"retain.hidden_versions": 4}), ("or 0", {"retain.hidden_versions": 0})],
    ),
    Refusal(
        {**OF_HIDDEN, at("data"): "reference", at("iterations"): 3, "retain.hidden_passes": 2},
        [("set it to at least 3", {"retain.hidden_passes": 3}), ("or 0", {"retain.hidden_passes": 0})],
    ),
    Refusal(
        {
            **OF_HIDDEN, at("iterations"): 4, at("plan.replay"): {"iterations": 2, "share": 0.5},
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
            at("rollout.group_size"): 2,
        },
        [
            ("leave disagreement_share out", {f"{GRADIENT}.disagreement_share": 1.0}),
            ("set teacher_coef to another value", {f"{GRADIENT}.teacher_coef": 1.0}),
        ],
    ),
    Refusal(
        {f"{GRADIENT}.early_weight": 0.5, f"{GRADIENT}.reward_coef": 1.0, at("rollout.group_size"): 2},
        [
            ("set reward_coef = 0", {f"{GRADIENT}.reward_coef": 0}),
            ("early_weight = 0", {f"{GRADIENT}.early_weight": 0}),
        ],
    ),
    Refusal(
        {**CONCURRENT, at("data"): "reference"},
        [('set data = "rollout"', {at("data"): "rollout"}), ("or false", {at("concurrent"): False})],
    ),
    Refusal(
        {**CONCURRENT, at("train.collapse_factor"): 4.0},
        [
            ("set concurrent = false", {at("concurrent"): False}),
            ("leave collapse_factor out", {at("train.collapse_factor"): GONE}),
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
            ("set concurrent = false", {at("concurrent"): False}),
            ("leave best_checkpoints out", {"retain.best_checkpoints": GONE}),
        ],
    ),
    Refusal(
        {**CONCURRENT, at("plan.where"): "reward > 0"},
        [("set concurrent = false", {at("concurrent"): False}), ("leave where out", {at("plan.where"): GONE})],
    ),
    Refusal(
        {at("plan.weight"): "1.0"},
        [
            ("set plan.limit to that number", {at("plan.limit"): 8}),
            ("or plan.replay", {at("plan.replay"): {"iterations": 1, "share": 0.25}}),
        ],
    ),
    Refusal(
        {at("window_samples"): 16},
        [
            ('set data = "stored"', {at("data"): "stored"}),
            ("leave window_samples out", {at("window_samples"): GONE}),
        ],
    ),
    Refusal(
        {
            at("window_samples"): 16, at("data"): "stored",
            at("plan.replay"): {"iterations": 2, "share": 0.5},
        },
        [("leave replay out", {at("plan.replay"): GONE})],
    ),
    Refusal(
        {at("plan.order"): "reward", at("plan.strict_batches"): False, at("rollout.group_size"): 1},
        [
            ("set strict_batches = true", {at("plan.strict_batches"): True}),
            ("leave order out", {at("plan.order"): GONE}),
        ],
    ),
    Refusal(
        {at("train.lora.alpha"): 8.0},
        [("set r", {at("train.lora.r"): 4}), ("leave the other keys out", {at("train.lora"): {}})],
    ),
    Refusal(
        {at("plan.strict_batches"): False, at("rollout.group_size"): 2},
        [
            ("set plan.strict_batches = true", {at("plan.strict_batches"): True}),
            ("rollout.group_size = 1", {at("rollout.group_size"): 1}),
        ],
    ),
    Refusal(
        {at("rollout.top_k"): 50},
        [
            ('set record = ["sampling_mask"]', {at("rollout.record"): ["sampling_mask"]}),
            ("or top_p = 1 and top_k = 0", {at("rollout.top_k"): 0}),
            ("give objective 'opd' a divergence instead", {"objectives.opd": {"divergence": {}}}),
        ],
    ),
    Refusal(
        {
            at("rollout.top_k"): 50, at("rollout.record"): ["sampling_mask"], at("rollout.teacher_mix"): 0.2,
            f"{GRADIENT}.student_logprob": "current",
        },
        [("set teacher_mix = 0", {at("rollout.teacher_mix"): 0.0})],
    ),
    Refusal(
        {**OF_HIDDEN, "engine.kind": "vllm", at("rollout.record"): ["experts"]},
        [('set engine.kind = "hf"', {"engine.kind": "hf"}), ("record = []", {at("rollout.record"): []})],
    ),
    Refusal(
        {**OF_HIDDEN, at("rollout.teacher_mix"): 0.2, at("rollout.policy"): "expert"},
        [('set rollout.policy = "self"', {at("rollout.policy"): "self"})],
    ),
    Refusal(
        {**OF_HIDDEN, at("rollout.teacher_mix"): 0.2, "engine.kind": "vllm"},
        [
            ('set engine.kind = "hf"', {"engine.kind": "hf"}),
            ("rollout.teacher_mix = 0", {at("rollout.teacher_mix"): 0.0}),
        ],
    ),
    Refusal(
        {at("rollout.teacher_mix"): 0.2},
        [('student_logprob = "current"', {f"{GRADIENT}.student_logprob": "current"})],
    ),
    Refusal(
        {at("rollout.student_share"): 0.5},
        [
            ("set rollout.student_share = 1", {at("rollout.student_share"): 1.0}),
            ("rollout.rest to a teacher", {at("rollout.rest"): "expert"}),
        ],
    ),
    Refusal(
        {**OF_HIDDEN, at("rollout.student_share"): 0.5, at("rollout.group_size"): 2},
        [("set group_size = 1", {at("rollout.group_size"): 1})],
    ),
    Refusal(
        {**OF_HIDDEN, at("score.engine"): "vllm", at("score.reads"): "prompt_logprobs"},
        [
            ('set score.reads = "states"', {at("score.reads"): "states"}),
            ('or in the objective signal = "topk"', OF_TOPK),
        ],
    ),
    Refusal(
        {**UNTIL, **CONCURRENT, at("plan.groups"): "all"},
        [
            ("set concurrent = false", {at("concurrent"): False, at("plan.groups"): "spread"}),
            ("leave until out", {at("rollout.until"): GONE}),
        ],
    ),
    Refusal(
        {**UNTIL, f"{GRADIENT}.reward_coef": 0.0},
        [
            ("give its policy_gradient a reward_coef", {f"{GRADIENT}.reward_coef": 1.0}),
            ("leave until out", {at("rollout.until"): GONE}),
        ],
    ),
    Refusal({**UNTIL, at("plan.groups"): "all"}, [('set plan.groups = "spread"', {at("plan.groups"): "spread"})]),
    Refusal(
        {**UNTIL, at("rollout.group_size"): 1}, [("set it to 2 or more", {at("rollout.group_size"): 2})]
    ),
    Refusal(
        {**UNTIL, at("rollout.prompts_per_iteration"): 60, at("rollout.until.at_most"): 3},
        [
            ("lower prompts_per_iteration", {at("rollout.prompts_per_iteration"): 42}),
            ("or at_most", {at("rollout.until.at_most"): 2}),
            ("raise domains.*.train", {"domains.sums.train": 116}),
        ],
    ),
    Refusal(
        {**UNTIL, at("rollout.prompts_per_iteration"): 100},
        [("lower prompts_per_iteration, or raise domains.*.train", {"domains.sums.train": 136})],
    ),
    Refusal(
        {**CONCURRENT, at("discriminator"): {}, f"{GRADIENT}.reward_coef": 1.0, at("rollout.group_size"): 2},
        [("set concurrent = false", {at("concurrent"): False})],
    ),
    Refusal(
        {at("data"): "reference", at("discriminator"): {}, **OF_HIDDEN},
        [
            (
                'set data = "rollout", and reward_coef in objective',
                {
                    at("data"): "rollout", "objectives.exact.policy_gradient": {"reward_coef": 1.0},
                    at("rollout.group_size"): 2,
                },
            )
        ],
    ),
    Refusal({at("plan.mixture"): {"sums": 1.0}}, [("give one (0 leaves it out)", {at("plan.mixture.words"): 0.0})]),
    Refusal(
        {f"{GRADIENT}.teacher_coef": 0.0},
        [
            ("give a term another weight", {"objectives.opd.divergence": {}}),
            ("policy_gradient a teacher_coef", {f"{GRADIENT}.teacher_coef": 1.0}),
            ("reward_coef", {f"{GRADIENT}.reward_coef": 1.0, at("rollout.group_size"): 2}),
            ("kl_coef other than 0", {f"{GRADIENT}.kl_coef": 0.1, f"{GRADIENT}.reference": "other"}),
        ],
    ),
    Refusal(
        {"objectives.opd.teacher_weights": {"expert": 0.0, "other": 0.0}},
        [("give one a weight above 0", {"objectives.opd.teacher_weights.other": 0.5})],
    ),
    Refusal(
        {f"{GRADIENT}.reward_coef": 1.0, at("rollout.group_size"): 1},
        [
            ("set rollout.group_size to 2 or more", {at("rollout.group_size"): 2}),
            ("reward_coef = 0", {f"{GRADIENT}.reward_coef": 0.0}),
        ],
    ),
    Refusal(
        {at("train.master_weights"): True},
        [
            ('set student.dtype = "bfloat16"', {"student.dtype": "bfloat16"}),
            ("leave it out", {at("train.master_weights"): GONE}),
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
        {"engine.kind": "vllm", "engine.reload": True}, [("give its url", {"engine.url": "http://127.0.0.1:8000/v1"})]
    ),
    Refusal(
        {at("rollout.record"): ["sampling_mask"]},
        [("set top_k to 1 ..", {at("rollout.top_k"): 1000})],
    ),
    Refusal(
        {at("score.engine"): "vllm", at("score.options"): {"quantization": "fp8"}},
        [("give vLLM a quantised checkpoint as the teacher's source", {at("score.options"): GONE})],
    ),
    Refusal(
        {"objectives.opd.teacher_weights": {"expert": [[5, 1.0], [3, 0.5]]}},
        [("with rising steps from 0 on", {"objectives.opd.teacher_weights.expert": [[3, 1.0], [5, 0.5]]})],
    ),
]  # fmt: skip
