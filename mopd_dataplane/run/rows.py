"""Samples of one stage, by their place in `samples`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mopd_dataplane.jobfile import Stage
from mopd_dataplane.records import Snapshot
from mopd_dataplane.store.dataset import Store

Rows = NDArray[np.int64]


def stage_samples(
    store: Store, stage: Stage, generation: int | None, columns: Sequence[str], snapshot: Snapshot | None = None
) -> tuple[Rows, pa.Table]:
    """Rows of a stage's samples (of one generation, or of all), and the asked columns of them, aligned.

    Metadata is scanned whole: `samples` is append-only, so a row's place in the scan is its row number.
    """
    table = store.samples(columns=list(dict.fromkeys([*columns, "run", "generation"])), snapshot=snapshot)
    mask = pc.equal(table["run"], stage.name)
    if generation is not None:
        mask = pc.and_(mask, pc.equal(table["generation"], generation))
    rows = np.flatnonzero(mask.to_numpy()).astype(np.int64)
    asked = table.select(list(columns))
    return rows, asked if len(rows) == table.num_rows else asked.take(rows)
