"""TRL on a store: train a model on stored signals, full-vocabulary divergences included.

    from trl import SFTConfig
    from mopd_dataplane.integrations.trl import StoreTrainer

    trainer = StoreTrainer(
        "models/base", args=SFTConfig("out", learning_rate=1e-5), store="runs/demo", stage="student",
        objective={"divergence": {"kind": "reverse"}},
    )
    trainer.train()

It is an SFTTrainer: `peft_config`, callbacks, checkpoints and model cards are TRL's, batches and loss are the store's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from mopd_dataplane.errors import UnknownNameError
from mopd_dataplane.integrations.hf_trainer import TrainsFromStore
from mopd_dataplane.store.dataset import Store


class StoreTrainer(TrainsFromStore, SFTTrainer):  # type: ignore[misc]  # typed where trl is installed
    """TRL's SFTTrainer on the planned steps of a store."""

    def __init__(self, model: Any, *, args: SFTConfig, store: str | Path | Store, stage: str, **others: Any) -> None:
        """model: a folder, a hub name or a model of transformers. args: TRL's settings. The rest as TrainsFromStore
        and SFTTrainer take it.

        Raises UnknownNameError for a stage without samples, and what TrainsFromStore raises.
        """
        opened = store if isinstance(store, Store) else Store.open(store)
        others.setdefault("train_dataset", _first_sample(opened, stage))
        args.remove_unused_columns = False
        args.dataset_kwargs = {**(args.dataset_kwargs or {}), "skip_prepare_dataset": True}
        super().__init__(model, args=args, store=opened, stage=stage, **others)


def _first_sample(store: Store, stage: str) -> Dataset:
    """One sample, as TRL names its columns: SFTTrainer looks at the first row of its dataset before it trains."""
    for rows, batch in store.scan_samples(["stage"]):
        of_stage = [row for row, name in zip(rows.tolist(), batch["stage"].to_pylist(), strict=True) if name == stage]
        if of_stage:
            [tokens] = store.read_tokens(of_stage[:1], ["tokens"])["tokens"].to_pylist()
            return Dataset.from_dict({"input_ids": [tokens], "labels": [tokens]})
    raise UnknownNameError(f"{store.uri} has no samples of stage {stage!r}")
