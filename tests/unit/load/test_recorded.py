"""Sampling masks, experts and policy versions in packs: no more of them than some sample of the window needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from replacing import replace_rows

from mopd_dataplane.errors import DamagedError, MismatchError
from mopd_dataplane.job import sections
from mopd_dataplane.job.objectives import CrossEntropyTerm, Objective, PolicyGradientTerm
from mopd_dataplane.load.slot_layout import arrays_of
from mopd_dataplane.load.source import WindowSource
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.plan.columns import SAMPLE_COLUMNS, collect_columns
from mopd_dataplane.plan.plan import build_window
from mopd_dataplane.records import Pack, Sample, sample_uid
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.read import row_reader
from mopd_dataplane.store.read.row_reader import PayloadReader

STAGE = "student"
ASKS = LoadSpec.for_stage(STAGE, sections.Load(), Objective(policy_gradient=PolicyGradientTerm(teacher_coef=0)))


@pytest.fixture(autouse=True, params=[0, 1 << 60], ids=["in-place", "through-lance"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything here is read in place, and through Lance."""
    monkeypatch.setattr(row_reader, "IN_PLACE_BYTES", request.param)


def sample(number: int, *, is_cut: bool) -> Sample:
    """A sample with a hole in its loss mask; sets of 0, 1, 2, 3, 0 … ids that begin with the drawn one."""
    rng = np.random.default_rng(number)
    response = int(rng.integers(3, 30))
    tokens = rng.integers(0, 1000, 4 + response).astype(np.int32)
    mask = np.ones(response, np.uint8)
    mask[1] = 0
    drawn = tokens[4:][mask.astype(bool)]
    sizes = (np.arange(len(drawn)) % 4).astype(np.int32)
    ids = [token + offset for token, size in zip(drawn.tolist(), sizes.tolist(), strict=True) for offset in range(size)]
    return Sample(
        uid=sample_uid(0, STAGE, f"p{number}", 0, 0), prompt_id=f"p{number}", group_id=f"p{number}#0", group_index=0,
        iteration=0, domain="math", stage=STAGE, writer="w", writer_seq=number, policy=STAGE, temperature=1.0,
        top_p=0.9 if is_cut else 1.0, top_k=0, prompt_len=4, tokens=tokens, finish_reason="stop", tokenizer="t",
        logprobs=-rng.random(response).astype(np.float32), loss_mask=mask, version_starts=np.zeros(1, np.int32),
        versions=np.zeros(1, np.int32), sampling_mask_sizes=sizes if is_cut else None,
        sampling_mask_ids=np.array(ids, np.int32) if is_cut else None,
    )  # fmt: skip


def opened(folder: Path, samples: list[Sample], spec: LoadSpec = ASKS) -> WindowSource:
    store = Store.create(folder / "store")
    rows = store.commit_samples(samples).rows
    columns = collect_columns(store.scan_samples(SAMPLE_COLUMNS), len(rows), route=None, teachers=[])
    settings = sections.Plan(pack_tokens=64, batch_samples=4)
    plan = build_window(
        columns, settings, seed=1, stage=STAGE, window=0, snapshot=store.snapshot(), teachers=[]
    )  # fmt: skip
    return WindowSource(store, plan, spec)


def packs(source: WindowSource) -> list[dict[str, Any]]:
    pack_arrays = []
    for pack in range(len(source.plan.pack_teachers)):
        fields, nbytes = source.fields(pack)
        assert nbytes <= source.largest_pack_bytes
        memory = memoryview(bytearray(b"\xdb" * nbytes))
        source.fill(pack, fields, memory, lambda pack=pack: [pack])
        pack_arrays.append(dict(arrays_of(memory, fields)))
    return pack_arrays


def test_every_trained_token_has_its_set_and_an_uncut_sample_has_sets_of_size_zero(tmp_path: Path) -> None:
    samples = [sample(number, is_cut=number % 3 != 0) for number in range(16)]
    source = opened(tmp_path, samples)
    seen = 0
    for pack in packs(source):
        ids = iter(pack["sampling_mask_ids"].tolist())
        sets = [[next(ids) for _ in range(size)] for size in pack["sampling_mask_sizes"].tolist()]
        assert next(ids, None) is None
        expected: list[list[int]] = []
        for row in pack["sample_rows"].tolist():
            stored = samples[row]
            sizes = (
                [0] * stored.loss_tokens if stored.sampling_mask_sizes is None else stored.sampling_mask_sizes.tolist()
            )
            own = iter([] if stored.sampling_mask_ids is None else stored.sampling_mask_ids.tolist())
            expected += [[next(own) for _ in range(size)] for size in sizes]
            seen += 1
        assert sets == expected
    assert seen == 16


def test_packs_carry_no_sets_that_nobody_has_or_asks_for(tmp_path: Path) -> None:
    uncut = opened(tmp_path / "uncut", [sample(number, is_cut=False) for number in range(8)])
    other = LoadSpec.for_stage(STAGE, sections.Load(), Objective(cross_entropy=CrossEntropyTerm()))
    unasked = opened(tmp_path / "unasked", [sample(number, is_cut=True) for number in range(8)], other)
    for source in (uncut, unasked):
        assert not any("sampling_mask_sizes" in pack for pack in packs(source))


