"""Row 19 of the fault list: one bit flips in any file of a real store; the audit names it, or readers see no change."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import flips
from deaths import folder
from inject import Row, Tally

STORE = Path(__file__).parents[1] / "data" / "store-format-1.tar.xz"
MAKE = """
import json, shutil, sys
from pathlib import Path
import numpy as np
from mopd_dataplane.job.sections import Lora
from mopd_dataplane.models import adapters, hf
from mopd_dataplane.models.adapter_files import Base
from mopd_dataplane.run.upgrade import upgrade_store
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.read.decode import keep_tokenizer
from mopd_dataplane.store.commit.token_stats import TokenStats, write_token_stats
root = Path(sys.argv[2])
list(upgrade_store(sys.argv[1], root))
store = Store.open(root)
for number in range(3):
    store.add_event(f"flip/{number}", "student", "measure", number, 0.5, {"number": number})
rows, samples = next(store.scan_samples(["uid", "loss_tokens"]))
for row, sample in list(zip(rows.tolist(), samples.to_pylist()))[:8]:
    entropy = np.linspace(0, 1, sample["loss_tokens"], dtype=np.float32)
    write_token_stats(store, [TokenStats(sample_row=row, stage="student", values={"student_entropy": entropy})])
    store.add_labels([{"label_id": f"label/{row}", "uid": sample["uid"], "label": "odd", "note": "why?",
                       "author": "reader", "removed": False}])
keep_tokenizer(store, "0badcafe", json.loads((root / "policies" / "init" / "tokenizer.json").read_text()))
store.write_json("provenance.json", {"runs": [{"commit": "1a01221"}]})
store.deletions.close(store.deletions.begin(["0" * 32], [1 << 40], ["a prompt"]))
shutil.copytree(root / "policies" / "student" / "v2", root / "policies" / "student" / "merged-v2")
start = root / "policies" / "init"
model = hf.load_model(start)
adapters.new_adapter(model, Lora(r=2))
adapters.save_adapter(model, adapters.trained_tensors(model), root / "policies" / "adapted" / "v1", start=start,
                      base=Base(str(start), "", hf.weights_digest(start)))
store.compact()
store.snapshot(tag="after")
"""


def flipped(count: int, seed: int) -> Tally:
    """Flip bits one at a time in a store that a job of every kind of stage left behind, with whatever else a store can
    hold put beside: statistics of tokens, labels, a kept tokenizer, a deletion, merged weights, a LoRA adapter."""
    tally = Tally()
    with folder() as home:
        home.mkdir()
        with tarfile.open(STORE) as archive:
            archive.extractall(home, filter="data")
        subprocess.run([sys.executable, "-c", MAKE, str(home / "store"), str(home / "new")], check=True, timeout=600)
        shutil.rmtree(home / "store")
        for outcome in flips.try_flips(home / "new", flips.draw(home / "new", count, seed)):
            tally.case(outcome.what in ("found", "harmless"), f"{outcome.what}, {outcome.flip}: {outcome.said}")
    return tally


ROWS = [
    Row(
        19, "store: one bit flips in any file", "named by verify, or nothing that is read has changed",
        flipped, (24, 500, 2_000),
    ),
]  # fmt: skip
