"""Adapters as peft itself writes them, with factors that change what the base says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from mopd_dataplane.models import hf


def write_adapter(base: Path, folder: Path, *, seed: int = 1, **settings: Any) -> Path:
    """An adapter on a base; settings: peft's LoraConfig."""
    torch.manual_seed(seed)
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings}
    model = get_peft_model(hf.load_model(base), LoraConfig(**config))
    for name, weight in model.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:
            torch.nn.init.normal_(weight, std=0.1)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    return folder
