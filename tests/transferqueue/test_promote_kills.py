"""A framework is killed at random; each group whose end was acknowledged after its checkpoint comes back with it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from queue_framework import Framework, expected

from mopd_dataplane.store.queue.opening import open_queue
from mopd_dataplane.transferqueue import backend, promote

KILLS = 2
LOOP = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from queue_framework import Framework

folder = Path(sys.argv[1])
run, first = Framework(folder), 0
saved = sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal() and (path / "complete").exists())
if saved:
    run.load(str(saved[-1]))
    first = saved[-1]
for step in range(first, 10**6):
    for number in range(3):
        uid = f"{sys.argv[3]}-{step}-{number}"
        run.issue(uid, step)
        run.finish(uid, step)
        print(uid, step, flush=True)
    for uid in [uid for uid, tag in run.tags().items() if tag["status"] == "finished"][:2]:
        run.train(uid)
        print("trained", uid, flush=True)
    if step % 5 == 4:
        run.save(str(step + 1))
        (folder / str(step + 1) / "complete").touch()
        print("saved", flush=True)
"""


def test_every_acknowledged_group_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "opened", lambda own: open_queue(own.store, own.queue, starts_folding=False))
    chance = random.Random(0)
    for kill in range(KILLS):
        words = [sys.executable, "-W", "ignore", "-c", LOOP, str(tmp_path), str(Path(__file__).parents[1]), str(kill)]
        loop = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ)
        assert loop.stdout is not None
        lines = iter(loop.stdout.readline, "")
        told = []
        for line in lines:
            told.append(line.split())
            if line == "saved\n":
                break
        time.sleep(chance.uniform(0, 0.5))
        os.kill(loop.pid, signal.SIGKILL)
        told += [line.split() for line in lines if line.endswith("\n")]
        loop.wait()
        last_save = max(number for number, words in enumerate(told) if words == ["saved"])
        gone_before = {words[1] for words in told[:last_save] if words[0] == "trained"}
        finished = {words[0]: int(words[1]) for words in told if len(words) == 2 and words[0] != "trained"}
        saved = max(int(path.parent.name) for path in tmp_path.glob("*/complete"))
        run = Framework(tmp_path)
        run.load(str(saved))
        for uid, step in finished.items():
            if uid in gone_before:
                assert uid not in run.tags()
                continue
            partition = "train" if uid in run.tags() else promote.WAITING + "train"
            assert run.tags(partition)[uid]["status"] == "finished"
            assert [run.tokens(f"{uid}_{session}_0", partition) for session in range(2)] == [
                expected(uid, session, step) for session in range(2)
            ]
        run.close()
