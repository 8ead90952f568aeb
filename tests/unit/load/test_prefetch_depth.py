"""The depth follows the trainer's speed and the reader's, on a clock made by hand."""

from __future__ import annotations

import pytest

from mopd_dataplane.load.prefetch_depth import REMEMBERED, PrefetchDepth


class Play:
    """A trainer that works `pack_s` on each pack, and a reader; `now` is their clock."""

    def __init__(self, least: int = 2) -> None:
        self.prefetch = PrefetchDepth(least)
        self.now = 100.0
        self.used: list[float] = []

    def read(self, seconds: float) -> None:
        self.prefetch.read(self.now + seconds, self.now)

    def take(self, packs: int, pack_s: float, wait_s: float = 0.0) -> None:
        for _ in range(packs):
            self.prefetch.taken([self.now])
            self.now += wait_s
            self.prefetch.lent(self.now)
            self.now += pack_s


def test_a_trainer_slower_than_every_read_keeps_the_least():
    play = Play(least=3)
    play.read(0.1)
    play.take(REMEMBERED, pack_s=0.5)
    assert (play.prefetch.depth, play.prefetch.pack_s) == (3, pytest.approx(0.5))


def test_a_fast_trainer_gets_as_many_as_it_takes_during_the_longest_read():
    play = Play()
    play.read(2.0)
    play.take(REMEMBERED, pack_s=0.1)
    assert play.prefetch.depth == pytest.approx(1 + 2.0 / 0.1, abs=1)
    play.take(2 * REMEMBERED, pack_s=0.5)
    assert play.prefetch.depth == pytest.approx(1 + 2.0 / 0.5, abs=1), "a trainer that becomes slower needs fewer"


def test_waits_are_not_the_trainers_time():
    waiting, alone = Play(), Play()
    for play, wait_s in ((waiting, 3.0), (alone, 0.0)):
        play.read(1.0)
        play.take(REMEMBERED, pack_s=0.2, wait_s=wait_s)
    assert waiting.prefetch.depth == pytest.approx(alone.prefetch.depth, abs=1)
    assert alone.prefetch.depth > 4


def test_a_whole_batch_taken_at_once_is_there():
    """Mean speed alone would say 2: eight packs in no time, then two seconds of work."""
    play = Play()
    play.read(0.1)
    for _ in range(4):
        play.take(8, pack_s=0.0)
        play.now += 2.0
    assert play.prefetch.depth == 9


@pytest.mark.parametrize("pack_s", [0.0, 0.3])
def test_packs_lent_together_count_as_if_each_had_been_asked_for(pack_s):
    """Eight packs at a time, then two seconds of work: four of them, or eight, come with one answer."""
    depths = []
    for together in (1, 4, 8):
        play = Play()
        play.read(1.0)
        for _ in range(4):
            for _ in range(8 // together):
                play.prefetch.taken([*play.used, play.now])
                play.prefetch.lent(play.now)
                play.used = [play.now + pack_s * position for position in range(1, together)]
                play.now += pack_s * together
            play.now += 2.0
        depths.append((play.prefetch.depth, play.prefetch.pack_s))
    assert depths[0][0] == {0.0: 9, 0.3: 5}[pack_s]
    assert [depth for depth, _ in depths] == [depths[0][0]] * 3
    assert depths[2][1] == pytest.approx(depths[0][1], rel=0.3), "the last answer's packs are not known yet"


def test_one_long_read_is_bridged_for_hundreds_of_packs_and_then_forgotten():
    play = Play()
    play.read(1.0)
    depths = []
    for _ in range(5000):
        play.take(1, pack_s=0.1)
        play.read(0.01)
        depths.append(play.prefetch.depth)
    assert depths[50] > 10
    assert depths[500] > 6
    assert depths[-1] == 2


def test_depth_is_bounded():
    play = Play()
    play.read(1e6)
    play.take(10 * REMEMBERED, pack_s=0.0)
    assert play.prefetch.depth == 1 + REMEMBERED


def test_packs_in_a_row_are_measured_from_one_to_the_next():
    """Two packs that got their slots together: the second was not being read while the first was."""
    prefetch = PrefetchDepth(2)
    prefetch.read(1.0, since=0.5)
    prefetch.read(1.6, since=0.5)
    assert prefetch.longest_read_s == pytest.approx(0.6)
