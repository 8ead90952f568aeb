"""The teacher pool: any number of teachers on disk, a bounded number in memory."""

from __future__ import annotations

import gc
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from mopd_kernels import Head
from numpy.typing import NDArray

from mopd_dataplane.base.files import file_digest
from mopd_dataplane.errors import MismatchError, UnknownNameError, nearest
from mopd_dataplane.job import sections
from mopd_dataplane.models import hf
from mopd_dataplane.models.adapter_files import base_folder, check_base, is_adapter, touches_head
from mopd_dataplane.models.architecture import UNLIMITED, context_length, has_length_dependent_rope
from mopd_dataplane.models.self_check import SelfCheck, check_forward
from mopd_dataplane.models.vllm_adapters import check_for_scoring, room_for
from mopd_dataplane.models.vllm_local import require_vllm
from mopd_dataplane.models.vocabulary import compare_vocabularies, unknown_tokens
from mopd_dataplane.records import Teacher
from mopd_dataplane.score.adapted_base import AdaptedBase, AdapterReader, VllmAdaptedBase
from mopd_dataplane.score.echo_logprobs import EchoLogprobs
from mopd_dataplane.score.engines import LOGPROB_READS, SCORING, SERVER_READS, engines_that
from mopd_dataplane.score.head_files import exchange_rows, exchanged_head, read_head_header, write_head
from mopd_dataplane.score.own_tokens import OwnTokenizer
from mopd_dataplane.score.quantise import quantisation_of, quantise
from mopd_dataplane.score.readers import HfReader, Reader, TeacherForward, blended_head
from mopd_dataplane.score.server_use import ServerUse
from mopd_dataplane.score.sglang_logprobs import SglangLogprobs
from mopd_dataplane.score.vllm_batch import ServerBatches
from mopd_dataplane.score.vllm_logprobs import LogprobReader, ServerLogprobs, VllmLogprobs
from mopd_dataplane.score.vllm_states import ExtractingReader, ServerReader, VllmReader

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class TeacherSpec:
    """A teacher's weights folder, and the settings with which the pool holds it."""

    folder: Path | None
    """Folder of the weights; None for a blend, whose members have folders, and for a teacher with only a url."""
    settings: sections.Teacher


