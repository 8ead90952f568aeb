"""The records of the flow: what one component hands to the next.

Axes used in shapes, here and in every component:
    P  prompt tokens            R  response tokens (everything after the prompt, tool output included)
    L  = P + R, one sequence    M  loss-masked response tokens, M <= R
    T  tokens of one pack       S  sequences in one pack
    K  top-k support            D  hidden size              V  vocabulary

A response token at response position j sits at absolute position P + j and is predicted by the
hidden state at absolute position P + j - 1.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FINISH_REASONS = ("stop", "length", "reference", "abandoned", "unknown")
RESUME_KINDS = ("none", "exact", "statistical")
FORMAT_1_NAMES = {
    "run": "stage",
    "generation": "iteration",
    "support": "sampling_mask",
    "support_sizes": "sampling_mask_sizes",
    "support_ids": "sampling_mask_ids",
    "support_len": "sampling_mask_len",
}
"""Names of a sample's fields in format 1, for reading token logs, exports and stores of that format."""


def sample_uid(seed: int, stage: str, prompt_id: str, index: int, iteration: int) -> str:
    """128-bit identity of one sample as 32 hex digits, a pure function of its arguments."""
    name = f"{seed}\0{stage}\0{prompt_id}\0{index}\0{iteration}".encode()
    return hashlib.blake2b(name, digest_size=16, person=b"mopd-uid").hexdigest()


class Column(NamedTuple):
    """What tables.py says of an attribute, where a record is a row of a table."""

    doc: str
    dtype: str = ""
    """numpy name, such as f4; empty for text, JSON included; in brackets for a list, such as [i8]."""
    unit: str = ""
    null: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One question put to the student; one row of `prompts`.

    Example: Prompt(prompt_id="chain_sum-train-7", domain="chain_sum", text="3 + 4 =", answer="7").
    """

    prompt_id: Annotated[str, Column("unique name of the prompt")]
    domain: Annotated[str, Column("routes samples to their teacher")]
    split: Annotated[str, Column("train, eval, tune or import")] = "train"
    """eval and tune are never trained on; import is of imported samples, neither sampled nor asked."""
    effort: Annotated[str, Column("reasoning-effort mode; empty when unused")] = ""
    """A second routing key."""
    source: Annotated[str, Column("where the prompt came from")] = ""
    text: Annotated[str, Column("text of the prompt, before the tokenizer's template")]
    answer: Annotated[str, Column("reference answer")] = ""
    """The response of an off-policy (reference) sample."""
    teacher_context: Annotated[str, Column("privileged text only the teacher sees")] = ""
    """In front of the prompt (context distillation)."""
    verifier_data: Annotated[str, Column("JSON for the reward function")] = ""
    """What it needs beside the answer, for example a reasoning-gym entry."""
    messages: Annotated[str, Column("JSON list of chat messages; empty where the prompt is `text` alone")] = ""
    """Where the prompt is more than one message of a user; `text` then is for people."""

    @property
    def asked(self) -> str | list[dict[str, Any]]:
        """Input of the tokenizer's template: messages, or text."""
        return json.loads(self.messages) if self.messages else self.text


