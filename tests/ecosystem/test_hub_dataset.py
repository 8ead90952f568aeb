"""Prompts of a dataset by its name on the hub, without a network: from a cache as `datasets` leaves it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import datasets

SCRIPT = """
import json
from mopd_dataplane.job.sections import Domain
from mopd_dataplane.prompts import load_prompts
domain = Domain(source="datasets", dataset="owner/sums", columns={"text": "problem"}, train=2)
print(json.dumps([(prompt.text, prompt.answer, prompt.source) for prompt in load_prompts("sums", domain)]))
domain = domain.model_copy(update={"dataset": "owner/others"})
try:
    load_prompts("sums", domain)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_name_on_the_hub_is_read_from_the_cache(tmp_path: Path) -> None:
    cached = tmp_path / "home" / "datasets" / "owner___sums" / "default" / "0.0.0" / ("0" * 40)
    cached.mkdir(parents=True)
    file = tmp_path / "train.parquet"
    datasets.Dataset.from_dict({"problem": ["3 + 4 =", "1 + 1 ="], "answer": ["7", "2"]}).to_parquet(str(file))
    builder = datasets.load_dataset_builder("parquet", data_files=str(file), cache_dir=str(tmp_path / "made"))
    builder.download_and_prepare()
    for part in Path(builder.cache_dir).iterdir():
        shutil.copy(part, cached / part.name.replace("parquet-train", "sums-train"))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False,
        env={**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    said, refused = done.stdout.splitlines()
    assert json.loads(said) == [["3 + 4 =", "7", "datasets:owner/sums"], ["1 + 1 =", "2", "datasets:owner/sums"]], (
        done.stderr
    )
    assert refused.startswith("ResourceError dataset 'owner/others': the hub does not answer")
