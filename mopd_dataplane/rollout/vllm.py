"""The vLLM engine of this machine: vLLM's core runs in a process of its own and streams tokens here.

    noise = "keyed"    KeyedSampler draws the tokens that the Hugging Face engine would draw, up to rounding, and the
                       same ones again at a resume
    noise = "seeded"   vLLM's own sampler, seeded per sample; faster for large vocabularies; a resume draws afresh

A resumed sample is read again up to its newest RESCORED tokens. Those the keyed sampler says again, so their log-probs
come from the same decode path, distribution and rounding as the ones in the log. A seeded sample is not compared: its
resume is statistical whatever the logits are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.errors import EngineError, MismatchError
from mopd_dataplane.models import load_tokenizer, model_shape, stop_ids, tokenizer_digest, weights_digest
from mopd_dataplane.rollout.engine import RESCORED, Request, StepOutput
from mopd_dataplane.rollout.streams import Streams, rescored
from mopd_dataplane.rollout.ticket import Ticket
from mopd_dataplane.vllm_local import answering, require_vllm, start

SAMPLER = "mopd_dataplane.rollout.keyed_sampler:KeyedSampler"
LOGPROBS_MODE = {"keyed": "processed_logits", "seeded": "processed_logprobs"}


class VllmEngine:
    """Decodes with vLLM on this machine.

    folder: model folder. options: more of vLLM's EngineArgs (`tensor_parallel_size`, `gpu_memory_utilization`, …).
    threads: CPU threads of vLLM's process, 0 leaves the choice to vLLM. Raises InputError without vLLM or with options
    it does not know, UnknownNameError without weights, EngineError when vLLM does not start.
    """

    lockstep = False

    def __init__(
        self,
        folder: str | Path,
        *,
        slots: int,
        policy_version: int = 0,
        dtype: str = "float32",
        noise: Literal["keyed", "seeded"] = "keyed",
        threads: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        require_vllm()
        self._folder = Path(folder)
        self.slots = slots
        self.position_keyed = noise == "keyed"
        self.tokenizer = load_tokenizer(folder)
        self.tokenizer_digest = tokenizer_digest(self.tokenizer)
        self.policy_digest = weights_digest(folder)
        self.policy_version = policy_version
        self._shape = model_shape(self._folder)
        self.vocab_size = self._shape["vocab_size"]
        self.context_length = self._shape["max_position_embeddings"]
        self._streams = Streams(slots, self.tokenizer, stop_ids(folder, self.tokenizer))
        arguments: dict[str, Any] = {
            "dtype": dtype,
            "max_num_seqs": slots,
            "max_model_len": self.context_length,
            "logprobs_mode": LOGPROBS_MODE[noise],
            "logits_processors": [SAMPLER] if self.position_keyed else None,
            "generation_config": "vllm",
        }
        self._engine = start(self._folder, arguments | dict(options or {}), threads=threads)

    def admit(self, requests: Sequence[tuple[int, Request]]) -> dict[int, NDArray[np.float32]]:
        """See Engine.admit. Other live slots go on meanwhile; their tokens are kept for the steps that follow."""
        again = RESCORED if self.position_keyed else 0
        opened = []
        for slot, request in requests:
            stream = self._streams.open(slot, request, again=min(again, len(request.prefix_ids)))
            known = [*request.prompt_ids.tolist(), *request.prefix_ids.tolist()]
            prompt = {"prompt_token_ids": known[: len(known) - len(stream.again)]}
            with answering():
                self._engine.add_request(stream.name, prompt, self._sampling(request, stream.again))
            opened.append((slot, stream))
        while not all(stream.is_rescored for _, stream in opened):
            self._listen()
        return rescored(opened)

    def _sampling(self, request: Request, again: tuple[int, ...]) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        settings: dict[str, Any] = {
            "max_tokens": request.max_new_tokens - len(request.prefix_ids) + len(again),
            "logprobs": 0,
            "ignore_eos": True,  # Streams ends a sample; a repeated prefix may hold end-of-sequence tokens
            "detokenize": False,
            "output_kind": RequestOutputKind.DELTA,
        }
        if self.position_keyed:
            settings |= {"temperature": 0.0, "extra_args": Ticket.of(request, again).as_arguments()}
        else:
            settings |= {
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": request.top_k,
                "seed": native_seed(request),
            }
        return SamplingParams(**settings)

    def step(self) -> StepOutput:
        """See Engine.step. Waits until at least one slot's next token is here."""
        while not self._streams.ready:
            self._listen()
        output, ended = self._streams.step()
        with answering():
            self._engine.abort_request(ended)
        bad = np.flatnonzero(np.isnan(output.logprobs))
        if len(bad):
            raise EngineError(
                f"policy version {self.policy_version} gives non-finite logits in slot {output.slots[bad[0]]} at "
                f"response position {output.positions[bad[0]]}; nothing of this step was written; check the policy's "
                "weights, then run again to continue"
            )
        return output

    def _listen(self) -> None:
        """Take what vLLM's next iteration has to say."""
        with answering():
            for answer in self._engine.step():
                completion = answer.outputs[0]
                ids = list(completion.token_ids)
                logprobs = [row[token].logprob for row, token in zip(completion.logprobs or [], ids, strict=True)]
                self._streams.arrive(answer.request_id, ids, logprobs)
                if answer.finished:
                    self._streams.end(answer.request_id)

    def release(self, slot: int) -> None:
        """See Engine.release."""
        if slot in self._streams:
            with answering():
                self._engine.abort_request([self._streams.close(slot)])

    def load_policy(self, folder: Path, version: int) -> None:
        """Swap the weights in place; every slot must be free. Every cached prefix is dropped with the old weights.

        Raises MismatchError when the folder holds a model of another shape; the old weights stay.
        """
        if len(self._streams):
            raise EngineError(f"{len(self._streams)} slots are still live; release them before loading another policy")
        shape = model_shape(folder)
        if shape != self._shape:
            odd = sorted(key for key in shape | self._shape if shape.get(key) != self._shape.get(key))
            raise MismatchError(
                f"{folder} is another model than {self._folder} ({', '.join(odd)} differ); start a new engine for it"
            )
        digest = weights_digest(folder)
        if digest != self.policy_digest:
            with answering():
                self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
                if not self._engine.reset_prefix_cache():
                    raise EngineError("vLLM did not drop its cached prefixes; run again to continue with a new engine")
        self.policy_version, self.policy_digest = version, digest

    def save(self, file: Path, requests: Sequence[tuple[int, Request]], *, limit_bytes: int) -> int:
        """vLLM's keys and values are out of reach: nothing is saved, prefixes are read again."""
        return 0

    def restore(self, file: Path, requests: Sequence[Request]) -> list[tuple[str, float]]:
        """See save."""
        return []

    def close(self) -> None:
        """End vLLM's process."""
        self._engine.engine_core.shutdown()


def native_seed(request: Request) -> int:
    """Seed of vLLM's own generator: other noise for every prefix, so that a resume repeats none that it has seen."""
    text = f"{request.key:032x}:{len(request.prefix_ids)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
