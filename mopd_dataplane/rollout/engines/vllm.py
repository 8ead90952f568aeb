"""The vLLM engine of this machine: vLLM's core runs in a process of its own and streams tokens here.

docs/engines.md explains `noise`. The keyed sampler draws the newest RESCORED tokens of a resumed sample again, on the
decode path and with the rounding of those in the log. A seeded sample is not compared: its resume is statistical.

Whole weights are reloaded into the running engine. Adapters are LoRA requests on their base, which stays loaded: vLLM's
reload_weights silently leaves a base that is ready for adapters unchanged, so it is not used there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mopd_dataplane.errors import EngineError, MismatchError
from mopd_dataplane.models.adapter_files import is_adapter, weights_folder
from mopd_dataplane.models.hf import model_shape, weights_digest
from mopd_dataplane.models.vllm_adapters import VllmAdapters, room_for
from mopd_dataplane.models.vllm_local import answering, can_sleep, require_vllm, start
from mopd_dataplane.rollout.engines.engine import StepOutput
from mopd_dataplane.rollout.engines.streaming import Noise, Stream, StreamingEngine

if TYPE_CHECKING:
    from mopd_dataplane.job.sections import Lora

SAMPLER = "mopd_dataplane.rollout.engines.vllm_sampler:KeyedSampler"
LOGPROBS_MODE = {"keyed": "processed_logits", "seeded": "processed_logprobs"}


class VllmEngine(StreamingEngine):
    """Decodes with vLLM on this machine.

    folder: model folder. options: more of vLLM's EngineArgs (`tensor_parallel_size`, `gpu_memory_utilization`, …).
    threads: CPU threads of vLLM's process, 0 leaves the choice to vLLM. sleeps: prepare for `sleep`. adapter: be ready
    for adapters like these on the folder's model. Raises InputError without vLLM or with options it does not know,
    UnknownNameError without weights, MismatchError for an adapter that vLLM cannot compute, EngineError when vLLM does
    not start.
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
        adapter: Lora | None = None,
    ) -> None:
        require_vllm()
        folder = Path(folder)
        self._folder = weights_folder(folder)
        """Folder that vLLM was started with: a model, or the base of adapters."""
        super().__init__(folder, slots=slots, noise=noise)
        adapted = [folder] if is_adapter(folder) else []
        arguments: dict[str, Any] = {
            "dtype": dtype,
            "max_num_seqs": slots,
            "max_model_len": self.context_length,
            "logprobs_mode": LOGPROBS_MODE[noise],
            "logits_processors": [SAMPLER] if self.samplers else None,
            "generation_config": "vllm",
            **({"enable_sleep_mode": True} if sleeps and can_sleep() else {}),
            **(room_for(self._folder, adapted, adapter, dtype=dtype) if adapted or adapter else {}),
            **(options or {}),
        }
        self._can_sleep = bool(arguments.get("enable_sleep_mode"))
        self._asleep = False
        self.context_length = int(arguments["max_model_len"])
        self._engine = start(self._folder, arguments, threads=threads)
        self._adapters = VllmAdapters(self._engine) if arguments.get("enable_lora") else None
        self._request: Any = None
        """The LoRA request for every sample; None for the model that vLLM was started with."""
        self.policy_version, self.policy_digest = policy_version, weights_digest(self._folder)
        if adapted:
            try:
                self.load_policy(folder, policy_version)
            except BaseException:
                self.close()
                raise

    def _send(self, stream: Stream, prompt: list[int]) -> None:
        with answering():
            from vllm import SamplingParams
            from vllm.sampling_params import RequestOutputKind

            settings = self._drawing(stream.request, stream.again, arguments_as="extra_args")
            parameters = SamplingParams(detokenize=False, output_kind=RequestOutputKind.DELTA, **settings)
            self._engine.add_request(stream.name, {"prompt_token_ids": prompt}, parameters, lora_request=self._request)

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
        """Pass on the tokens of vLLM's next iteration."""
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
        """Swap the policy; every slot must be free. No cached prefix outlives the weights that computed it.

        Raises MismatchError when the folder holds a model of another shape, an adapter on another base, an adapter
        where vLLM was started without support, or whole weights where it was started for adapters; the old policy
        stays.
        """
        self._require_free()
        shape = model_shape(folder)
        if shape != self._shape:
            odd = sorted(key for key in shape | self._shape if shape.get(key) != self._shape.get(key))
            raise MismatchError(
                f"{folder} is another model than {self._folder} ({', '.join(odd)} differ); start a new engine for it"
            )
        digest = weights_digest(folder)
        if self._adapters is not None:
            self._adapt(self._adapters, folder, digest)
        elif is_adapter(folder):
            raise MismatchError(f"{folder} is an adapter, and vLLM was started for none; start a new engine for it")
        elif digest != self.policy_digest or self._asleep:
            self._reload(folder)
        self.policy_version, self.policy_digest = version, digest

    def _reload(self, folder: Path) -> None:
        """Replace whole weights by whole weights, dropping every cached prefix."""
        with answering():
            if self._asleep:
                self._engine.wake_up(["weights"])  # weights first: they are read before the cache is allocated
            self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            if self._asleep:
                self._engine.wake_up(["kv_cache"])
                self._asleep = False
            if not self._engine.reset_prefix_cache():
                raise EngineError("vLLM did not drop its cached prefixes; run again to continue with a new engine")

    def _adapt(self, adapters: VllmAdapters, folder: Path, digest: str) -> None:
        """Switch to the plain base, or to an adapter on it."""
        base = weights_digest(weights_folder(folder))
        if base != weights_digest(self._folder):
            raise MismatchError(
                f"{folder} needs the base {base[:16]}, vLLM was started with {self._folder}; start a new engine for it"
            )
        if self._asleep:
            with answering():
                self._engine.wake_up()
            self._asleep = False
        self._request = adapters.request(folder, digest) if is_adapter(folder) else None
        adapters.keep_only(digest)

    def sleep(self) -> bool:
        """Free the device until `load_policy`; every slot must be free. Returns False if this build of vLLM cannot do
        it.

        Weights are dropped instead of moved to the host, because the next policy brings its own. A base of adapters is
        moved to the host, because nothing would load it again.
        """
        self._require_free()
        if self._can_sleep and not self._asleep:
            with answering():
                self._engine.sleep(2 if self._adapters is None else 1)
            self._asleep = True
        return self._asleep

    def close(self) -> None:
        """End vLLM's process."""
        self._engine.engine_core.shutdown()
