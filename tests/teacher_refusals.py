"""Jobs that are refused for what they say of teachers, and what the messages advise."""

from __future__ import annotations

from typing import Any

from refused_job import CONCURRENT, GONE, GRADIENT, OF_HIDDEN, OF_TOPK, Refusal, at

REMOTE = {"source": GONE, "url": "http://127.0.0.1:8000/v1"}


def remote(teacher: str) -> dict[str, Any]:
    return {f"teachers.{teacher}.{key}": value for key, value in REMOTE.items()}


OWN_TOKENS = {"teachers.expert.tokenizer": "own"}
FOLLOWING = {"teachers.expert": {"source": "student", "follows": 2}}
STAYS = ("set teachers.expert.follows = 0", {"teachers.expert.follows": 0})
OF_TEACHERS = [
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
        {**FOLLOWING, at("rollout.policy"): "routed"},
        [("let the student answer", {at("rollout.policy"): "self"}), STAYS],
    ),
    Refusal({**FOLLOWING, at("data"): "reference"}, [STAYS]),
    Refusal({**FOLLOWING, **CONCURRENT}, [("set concurrent = false", {at("concurrent"): False}), STAYS]),
    Refusal(
        {**FOLLOWING, at("score.engine"): "vllm"},
        [('set score.engine = "hf"', {at("score.engine"): "hf"}), STAYS],
    ),
    Refusal(
        {**FOLLOWING, **OF_HIDDEN},
        [
            ("take an objective of log-probs (policy_gradient)", {at("objective"): "opd"}),
            ('or of a top-k (divergence, signal = "topk")', OF_TOPK),
            STAYS,
        ],
    ),
    Refusal(
        {"teachers.expert": {"source": "student", "follows": 1, "average": 0.5}, at("train.lora"): {"r": 4}},
        [("set teachers.expert.average = 1", {"teachers.expert.average": 1}),
         ("set teachers.expert.follows = 0", {"teachers.expert.follows": 0, "teachers.expert.average": 1})],
    ),
    Refusal(
        {"teachers.both": {"blend": {"expert": 0.5, "other": 0.5}, "end": "map"}},
        [("give end to its members", {"teachers.both.end": GONE, "teachers.expert.end": "map"})],
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
        {**OWN_TOKENS, at("rollout.policy"): "routed"},
        [
            ("let another one answer", {at("rollout.policy"): "other"}),
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
            ("take an objective of log-probs", {at("objective"): "opd"}),
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
        {**OWN_TOKENS, **OF_TOPK, at("score.topk_source"): "student"},
        [
            ('set score.topk_source = "teacher"', {at("score.topk_source"): "teacher"}),
            ('teachers.expert.tokenizer = "student"', {"teachers.expert.tokenizer": "student"}),
        ],
    ),
    Refusal(
        {**OWN_TOKENS, at("score.engine"): "vllm"},
        [
            ('set score.engine = "hf"', {at("score.engine"): "hf"}),
            ('teachers.expert.tokenizer = "student"', {"teachers.expert.tokenizer": "student"}),
        ],
    ),
    Refusal(
        {
            "objectives.exact.divergence": {"kind": "reverse", "signal": "topk"}, **OF_HIDDEN,
            at("score.engine"): "vllm", at("score.reads"): "extract_hidden_states",
            "teachers.expert.url": "http://127.0.0.1:8000/v1",
        },
        [
            ('set reads = "states"', {at("score.reads"): "states"}),
            ("leave the url out", {"teachers.expert.url": GONE}),
        ],
    ),
    Refusal(
        {
            **OF_TOPK, at("score.topk_source"): "student", at("score.engine"): "vllm", at("score.reads"): "echo",
            "teachers.expert.url": REMOTE["url"], "teachers.other.url": REMOTE["url"],
        },
        [
            ('set score.reads = "states"', {at("score.reads"): "states"}),
            ('"sglang" (teachers behind SGLang servers)', {at("score.reads"): "sglang"}),
            ('or score.topk_source = "teacher"', {at("score.topk_source"): "teacher"}),
        ],
    ),
    Refusal(
        {**remote("expert"), "teachers.expert.revision": "main", at("score.engine"): "vllm",
         at("score.reads"): "prompt_logprobs"},
        [
            ("leave them out", {"teachers.expert.revision": GONE}),
            ("give source", {"teachers.expert.source": "models/expert"}),
        ],
    ),
    Refusal(
        {**remote("expert"), "teachers.both": {"blend": {"expert": 0.5, "other": 0.5}}, "routing.sums": "both",
         **OF_HIDDEN},
        [("give teachers.expert.source", {"teachers.expert.source": "models/expert", "teachers.expert.url": GONE})],
    ),
    Refusal(
        {**remote("expert"), at("rollout.policy"): "routed", at("score.engine"): "vllm",
         at("score.reads"): "prompt_logprobs"},
        [
            ("give teachers.expert.source", {"teachers.expert.source": "models/expert"}),
            ("let another teacher", {at("rollout.policy"): "other"}),
            ("or the student answer", {at("rollout.policy"): "self"}),
        ],
    ),
    Refusal(
        remote("expert"),
        [
            (
                'set score.engine = "vllm" and score.reads = "prompt_logprobs"',
                {at("score.engine"): "vllm", at("score.reads"): "prompt_logprobs"},
            ),
            (
                '(or "echo")',
                {at("score.engine"): "vllm", at("score.reads"): "echo", "teachers.other.url": REMOTE["url"]},
            ),
            ("give teachers.expert.source", {"teachers.expert.source": "models/expert"}),
        ],
    ),
    Refusal(
        {at("score.engine"): "vllm", at("score.reads"): "echo", "teachers.other.url": REMOTE["url"]},
        [
            ("give teachers.expert.url", {"teachers.expert.url": REMOTE["url"]}),
            ('set reads = "prompt_logprobs"', {at("score.reads"): "prompt_logprobs"}),
        ],
    ),
    Refusal(
        {"teachers.expert.quantisation": "int8", at("score.engine"): "vllm"},
        [
            ('set score.engine = "hf"', {at("score.engine"): "hf"}),
            ('quantisation = "none"', {"teachers.expert.quantisation": "none"}),
        ],
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
        {"student.path": "models/student"},
        [("give exactly one of", {"student.config": GONE})],
    ),
]  # fmt: skip
