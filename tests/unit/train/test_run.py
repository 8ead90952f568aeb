"""Whole windows: metrics, published policies, and a resume that changes nothing."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mopd_dataplane.base import fault_points
from mopd_dataplane.errors import DamagedError, InputError, MismatchError
from mopd_dataplane.job.objectives import CrossEntropyTerm, Objective, PolicyGradientTerm
from mopd_dataplane.job.sections import Train
from mopd_dataplane.models import hf
from mopd_dataplane.records import Pack, StepMetrics
from mopd_dataplane.train.metrics import MetricsReader
from mopd_dataplane.train.newest import newest_checkpoint
from mopd_dataplane.train.ranks import Ranks
from mopd_dataplane.train.run import Run
from mopd_dataplane.train.spec import TrainSpec, load_spec
from mopd_dataplane.train.spikes import SpikeError
from mopd_dataplane.train.stop import Stop
from mopd_dataplane.train.token_stats import read_stats, stats_files

ALONE = Ranks(0, 1, torch.device("cpu"))
STEPS = 5
OPD = Objective(policy_gradient=PolicyGradientTerm(student_logprob="current", correction="icepop", band=(0, 99)))


class StopAfter(Stop):
    """Asks to stop after a number of steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps

    def __call__(self) -> bool:
        self._left -= 1
        return self._left <= 0


@pytest.fixture(scope="module")
def noisy(make_policy: Callable[..., Path]) -> Path:
    """A start whose training draws random numbers: a resume must draw the same ones."""
    return make_policy(attention_dropout=0.2)


@pytest.fixture(scope="module")
def whole(noisy: Path, windows: Callable[[], Any], tmp_path_factory: pytest.TempPathFactory) -> TrainSpec:
    """An uninterrupted run, finished: what every interrupted one must equal."""
    spec = make_spec(noisy, tmp_path_factory.mktemp("whole"))
    torch.set_num_threads(1)
    assert run_to_end(spec, windows())
    return spec


@pytest.fixture
def spec(noisy: Path, tmp_path: Path) -> TrainSpec:
    return make_spec(noisy, tmp_path)


