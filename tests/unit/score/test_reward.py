"""The plug-in point for outcome rewards."""

from __future__ import annotations

import json
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
import reasoning_gym

from mopd_dataplane.errors import PromptError, UnknownNameError
from mopd_dataplane.records import Prompt
from mopd_dataplane.score.reward import Outcome, RewardError, Unscorable, resolve_reward
from mopd_dataplane.score.timed_reward import TimedReward


def gym_prompt(dataset: str, seed: int = 1) -> Prompt:
    entry = reasoning_gym.create_dataset(dataset, seed=seed, size=1)[0]
    data = json.dumps({"dataset": dataset, "entry": entry}, default=str)
    return Prompt(prompt_id="p0", domain=dataset, text=entry["question"], answer=entry["answer"], verifier_data=data)


@pytest.mark.parametrize("dataset", ["chain_sum", "spell_backward", "number_sorting"])
def test_reasoning_gym_pays_the_right_answer_and_not_a_wrong_one(dataset: str) -> None:
    reward, prompt = resolve_reward("reasoning-gym"), gym_prompt(dataset)
    assert reward(prompt, f" {prompt.answer}\n") == (1.0, True)
    wrong = reward(prompt, "certainly not")
    assert wrong.reward < 0.5
    assert wrong.correct is False
    assert reward.version == metadata.version("reasoning-gym")


@pytest.mark.parametrize("response", ["", "\x00", "9" * 5000, "{'a': [", "\x1b[31m", "\ud800"])
def test_hostile_responses_earn_nothing_and_break_nothing(response: str) -> None:
    reward = resolve_reward("reasoning-gym")
    for dataset in ("chain_sum", "number_sorting"):
        assert reward(gym_prompt(dataset), response).reward < 0.5
        assert reward(gym_prompt(dataset), response).correct is False


def test_partial_credit_is_not_right() -> None:
    prompt = gym_prompt("spell_backward")
    almost = prompt.answer[:-1] + "#"
    outcome = resolve_reward("reasoning-gym")(prompt, almost)
    assert 0.5 < outcome.reward < 1
    assert outcome.correct is False


def test_a_prompt_without_an_entry_is_named() -> None:
    with pytest.raises(PromptError, match="'p7' has no reasoning-gym entry"):
        resolve_reward("reasoning-gym")(Prompt(prompt_id="p7", domain="d", text="x"), "y")


def test_exact_compares_stripped_text() -> None:
    reward, prompt = resolve_reward("exact"), Prompt(prompt_id="p", domain="d", text="3 + 4 =", answer=" 7")
    assert [reward(prompt, text) for text in ("7 \n", "7.0", "")] == [(1.0, True), (0.0, False), (0.0, False)]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_rewards.py").write_text(
        "def length(prompt, response):\n    return len(response) / len(prompt)\n"
        "def broken(prompt, response):\n    return float('nan')\n"
        "def verified(prompt, response):\n    return response == 'ab'\n"
        "def partial(prompt, response):\n    return 0.9, False\n"
        "def mixed_up(prompt, response):\n    return 0.9, 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    return "my_rewards"


def test_any_importable_function_of_prompt_and_response_is_a_reward(plugin: str) -> None:
    reward = resolve_reward(f"{plugin}:length")
    assert reward(Prompt(prompt_id="p", domain="d", text="abcd"), "ab") == (0.5, None)
    assert len(reward.version) == 12  # a loose file has no version: its digest stands in


def test_a_reward_that_is_not_a_number_is_refused(plugin: str) -> None:
    with pytest.raises(RewardError, match="nan for prompt 'p'"):
        resolve_reward(f"{plugin}:broken")(Prompt(prompt_id="p", domain="d", text="abcd"), "ab")


def test_a_function_says_itself_what_is_right(plugin: str) -> None:
    prompt = Prompt(prompt_id="p", domain="d", text="abcd")
    assert resolve_reward(f"{plugin}:verified")(prompt, "ab") == (1.0, True)
    assert resolve_reward(f"{plugin}:verified")(prompt, "ba") == (0.0, False)
    assert resolve_reward(f"{plugin}:partial")(prompt, "ab") == (0.9, False)
    with pytest.raises(RewardError, match=r"\(number, bool\)"):
        resolve_reward(f"{plugin}:mixed_up")(prompt, "ab")