class TeacherPool:
    """Loads each teacher on first use and keeps at most `max_resident`, dropping the least recently used.

    Adapters on one base count as one: the base is loaded once, and the active adapter is switched. student_tokenizer:
    its ids must mean the same to every teacher that reads them (models/vocabulary.py). engine: what runs the teachers.
    reads: the output requested from vLLM. options: EngineArgs for vLLM started here. check_texts: gives the texts
    [tokens] that the self-check of a teacher reads besides one that is made up, by the teacher's name. close() ends
    running engines, and counts what was requested from servers.
    """

    def __init__(
        self,
        specs: Mapping[str, TeacherSpec],
        *,
        student_tokenizer: PreTrainedTokenizerBase,
        max_resident: int = 1,
        device: str = "cpu",
        engine: Literal["hf", "vllm"] = "hf",
        reads: Literal["states", "extract_hidden_states", "prompt_logprobs", "echo", "sglang"] = "states",
        options: Mapping[str, Any] | None = None,
        check_texts: Callable[[str], Sequence[NDArray[np.int64]]] = lambda name: (),
    ) -> None:
        self._specs = dict(specs)
        self._check_texts = check_texts
        self._student_tokenizer = student_tokenizer
        self._max_resident = max_resident
        self._device = device
        self._engine = SCORING[engine]
        self._reads = reads
        self._options = options or {}
        for name, spec in specs.items():
            if spec.settings.quantisation != "none" and not self._engine.quantises:
                raise MismatchError(
                    f"teacher {name!r} has quantisation = {spec.settings.quantisation!r}, which {engine} does not "
                    f'apply; set score.engine = {engines_that(lambda one: one.quantises)}, or quantisation = "none"'
                )
            if spec.folder is not None and is_adapter(spec.folder):
                if spec.settings.quantisation != "none":
                    raise MismatchError(
                        f'teacher {name!r} is an adapter, whose base is not quantised: set quantisation = "none", or '
                        "merge it first"
                    )
                if spec.settings.end == "map":
                    raise MismatchError(
                        f'teacher {name!r} is an adapter, and end = "map" changes the LM head that it shares with its '
                        'base: set end = "own", or merge it (train.lora.merge = "end" of its stage, or '
                        "merge_and_unload of peft)"
                    )
                if not self._engine.here:
                    check_for_scoring(spec.folder, url=spec.settings.url, reads=reads)
        self._resident: OrderedDict[str, Reader | LogprobReader | AdaptedBase | VllmAdaptedBase] = OrderedDict()
        self.loads: dict[str, int] = {}
        """How often each teacher's weights were read from disk; adapters count under the digest of their base."""
        self._past_use = ServerUse()
        """What was requested from servers whose teachers were dropped."""
        self._own_tokenizers: dict[str, OwnTokenizer] = {}
        self._self_checks: dict[str, SelfCheck] = {}
        """Self-check of each teacher that runs here, by its key in the pool."""

    @property
    def resident(self) -> tuple[str, ...]:
        """Teachers in memory, least recently used first; adapters with their base."""
        resident = self._resident.items()
        return tuple(name for key, one in resident for name in getattr(one, "teachers", (key,)))

    @property
    def switches(self) -> int:
        """Number of switches of the active adapter, over the bases in memory."""
        return sum(getattr(one, "switches", 0) for one in self._resident.values())

    def teacher(self, name: str) -> TeacherForward:
        """Return the teacher, ready to score.

        Raises UnknownNameError, and MismatchError, also for a blend of more teachers than `max_resident`.
        """
        blend = self._spec(name).settings.blend or {name: 1.0}
        places = len({self._pool_key(member) for member in blend})
        if places > self._max_resident:
            raise MismatchError(
                f"teacher {name!r} blends {places} teachers, score.max_resident = {self._max_resident} may be in "
                f"memory at once; set it to at least {places}"
            )
        return TeacherForward(tuple(self.reader(member) for member in blend), tuple(blend.values()))

    def model(self, name: str) -> PreTrainedModel:
        """Return a teacher's own transformers model, in evaluation mode. Raises UnknownNameError, MismatchError."""
        reader = self.reader(name)
        if not isinstance(reader, HfReader):
            raise MismatchError(
                f"teacher {name!r} runs in vLLM, and its transformers model is needed; set score.engine = 'hf'"
            )
        if isinstance(reader, AdapterReader):
            reader.act()
        return reader.model

    def reader(self, name: str) -> Reader:
        """Return a teacher, ready to compute states, in its own dtype. Raises UnknownNameError, MismatchError,
        EngineError."""
        return self._held(name)  # type: ignore[return-value]

    def as_stored(self, name: str) -> Reader:
        """Load a teacher with its stored weights, not quantised.

        The pool first drops the teachers that it holds, and does not keep this one. Raises UnknownNameError,
        MismatchError.
        """
        self.close()
        return self._hf_reader(name, self._checked(name), self._spec(name).settings)

    def logprob_reader(self, name: str) -> LogprobReader:
        """Return a teacher, ready to score, from a pool of vLLM teachers that give log-probs of text."""
        return self._held(name)  # type: ignore[return-value]

    def self_check(self, name: str) -> SelfCheck | None:
        """Return the self-check of a teacher, or of an adapter's base, that was loaded here; None if it was not."""
        return self._self_checks.get(self._pool_key(name))

    def server_reader(self, name: str) -> ServerLogprobs:
        """Return a teacher whose log-probs come from a server. Raises MismatchError for another."""
        reader = self._held(name)
        if not isinstance(reader, ServerLogprobs):
            raise MismatchError(
                f"teacher {name!r} does not give log-probs from a server; give teachers.{name}.url and set score.reads "
                '= "prompt_logprobs"'
            )
        return reader

    @property
    def server_use(self) -> ServerUse:
        """What was requested from the servers of all teachers so far."""
        live = (reader for reader in self._resident.values() if isinstance(reader, ServerBatches))
        return reduce(ServerUse.plus, (reader.use for reader in live), self._past_use)

    def unknown_tokens(self, name: str) -> dict[int, str]:
        """Return the student's tokens that a teacher's tokenizer does not have, by id; for a blend, those that a member
        lacks."""
        tokens: dict[int, str] = {}
        for member in self._spec(name).settings.blend or (name,):
            settings = self._spec(member).settings
            if not settings.is_remote and settings.tokenizer == "student":
                tokens |= unknown_tokens(self._student_tokenizer, hf.load_tokenizer(self._checked(member)))
        return tokens

    def own_tokenizer(self, name: str) -> OwnTokenizer | None:
        """Return what turns samples into a teacher's own tokens; None for a teacher that reads the student's."""
        if self._spec(name).settings.tokenizer == "student":
            return None
        if name not in self._own_tokenizers:
            theirs = hf.load_tokenizer(self._checked(name))
            self._own_tokenizers[name] = OwnTokenizer(self._student_tokenizer, theirs, name=name)
        return self._own_tokenizers[name]

    def exchanged_tokens(self, name: str) -> tuple[int, ...]:
        """Return the tokens whose probabilities a teacher exchanges: the two ends, with `end = "map"`."""
        return self._exchanged(self._checked(name), self._spec(name).settings)

    def context_length(self, name: str) -> int:
        """Return the number of tokens, prompt and response together, that a teacher can read by its config or its
        server.

        For a blend, it is the smallest number. `beyond_context` lifts the limit, but not that of a rotary embedding
        whose frequencies depend on the length.
        """
        limits = [UNLIMITED]
        for member in self._spec(name).settings.blend or (name,):
            if self._spec(member).settings.is_remote:
                limits.append(self.server_reader(member).context_length)
                continue
            config = hf.model_shape(self._checked(member))
            if not self._spec(member).settings.beyond_context or has_length_dependent_rope(config):
                limits.append(context_length(config))
        return min(limits)

    def close(self) -> None:
        """Drop every teacher in memory, and end the engines that run them."""
        while self._resident:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        reader = self._resident.popitem(last=False)[1]
        if isinstance(reader, ServerBatches):
            self._past_use = self._past_use.plus(reader.use)
        reader.close()

    def _held(self, name: str) -> Reader | LogprobReader:
        key = self._pool_key(name)
        if key not in self._resident:
            spec = self._spec(name)
            folder = None if spec.settings.is_remote else self._checked(name)
            while len(self._resident) >= self._max_resident:
                self._drop_oldest()
                gc.collect()
            if folder is None:
                self._resident[key] = self._open_remote(spec.settings.url)
            elif key == name:
                self._resident[key] = self._open(name, folder, spec.settings)
            else:
                self._resident[key] = self._open_base(key, base_folder(folder), name, spec.settings.dtype)
            self.loads[key] = self.loads.get(key, 0) + 1
        self._resident.move_to_end(key)
        reader = self._resident[key]
        if key == name:
            return reader  # type: ignore[return-value]
        return reader.reader(name, self._checked(name))  # type: ignore[union-attr]

    def _pool_key(self, name: str) -> str:
        """Return the key of a teacher in the pool: its name, or one shared by all adapters on one base in one dtype.

        Adapters behind a server have keys of their own.
        """
        spec = self._spec(name)
        if spec.folder is None or not is_adapter(spec.folder) or spec.settings.url:
            return name
        base = hf.weights_digest(base_folder(spec.folder))
        check_base(spec.folder, base)
        return f"{base} in {spec.settings.dtype}"

    def _open_base(self, source: str, base: Path, name: str, dtype: str) -> AdaptedBase | VllmAdaptedBase:
        """Load a base for all its adapters in the pool. name: of the adapter that is asked for."""
        if self._engine.here:
            model = hf.load_model(base, dtype=dtype, device=self._device)
            part = f"Scoring with adapters on {base.name}"
            self._self_checks[source] = check_forward(model, part, self._check_texts(name))
            return AdaptedBase(model)
        require_vllm()
        adapters = [spec.folder for name, spec in self._specs.items() if spec.folder and self._pool_key(name) == source]
        room = room_for(base, adapters, dtype=dtype)
        shared: Any = self._vllm_reader(base, dtype, room | dict(self._options))
        return VllmAdaptedBase(shared)

    def _open_remote(self, url: str) -> ServerLogprobs:
        """Open a teacher that has only a url; its tokenizer must be the student's, as far as texts can tell."""
        reader = self._served_logprobs(None, url, len(self._student_tokenizer), self._student_tokenizer)
        try:
            reader.check_tokenizer(self._student_tokenizer)
        except BaseException:
            reader.close()
            raise
        return reader

    def _served_logprobs(
        self, folder: Path | None, url: str, vocab_size: int, tokenizer: PreTrainedTokenizerBase
    ) -> ServerLogprobs:
        if self._reads in SERVER_READS:
            reader = SglangLogprobs if self._reads == "sglang" else EchoLogprobs
            return reader(folder, url=url, vocab_size=vocab_size, tokenizer=tokenizer)
        return ServerLogprobs(folder, url=url, vocab_size=vocab_size)

    def _open(self, name: str, folder: Path, settings: sections.Teacher) -> Reader | LogprobReader:
        if self._engine.here:
            reader = self._hf_reader(name, folder, settings)
            quantise(reader.model, settings.quantisation)
            return reader
        exchanged = self._exchanged(folder, settings)
        return self._vllm_reader(folder, settings.dtype, self._options, url=settings.url, exchanged=exchanged)

    def _vllm_reader(
        self, folder: Path, dtype: str, options: Mapping[str, Any], url: str = "", exchanged: tuple[int, ...] = ()
    ) -> Reader | LogprobReader:
        """Open a teacher in a vLLM started here, or in a running server."""
        if self._reads in LOGPROB_READS:
            if exchanged:
                raise MismatchError(
                    f'teachers.*.end = "map" exchanges rows of an LM head, which score.reads = "{self._reads}" does '
                    f'not have for {folder}; set score.reads = "states", or end = "own"'
                )
            if url:
                vocab_size = int(hf.model_shape(folder)["vocab_size"])
                return self._served_logprobs(folder, url, vocab_size, hf.load_tokenizer(folder))
            if self._reads in SERVER_READS:
                raise MismatchError(
                    f'score.reads = "{self._reads}" reads a running server, which the teacher in {folder} does not have'
                    '; give its teachers.*.url, or set score.reads = "prompt_logprobs"'
                )
            return VllmLogprobs(folder, dtype=dtype, options=options)
        head = exchanged_head(hf.load_head(folder, dtype="float32", device=self._device), exchanged)
        if url:
            return ServerReader(folder, head, url=url)
        reader_class = ExtractingReader if self._reads == "extract_hidden_states" else VllmReader
        return reader_class(folder, head, dtype=dtype, options=options)

    def _hf_reader(self, name: str, folder: Path, settings: sections.Teacher) -> HfReader:
        model = hf.load_model(folder, dtype=settings.dtype, device=self._device)
        self._self_checks[name] = check_forward(model, f"Scoring with {folder.name}", self._check_texts(name))
        exchange_rows(model, *self._exchanged(folder, settings))
        return HfReader(model)

    def _exchanged(self, folder: Path, settings: sections.Teacher) -> tuple[int, ...]:
        """Return the ids of the student's end and the teacher's if `end = "map"` exchanges them; empty otherwise."""
        ends = (self._student_tokenizer.eos_token_id, hf.load_tokenizer(folder).eos_token_id)
        return ends if settings.end == "map" and None not in ends and ends[0] != ends[1] else ()

    def _head(self, name: str) -> Head:
        """Load the LM head of a teacher or a blend, in its own dtype; no engine is started for it."""
        if self._engine.here:
            return self.teacher(name).head
        blend = self._spec(name).settings.blend or {name: 1.0}
        heads = [self._stored_head(one) for one in blend]
        return blended_head(heads, list(blend.values()))

    def _stored_head(self, name: str) -> Head:
        folder, settings = self._checked(name), self._spec(name).settings
        return exchanged_head(hf.load_head(folder, dtype=settings.dtype), self._exchanged(folder, settings))

    def register(self, name: str, root: Path) -> Teacher:
        """Check a teacher and write its LM head to `root/heads/<name>.safetensors` unless it exists.

        Returns the row for `teachers`. Raises MismatchError, with nothing written, when the tokenizer differs from the
        student's or when the head file has other weights; UnknownNameError for an unknown name or folder.
        """
        spec = self._spec(name)
        weights, owner, own = self._digest(name), self._head_owner(name), self.own_tokenizer(name)
        file = root / self.head_file(name)
        if not file.is_file():
            write_head(file, self._head(name), owner)
        shape, metadata = read_head_header(file)
        if metadata["weights_digest"] != owner:
            raise MismatchError(
                f"{file} is the head of weights {metadata['weights_digest'][:16]}, teacher {name!r} now has "
                f"{owner[:16]}; signals of both cannot share a name: give the new teacher another name"
            )
        return Teacher(
            name=name,
            source=spec.settings.source or _words(spec.settings.blend),
            weights_digest=weights,
            tokenizer_digest=hf.tokenizer_digest(own.tokenizer if own else self._student_tokenizer),
            vocab_size=shape[0],
            hidden_size=shape[1],
            dtype=spec.settings.dtype,
            norm_placement=metadata["norm_placement"],
            logit_softcap=float(metadata["logit_softcap"]),
            logit_scale=float(metadata["logit_scale"]),
            quantisation=quantisation_of(
                self._spec(one).settings.quantisation for one in spec.settings.blend or (name,)
            ),
            head_file=str(file.relative_to(root)),
            head_digest=file_digest(file),
        )

    def record_without_head(self, name: str, source: str, identity: str = "") -> Teacher:
        """Return the row for `teachers` of a teacher without one LM head: behind a url, or one that follows a policy.

        source: where its weights are. identity: digest of its server's ServerIdentity; empty for weights that change.
        """
        return Teacher(
            name=name,
            source=source,
            weights_digest=identity,
            tokenizer_digest=hf.tokenizer_digest(self._student_tokenizer),
            vocab_size=len(self._student_tokenizer),
            hidden_size=0,
            dtype="",
            head_file="",
            head_digest="",
        )

    def head_file(self, name: str) -> str:
        """Return the path of a teacher's head in the store; adapters that do not change their base's head share one
        file."""
        dtype = self._spec(name).settings.dtype
        head = f"base-{self._head_owner(name)[:16]}-{dtype}" if self._shares_head(name) else name
        return f"heads/{head}.safetensors"

    def _shares_head(self, name: str) -> bool:
        folder = self._spec(name).folder
        return folder is not None and is_adapter(folder) and not touches_head(folder)

    def _head_owner(self, name: str) -> str:
        """Return the digest of the weights that a teacher's head belongs to."""
        folder = self._spec(name).folder
        if folder is None or not self._shares_head(name):
            return self._digest(name)
        return hf.weights_digest(base_folder(folder))

    def _digest(self, name: str) -> str:
        """Return the digest of the weights that a teacher scores with: the stored ones, exchanged ends and
        quantisation.

        For a blend, it covers its members' digests and weights.
        """
        settings = self._spec(name).settings
        if settings.blend:
            return _digest_of("+".join(f"{self._digest(m)}*{weight!r}" for m, weight in settings.blend.items()))
        stored = hf.weights_digest(self._checked(name))
        if ends := self._exchanged(self._checked(name), settings):
            stored = _digest_of(f"{stored} with ends {ends[0]} and {ends[1]} exchanged")
        return stored if settings.quantisation == "none" else _digest_of(f"{stored} as {settings.quantisation}")

    def _spec(self, name: str) -> TeacherSpec:
        if name not in self._specs:
            raise UnknownNameError(f"no teacher {name!r} in the pool: {nearest(name, self._specs)}")
        return self._specs[name]

    def _checked(self, name: str) -> Path:
        """Return the folder of a teacher, after checking that the student's ids mean the same to it."""
        folder = self._spec(name).folder
        if folder is None and self._spec(name).settings.is_remote:
            raise MismatchError(
                f"teacher {name!r} has its weights behind {self._spec(name).settings.url} only; give "
                f'teachers.{name}.source, or set score.engine = "vllm" and score.reads = "prompt_logprobs"'
            )
        if folder is None:
            raise MismatchError(f"teacher {name!r} is a blend: it has no weights of its own; name one of its members")
        if self._spec(name).settings.tokenizer == "student":
            compare_vocabularies(self._student_tokenizer, hf.load_tokenizer(folder), name=name)
        return folder


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _words(blend: Mapping[str, float]) -> str:
    signed = (f"{'-' if weight < 0 else '+'} {abs(weight):g} {name}" for name, weight in blend.items())
    return " ".join(signed).removeprefix("+ ")
