"""Checks across the sections of a job: names exist and come in order, and settings are compatible."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mopd_dataplane.errors import JobFileError, require_known
from mopd_dataplane.job.check_following import check_following
from mopd_dataplane.job.check_tokenizers import check_own_tokenizers, check_own_tokenizers_of_stage
from mopd_dataplane.job.schedules import Weight, weight_at
from mopd_dataplane.rollout.engines.kinds import ENGINES, engine_kind, kinds_that
from mopd_dataplane.score.engines import CHOSEN_READS, LOGPROB_READS, SCORING, SERVER_READS, engines_that

if TYPE_CHECKING:
    from mopd_dataplane.job.job import Job, Stage

_require = partial(require_known, kind=JobFileError)


def check_references(job: Job, where: str) -> None:
    """Raise JobFileError, naming file and key, for the first setting that contradicts the rest of the job."""
    names = [stage.name for stage in job.stages]
    if len(set(names)) != len(names):
        raise JobFileError(f"{where}: two stages share a name: {sorted(n for n in names if names.count(n) > 1)[0]!r}")
    _check_writers(job, where)
    _check_engine(job, where)
    _check_teachers(job, where)
    check_own_tokenizers(job, where)
    for number, stage in enumerate(job.stages):
        at, earlier = f"{where}: stages.{stage.name}", names[:number]
        _require(stage.start, ["init", *earlier], f"{at}.start: no earlier stage")
        for domain in stage.domains:
            _require(domain, job.domains, f"{at}.domains: unknown domain")
        _require(stage.objective, [*job.objectives, "cross-entropy"], f"{at}.objective: no objective")
        if stage.concurrent and stage.data != "rollout":
            raise JobFileError(
                f'{at}.concurrent: data = "{stage.data}" has no rollout to run beside; set data = "rollout", or false'
            )
        if stage.concurrent and stage.train.collapse_factor:
            raise JobFileError(
                f"{at}.train.collapse_factor: a concurrent stage trains while it samples, so that no iteration ends "
                "before it is trained on; set concurrent = false, or leave collapse_factor out"
            )
        _check_windows(stage, at)
        _check_retention(job, stage, where)
        _check_best(job, stage, where)
        _check_replay(job, stage, at)
        _check_scale(job, stage, at)
        _check_choices(stage, at)
        _check_lora(stage, at)
        _check_memory(job, stage, at)
        if stage.data == "rollout":
            _check_rollout(job, stage, at)
        for source in stage.sources:
            if not source.store:
                _require(source.stage, earlier, f"{at}.data.from: no earlier stage")
        _check_discriminator(job, stage, earlier, at)
        _check_reads(job, stage, at)
        _check_weights(job, stage, at)
        _check_routing(job, stage, earlier, at)
        _check_effect(job, stage, at)


def _check_writers(job: Job, where: str) -> None:
    """Refuse group commit for a store that promises a single writer."""
    if job.single_writer and job.group_commit:
        raise JobFileError(
            f"{where}: group_commit = true is for many writers, and single_writer = true promises that one process "
            "writes, as a server that ignores If-None-Match needs; set group_commit = false, or leave single_writer out"
        )


def _check_engine(job: Job, where: str) -> None:
    """Refuse keys of `[engine]` that its kind does not have."""
    keys_of_kinds = {key for kind in ENGINES.values() for key in kind.settings}
    foreign = keys_of_kinds - set(engine_kind(job.engine.kind).settings)
    if strange := sorted(foreign & job.engine.model_dump(exclude_defaults=True).keys()):
        able = " or ".join(f'"{name}"' for name, kind in ENGINES.items() if set(strange) <= set(kind.settings))
        raise JobFileError(
            f'{where}: engine: {", ".join(strange)}: only for kind = {able}, and it is "{job.engine.kind}"; leave '
            f"{'it' if len(strange) == 1 else 'them'} out, or change kind"
        )


def _check_teachers(job: Job, where: str) -> None:
    for name, teacher in job.teachers.items():
        if teacher.end != "own" and (teacher.blend or teacher.url):
            problem = "a blend has no LM head of its own; give end to its members"
            if teacher.url:
                problem = 'end needs the teacher\'s LM head here; leave url empty, or end at "own"'
            raise JobFileError(f"{where}: teachers.{name}.end = {teacher.end!r}: {problem}")
        if teacher.is_remote and (teacher.quantisation != "none" or teacher.revision):
            raise JobFileError(
                f"{where}: teachers.{name}: quantisation and revision are for weights that are here, and this teacher "
                "has only a url; leave them out, or give source"
            )
        for member in teacher.blend:
            _require(member, job.teachers, f"{where}: teachers.{name}.blend names no teacher")
            if job.teachers[member].is_remote:
                raise JobFileError(
                    f"{where}: teachers.{name}.blend: {member!r} has only a url, and a blend adds logits; give "
                    f"teachers.{member}.source"
                )
            if job.teachers[member].blend:
                raise JobFileError(f"{where}: teachers.{name}.blend: {member!r} is a blend itself; name its members")


def _check_windows(stage: Stage, at: str) -> None:
    if not stage.window_samples:
        return
    if not stage.has_stored_samples:
        raise JobFileError(
            f"{at}.window_samples = {stage.window_samples} cuts stored samples into windows, and this stage has "
            f'data = "{stage.data}"; set data = "stored", or leave window_samples out'
        )
    if stage.plan.replay:
        raise JobFileError(
            f"{at}.plan.replay: with window_samples every sample comes again in the next pass; leave replay out"
        )


def _check_retention(job: Job, stage: Stage, where: str) -> None:
    bound = job.retain.hidden_versions
    if 0 < bound <= stage.plan.max_staleness or (stage.data != "rollout" and 0 < bound < stage.iterations):
        raise JobFileError(
            f"{where}: retain.hidden_versions = {bound} frees hidden states that stage {stage.name!r} still needs; "
            f"set it above {max(stage.plan.max_staleness, stage.iterations - 1)}, or 0"
        )
    passes = stage.iterations * stage.train.epochs
    if stage.data != "rollout" and not stage.window_samples and 0 < job.retain.hidden_passes < passes:
        raise JobFileError(
            f"{where}: retain.hidden_passes = {job.retain.hidden_passes} frees hidden states before stage "
            f"{stage.name!r} has passed over its data {passes} times; set it to at least {passes}, or 0"
        )


def _check_best(job: Job, stage: Stage, where: str) -> None:
    """Refuse to keep the checkpoints of the best versions where none is evaluated while it is still there."""
    if not job.retain.best_checkpoints:
        return
    if not job.eval.every:
        raise JobFileError(
            f"{where}: retain.best_checkpoints = {job.retain.best_checkpoints} compares versions by their evaluations, "
            "and eval.every = 0 evaluates the last version alone; set eval.every = 1, or leave best_checkpoints out"
        )
    if stage.concurrent:
        raise JobFileError(
            f"{where}: retain.best_checkpoints = {job.retain.best_checkpoints}: the versions of concurrent stage "
            f"{stage.name!r} are evaluated when it has ended; set concurrent = false, or leave best_checkpoints out"
        )


def _check_replay(job: Job, stage: Stage, at: str) -> None:
    """Refuse a retention that frees the hidden states of samples that may be replayed."""
    replay, retain = stage.plan.replay, job.retain
    if replay is None or stage.data != "rollout" or "hidden" not in job.objective(stage).signals:
        return
    if retain.hidden_passes or 0 < retain.hidden_versions <= replay.iterations:
        raise JobFileError(
            f"{at}.plan.replay: samples of {replay.iterations} iterations before may be trained on again, and retain "
            f"frees hidden states earlier (hidden_passes = {retain.hidden_passes}, hidden_versions = "
            f"{retain.hidden_versions}); set hidden_passes = 0 and hidden_versions to 0 or above {replay.iterations}"
        )


def _check_scale(job: Job, stage: Stage, at: str) -> None:
    term = job.objective(stage).policy_gradient
    if job.scale.context_parallel > 1 and term is not None and term.correction == "mis":
        raise JobFileError(
            f'{at}: correction = "mis" keeps or drops a sequence by all its tokens, which the ranks of '
            'scale.context_parallel do not share; set scale.context_parallel = 1, or correction = "icepop"'
        )
    if job.scale.context_parallel > 1 and term is not None and term.discount:
        raise JobFileError(
            f"{at}: objective {stage.objective!r} sums over later tokens (discount = {term.discount}), which the "
            "ranks of scale.context_parallel do not share; set scale.context_parallel = 1, or discount = 0"
        )
    if job.scale.context_parallel > 1 and term is not None and term.early_weight:
        raise JobFileError(
            f"{at}: early_weight = {term.early_weight} compares all tokens of a sample, which the ranks of "
            "scale.context_parallel do not share; set scale.context_parallel = 1, or early_weight = 0"
        )
    parts = [part for part in job.objective(stage).teacher_parts.values() if part != "all"]
    if job.scale.context_parallel > 1 and parts:
        raise JobFileError(
            f"{at}: teacher_parts = {parts[0]!r} looks at the tokens before, which the ranks of scale.context_parallel "
            "do not share; set scale.context_parallel = 1, or leave teacher_parts out"
        )
    for key, share in term.shares.items() if job.scale.context_parallel > 1 and term is not None else ():
        raise JobFileError(
            f"{at}: {key} = {share:g} compares all tokens of a sample, which the ranks of scale.context_parallel do "
            f"not share; set scale.context_parallel = 1, or {key} = 1"
        )


def _check_choices(stage: Stage, at: str) -> None:
    plan = stage.plan
    choices = {"where": plan.where, "groups": plan.groups != "all", "limit": plan.limit, "weight": plan.weight,
               "order": plan.order, "replay": plan.replay}  # fmt: skip
    for key in (key for key, value in choices.items() if value and stage.concurrent):
        raise JobFileError(
            f"{at}.plan.{key}: a concurrent stage plans samples in the order in which they were begun, before the "
            f"others of their domain are there to compare them with; set concurrent = false, or leave {key} out"
        )
    if plan.weight and not (plan.limit or plan.replay):
        raise JobFileError(
            f"{at}.plan.weight = {plan.weight!r:.200} says how likely a sample is drawn, but not how many are; set "
            "plan.limit to that number, or plan.replay"
        )
    if plan.order and not plan.strict_batches:
        raise JobFileError(
            f"{at}.plan.order: with plan.strict_batches = false packs are shuffled, not samples; set strict_batches = "
            "true, or leave order out"
        )


def _check_lora(stage: Stage, at: str) -> None:
    lora = stage.train.lora
    if not lora.target_modules:
        raise JobFileError(f'{at}.train.lora.target_modules is empty; name some modules, or "all-linear"')
    if not lora.r and lora != type(lora)():
        raise JobFileError(f"{at}.train.lora: r = 0 trains the weights themselves; set r, or leave the other keys out")


def _check_memory(job: Job, stage: Stage, at: str) -> None:
    train = stage.train
    if not train.master_weights:
        return
    if train.offload:
        problem = "train.offload has the float32 copy on the host; leave one of the two out"
    elif train.lora.r:
        problem = "an adapter is trained in float32, and its base not at all; leave master_weights out"
    elif job.student.dtype == "float32":
        problem = 'weights in float32 need no copy in float32; set student.dtype = "bfloat16", or leave it out'
    else:
        return
    raise JobFileError(f"{at}.train.master_weights = true: {problem}")


def _check_rollout(job: Job, stage: Stage, at: str) -> None:
    rollout, gradient = stage.rollout, job.objective(stage).policy_gradient
    for key, others in (("policy", ("self",)), ("rest", ("reference",))):
        _require(getattr(rollout, key), [*others, "routed", *job.teachers], f"{at}.rollout.{key}: no teacher")
    if rollout.group_size > 1 and not stage.plan.strict_batches:
        raise JobFileError(
            f"{at}: rollout.group_size = {rollout.group_size} keeps groups in one step, which "
            "plan.strict_batches = false cannot; set plan.strict_batches = true, or rollout.group_size = 1"
        )
    if gradient and (rollout.top_p < 1 or rollout.top_k) and "sampling_mask" not in rollout.record:
        raise JobFileError(
            f"{at}: under rollout.top_p = {rollout.top_p:g}, top_k = {rollout.top_k} the sampler's log-probs are those "
            "of the tokens it keeps, the trainer's those of all, so the ratios of a policy gradient would be wrong; "
            'set record = ["sampling_mask"] to store what it keeps, or top_p = 1 and top_k = 0, or give objective '
            f"{stage.objective!r} a divergence instead"
        )
    if "sampling_mask" in rollout.record and rollout.teacher_mix:
        raise JobFileError(
            f"{at}: under rollout.teacher_mix = {rollout.teacher_mix} a token is drawn from what two models keep, "
            'not from what the student keeps; take "sampling_mask" out of rollout.record, or set teacher_mix = 0'
        )
    _check_until(job, stage, at)
    kind, recorded_kinds = engine_kind(job.engine.kind), set(rollout.record)
    if not recorded_kinds <= set(kind.records):
        raise JobFileError(
            f"{at}: engine.kind = {job.engine.kind!r} does not say what record = {list(rollout.record)} asks for; "
            f"set engine.kind = {kinds_that(lambda one: recorded_kinds <= set(one.records))}, or record = "
            f"{list(kind.records)}"
        )
    others_write = rollout.policy != "self" or (rollout.student_share < 1 and rollout.rest != "reference")
    if "experts" in rollout.record and (rollout.teacher_mix or others_write):
        raise JobFileError(
            f"{at}: a teacher that writes, or helps to write, samples has experts of its own, which the student cannot "
            'follow; take "experts" out of rollout.record, or let the student alone sample'
        )
    if rollout.teacher_mix and rollout.policy != "self":
        raise JobFileError(f'{at}: rollout.teacher_mix mixes a teacher into the student; set rollout.policy = "self"')
    if rollout.teacher_mix and not kind.mixes:
        raise JobFileError(
            f"{at}: rollout.teacher_mix = {rollout.teacher_mix} draws each token from two models, which engine.kind = "
            f"{job.engine.kind!r} cannot; set engine.kind = {kinds_that(lambda kind: kind.mixes)}, or "
            "rollout.teacher_mix = 0"
        )
    if rollout.teacher_mix and gradient and gradient.teacher_coef and gradient.student_logprob == "sampler":
        raise JobFileError(
            f"{at}: under rollout.teacher_mix the sampler's log-prob is the mixture's, not the student's; set "
            f'objectives.{stage.objective}.policy_gradient.student_logprob = "current"'
        )
    if rollout.student_share < 1 and rollout.rest == "reference":
        if gradient:
            raise JobFileError(
                f"{at}: reference answers have no sampler log-prob for a policy gradient; set rollout.student_share = "
                "1, or rollout.rest to a teacher"
            )
        if rollout.group_size > 1:
            raise JobFileError(f"{at}: a prompt has one reference answer, not {rollout.group_size}: set group_size = 1")


def _check_reads(job: Job, stage: Stage, at: str) -> None:
    served = [name for name, teacher in job.teachers.items() if teacher.url]
    if stage.score.reads == "extract_hidden_states" and served:
        raise JobFileError(
            f'{at}.score.reads = "extract_hidden_states" is for teachers that vLLM runs on this machine, but teacher '
            f'{served[0]!r} has a url; set reads = "states" (a pooling server), or leave the url out'
        )
    score = stage.score
    reads_text = not SCORING[score.engine].here and score.reads in LOGPROB_READS
    if reads_text and "hidden" in job.objective(stage).signals:
        raise JobFileError(
            f'{at}: objective {stage.objective!r} needs hidden states, and score.reads = "{score.reads}" returns '
            'log-probs only; set score.reads = "states", or in the objective signal = "topk"'
        )
    is_students = score.topk_source == "student" and "topk" in job.objective(stage).signals
    if is_students and reads_text and score.reads not in CHOSEN_READS:
        raise JobFileError(
            f"{at}: score.topk_source = \"student\" needs a teacher's log-probs of the student's likeliest tokens, and "
            f'score.reads = "{score.reads}" returns those of the teacher\'s own only; set score.reads = "states", '
            f'"sglang" (teachers behind SGLang servers), or score.topk_source = "teacher"'
        )


def _check_until(job: Job, stage: Stage, at: str) -> None:
    """Refuse `rollout.until` where rewards cannot end the sampling, or no further prompts are left."""
    rollout, until = stage.rollout, stage.rollout.until
    if until is None:
        return
    total = sum(job.domains[name].train for name in job.domains_of(stage))
    counted = all(job.domains[name].source != "store" for name in job.domains_of(stage))
    count = rollout.prompts_per_iteration
    if stage.concurrent:
        problem = "a concurrent stage samples before rewards are known; set concurrent = false, or leave until out"
    elif stage.discriminator:
        problem = "a discriminator rewards an iteration after all of it is sampled; leave one of the two out"
    elif not job.objective(stage).needs_rewards:
        problem = (
            f"objective {stage.objective!r} trains on no rewards; give its policy_gradient a reward_coef, or leave "
            "until out"
        )
    elif rollout.group_size == 1:
        problem = "rollout.group_size = 1, and the rewards of a group of one never differ; set it to 2 or more"
    elif stage.plan.groups != "spread":
        problem = (
            f"plan.groups = {stage.plan.groups!r} also trains on groups whose rewards are all equal; set plan.groups = "
            '"spread"'
        )
    elif not count or (counted and count * until.at_most > total):
        fewer = " or at_most" if 2 * (count or total) <= total else ""  # 2 is the least
        problem = (
            f"at_most = {until.at_most} times rollout.prompts_per_iteration = {count or total} are more than the "
            f"{total} training prompts of the stage's domains; lower prompts_per_iteration{fewer}, or raise "
            "domains.*.train"
        )
    else:
        return
    raise JobFileError(f"{at}.rollout.until: {problem}")


def _check_discriminator(job: Job, stage: Stage, earlier: list[str], at: str) -> None:
    if stage.discriminator is None:
        return
    _require(stage.discriminator.text, ["reference", *earlier], f"{at}.discriminator.text: no earlier stage")
    if stage.concurrent:
        raise JobFileError(f"{at}: a discriminator learns between rollout and training; set concurrent = false")
    if stage.data != "rollout" or not job.objective(stage).needs_rewards:
        raise JobFileError(
            f'{at}: a discriminator rewards rollouts; set data = "rollout", and reward_coef in objective '
            f"{stage.objective!r}"
        )


def _check_weights(job: Job, stage: Stage, at: str) -> None:
    domains = job.domains_of(stage)
    for domain in domains if stage.plan.mixture else ():
        if domain not in stage.plan.mixture:
            raise JobFileError(f"{at}.plan.mixture: domain {domain!r} has no weight; give one (0 leaves it out)")
    for domain in stage.plan.mixture:
        _require(domain, domains, f"{at}.plan.mixture: the stage has no domain")
    for teacher in job.objective(stage).teacher_weights:
        _require(teacher, job.teachers, f"{at}: objective {stage.objective!r} gives a weight to no known teacher,")
    for teacher in job.objective(stage).teacher_parts:
        _require(teacher, job.teachers, f"{at}: objective {stage.objective!r} gives a part to no known teacher,")


def _check_effect(job: Job, stage: Stage, at: str) -> None:
    """Raise JobFileError for a stage whose loss has no gradient, whatever its samples are."""
    objective, gradient = job.objective(stage), job.objective(stage).policy_gradient
    if not objective.has_effect:
        raise JobFileError(
            f"{at}: the weights of objective {stage.objective!r} are 0 or cancel ({objective.weights_text}), so "
            "nothing would be learned; give a term another weight, or policy_gradient a teacher_coef, reward_coef or "
            "kl_coef other than 0"
        )
    teachers = job.teachers_of(stage)
    weights = [objective.teacher_weights.get(teacher, 1.0) for teacher in teachers]
    if weights and not any(np.any(weight_at(weight, [0, *_turns(weight)]) > 0) for weight in weights):
        raise JobFileError(
            f"{at}: objectives.{stage.objective}.teacher_weights is 0 for every teacher of the stage "
            f"({', '.join(teachers)}), so nothing would be learned; give one a weight above 0"
        )
    if gradient and gradient.reward_coef and stage.data == "rollout" and stage.rollout.group_size == 1:
        raise JobFileError(
            f"{at}: objective {stage.objective!r} has reward_coef = {gradient.reward_coef:g}, and rollout.group_size = "
            "1: an answer's advantage is its reward minus its group's mean, 0 in a group of one, so rewards would "
            "teach nothing; set rollout.group_size to 2 or more, or reward_coef = 0"
        )


def _turns(weight: Weight) -> list[int]:
    """Steps at which a scheduled weight turns."""
    return [] if isinstance(weight, int | float) else [step for step, _ in weight]


def sampling_teachers(job: Job, stage: Stage) -> set[str]:
    """Teachers that write, or help to write, some sample of a stage."""
    rollout = stage.rollout
    if stage.data != "rollout":
        return set()
    writers = [rollout.policy] if rollout.student_share else []
    writers += [rollout.rest] if rollout.student_share < 1 else []
    writers += ["routed"] if rollout.teacher_mix else []
    engines_needed = {
        job.sampler_of(stage, who, d, job.domains[d].effort) for who in writers for d in job.domains_of(stage)
    }
    return engines_needed - {"self", "reference"}


def _check_routing(job: Job, stage: Stage, earlier: list[str], at: str) -> None:
    for key, teacher in (stage.routing or job.routing).items():
        _require(key.partition("/")[0], job.domains, f"{at}: routing names an unknown domain")
        _require(teacher, job.teachers, f"{at}: routing of {key!r} names no teacher")
    try:
        samplers = sampling_teachers(job, stage)
        teachers = {*job.teachers_of(stage), *samplers}
    except JobFileError as error:
        raise JobFileError(f"{at}: {error}") from None
    for sampler in sorted(samplers):
        if job.teachers[sampler].blend:
            raise JobFileError(f"{at}.rollout: teacher {sampler!r} is a blend and cannot answer; name a member")
        if job.teachers[sampler].is_remote:
            raise JobFileError(
                f"{at}.rollout: teacher {sampler!r} has only a url, from which it does not answer prompts; give "
                f"teachers.{sampler}.source, or let another teacher or the student answer"
            )
    gradient = job.objective(stage).policy_gradient
    for other in job.others_of(stage):
        key = "reference" if gradient is not None and other == gradient.reference else "calibration"
        _require(other, job.teachers, f"objectives.{stage.objective}.policy_gradient.{key} names no teacher")
        teachers.add(other)
    check_own_tokenizers_of_stage(job, stage, tuple(sorted(samplers)), at)
    check_following(job, stage, samplers, at)
    scorers = {member for name in job.scorers_of(stage) for member in job.members_of(name)}
    for teacher in sorted({member for name in teachers for member in job.members_of(name)}):
        score = stage.score
        if score.reads in SERVER_READS and teacher in scorers and not job.teachers[teacher].url:
            raise JobFileError(
                f'{at}.score.reads = "{score.reads}" is for teachers behind a server, but teacher {teacher!r} has no '
                f'url; give teachers.{teacher}.url, or set reads = "prompt_logprobs"'
            )
        if job.teachers[teacher].is_remote and (SCORING[score.engine].here or score.reads not in LOGPROB_READS):
            raise JobFileError(
                f"{at}: teacher {teacher!r} has only a url, so it gives log-probs and no states, but score.engine = "
                f'{score.engine!r} and score.reads = {score.reads!r}; set score.engine = "vllm" and score.reads = '
                f'"prompt_logprobs" (or "echo"), or give teachers.{teacher}.source'
            )
        rounded = job.teachers[teacher].quantisation
        if rounded != "none" and not SCORING[stage.score.engine].quantises:
            raise JobFileError(
                f"{at}: teachers.{teacher}.quantisation = {rounded!r} is not applied by {stage.score.engine}; set "
                f'score.engine = {engines_that(lambda one: one.quantises)}, or quantisation = "none"'
            )
        source = job.teachers[teacher].stage
        if source is not None:
            _require(source, [s.name for s in job.stages], f"{at}: teachers.{teacher}.source names no stage")
            if source not in earlier:
                raise JobFileError(f"{at}: teacher {teacher!r} comes from stage {source!r}, which runs later")
