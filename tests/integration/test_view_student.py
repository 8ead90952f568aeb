"""The student's own distribution in the viewer: what its weights say now is what it sampled from then."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mopd_dataplane import open_store
from mopd_dataplane.errors import UnknownNameError
from mopd_dataplane.view.sample import read_payload
from mopd_dataplane.view.shown import Shown
from mopd_dataplane.view.student import version_at


def test_the_weights_say_what_the_sampler_recorded(finished_job: Path) -> None:
    shown = Shown(open_store(str(finished_job / "store")))
    index = shown.index()
    rows = index.rows("select * from rollouts where policy <> 'reference' and top_p = 1 and top_k = 0 "
                      "order by policy_version_first, uid")  # fmt: skip
    chosen = [rows[0], rows[-1]]
    assert chosen[0]["policy_version_first"] < chosen[1]["policy_version_first"], "the first policy and a later one"
    for row in chosen:
        payload = read_payload(shown.store, row, index.snapshot)
        assert payload.logprobs is not None
        for position in np.flatnonzero(payload.mask)[:4].tolist():
            candidates = shown.student.candidates(row, payload, position)
            assert candidates["version"] == version_at(payload, position)
            assert candidates["own"] == pytest.approx(float(payload.logprobs[position]), abs=1e-3)
            assert sum(np.exp(candidates["logprobs"])) + candidates["tail"] == pytest.approx(1, abs=1e-5)
            assert candidates["logprobs"] == sorted(candidates["logprobs"], reverse=True)
    reference = index.rows("select * from rollouts where policy = 'reference' limit 1")[0]
    with pytest.raises(UnknownNameError, match="no policy wrote"):
        shown.student.candidates(reference, read_payload(shown.store, reference, index.snapshot), 0)
