"""Runs inside vLLM, as its `worker_extension_cls`: reports which parts of an adapter vLLM uses."""

from __future__ import annotations

from typing import Any


class AdapterWorker:
    """Methods added to vLLM's worker."""

    model_runner: Any

    def unreached(self, adapter: int) -> list[str]:
        """Return the modules that an adapter has factors for but that this worker does not adapt."""
        manager = self.model_runner.lora_manager._adapter_manager
        adapter_weights = manager.get_adapter(adapter)
        reached = {id(manager._get_lora_layer_weights(adapter_weights, name)) for name in manager.modules}
        return [name for name, factors in adapter_weights.loras.items() if id(factors) not in reached]