def make_spec(policy: Path, tmp_path: Path) -> TrainSpec:
    return TrainSpec(
        stage="student", start=str(policy), policy_dir=str(tmp_path / "policies"), socket="unused",
        checkpoint_dir=str(tmp_path / "checkpoints"), objective=OPD, teachers=("math",), total_steps=2 * STEPS, seed=7,
        train=Train(learning_rate=1e-3, warmup_steps=2, schedule="cosine", weight_decay=0.1, checkpoint_steps=2,
                    stats="full"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def windows(source: Callable[..., Any], pack: Callable[..., Pack], batch: Callable[..., Any]) -> Callable[[], Any]:
    """Two windows of STEPS batches; a fresh source each time."""

    def make() -> Any:
        return source(
            {
                w: [
                    batch([pack([9, 6], seed=20 * w + s), pack([7], seed=20 * w + s + 10)], step=s, window=w)
                    for s in range(5)
                ]
                for w in range(2)
            }
        )

    return make


def run_to_end(spec: TrainSpec, source: Any, stop: Stop | None = None) -> bool:
    torch.manual_seed(int.from_bytes(spec.stage.encode()[:4], "big") + len(source.asked))
    run = Run(spec, source, ALONE)
    try:
        return run.train(stop or Stop())
    finally:
        run.close()


def moved(spec: TrainSpec, folder: Path) -> TrainSpec:
    return spec.model_copy(
        update={"policy_dir": str(folder / "policies"), "checkpoint_dir": str(folder / "checkpoints")}
    )


def what_counts(folder: str) -> list[dict[str, Any]]:
    """Metrics without wall times."""
    timed = ("step_time_s", "data_wait_s")
    return [
        {name: getattr(m, name) for name in StepMetrics.__dataclass_fields__ if name not in timed}
        for m in MetricsReader(Path(folder)).steps()
    ]


def kept_statistics(spec: TrainSpec) -> dict[tuple[int, int], dict[str, list[float]]]:
    """Statistics that wait for the store, by step and sample; each once."""
    stats = [one for group in stats_files(Path(spec.checkpoint_dir), before=99) for one in read_stats(group)]
    stats_by_sample = {(one.step, one.sample_row): {n: v.tolist() for n, v in one.values.items()} for one in stats}
    assert len(stats_by_sample) == len(stats)
    return stats_by_sample


def same_weights(a: Path, b: Path) -> bool:
    first, second = hf.load_model(a).state_dict(), hf.load_model(b).state_dict()
    return all(torch.equal(first[name], second[name]) for name in first)


def test_every_window_publishes_a_policy_and_metrics_count_steps(whole: TrainSpec) -> None:
    spec = whole
    metrics = MetricsReader(Path(spec.checkpoint_dir)).steps()
    assert [m.step for m in metrics] == list(range(2 * STEPS))
    assert [(m.window, m.policy_version, m.plan_digest) for m in metrics[4:6]] == [(0, 0, "plan0"), (1, 1, "plan1")]
    assert metrics[0].staleness_max == 0
    assert metrics[-1].staleness_max == 1
    assert metrics[-1].learning_rate < metrics[2].learning_rate
    assert {step for step, _ in kept_statistics(spec)} == set(range(2 * STEPS)), "of every step, none waits in memory"
    v1, v2 = Path(spec.policy_dir) / "v1", Path(spec.policy_dir) / "v2"
    assert not same_weights(v1, v2)
    assert hf.tokenizer_digest(hf.load_tokenizer(v2)) == hf.tokenizer_digest(hf.load_tokenizer(spec.start))
    checkpoints = {folder.name for folder in Path(spec.checkpoint_dir).glob("step-*")}
    assert checkpoints == {"step-00000005", "step-00000008", "step-00000010"}, "the newest two, and the ends of windows"
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (Path(spec.start), v2))
    assert before == after  # the trainer's own attention stays in the trainer


@pytest.mark.parametrize("stop_after", [1, 4, 7])
def test_a_stopped_run_continues_bit_for_bit(
    stop_after: int, spec: TrainSpec, windows: Callable[[], Any], whole: TrainSpec
) -> None:
    assert not run_to_end(spec, windows(), StopAfter(stop_after))
    assert len(MetricsReader(Path(spec.checkpoint_dir)).steps()) == stop_after
    again = windows()
    assert run_to_end(spec, again)
    assert again.asked[0] == divmod(stop_after, STEPS)  # a stop loses no step, a crash may
    assert what_counts(spec.checkpoint_dir) == what_counts(whole.checkpoint_dir)
    assert kept_statistics(spec) == kept_statistics(whole)
    for version in ("v1", "v2"):
        assert same_weights(Path(spec.policy_dir) / version, Path(whole.policy_dir) / version)


class Killed(BaseException):
    """Stands for a crash: no handler of the trainer sees it coming."""


def crash_after(served: int, spec: TrainSpec, source: Any) -> None:
    """Train `served` steps and die."""
    inner = source.batches
    left = served

    def failing(stage: str, window: int, start_step: int) -> Iterator[Any]:
        nonlocal left
        for one in inner(stage, window, start_step):
            if not left:
                raise Killed
            left -= 1
            yield one

    source.batches = failing
    with pytest.raises(Killed):
        run_to_end(spec, source)


@pytest.mark.parametrize("crash_at", [1, 8])
def test_a_crashed_run_repeats_the_steps_after_its_checkpoint(
    crash_at: int, spec: TrainSpec, windows: Callable[[], Any], whole: TrainSpec
) -> None:
    crash_after(crash_at, spec, windows())
    assert len(MetricsReader(Path(spec.checkpoint_dir)).steps()) == crash_at
    again = windows()
    assert run_to_end(spec, again)
    first_window, first_step = again.asked[0]
    assert first_window * STEPS + first_step <= crash_at
    assert what_counts(spec.checkpoint_dir) == what_counts(whole.checkpoint_dir)
    assert kept_statistics(spec) == kept_statistics(whole)
    assert same_weights(Path(spec.policy_dir) / "v2", Path(whole.policy_dir) / "v2")


@pytest.fixture
def spiked(pack: Callable[..., Pack], batch: Callable[..., Any], source: Callable[..., Any]) -> Callable[..., Any]:
    """Two windows of STEPS batches, of which some have a loss that is no number; a fresh source each time."""

    def broken(one: Pack) -> Pack:
        one.teacher_logprobs = one.teacher_logprobs.copy()
        one.teacher_logprobs[one.loss_mask.astype(bool)] = math.nan
        return one

    def make(*spikes: tuple[int, int], windows: int = 2) -> Any:
        content = {}
        for w in range(windows):
            packs = [pack([9, 6], seed=20 * w + s) for s in range(STEPS)]
            packs = [broken(one) if (w, s) in spikes else one for s, one in enumerate(packs)]
            content[w] = [batch([one], step=s, window=w) for s, one in enumerate(packs)]
        return source(content)

    return make


def rewinding(spec: TrainSpec) -> TrainSpec:
    return spec.model_copy(update={"train": spec.train.model_copy(update={"on_spike": "rewind"})})


@pytest.mark.parametrize("spike", [(0, 0), (0, 3), (1, 2)])
def test_a_spike_takes_its_window_back_to_its_beginning(
    spike: tuple[int, int], spec: TrainSpec, spiked: Callable[..., Any]
) -> None:
    """The window leaves no trace in weights and optimizer state; the other one is trained as if it were alone."""
    window, step = spike
    assert run_to_end(rewinding(spec), spiked(spike))
    folders = [Path(spec.start), *(Path(spec.policy_dir) / f"v{version}" for version in (1, 2))]
    assert same_weights(folders[window], folders[window + 1])
    assert not same_weights(folders[1 - window], folders[2 - window])
    marked = [
        (m.window, "skipped" in m.extra, "rewound" in m.extra) for m in MetricsReader(Path(spec.checkpoint_dir)).steps()
    ]
    assert [is_skipped for of, is_skipped, _ in marked if of == window] == [s >= step for s in range(STEPS)]
    assert [is_rewound for of, _, is_rewound in marked if of == window] == [s == step for s in range(STEPS)]
    assert not any(is_skipped for of, is_skipped, _ in marked if of != window)


def test_a_window_after_one_that_was_taken_back_starts_from_the_optimizer_before_it(
    spec: TrainSpec, spiked: Callable[..., Any], tmp_path: Path
) -> None:
    """Three windows of which the middle one spikes late, beside the same with a spike in its first step."""
    folders = []
    for step in (0, 4):
        own = rewinding(moved(spec, tmp_path / str(step)))
        assert run_to_end(own, spiked((1, step), windows=3))
        folders.append(Path(own.policy_dir) / "v3")
    assert same_weights(*folders)


@pytest.mark.parametrize("crash_at", [3, 5, 8])
def test_a_run_that_crashed_in_a_window_that_was_taken_back_ends_as_one_that_did_not(
    crash_at: int, spec: TrainSpec, spiked: Callable[..., Any], tmp_path: Path
) -> None:
    """The spike is step 2 of the first window; checkpoints are written every two steps."""
    crashed, through = rewinding(moved(spec, tmp_path / "crashed")), rewinding(moved(spec, tmp_path / "through"))
    assert run_to_end(through, spiked((0, 2)))
    crash_after(crash_at, crashed, spiked((0, 2)))
    assert run_to_end(crashed, spiked((0, 2)))
    assert repr(what_counts(crashed.checkpoint_dir)) == repr(what_counts(through.checkpoint_dir)), "nan equals itself"
    for version in ("v1", "v2"):
        assert same_weights(Path(crashed.policy_dir) / version, Path(through.policy_dir) / version)


def test_the_run_stops_after_three_windows_in_a_row_that_were_taken_back(
    spec: TrainSpec, spiked: Callable[..., Any]
) -> None:
    spikes = [(0, 1), (1, 1), (2, 1), (3, 1)]
    with pytest.raises(SpikeError, match="after 3 windows in a row that were taken back: loss nan"):
        run_to_end(rewinding(spec), spiked(*spikes, windows=4))
    assert not (Path(spec.policy_dir) / "v4").exists()
    healthy = moved(spec, Path(spec.policy_dir).parent / "healthy")
    assert run_to_end(rewinding(healthy), spiked(*spikes[:2], spikes[3], windows=4)), "the third one is whole"


def in_less_memory(spec: TrainSpec, dtype: str, option: str) -> TrainSpec:
    return spec.model_copy(update={"dtype": dtype, "train": spec.train.model_copy(update={option: True})})


def checkpoint_tensors(spec: TrainSpec) -> dict[str, torch.Tensor]:
    folder = Path(spec.checkpoint_dir)
    (file,) = (folder / newest_checkpoint(folder)).glob("*.safetensors")
    return load_file(file)


def test_optimizer_state_on_the_host_changes_no_bit_and_may_come_at_a_restart(
    spec: TrainSpec, windows: Callable[[], Any], whole: TrainSpec
) -> None:
    crash_after(8, spec, windows())
    assert run_to_end(in_less_memory(spec, "float32", "offload"), windows())
    assert what_counts(spec.checkpoint_dir) == what_counts(whole.checkpoint_dir)
    assert kept_statistics(spec) == kept_statistics(whole)
    assert same_weights(Path(spec.policy_dir) / "v2", Path(whole.policy_dir) / "v2")
    ours, theirs = checkpoint_tensors(spec), checkpoint_tensors(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("option", ["master_weights", "offload"])
def test_a_crashed_run_with_bfloat16_weights_continues_bit_for_bit(
    option: str, spec: TrainSpec, windows: Callable[[], Any], whole: TrainSpec, tmp_path: Path
) -> None:
    lean = in_less_memory(spec, "bfloat16", option)
    uninterrupted = moved(lean, tmp_path / "uninterrupted")
    assert run_to_end(uninterrupted, windows())
    crash_after(8, lean, windows())
    assert run_to_end(lean, windows())
    assert what_counts(lean.checkpoint_dir) == what_counts(uninterrupted.checkpoint_dir)
    assert same_weights(Path(lean.policy_dir) / "v2", Path(uninterrupted.policy_dir) / "v2")
    ours, theirs = checkpoint_tensors(lean), checkpoint_tensors(uninterrupted)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert all(tensor.dtype == torch.float32 for tensor in ours.values())
    # The step from float32 to bfloat16 in the forward pass, and nothing more: losses are near those of float32.
    for half, full in zip(
        MetricsReader(Path(lean.checkpoint_dir)).steps(), MetricsReader(Path(whole.checkpoint_dir)).steps(), strict=True
    ):
        assert half.loss == pytest.approx(full.loss, rel=0.05, abs=0.02)


@pytest.mark.parametrize("point", ["train.save", "train.save.written", "train.save.named"])
def test_a_kill_between_a_policy_and_its_checkpoint_repeats_steps_and_changes_nothing(
    point: str, spec: TrainSpec, windows: Callable[[], Any], whole: TrainSpec
) -> None:
    def die(at: str) -> None:
        if at == point and (Path(spec.policy_dir) / "v2").exists():
            raise Killed

    fault_points.observe(die)
    try:
        with pytest.raises(Killed):
            run_to_end(spec, windows())
    finally:
        fault_points.observe(None)
    again = windows()
    assert run_to_end(spec, again)
    assert again.asked[0] == (1, 3)  # the checkpoint inside of the window, at step 8
    assert what_counts(spec.checkpoint_dir) == what_counts(whole.checkpoint_dir)
    assert kept_statistics(spec) == kept_statistics(whole)
    assert same_weights(Path(spec.policy_dir) / "v2", Path(whole.policy_dir) / "v2")
    assert newest_checkpoint(Path(spec.checkpoint_dir)) == newest_checkpoint(Path(whole.checkpoint_dir))


def test_a_plan_that_changed_under_a_window_is_refused(spec: TrainSpec, windows: Callable[[], Any]) -> None:
    assert not run_to_end(spec, windows(), StopAfter(3))
    source = windows()
    source.plan = lambda stage, window: {"steps": STEPS, "plan_digest": "planX", "snapshot_digest": f"snap{window}"}
    with pytest.raises(MismatchError, match=r"'plan0'.*'planX'"):
        run_to_end(spec, source)


def test_a_finished_window_is_only_published_again(spec: TrainSpec, windows: Callable[[], Any]) -> None:
    """A crash between the last checkpoint of a window and its policy folder."""
    assert run_to_end(spec, windows())
    before = hf.load_model(Path(spec.policy_dir) / "v2").state_dict()
    for file in (Path(spec.policy_dir) / "v2").iterdir():
        file.unlink()
    (Path(spec.policy_dir) / "v2").rmdir()
    source = windows()
    assert run_to_end(spec, source)
    assert source.asked == []
    after = hf.load_model(Path(spec.policy_dir) / "v2").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"stage": "other"}, ["'student'", "'other'"]),
        ({"objective": Objective(cross_entropy=CrossEntropyTerm())}, ["icepop", "cross_entropy"]),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(
    change: dict[str, Any], shown: list[str], spec: TrainSpec, windows: Callable[[], Any]
) -> None:
    assert not run_to_end(spec, windows(), StopAfter(3))
    with pytest.raises(MismatchError) as refusal:
        run_to_end(spec.model_copy(update=change), windows())
    for part in shown:
        assert part in str(refusal.value)


