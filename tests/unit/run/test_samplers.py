"""Who answers which prompt: shares, mixing, and the job files that make no sense of them."""

from __future__ import annotations

from typing import Any

import pytest

from mopd_dataplane.errors import JobFileError
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import check_job
from mopd_dataplane.records import Prompt
from mopd_dataplane.run.iteration import Sampler, sampler_of

COUNT = 4000


def job(rollout: dict[str, Any], objective: dict[str, Any] | None = None, **stage: Any) -> Job:
    domain = {"source": "reasoning-gym", "dataset": "chain_sum", "train": 4}
    stages = [
        {"name": "base", "data": "reference", "plan": {"batch_samples": 2}},
        {"name": "student", "start": "base", "objective": "mine", "rollout": rollout, "plan": {"batch_samples": 2}}
        | stage,
    ]
    teachers = {name: {"source": "stage:base"} for name in ("summer", "poet")}
    raw = {"name": "small", "store": "runs/x", "student": {"path": "somewhere"}, "stages": stages}
    raw |= {"domains": {"sums": domain, "words": domain}, "routing": {"sums": "summer", "words": "poet"}}
    return check_job(raw | {"teachers": teachers, "objectives": {"mine": objective or {"divergence": {}}}}, where="j")


def prompts() -> list[Prompt]:
    return [Prompt(prompt_id=f"p{i}", domain=("sums", "words")[i % 2], text="x") for i in range(COUNT)]


def samplers(rollout: dict[str, Any], iteration: int = 0) -> list[Sampler]:
    parsed_job = job(rollout)
    return [sampler_of(parsed_job, parsed_job.stage("student"), prompt, iteration) for prompt in prompts()]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_students_share_is_drawn_prompt_by_prompt(share: float) -> None:
    draws = samplers({"student_share": share})
    own = sum(sampler == Sampler("self") for sampler in draws)
    assert own + sum(sampler == Sampler("reference") for sampler in draws) == COUNT
    assert own / COUNT == pytest.approx(share, abs=0.03)  # four standard deviations
    assert samplers({"student_share": share}) == draws
    if 0 < share < 1:
        assert samplers({"student_share": share}, iteration=1) != draws


def test_the_rest_may_be_a_teachers() -> None:
    routed = samplers({"student_share": 0.5, "rest": "routed"})
    assert {s.policy for s in routed[::2]} == {"self", "summer"}
    assert {s.policy for s in routed[1::2]} == {"self", "poet"}
    assert {s.writer_prefix for s in routed} == {"engine-", "teacher-summer-", "teacher-poet-"}


def test_each_students_draw_is_mixed_with_its_prompts_teacher() -> None:
    """One log a mixture: a sample continues on the mixture that began it."""
    draws = samplers({"teacher_mix": 0.2, "student_share": 0.5})
    assert set(draws[::2]) == {Sampler("self", "summer"), Sampler("reference")}
    assert set(draws[1::2]) == {Sampler("self", "poet"), Sampler("reference")}
    assert Sampler("self", "poet").writer_prefix == "mixed-poet-"


GRADIENT = {"policy_gradient": {"reward_coef": 1.0}}


@pytest.mark.parametrize(
    ("rollout", "objective", "stage", "said"),
    [
        ({"teacher_mix": 0.2}, GRADIENT, {}, r'log-prob is the mixture\'s.*student_logprob = "current"'),
        ({"teacher_mix": 0.2, "policy": "summer"}, None, {}, 'set rollout.policy = "self"'),
        ({"teacher_mix": 1.0}, None, {}, "teacher_mix"),
        ({"top_p": 0.9}, GRADIENT, {}, "top_p = 0.9, top_k = 0 the sampler's log-probs.*ratios of a policy gradient"),
        ({"top_k": 20}, GRADIENT, {}, "top_p = 1, top_k = 20 the sampler's log-probs"),
        ({"top_k": 20, "record": ["sampling_mask"], "teacher_mix": 0.2}, None, {}, "drawn from what two models keep"),
        ({"top_p": 0.9, "record": ["sampling_mask"]}, None, {}, r"set top_k to 1 \.\. 65536, found 0"),
        ({"top_k": 20, "record": ["suport"]}, None, {}, "record"),
        ({"record": ["experts"], "teacher_mix": 0.2}, None, {}, "has experts of its own, which the student cannot"),
        ({"record": ["experts"], "policy": "routed"}, None, {}, "let the student alone sample"),
        ({"record": ["experts"], "student_share": 0.5, "rest": "poet"}, None, {}, "let the student alone sample"),
        ({"student_share": 0.5, "rest": "poeet"}, None, {}, "rollout.rest: no teacher 'poeet'.*'poet'"),
        ({"student_share": 0.5}, GRADIENT, {}, "no sampler log-prob for a policy gradient"),
        ({"student_share": 0.5, "group_size": 2}, None, {}, "one reference answer, not 2"),
        ({"teacher_mix": 0.2}, None, {"routing": {"sums": "summer"}}, "no teacher for domain 'words'"),
        ({}, GRADIENT, {"discriminator": {"text": "bass"}}, "no earlier stage 'bass'.*'base'"),
        ({}, GRADIENT, {"discriminator": {"text": "student"}}, "no earlier stage 'student'"),
        ({}, GRADIENT, {"discriminator": {}, "concurrent": True}, "learns between rollout and training"),
        ({}, None, {"discriminator": {}}, "a discriminator rewards rollouts"),
        ({}, GRADIENT, {"discriminator": {}, "data": "reference"}, "a discriminator rewards rollouts"),
    ],
)
def test_settings_that_contradict_one_another_are_named(
    rollout: dict[str, Any], objective: dict[str, Any] | None, stage: dict[str, Any], said: str
) -> None:
    with pytest.raises(JobFileError, match=said):
        job(rollout, objective, **stage)


def test_a_divergence_may_be_trained_on_cut_samples() -> None:
    assert job({"top_p": 0.9, "top_k": 20}).stage("student").rollout.top_k == 20


def test_a_policy_gradient_may_be_trained_on_cut_samples_whose_sampling_masks_are_stored() -> None:
    parsed_job = job({"top_p": 0.9, "top_k": 20, "record": ["sampling_mask"], "group_size": 2}, GRADIENT)
    assert parsed_job.stage("student").rollout.record == ("sampling_mask",)
    raw = parsed_job.model_dump(mode="json") | {"engine": {"kind": "vllm"}}
    with pytest.raises(
        JobFileError, match=r"engine.kind = 'vllm' does not say what record = \['sampling_mask'\] asks for"
    ):
        check_job(raw, where="j")


def test_a_mixture_is_drawn_by_the_hugging_face_engine_only() -> None:
    raw = job({"teacher_mix": 0.2}).model_dump(mode="json") | {"engine": {"kind": "vllm"}}
    with pytest.raises(JobFileError, match=r"stages.student.*teacher_mix = 0.2.*engine.kind = 'vllm'.*set engine.kind"):
        check_job(raw, where="j")
    raw["stages"][1]["rollout"]["teacher_mix"] = 0.0
    assert check_job(raw, where="j").engine.kind == "vllm"


def test_a_mixture_needs_its_teachers_to_be_trained_before() -> None:
    """Also where the objective itself asks no teacher."""
    supervised = {"cross_entropy": {}}
    raw = job({"teacher_mix": 0.2}, supervised).model_dump(mode="json")
    raw["stages"] = [{**raw["stages"][1], "start": "init"}, raw["stages"][0]]
    with pytest.raises(JobFileError, match=r"teacher '\w+' comes from stage 'base', which runs later"):
        check_job(raw, where="j")