@pytest.mark.parametrize("name", ["exakt", "no_such_module:f", "json:no_such_function"])
def test_unknown_rewards_are_refused(name: str) -> None:
    with pytest.raises(UnknownNameError, match=name.partition(":")[0]):
        resolve_reward(name)


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of a reward that answers, cannot, raises, hangs, prints or dies, as the response asks."""
    (tmp_path / "failing_rewards.py").write_text(
        "import json, os, subprocess, sys, time\n"
        "def judge(prompt, response):\n"
        "    if response == 'raise':\n"
        "        raise KeyError('no parser')\n"
        "    if response == 'hang':\n"
        "        time.sleep(600)\n"
        "    if response == 'die':\n"
        "        os._exit(7)\n"
        "    if response == 'parse':\n"
        "        json.loads('no JSON')\n"
        "    if response == 'exit':\n"
        "        sys.exit('done')\n"
        "    if response == 'read':\n"
        "        return float(len(sys.stdin.read()))\n"
        "    if response == 'start':\n"
        "        child = subprocess.Popen(['sleep', '600'])\n"
        "        open(__file__ + '.pid', 'w').write(str(child.pid))\n"
        "        child.wait()\n"
        "    print('judged', response)\n"
        "    return None if response == 'none' else 0.5\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "failing_rewards", raising=False)
    return "failing_rewards:judge"


def test_none_is_an_answer_that_cannot_be_scored_and_what_raises_is_named(failing: str) -> None:
    reward, prompt = resolve_reward(failing), Prompt(prompt_id="p", domain="d", text="2+2?")
    assert reward(prompt, "none") == Unscorable("the function returned None")
    with pytest.raises(RewardError, match=r"raised KeyError: 'no parser' \(.*failing_rewards\.py:4\) at prompt 'p'"):
        reward(prompt, "raise")
    with pytest.raises(RewardError, match=r"raised JSONDecodeError: .*failing_rewards\.py:10\)"):
        reward(prompt, "parse")
    with pytest.raises(RewardError, match=r"raised SystemExit: done .*failing_rewards\.py:12\)"):
        reward(prompt, "exit")


def test_an_answer_that_takes_too_long_cannot_be_scored_and_the_next_can(failing: str) -> None:
    timed, prompt = TimedReward(resolve_reward(failing), 2.0), Prompt(prompt_id="p", domain="d", text="2+2?")
    try:
        assert timed(prompt, "fine") == Outcome(0.5, None)
        assert timed(prompt, "hang") == Unscorable("no result after 2 s")
        assert timed(prompt, "fine") == Outcome(0.5, None)
        assert timed(prompt, "none") == Unscorable("the function returned None")
        with pytest.raises(RewardError, match=r"failing_rewards\.py:4"):
            timed(prompt, "raise")
        with pytest.raises(RewardError, match="ended its process with exit code 7 at prompt 'p'"):
            timed(prompt, "die")
        assert timed(prompt, "fine") == Outcome(0.5, None)
        assert timed(prompt, "read") == Outcome(0.0, None)
    finally:
        timed.close()


def test_what_a_reward_started_ends_with_it(failing: str, tmp_path: Path) -> None:
    timed, prompt = TimedReward(resolve_reward(failing), 3.0), Prompt(prompt_id="p", domain="d", text="2+2?")
    assert timed(prompt, "start") == Unscorable("no result after 3 s")
    child = int((tmp_path / "failing_rewards.py.pid").read_text())
    state = Path(f"/proc/{child}/stat")
    deadline = time.monotonic() + 10
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not state.exists() or state.read_text().split()[2] == "Z"


@pytest.mark.parametrize(
    ("source", "error", "line"),
    [("def judge(:\n", "SyntaxError", 1), ("\nlimit = 1 / 0\n", "ZeroDivisionError: division by zero", 2)],
)
def test_a_module_that_raises_when_it_is_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, error: str, line: int
) -> None:
    (tmp_path / "broken_rewards.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    words = rf"importing 'broken_rewards' raised {error}.*broken_rewards\.py:{line}\)"
    with pytest.raises(UnknownNameError, match=words):
        resolve_reward("broken_rewards:judge")