def test_a_damaged_checkpoint_is_named(spec: TrainSpec, windows: Callable[[], Any]) -> None:
    assert not run_to_end(spec, windows(), StopAfter(3))
    folder = Path(spec.checkpoint_dir)
    (file,) = (folder / newest_checkpoint(folder)).glob("shard-*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedError, match=r"shard-00001-\S*\.safetensors has crc32c"):
        run_to_end(spec, windows())


def test_a_loader_that_gives_fewer_steps_than_planned_is_refused(spec: TrainSpec, windows: Callable[[], Any]) -> None:
    source = windows()
    source.windows[0].pop()
    source.plan = lambda stage, window: {"steps": STEPS, "plan_digest": "plan0", "snapshot_digest": "snap0"}
    with pytest.raises(MismatchError, match=r"5 steps in its plan, but the loader delivered 4"):
        run_to_end(spec, source)


def test_proximal_policy_is_the_windows_start(policy: Path, windows: Callable[[], Any], tmp_path: Path) -> None:
    """With clip and correction, a resume inside a window still compares with the window's first policy."""
    term = PolicyGradientTerm(clip=(0.01, 0.01), correction="icepop", band=(0, 99))
    clipped = make_spec(policy, tmp_path).model_copy(update={"objective": Objective(policy_gradient=term)})
    whole = moved(clipped, tmp_path / "whole")
    assert run_to_end(whole, windows())
    metrics = MetricsReader(Path(whole.checkpoint_dir)).steps()
    assert metrics[0].extra["clipped"] == 0.0  # at the window's first step the policy is its own proximal policy
    assert metrics[STEPS].extra["clipped"] == 0.0
    assert metrics[STEPS - 1].extra["clipped"] > 0.0
    assert not run_to_end(clipped, windows(), StopAfter(7))
    assert run_to_end(clipped, windows())
    assert what_counts(clipped.checkpoint_dir) == what_counts(whole.checkpoint_dir)


def test_a_half_precision_policy_is_published_in_its_dtype(spec: TrainSpec, windows: Callable[[], Any]) -> None:
    source = windows()
    del source.windows[1]
    assert run_to_end(spec.model_copy(update={"dtype": "bfloat16"}), source)
    from safetensors.torch import load_file

    (file,) = (Path(spec.policy_dir) / "v1").glob("*.safetensors")
    assert {tensor.dtype for tensor in load_file(file).values()} == {torch.bfloat16}


def test_a_bad_spec_names_its_key(spec: TrainSpec, tmp_path: Path) -> None:
    content = json.loads(spec.model_dump_json())
    content["context_parallel"] = 0
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match="context_parallel"):
        load_spec(file)
    file.write_text(spec.model_dump_json())
    assert load_spec(file) == spec
    with pytest.raises(InputError, match="no train spec"):
        load_spec(tmp_path / "none.json")


def test_tensorboard_shows_each_step_once_after_a_crash(spec: TrainSpec, windows: Callable[[], Any]) -> None:
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"track": "tensorboard"})})
    crash_after(3, spec, windows())
    run_to_end(spec, windows())
    shown = EventAccumulator(str(Path(spec.checkpoint_dir) / "tensorboard")).Reload().Scalars("student/loss")
    losses = [metrics.loss for metrics in MetricsReader(Path(spec.checkpoint_dir)).steps()]
    assert [event.step for event in shown] == list(range(2 * STEPS))
    assert [event.value for event in shown] == pytest.approx(losses, rel=1e-6)  # TensorBoard keeps float32


def test_a_tracker_that_is_not_installed_is_named(spec: TrainSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"track": "wandb"})})
    with pytest.raises(InputError, match=r"mopd-dataplane\[track\]"):
        Run(spec, None, ALONE)  # type: ignore[arg-type]
