"""Per-token statistics of a step: against log-softmax over the whole vocabulary, whatever the objective and the cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mopd_kernels import decode, encode
from mopd_kernels.heads import Head
from safetensors.torch import save_file

from mopd_dataplane.base.files import file_digest
from mopd_dataplane.base.stats_choice import SHARE, keeps_stats
from mopd_dataplane.job.objectives import CrossEntropyTerm, DivergenceTerm, Objective, PolicyGradientTerm
from mopd_dataplane.job.sections import Train
from mopd_dataplane.records import PER_TOKEN_STATS, Pack
from mopd_dataplane.train.context import part_of
from mopd_dataplane.train.heads import TeacherHeads
from mopd_dataplane.train.loop import Trainer
from mopd_dataplane.train.microbatch import build
from mopd_dataplane.train.objective import ObjectiveLoss
from mopd_dataplane.train.ranks import Ranks
from mopd_dataplane.train.spec import HeadFile, Window
from mopd_dataplane.train.student import load_student
from mopd_dataplane.train.token_stats import STEPS, StatsOfSteps, read_stats, stats_files

ALONE = Ranks(0, 1, torch.device("cpu"))
WINDOW = Window(window=0, plan_digest="p0", snapshot_digest="s0", steps=1, policy_version=2)
WIDTH = 24
EXACT = {"logprob_gap", "student_entropy", "teacher_entropy", "reverse_kl", "forward_kl", "top1_agreement"}
OF_BOTH = EXACT - {"logprob_gap", "student_entropy"}
OBJECTIVES = {
    "cross-entropy": (Objective(cross_entropy=CrossEntropyTerm()), {"logprob_gap", "student_entropy"}),
    "cross-entropy, frozen head": (Objective(cross_entropy=CrossEntropyTerm()), {"logprob_gap", "student_entropy"}),
    "policy-gradient": (Objective(policy_gradient=PolicyGradientTerm()), {"logprob_gap", "student_entropy"}),
    "mis": (Objective(policy_gradient=PolicyGradientTerm(correction="mis")), {"logprob_gap", "student_entropy"}),
    "exact": (Objective(divergence=DivergenceTerm()), EXACT),
}


@pytest.fixture
def packs(pack: Callable[..., Pack]) -> list[Pack]:
    """Six samples in three packs, with hidden states of one teacher."""
    sample_packs = [pack([9, 14], seed=1, index=0), pack([7, 12, 8], seed=2, index=1), pack([11], seed=3, index=2)]
    row = 0
    for one in sample_packs:
        one.sample_rows = np.arange(row, row + len(one.sample_rows))
        row += len(one.sample_rows)
        generator = torch.Generator().manual_seed(one.index)
        one.hidden = encode(torch.randn(int(one.loss_mask.sum()), WIDTH, generator=generator), "bf16")
        one.hidden_codec = "bf16"
    return sample_packs


@pytest.fixture
def head(tmp_path: Path) -> HeadFile:
    weight = torch.randn(100, WIDTH, generator=torch.Generator().manual_seed(0))
    save_file({"weight": weight}, tmp_path / "math.safetensors", metadata={"logit_softcap": "0", "logit_scale": "1"})
    return HeadFile(path=str(tmp_path / "math.safetensors"), digest=file_digest(tmp_path / "math.safetensors"))


def step(
    policy: Path, batch: Any, objective: Objective, head: HeadFile, stats: StatsOfSteps | None, **settings: Any
) -> Any:
    student = load_student(policy, ALONE, Train(**settings))
    trainer = Trainer(
        student, ObjectiveLoss(objective), Train(**settings), ALONE,
        TeacherHeads({"math": head}, ALONE.device), ("math",), stats=stats,
    )  # fmt: skip
    metrics = trainer.step(batch, WINDOW, 4)
    if stats is not None:
        stats.write()
    return metrics


def expected(policy: Path, packs: list[Pack], head: HeadFile) -> dict[int, dict[str, np.ndarray]]:
    """By sample row, from logits of the whole vocabulary and torch's log_softmax."""
    student, values_by_row = load_student(policy, ALONE), {}
    weight = TeacherHeads({"math": head}, ALONE.device).get("math").weight
    for pack in packs:
        micro = build([pack])
        with torch.no_grad():
            mine = student(micro, lambda hidden, own: (hidden @ own.weight.T).log_softmax(1))
        theirs = (decode(micro.hidden, "bf16", WIDTH, torch.float32) @ weight.T).log_softmax(1)
        own = mine.gather(1, micro.targets[:, None])[:, 0]
        values = {
            "logprob_gap": own - micro.sampler_logprobs,
            "student_entropy": -(mine.exp() * mine).sum(1),
            "teacher_entropy": -(theirs.exp() * theirs).sum(1),
            "reverse_kl": (mine.exp() * (mine - theirs)).sum(1),
            "forward_kl": (theirs.exp() * (theirs - mine)).sum(1),
            "top1_agreement": (mine.argmax(1) == theirs.argmax(1)).float(),
        }
        for sequence, row in enumerate(pack.sample_rows.tolist()):
            chosen = micro.sequence == sequence
            values_by_row[row] = {name: value[chosen].numpy() for name, value in values.items()}
    return values_by_row


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("cut", [{}, {"micro_batch_packs": 3}, {"micro_batch_packs": 2, "micro_batch_tokens": 20}])
def test_what_is_left_for_the_store_is_what_log_softmax_says(
    name: str, cut: dict[str, int], policy: Path, packs: list[Pack], batch: Any, head: HeadFile, tmp_path: Path
) -> None:
    objective, names = OBJECTIVES[name]
    stats = StatsOfSteps(tmp_path, "full", rank=0, temperature=1.0)
    step(policy, batch(packs), objective, head, stats, **cut, freeze_head="frozen" in name)
    (files,) = stats_files(tmp_path, before=5)
    assert stats_files(tmp_path, before=4) == [], "a step that is not over yet is left alone"
    stats_by_row = {one.sample_row: one for one in read_stats(files)}
    expected_values = expected(policy, packs, head)
    assert stats_by_row.keys() == expected_values.keys()
    for row, one in stats_by_row.items():
        assert (one.step, one.policy_version, one.teacher) == (4, 2, "math")
        assert set(one.values) == names
        for stat, values in one.values.items():
            assert values.dtype == np.float16
            np.testing.assert_allclose(values, expected_values[row][stat], rtol=2e-3, atol=2e-3, err_msg=stat)


