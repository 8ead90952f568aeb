"""Prompts of a dataset by its name on the hub, without a network: from a cache as `datasets` leaves it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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


def test_a_name_on_the_hub_is_read_from_the_cache(tmp_path: Path, write_hub_cache: Callable[[Path], Path]) -> None:
    home = write_hub_cache(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False,
        env={**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    said, refused = done.stdout.splitlines()
    assert json.loads(said) == [["3 + 4 =", "7", "datasets:owner/sums"], ["1 + 1 =", "2", "datasets:owner/sums"]], (
        done.stderr
    )
    assert refused.startswith("ResourceError dataset 'owner/others': the hub does not answer")