@dataclass(kw_only=True, slots=True)
class Sample:
    """A finished generation: prompt and response tokens with the sampler's log-probs.

    Example: prompt_len=2, tokens=[5, 6, 7, 8, 2] and R=3; logprobs=[-0.1, -0.7, 0.0];
    loss_mask=[1, 1, 1]; version_starts=[0], versions=[4]: all sampled by policy version 4.
    """

    uid: str
    prompt_id: str
    group_id: str
    """Samples of one prompt in one iteration share it (GRPO group)."""
    group_index: int
    iteration: int
    """Iteration of the run that asked for this sample."""
    domain: str
    effort: str = ""
    stage: str
    """Name of the job stage that owns the sample."""
    writer: str
    """Engine replica (or importer) that produced it."""
    writer_seq: int
    """Admission ordinal inside the writer."""
    policy: str
    """Name of the sampling policy; 'reference' for text that was not sampled."""
    temperature: float
    top_p: float
    top_k: int
    sampler: str | None = None
    """Name and version of what drew the tokens (rollout/engines/sampling.py); None when nobody recorded it."""
    prompt_len: int
    tokens: NDArray[np.int32]
    """[L] prompt then response."""
    logprobs: NDArray[np.float32] | None
    """[R] log-prob of each response token under the sampling distribution; 0 where loss_mask is 0;
    None when the text was not sampled, or its sampler's log-probs were not recorded (imports)."""
    loss_mask: NDArray[np.uint8]
    """[R] 1 on tokens the policy wrote, 0 on tool or environment tokens."""
    version_starts: NDArray[np.int32]
    """[spans] response position where each policy-version span starts; the first is 0."""
    versions: NDArray[np.int32]
    """[spans] policy version of each span."""
    sampling_mask_sizes: NDArray[np.int32] | None = None
    """[M] how many ids each loss-masked token was drawn from; 0 where nothing was cut; None when not recorded."""
    sampling_mask_ids: NDArray[np.int32] | None = None
    """[sum of sampling_mask_sizes] those ids, token after token."""
    experts: NDArray[np.int16] | None = None
    """[L - 1, W] expert ids, over all layers, of every token but the last, which nothing read; None when not recorded.
    """
    extra: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Recorded fields of fields.py that have no attribute here, by name."""
    turns: int = 1
    finish_reason: str
    """One of FINISH_REASONS."""
    interruptions: int = 0
    """How often the generation was interrupted and continued."""
    resume: str = "none"
    """One of RESUME_KINDS."""
    abandoned: str = ""
    """Why it was given up, when finish_reason is abandoned."""
    tokenizer: str
    """Tokenizer digest."""

    @property
    def response_len(self) -> int:
        """R."""
        return len(self.tokens) - self.prompt_len

    @property
    def loss_tokens(self) -> int:
        """M."""
        return int(np.count_nonzero(self.loss_mask))


@dataclass(kw_only=True, slots=True)
class Signal:
    """One teacher's values for one sample, in one of three fidelities, its own tokens, or another package's kind.

    kind logprob: logprob [R] f32, 0 where loss_mask is 0.
    kind topk:    topk_ids [M, K] int32 and topk_logprobs [M, K] f32.
    kind hidden:  hidden [M, row_bytes] uint8, codec bytes of the state that predicts each loss-masked token, in order.
    kind alignment: student_chunk_ends [R] uint8, teacher_tokens [Q] int32 and teacher_chunk_ends [Q] uint8, with Q the
                  number of tokens of the response in the teacher's tokenizer.
    any other:    `extra[kind]` [R] f32, 0 where loss_mask is 0 (score/signal_kinds.py).
    """

    uid: str
    sample_row: int
    """Row of the sample in `samples`."""
    kind: str
    codec: str = "fp32"
    """fp32, bf16, int8, fp8 or mxfp4 (hidden); fp32 otherwise."""
    logprob: NDArray[np.float32] | None = None
    topk_ids: NDArray[np.int32] | None = None
    topk_logprobs: NDArray[np.float32] | None = None
    topk_source: str = "teacher"
    """Whose top-k the ids are: teacher or student."""
    hidden: NDArray[np.uint8] | None = None
    student_chunk_ends: NDArray[np.uint8] | None = None
    teacher_tokens: NDArray[np.int32] | None = None
    teacher_chunk_ends: NDArray[np.uint8] | None = None
    extra: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Fields of fields.py that have no attribute here, by name."""
    mean_reverse_kl: float | None = None
    """Mean over loss tokens of sampler log-prob minus teacher log-prob (k1 estimate of reverse KL)."""
    logprob_std: float | None = None
    """Kind logprob: standard deviation of the teacher's log-probs over loss tokens."""
    teacher_entropy: NDArray[np.float32] | None = None
    """Kind logprob: [M] entropy of the teacher's distribution; None of a teacher that gives log-probs only."""
    is_first_choice: NDArray[np.bool_] | None = None
    """Kind logprob, where it was computed: [M] whether the teacher's likeliest token is the one written."""