@pytest.mark.parametrize(
    ("settings", "vocabulary", "missing"),
    [
        ({"divergence": DivergenceTerm(temperature=0.7)}, 100, set()),
        ({"divergence": DivergenceTerm()}, 64, set()),
        ({"divergence": DivergenceTerm(), "teacher_weights": {"math": 0.0}}, 100, OF_BOTH),
    ],
    ids=["another temperature", "a smaller vocabulary", "a teacher without weight"],
)  # fmt: skip
def test_the_gap_is_of_the_distribution_that_was_sampled_from(
    settings: dict[str, Any], vocabulary: int, missing: set[str], policy: Path, packs: list[Pack], batch: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    weight = torch.randn(vocabulary, WIDTH, generator=torch.Generator().manual_seed(0))
    save_file({"weight": weight}, tmp_path / "math.safetensors", metadata={"logit_softcap": "0", "logit_scale": "1"})
    head = HeadFile(path=str(tmp_path / "math.safetensors"), digest=file_digest(tmp_path / "math.safetensors"))
    stats = StatsOfSteps(tmp_path, "full", rank=0, temperature=1.0)
    step(policy, batch(packs), Objective(**settings), head, stats)
    sample_stats = list(read_stats(stats_files(tmp_path, before=5)[0]))
    assert len(sample_stats) == sum(len(pack.sample_rows) for pack in packs)
    for one in sample_stats:
        assert set(one.values) == EXACT - missing
    gaps = {one.sample_row: one.values["logprob_gap"] for one in sample_stats}
    for pack in packs:
        micro = build([pack])
        with torch.no_grad():
            mine = load_student(policy, ALONE)(micro, lambda hidden, own: (hidden @ own.weight.T).log_softmax(1))
        gap = (mine.gather(1, micro.targets[:, None])[:, 0] - micro.sampler_logprobs).numpy()
        for sequence, row in enumerate(pack.sample_rows.tolist()):
            expected_gap = gap[(micro.sequence == sequence).numpy()]
            np.testing.assert_allclose(gaps[row], expected_gap, rtol=2e-3, atol=2e-3)


def test_the_loss_does_not_depend_on_them(
    policy: Path, packs: list[Pack], batch: Any, head: HeadFile, tmp_path: Path
) -> None:
    losses = []
    for stats in (None, StatsOfSteps(tmp_path, "full", rank=0, temperature=1.0)):
        losses.append(step(policy, batch(packs), OBJECTIVES["exact"][0], head, stats))
    assert losses[0].loss == losses[1].loss
    assert losses[0].grad_norm == losses[1].grad_norm


def test_parts_of_ranks_that_share_a_pack_become_whole_samples(pack: Callable[..., Pack], tmp_path: Path) -> None:
    micro = build([pack([9, 14], seed=1), pack([7], seed=2)])
    micro = part_of(micro, 0, 1)
    head = Head(torch.randn(99, 8, generator=torch.Generator().manual_seed(1)))
    hidden = torch.randn(len(micro.targets), 8, generator=torch.Generator().manual_seed(2))
    for folder, members in (("alone", 1), ("shared", 3)):
        done = 0
        for member in range(members):
            share = part_of(micro, member, members)
            mine = hidden[done : done + len(share.targets)]
            done += len(share.targets)
            stats = StatsOfSteps(tmp_path / folder, "full", rank=member, temperature=1.0)
            picked = stats.pick(share, torch.device("cpu"))
            if picked is not None:
                stats.add(picked, {}, mine, head, share)
            stats.end_step(0, 0)
            stats.write()
    alone, shared = (
        {one.sample_row: one.values for one in read_stats(stats_files(tmp_path / folder, before=1)[0])}
        for folder in ("alone", "shared")
    )
    assert alone.keys() == shared.keys()
    for row, values in alone.items():
        for name, array in values.items():
            np.testing.assert_array_equal(array, shared[row][name])


def test_steps_share_a_file_and_a_sample_has_its_figures_of_each(pack: Callable[..., Pack], tmp_path: Path) -> None:
    micro = part_of(build([pack([9, 14], seed=1)]), 0, 1)
    head = Head(torch.randn(99, 8, generator=torch.Generator().manual_seed(1)))
    states = torch.randn(STEPS + 2, len(micro.targets), 8, generator=torch.Generator().manual_seed(2))
    stats = StatsOfSteps(tmp_path, "full", rank=0, temperature=1.0)
    for step, hidden in enumerate(states):
        picked = stats.pick(micro, torch.device("cpu"))
        assert picked is not None
        stats.add(picked, {}, hidden, head, micro)
        stats.end_step(step, step // 4)
    assert stats_files(tmp_path, before=STEPS - 1) == [], "a file waits until all its steps are over"
    stats.write()
    stats.write()
    first, rest = stats_files(tmp_path, before=STEPS + 2)
    assert [len(first), len(rest)] == [1, 1]
    stats_by_key = {(one.step, one.sample_row): one for group in (first, rest) for one in read_stats(group)}
    assert stats_by_key.keys() == {(step, row) for step in range(STEPS + 2) for row in micro.sample_rows.tolist()}
    for (step, row), one in stats_by_key.items():
        assert one.policy_version == step // 4
        mine = micro.sequence == micro.sample_rows.tolist().index(row)
        log_q = (states[step][mine] @ head.weight.T).log_softmax(1)
        expected_gap = log_q.gather(1, micro.targets[mine, None])[:, 0] - micro.sampler_logprobs[mine]
        np.testing.assert_allclose(one.values["logprob_gap"], expected_gap, rtol=2e-3, atol=2e-3)


def test_a_teacher_without_weight_beside_one_with_it(
    policy: Path, packs: list[Pack], batch: Any, head: HeadFile, tmp_path: Path
) -> None:
    packs[-1].teacher = "other"
    objective = Objective(divergence=DivergenceTerm(), teacher_weights={"other": 0.0})
    stats = StatsOfSteps(tmp_path, "full", rank=0, temperature=1.0)
    trainer = Trainer(
        load_student(policy, ALONE), ObjectiveLoss(objective), Train(), ALONE,
        TeacherHeads({"math": head, "other": head}, ALONE.device), ("math", "other"), stats=stats,
    )  # fmt: skip
    trainer.step(batch(packs), WINDOW, 4)
    stats.write()
    sample_stats = list(read_stats(stats_files(tmp_path, before=5)[0]))
    assert {one.teacher: set(one.values) for one in sample_stats} == {"math": EXACT, "other": EXACT - OF_BOTH}


def test_a_torn_file_says_nothing_and_stops_nobody(tmp_path: Path, pack: Callable[..., Pack]) -> None:
    folder = tmp_path / "token_stats"
    folder.mkdir()
    (folder / "00000000-0.safetensors").write_bytes(b"\0" * 200)
    (files,) = stats_files(tmp_path, before=1)
    assert list(read_stats(files)) == []


def test_one_sample_in_eight_is_kept_and_always_the_same() -> None:
    rows = np.arange(100_000)
    mask = keeps_stats("sampled", rows)
    assert abs(mask.mean() - 1 / SHARE) < 0.01
    assert (keeps_stats("sampled", rows[::-1])[::-1] == mask).all()
    groups = mask.reshape(-1, 8).sum(1)
    assert groups.max() < 8, "not whole groups, which lie side by side"
    assert keeps_stats("full", rows).all()
    assert not keeps_stats("off", rows).any()


def test_the_table_has_a_column_for_each_statistic() -> None:
    import pyarrow as pa

    from mopd_dataplane.tables import TOKEN_STATS

    assert tuple(field.name for field in TOKEN_STATS.schema if pa.types.is_list(field.type)) == PER_TOKEN_STATS