def test_metadata_that_counts_other_ids_is_damage(tmp_path: Path) -> None:
    source = opened(tmp_path, [sample(number, is_cut=True) for number in range(4)])
    store = source._store
    rows = store.samples().to_pylist()
    rows[2]["sampling_mask_len"] += 1
    replace_rows(f"{store.uri}/samples", pa.Table.from_pylist(rows, schema=store.dataset("samples").schema))
    source = WindowSource(Store.open(store.uri), _at(source.plan, Store.open(store.uri)), ASKS)
    with pytest.raises(DamagedError, match=r"sample row 2 has \d+ values of sampling_mask_ids, its metadata says"):
        packs(source)


def by_versions(number: int) -> Sample:
    """A sample of 1 to 3 policies; the third may be the first again, where old weights were brought back."""
    versioned_sample = sample(number, is_cut=False)
    spans = min(1 + number % 3, len(versioned_sample.loss_mask))
    versioned_sample.version_starts = np.arange(spans, dtype=np.int32)
    versioned_sample.versions = np.array([5, 7, 5], np.int32)[:spans]
    return versioned_sample


@pytest.mark.parametrize("older", [False, True], ids=["counted", "older writer"])
@pytest.mark.parametrize("changes", [False, True], ids=["one policy", "policies"])
def test_the_spans_of_a_pack_say_which_policy_wrote_each_token(tmp_path: Path, changes: bool, older: bool) -> None:
    samples = [by_versions(number if changes else 0) for number in range(16)]
    for number, versioned_sample in enumerate(samples):
        versioned_sample.uid, versioned_sample.writer_seq = sample_uid(0, STAGE, f"p{number}", 0, 1), number
    source = opened(tmp_path, samples)
    if older:
        lance.dataset(f"{source._store.uri}/samples").drop_columns(["version_spans"])
        source = WindowSource(Store.open(source._store.uri), _at(source.plan, Store.open(source._store.uri)), ASKS)
    seen = 0
    for index, arrays in enumerate(packs(source)):
        pack = Pack(index=index, teacher="", **arrays)
        assert (np.diff(pack.version_starts, append=len(pack.tokens)) > 0).all()
        expected: list[int] = []
        for row in pack.sample_rows.tolist():
            stored = samples[row]
            ends = [*stored.version_starts[1:].tolist(), len(stored.loss_mask)]
            spans = zip(stored.version_starts.tolist(), ends, stored.versions.tolist(), strict=True)
            written = [version for start, end, version in spans for _ in range(end - start)]
            expected += [-1] * 4 + [v if m else -1 for v, m in zip(written, stored.loss_mask, strict=True)]
            seen += 1
        assert pack.policy_versions.tolist() == expected
    assert seen == 16


def test_metadata_that_counts_other_spans_is_damage(tmp_path: Path) -> None:
    source = opened(tmp_path, [by_versions(number) for number in range(4)])
    source._version_spans = source._version_spans + 1
    with pytest.raises(DamagedError, match=r"sample row \d+ has \d policy versions, its metadata says \d"):
        packs(source)


def _at(plan: Any, store: Store) -> Any:
    plan.snapshot = store.snapshot()
    return plan


def with_experts(number: int, width: int = 6) -> Sample:
    sample_with_experts = sample(number, is_cut=False)
    ids = np.random.default_rng(number).integers(0, 60, (len(sample_with_experts.tokens) - 1, width))
    sample_with_experts.experts = ids.astype(np.int16)
    return sample_with_experts


def test_every_token_that_was_read_has_its_experts(tmp_path: Path) -> None:
    samples = [with_experts(number) if number % 3 else sample(number, is_cut=number % 2 == 0) for number in range(16)]
    seen = 0
    for pack in packs(opened(tmp_path, samples)):
        bounds = pack["cu_seqlens"].tolist()
        for row, first, last in zip(pack["sample_rows"].tolist(), bounds[:-1], bounds[1:], strict=True):
            own, stored = pack["experts"][first:last], samples[row].experts
            expected = np.full((last - first - 1, 6), -1) if stored is None else stored
            assert own[:-1].tolist() == expected.tolist()
            assert own[-1].tolist() == [-1] * 6
            seen += 1
    assert seen == 16


def test_samples_of_two_models_in_one_window_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="6 and 8 values of experts a token: two models"):
        opened(tmp_path, [with_experts(0), with_experts(1, width=8)])


@pytest.mark.parametrize(
    ("column", "said"),
    [("experts", r"\d+ values of experts"), ("sampling_mask_ids", r"\d+ values of sampling_mask_ids")],
)
def test_lists_of_another_length_than_the_metadata_says_are_damage(tmp_path: Path, monkeypatch, column, said) -> None:
    make_sample = with_experts if column == "experts" else lambda number: sample(number, is_cut=True)
    source = opened(tmp_path, [make_sample(number) for number in range(4)])
    lists = PayloadReader.lists

    def shortened(self, *args, **options):
        columns = lists(self, *args, **options)
        if column in columns:
            columns[column].lengths[:] -= 1
        return columns

    monkeypatch.setattr(PayloadReader, "lists", shortened)
    with pytest.raises(
        DamagedError, match=rf"sample row \d+ has {said}, its metadata says \d+; run `mopd store verify`"
    ):
        packs(source)