PER_TOKEN_STATS = (
    "logprob_gap", "student_entropy", "teacher_entropy", "reverse_kl", "forward_kl", "top1_agreement",
)  # fmt: skip
"""Per-token statistics of scoring and training: columns of `token_stats`, which documents them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Teacher:
    """A teacher as a row of `teachers`; its digests are compared before anything is written."""

    name: Annotated[str, Column("unique name")]
    source: Annotated[str, Column("path, stage or url the weights came from")]
    weights_digest: Annotated[str, Column("sha256 over the weight files, or over the fingerprint of a server's model")]
    tokenizer_digest: Annotated[str, Column("must equal the student's")]
    vocab_size: Annotated[int, Column("rows of the LM head that are real tokens", "i4")]
    hidden_size: Annotated[int, Column("D", "i4")]
    dtype: Annotated[str, Column("compute dtype of the scoring pass")]
    norm_placement: Annotated[str, Column("post: hidden states are after the final norm")] = "post"
    """post is what the LM head reads."""
    logit_softcap: Annotated[float, Column("0 when the architecture has none", "f4")] = 0.0
    logit_scale: Annotated[float, Column("multiplier on logits", "f4")] = 1.0
    quantisation: Annotated[
        str, Column("none, int8, fp8 or mxfp4: quantisation of its weights; for a blend, each that occurs")
    ] = "none"
    head_file: Annotated[str, Column("LM head, relative to the store root; empty where an import brought none")]
    head_digest: Annotated[str, Column("sha256 of the head file")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """One version of every table, at which a plan, a reader or a report reads.

    Example: Snapshot(uri="runs/demo", versions={"samples": 12, "tokens": 9}).
    """

    uri: str
    versions: dict[str, int]

    @property
    def digest(self) -> str:
        """16 hex digits over the versions (not over the store's path)."""
        text = "\n".join(f"{name}={version}" for name, version in sorted(self.versions.items()))
        return hashlib.blake2b(text.encode(), digest_size=8, person=b"mopd-snap").hexdigest()


@dataclass(kw_only=True, slots=True)
class PlanWindow:
    """A window of a plan: which samples make up which packs, and which packs which step; one row of `plans`.

    Packs are numbered through the window; pack k holds sample_rows[pack_starts[k]:pack_starts[k+1]]
    and step s holds packs step_starts[s] up to step_starts[s+1].
    """

    stage: Annotated[str, Column("job stage the plan is for")]
    window: Annotated[int, Column("ordinal inside the stage", "i4")]
    digest: Annotated[str, Column("over snapshot, seed, settings and layout")] = ""
    """32 hex digits over everything except stats."""
    seed: Annotated[int, Column("shuffle seed", "i8")]
    settings: Annotated[dict[str, Any], Column("JSON")]
    snapshot: Annotated[Snapshot, Column("JSON: version of every table")]
    teachers: Annotated[list[str], Column("names that pack_teachers indexes", "[]")]
    sample_rows: Annotated[NDArray[np.int64], Column("[samples] row ids in `samples`, in pack order", "[i8]")]
    pack_starts: Annotated[NDArray[np.int64], Column("[packs + 1]", "[i8]")]
    pack_teachers: Annotated[NDArray[np.int16], Column("[packs]", "[i2]")]
    """Index into teachers; -1 when the objective needs no teacher."""
    step_starts: Annotated[NDArray[np.int64], Column("[steps + 1]", "[i8]")]
    stats: Annotated[dict[str, float], Column("JSON: density, straggler ratio, counts")] = field(default_factory=dict)
    """density, straggler_ratio, tokens, samples, packs, teacher_switches, dropped_<reason>."""


@dataclass(kw_only=True, slots=True)
class Pack:
    """One packed row of sequences as the trainer sees it: numpy or torch views into shared memory.

    All [T] arrays are indexed by absolute position in the pack; a field at position t belongs to token t (which the
    hidden state at t - 1 predicts). Valid until the owning Batch is released.
    """

    index: int
    """Pack number in the plan window."""
    teacher: str
    """Empty when the objective needs none."""
    tokens: Any
    """[T] int32"""
    cu_seqlens: Any
    """[S + 1] int32"""
    loss_mask: Any
    """[T] uint8, 1 on trained tokens"""
    sampler_logprobs: Any
    """[T] f32, 0 where loss_mask is 0"""
    sample_rows: Any
    """[S] int64"""
    version_starts: Any
    """[P] int32, from 0, rising: where each span of one policy version starts; a prompt is part of the first"""
    versions: Any
    """[P] int32, policy version of each span"""
    rewards: Any
    """[S] f32, NaN where a sample has none"""
    advantages: Any
    """[S] f32, group-relative outcome advantage; 0 where there is none"""
    sampling_mask_sizes: Any | None = None
    """[M] int32, ids that each trained token was drawn from; 0: from the whole vocabulary"""
    sampling_mask_ids: Any | None = None
    """[sum of sampling_mask_sizes] int32, those ids, token after token"""
    experts: Any | None = None
    """[T, W] int16, expert ids of each token over all layers; -1 where none are recorded"""
    teacher_logprobs: Any | None = None
    """[T] f32, 0 where loss_mask is 0"""
    reference_logprobs: Any | None = None
    """[T] f32, log-prob under the reference policy of ExOPD, 0 where loss_mask is 0"""
    helped_logprobs: Any | None = None
    """[T] f32, log-prob under the teacher with a prompt that helps it, 0 where loss_mask is 0"""
    misled_logprobs: Any | None = None
    """[T] f32, log-prob under the teacher with a prompt that misleads it, 0 where loss_mask is 0"""
    topk_ids: Any | None = None
    """[M, K] int32"""
    topk_logprobs: Any | None = None
    """[M, K] f32"""
    hidden: Any | None = None
    """[M, row_bytes] uint8, codec bytes in the order of loss-masked positions"""
    hidden_codec: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields of fields.py that have no attribute here, by name."""

    @property
    def position_ids(self) -> Any:
        """[T] int32, restarting at 0 in every sequence; computed, since it follows from `cu_seqlens`"""
        bounds = np.asarray(self.cu_seqlens)
        return self._like_others(np.arange(bounds[-1], dtype=np.int32) - np.repeat(bounds[:-1], np.diff(bounds)))

    @property
    def policy_versions(self) -> Any:
        """[T] int32, policy version that sampled each trained token; -1 where loss_mask is 0"""
        spans = np.diff(np.asarray(self.version_starts), append=len(self.tokens))
        each = np.repeat(np.asarray(self.versions), spans)
        return self._like_others(np.where(np.asarray(self.loss_mask) > 0, each, np.int32(-1)))

    def _like_others(self, array: NDArray[Any]) -> Any:
        """As a tensor where the pack's arrays are tensors."""
        if isinstance(self.tokens, np.ndarray):
            return array
        import torch

        return torch.from_numpy(array)


@dataclass(kw_only=True, slots=True)
class Batch:
    """One optimizer step of one rank: its packs, and the global sums every rank normalises by."""

    stage: str
    window: int
    step: int
    """Step inside the stage, counted over windows; the resume integer."""
    packs: Sequence[Pack]
    loss_tokens: int
    """Trained tokens in the whole step over all ranks."""
    sequences: int
    """Sequences in the whole step over all ranks."""

    @property
    def teachers(self) -> list[str]:
        """Teacher of each pack."""
        return [pack.teacher for pack in self.packs]

    @property
    def lengths(self) -> list[list[int]]:
        """Tokens of each sample of each pack."""
        return [np.diff(pack.cu_seqlens).tolist() for pack in self.packs]

    def release(self, *packs: Pack) -> None:
        """Give back the named packs, or all of them. A batch in ordinary memory has nothing to give back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """Metrics of one optimizer step; one row of `steps`."""

    stage: Annotated[str, Column("job stage")]
    step: Annotated[int, Column("ordinal inside the stage", "i4")]
    window: Annotated[int, Column("plan window the batch came from", "i4")]
    plan_digest: Annotated[str, Column("plan the batch came from")]
    policy_version: Annotated[int, Column("version the step starts from", "i4")]
    loss: Annotated[float, Column("objective value", "f8")]
    grad_norm: Annotated[float, Column("before clipping", "f8")]
    learning_rate: Annotated[float, Column("at this step", "f8")]
    samples: Annotated[int, Column("sequences in the global batch", "i4")]
    tokens: Annotated[int, Column("tokens in the global batch", "i8", unit="tokens")]
    loss_tokens: Annotated[int, Column("trained tokens in the global batch", "i8", unit="tokens")]
    reverse_kl: Annotated[float, Column("mean over trained tokens", "f8", unit="nat/token", null=True)]
    """NaN when no teacher signal was used."""
    staleness_mean: Annotated[float, Column("versions between sampling and training", "f4", unit="versions")]
    """Mean over trained tokens."""
    staleness_max: Annotated[int, Column("largest of the batch", "i4", unit="versions")]
    step_time_s: Annotated[float, Column("wall time of the step", "f4", unit="s")]
    data_wait_s: Annotated[float, Column("of which waiting for data", "f4", unit="s")]
    extra: Annotated[dict[str, float], Column("JSON: objective metrics")] = field(default_factory=dict)
    """Masked fraction, clip fraction, entropy, teacher/<name>/reverse_kl …"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A key of the job that got another value after its stage had begun; one row of `changes`."""

    ordinal: Annotated[int, Column("position in the order in which the changes were made", "i4")]
    stage: Annotated[str, Column("job stage that goes on with the new value")]
    iteration: Annotated[int, Column("first iteration with the new value; of a free key the one that is open", "i4")]
    key: Annotated[str, Column("key of the job, as in --set")]
    before: Annotated[str, Column("JSON: value until then; null for a table that is new")]
    after: Annotated[str, Column("JSON: value from then on; null for a table that is gone")]
    change_class: Annotated[str, Column("'free' or 'from here on'")]
    command: Annotated[str, Column("command line that made the change")]

    @property
    def text(self) -> str:
        """The change without its stage, in a few words."""
        return f"{self.key.removeprefix(f'stages.{self.stage}.')}: {self.before} → {self.after}"

    @property
    def line(self) -> str:
        """The change with its stage and iteration."""
        return f"{self.stage} from iteration {self.iteration}: {self.text}"
