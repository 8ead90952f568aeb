"""The vLLM engine of this machine: vLLM's core runs in a process of its own and streams tokens here.

    noise = "keyed"    KeyedSampler draws the tokens that the Hugging Face engine would draw, up to rounding, and the
                       same ones again at a resume
    noise = "seeded"   vLLM's own sampler, seeded per sample; faster for large vocabularies; a resume draws afresh

A resumed sample is read again up to its newest RESCORED tokens. The keyed sampler draws those again, so their log-probs
come from the same decode path, distribution and rounding as the ones in the log. A seeded sample is not compared: its
resume is statistical whatever the logits are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mopd_dataplane.errors import EngineError, MismatchError
from mopd_dataplane.models.hf import model_shape, weights_digest
from mopd_dataplane.models.vllm_local import answering, can_sleep, require_vllm, start
from mopd_dataplane.rollout.engines.engine import StepOutput
from mopd_dataplane.rollout.engines.sampler_arguments import SamplerArguments
from mopd_dataplane.rollout.engines.streaming import Noise, StreamingEngine, native_seed, tokens_to_draw
from mopd_dataplane.rollout.engines.token_streams import Stream

SAMPLER = "mopd_dataplane.rollout.engines.vllm_sampler:KeyedSampler"
LOGPROBS_MODE = {"keyed": "processed_logits", "seeded": "processed_logprobs"}


class VllmEngine(StreamingEngine):
    """Decodes with vLLM on this machine.

    folder: model folder. options: more of vLLM's EngineArgs (`tensor_parallel_size`, `gpu_memory_utilization`, …).
    threads: CPU threads of vLLM's process, 0 leaves the choice to vLLM. sleeps: prepare for `sleep`. Raises InputError
    without vLLM or with options it does not know, UnknownNameError without weights, EngineError when vLLM does not
    start.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        slots: int,
        policy_version: int = 0,
        dtype: str = "float32",
        noise: Noise = "keyed",
        threads: int = 0,
        options: Mapping[str, Any] | None = None,
        sleeps: bool = False,
    ) -> None:
        require_vllm()
        self._folder = Path(folder)
        super().__init__(self._folder, slots=slots, noise=noise)
        self.policy_version, self.policy_digest = policy_version, weights_digest(folder)
        arguments: dict[str, Any] = {
            "dtype": dtype,
            "max_num_seqs": slots,
            "max_model_len": self.context_length,
            "logprobs_mode": LOGPROBS_MODE[noise],
            "logits_processors": [SAMPLER] if self.samplers else None,
            "generation_config": "vllm",
            **({"enable_sleep_mode": True} if sleeps and can_sleep() else {}),
            **(options or {}),
        }
        self._can_sleep = bool(arguments.get("enable_sleep_mode"))
        self._asleep = False
        self.context_length = int(arguments["max_model_len"])
        self._engine = start(self._folder, arguments, threads=threads)

    def _send(self, stream: Stream, prompt: list[int]) -> None:
        with answering():
            self._engine.add_request(stream.name, {"prompt_token_ids": prompt}, self._sampling(stream))

    def _sampling(self, stream: Stream) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        request = stream.request
        settings: dict[str, Any] = {
            "max_tokens": tokens_to_draw(stream),
            "logprobs": 0,
            "ignore_eos": True,  # Streams ends a sample; a repeated prefix may hold end-of-sequence tokens
            "detokenize": False,
            "output_kind": RequestOutputKind.DELTA,
        }
        if self.samplers:
            settings |= {"temperature": 0.0, "extra_args": SamplerArguments.of(request, stream.again).as_arguments()}
        else:
            settings |= {
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": request.top_k,
                "seed": native_seed(request),
            }
        return SamplingParams(**settings)

    def step(self) -> StepOutput:
        """See Engine.step. Raises EngineError on non-finite logits."""
        output = super().step()
        bad = np.flatnonzero(np.isnan(output.logprobs))
        if len(bad):
            raise EngineError(
                f"policy version {self.policy_version} gives non-finite logits in slot {output.slots[bad[0]]} at "
                f"response position {output.positions[bad[0]]}; nothing of this step was written; check the policy's "
                "weights, then run again to continue"
            )
        return output

    def _listen(self) -> None:
        """Take the tokens of vLLM's next iteration."""
        with answering():
            for answer in self._engine.step():
                completion = answer.outputs[0]
                ids = list(completion.token_ids)
                logprobs = [row[token].logprob for row, token in zip(completion.logprobs or [], ids, strict=True)]
                self._streams.arrive(answer.request_id, ids, logprobs)
                if answer.finished:
                    self._streams.end(answer.request_id)

    def _cancel(self, names: Sequence[str]) -> None:
        with answering():
            self._engine.abort_request(list(names))

    def load_policy(self, folder: Path, version: int) -> None:
        """Swap the weights in place; every slot must be free. Every cached prefix is dropped with the old weights.

        Raises MismatchError when the folder holds a model of another shape; the old weights stay.
        """
        self._require_free()
        shape = model_shape(folder)
        if shape != self._shape:
            odd = sorted(key for key in shape | self._shape if shape.get(key) != self._shape.get(key))
            raise MismatchError(
                f"{folder} is another model than {self._folder} ({', '.join(odd)} differ); start a new engine for it"
            )
        digest = weights_digest(folder)
        if digest != self.policy_digest or self._asleep:
            with answering():
                if self._asleep:
                    self._engine.wake_up(["weights"])  # room for the weights first: they are read before the cache is
                self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
                if self._asleep:
                    self._engine.wake_up(["kv_cache"])
                    self._asleep = False
                if not self._engine.reset_prefix_cache():
                    raise EngineError("vLLM did not drop its cached prefixes; run again to continue with a new engine")
        self.policy_version, self.policy_digest = version, digest

    def sleep(self) -> bool:
        """Leave the device until `load_policy`; every slot must be free. False where this build of vLLM cannot.

        Weights are dropped rather than kept on the host: the next policy brings its own.
        """
        self._require_free()
        if self._can_sleep and not self._asleep:
            with answering():
                self._engine.sleep(2)
            self._asleep = True
        return self._asleep

    def close(self) -> None:
        """End vLLM's process."""
        self._engine.engine_core.shutdown()
