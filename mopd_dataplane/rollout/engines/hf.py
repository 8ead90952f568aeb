"""The Hugging Face engine: batched decoding of any stock causal LM, with continuous refill of finished slots.

Live sequences occupy rows 0 .. n - 1 of a SlotCache. A step feeds each row its last token, so prompts are prefilled up
to their last token but one, and the last prompt token takes the same path as every generated one.

A sample depends on the rest of the batch only through the rounding of differently shaped matrix products (about 1e-6
relative in float32): tokens agree between batch sizes unless two candidates are tied to that precision.

With a mixed teacher, every token is drawn from the mixture of both models' sampling distributions, and its log-prob is
the mixture's (teacher-mixed sampling of MiniLLM, arXiv 2306.08543), so ratios to the sampler stay right.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from mopd_dataplane.base.sampling_masks import SamplingMasks, sampling_masks_of
from mopd_dataplane.errors import EngineError, MismatchError
from mopd_dataplane.models.hf import load_tokenizer, model_shape, stop_ids, tokenizer_digest
from mopd_dataplane.models.self_check import SelfCheck
from mopd_dataplane.models.vocabulary import compare_vocabularies
from mopd_dataplane.rollout.engines import kv_file
from mopd_dataplane.rollout.engines.decoder import Decoder
from mopd_dataplane.rollout.engines.device_sampling import distribution_of
from mopd_dataplane.rollout.engines.engine import GOING, LENGTH, RESCORED, STOP, Request, Routes, StepOutput
from mopd_dataplane.rollout.engines.philox import key_words
from mopd_dataplane.rollout.engines.sampling import SAMPLERS, Distribution, by_sampler, sampler
from mopd_dataplane.rollout.stop_strings import StopText

_PREFILL_TOKENS = 8192
"""Upper bound of the tokens in one prefill pass, with padding."""
_ROW = np.dtype([
    ("slot", "i8"), ("key", "u4", 4), ("last", "i8"), ("length", "i8"), ("prompt", "i8"), ("budget", "i8"),
    ("temperature", "f8"), ("top_p", "f8"), ("top_k", "i8"), ("sampling_mask", "?"),
], align=True)  # fmt: skip
"""Columns of a live row: slot, noise key, newest token, length so far and of the prompt, then the request's
settings."""


@dataclass(frozen=True)
class MixedTeacher:
    """A second model, a teacher, whose distribution is mixed into every draw."""

    folder: Path
    share: float
    """Its weight in the mixture, 0 to 1."""


class HfEngine:
    """The Engine of a transformers model on one device.

    folder: model folder (config, safetensors, tokenizer). slots: sequences decoded together. threads: CPU threads, 0
    leaves the choice to torch. Raises UnknownNameError without weights, MismatchError for an unsupported architecture,
    or a mixed teacher of other tokens.
    """

    lockstep = True
    samplers = tuple(SAMPLERS)

    def __init__(
        self,
        folder: str | Path,
        *,
        slots: int,
        policy_version: int = 0,
        dtype: str = "float32",
        device: str = "cpu",
        threads: int = 0,
        mixed_teacher: MixedTeacher | None = None,
    ) -> None:
        if threads:
            torch.set_num_threads(threads)
        self.slots = slots
        self.tokenizer = load_tokenizer(folder)
        self.tokenizer_digest = tokenizer_digest(self.tokenizer)
        self._dtype = dtype
        self._device = device
        self._mixed_teacher = mixed_teacher
        self._checked_shape: dict[str, Any] | None = None
        """Shape of the policy that passed the self-check."""
        self.load_policy(Path(folder), policy_version)

    def load_policy(self, folder: Path, version: int) -> None:
        """Swap the weights; every slot must be free. Keys and values of the old weights are dropped.

        An adapter on the loaded base replaces the previous one; the base is not read again.
        """
        if getattr(self, "_requests", None):
            raise EngineError(f"{len(self._requests)} slots are still live; release them before loading another policy")
        policy = self._with_policy(folder)
        self.vocab_size = policy.vocab_size
        self.context_length = policy.context_length
        self._decoders = [policy]
        self.policy_version, self.policy_digest = version, policy.digest
        if self._mixed_teacher is not None:
            teacher = self._open_mixed_teacher(self._mixed_teacher.folder, policy)
            self._decoders.append(teacher)
            # Everything that the sampling distribution depends on.
            parts = (policy.digest, teacher.digest, repr(self._mixed_teacher.share))
            self.policy_digest = blake2b("\n".join(parts).encode(), digest_size=32).hexdigest()
        self._stop_ids = np.array(stop_ids(folder, self.tokenizer), np.int32)
        self._clear()

    def _with_policy(self, folder: Path) -> Decoder:
        """Return the decoder of a policy: the current one if only its adapter changes, else a new one."""
        here: list[Decoder] = getattr(self, "_decoders", [])
        if here and here[0].swap_adapter(folder):
            here[0].clear(self.slots)
            return here[0]
        decoder = Decoder(folder, rows=self.slots, dtype=self._dtype, device=self._device)
        shape = model_shape(folder)
        if shape != self._checked_shape:  # all versions of a policy have the same shape
            self.self_check = decoder.check()
            self._checked_shape = shape
        return decoder

    def check(self, texts: Sequence[NDArray[np.int64]]) -> SelfCheck:
        """See HasSelfCheck.check. The policy and the mixed teacher read the texts."""
        if self._requests:
            raise EngineError(f"{len(self._requests)} slots are still live; release them before a self-check")
        checks = [decoder.check(texts) for decoder in self._decoders]
        self.self_check = checks[0]
        return self.self_check

    def _open_mixed_teacher(self, folder: Path, policy: Decoder) -> Decoder:
        """Open the mixed teacher's decoder. Raises MismatchError when it does not fit the policy."""
        compare_vocabularies(self.tokenizer, load_tokenizer(folder), name=str(folder))
        decoder = Decoder(folder, rows=self.slots, dtype=self._dtype, device=self._device)
        decoder.check()
        if decoder.vocab_size != policy.vocab_size:
            raise MismatchError(
                f"{folder} has {decoder.vocab_size} logits, the policy {policy.vocab_size}; a mixture needs the same "
                "tokens: use a teacher of the student's family, or rollout.teacher_mix = 0"
            )
        self.context_length = min(policy.context_length, decoder.context_length)
        return decoder

    def _clear(self) -> None:
        self._requests: list[Request] = []
        self._stops: list[StopText] = []
        self._read: list[NDArray[np.int16] | None] = []
        """Expert ids of each row's prefill, until its next step reports them."""
        self._rows = np.zeros(self.slots, _ROW)

    @property
    def _live(self) -> NDArray[np.void]:
        """[live] rows of _ROW; writing to them writes to the original rows."""
        return self._rows[: len(self._requests)]

    def admit(self, requests: Sequence[tuple[int, Request]]) -> dict[int, NDArray[np.float32]]:
        """See Engine.admit. Prefills in groups of similar length."""
        rescored: dict[int, NDArray[np.float32]] = {}
        ordered = sorted(requests, key=lambda item: len(item[1].prompt_ids) + len(item[1].prefix_ids))
        for group in _groups(ordered):
            rescored |= self._prefill(group)
        return rescored

    @torch.inference_mode()
    def _prefill(self, group: Sequence[tuple[int, Request]]) -> dict[int, NDArray[np.float32]]:
        sequences = [np.concatenate([request.prompt_ids, request.prefix_ids]) for _, request in group]
        rows = [self._enter(slot, request, ids) for (slot, request), ids in zip(group, sequences, strict=True)]
        lengths = [len(ids) - 1 for ids in sequences]
        width = max(lengths)
        block = np.zeros((len(sequences), width), np.int64)
        for row, ids in zip(block, sequences, strict=True):
            row[: len(ids) - 1] = ids[:-1]
        if width == 0:
            for decoder in self._decoders:
                decoder.cache.reset_states(torch.tensor(rows))
            return {}
        states = [decoder.prefill(rows, block, lengths) for decoder in self._decoders]
        if any(request.experts for _, request in group):
            routes = self._decoders[0].routes().reshape(*block.shape, -1)
            for ordinal, own, ids in zip(rows, routes, sequences, strict=True):
                self._read[ordinal] = own[: len(ids) - 1] if self._requests[ordinal].experts else None
        resumed = [index for index, (_, request) in enumerate(group) if len(request.prefix_ids)]
        return {group[i][0]: self._rescore(rows[i], [every[i] for every in states]) for i in resumed}

    def _enter(self, slot: int, request: Request, ids: NDArray[np.int32]) -> int:
        row = len(self._requests)
        if row == self.slots or slot in self._live["slot"]:
            raise EngineError(f"slot {slot} of {self.slots} is not free")
        self._requests.append(request)
        self._stops.append(StopText(self.tokenizer, request.stop, request.prefix_ids.tolist()))
        self._read.append(None)
        self._rows[row] = (
            slot, key_words(request.key), ids[-1], len(ids), len(request.prompt_ids), request.max_new_tokens,
            request.temperature, request.top_p, request.top_k, request.sampling_mask,
        )  # fmt: skip
        return row

    def _rescore(self, row: int, states: Sequence[torch.Tensor]) -> NDArray[np.float32]:
        """Compute log-probs of a row's newest prefix tokens, from each decoder's prefill states [width, D]."""
        request = self._requests[row]
        count = min(len(request.prefix_ids), RESCORED)
        end = len(request.prompt_ids) + len(request.prefix_ids) - 1
        newest = slice(end - count, end)
        logits = [decoder.logits(own[newest]) for decoder, own in zip(self._decoders, states, strict=True)]
        distribution = self._distribution(sampler(request.sampler), logits, np.repeat(self._rows[row : row + 1], count))
        return distribution.logprobs(request.prefix_ids[-count:])

    @torch.inference_mode()
    def step(self) -> StepOutput:
        live = self._live
        logits = self._forward()
        positions = live["length"] - live["prompt"]
        with np.errstate(invalid="ignore"):
            tokens, logprobs, masks = self._sample(logits, positions)
        # After the draw, whose noise is computed while a device still works on the logits. A sum is finite if all terms
        # are.
        finite = torch.stack([own.sum(1).isfinite() for own in logits]).all(0).cpu().numpy()
        if not finite.all():
            bad = int(np.flatnonzero(~finite)[0])
            raise EngineError(
                f"policy version {self.policy_version} gives non-finite logits for sample {self._requests[bad].uid} "
                f"at response position {positions[bad]}; nothing of this step was written; "
                "check the policy's weights, then run again to continue"
            )
        finished = self._finished(tokens, positions)
        output = StepOutput(
            live["slot"].copy(), positions.astype(np.int32), tokens, logprobs, finished, masks, self._routes()
        )
        live["last"] = tokens
        live["length"] += 1
        for row in np.flatnonzero(finished)[::-1]:
            self._leave(int(row))
        return output

    def _forward(self) -> list[torch.Tensor]:
        """Compute the logits [live, V] of each decoder."""
        last, columns = self._live["last"].copy(), self._live["length"] - 1
        return [decoder.forward(last, columns) for decoder in self._decoders]

    def _routes(self) -> Routes | None:
        """Return experts of the tokens that the asking rows have read since their last report, up to the newest
        pass."""
        if not any(request.experts for request in self._requests):
            return None
        stepped = self._decoders[0].routes()
        said: list[NDArray[np.int16]] = []
        for row, request in enumerate(self._requests):
            before, self._read[row] = self._read[row], None
            own = stepped[row : row + 1] if request.experts else stepped[:0]
            said.append(own if before is None else np.concatenate([before, own]))
        return Routes(np.array([len(ids) for ids in said], np.int32), np.concatenate(said))

    def _distribution(
        self, kind: type[Distribution], logits: Sequence[torch.Tensor], rows: NDArray[np.void]
    ) -> Distribution:
        """Build the distribution for a sampler. logits: [N, V] of each decoder; rows: [N] of _ROW."""
        settings = rows["temperature"], rows["top_k"], rows["top_p"]
        parts = [distribution_of(kind, own, *settings) for own in logits]
        return parts[0] if self._mixed_teacher is None else parts[0].mixed(parts[1], share=self._mixed_teacher.share)

    def _sample(
        self, logits: Sequence[torch.Tensor], positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], SamplingMasks | None]:
        live = len(positions)
        needs_mask = self._live["sampling_mask"]
        inside = np.zeros((live, self.vocab_size if needs_mask.any() else 0), np.bool_)
        tokens = np.zeros(live, np.int32)
        logprobs = np.zeros(live, np.float32)
        for kind, rows in by_sampler([request.sampler for request in self._requests]):
            own = self._live[rows]
            distribution = self._distribution(kind, [every[rows] for every in logits], own)
            tokens[rows] = distribution.draw(own["key"], positions[rows], own["temperature"])
            logprobs[rows] = distribution.logprobs(tokens[rows])
            if needs_mask.any():
                inside[rows] = distribution.kept()
        return tokens, logprobs, sampling_masks_of(inside, needs_mask) if needs_mask.any() else None

    def _finished(self, tokens: NDArray[np.int32], positions: NDArray[np.int64]) -> NDArray[np.uint8]:
        stopped = np.isin(tokens, self._stop_ids)
        for row, stops in enumerate(self._stops):
            stopped[row] |= stops.add(int(tokens[row]))
        full = positions + 1 >= self._live["budget"]
        return np.where(stopped, STOP, np.where(full, LENGTH, GOING)).astype(np.uint8)

    @torch.inference_mode()
    def release(self, slot: int) -> None:
        for row in np.flatnonzero(self._live["slot"] == slot):
            self._leave(int(row))

    def _leave(self, row: int) -> None:
        """Free a row by moving the last row into it."""
        last = len(self._requests) - 1
        request, stops, read = self._requests.pop(), self._stops.pop(), self._read.pop()
        if row == last:
            return
        self._requests[row], self._stops[row], self._read[row] = request, stops, read
        for decoder in self._decoders:
            decoder.cache.move(last, row, int(self._rows["length"][last]))
        self._rows[row] = self._rows[last]

    @torch.inference_mode()
    def save(self, file: Path, requests: Sequence[tuple[int, Request]], *, limit_bytes: int) -> int:
        """See Engine.save. The logits of the next token are saved too: restore compares them bit by bit."""
        if not self._requests or not limit_bytes or any(read is not None for read in self._read):
            return 0
        if any(decoder.layer_types.has_states for decoder in self._decoders):
            return 0  # the pass below would advance a recurrent state twice
        # The pass writes the keys of each row's last token; the next step writes the same ones again.
        logits = torch.stack(self._forward()).cpu()
        lengths = self._live["length"].tolist()
        token_bytes = sum(decoder.cache.token_bytes() for decoder in self._decoders)
        if sum(lengths) * token_bytes + logits.nbytes > limit_bytes:
            return 0
        now = dict(requests)
        rows = [now[slot].digest() for slot in self._live["slot"].tolist()]
        tensors = {"logits": logits}
        for index, decoder in enumerate(self._decoders):
            tensors |= {f"{index}.{name}": tensor for name, tensor in decoder.cache.take(lengths).items()}
        return kv_file.write(file, tensors, rows, self._identity())

    @torch.inference_mode()
    def restore(self, file: Path, requests: Sequence[Request]) -> list[tuple[str, float]]:
        """See Engine.restore. Rows keep their order: a batch of the same shape rounds the same way."""
        if self._requests:
            raise EngineError(f"{len(self._requests)} slots are still live; release them before restoring others")
        by_digest = {request.digest(): request for request in requests}
        saved = kv_file.read(file, self._identity())
        if saved is None or len(saved.rows) > self.slots or not by_digest.keys() >= set(saved.rows):
            return []
        admitted = [by_digest[digest] for digest in saved.rows]
        for slot, request in enumerate(admitted):
            self._enter(slot, request, np.concatenate([request.prompt_ids, request.prefix_ids]))
        for index, decoder in enumerate(self._decoders):
            prefix = f"{index}."
            own = {n.removeprefix(prefix): tensor for n, tensor in saved.tensors.items() if n.startswith(prefix)}
            decoder.cache.put(self._live["length"].tolist(), own, self._device)
        gaps = (torch.stack(self._forward()).cpu() - saved.tensors["logits"]).abs().amax((0, 2)).tolist()
        return [(request.uid, float(gap)) for request, gap in zip(admitted, gaps, strict=True)]

    def _identity(self) -> dict[str, str]:
        """Return everything besides the tokens that keys, values and logits depend on."""
        return {
            "weights": self.policy_digest,
            "tokenizer": self.tokenizer_digest,
            "build": f"torch {torch.__version__}, transformers {transformers.__version__}",
            "device": f"{self._device}, {self._dtype}, {torch.get_num_threads()} threads",
        }

    def close(self) -> None:
        """Drop the models and their caches."""
        del self._decoders


def _groups(ordered: list[tuple[int, Request]]) -> list[list[tuple[int, Request]]]:
    """Cut requests, shortest first, into groups of at most _PREFILL_TOKENS padded tokens."""
    groups: list[list[tuple[int, Request]]] = []
    for item in ordered:
        length = len(item[1].prompt_ids) + len(item[1].prefix_ids)
        if not groups or (len(groups[-1]) + 1) * length > _PREFILL_TOKENS:
            groups.append([])
        groups[-1].append(item)
    return groups
