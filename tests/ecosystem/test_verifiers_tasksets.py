"""Tasksets of the real verifiers as prompts, tools and rewards of a domain: one turn, and several with tools."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mopd_dataplane import load_job, open_store, run_job
from mopd_dataplane.errors import EngineError, InputError, PromptError
from mopd_dataplane.job.sections import Domain, Student
from mopd_dataplane.models.hf import load_tokenizer
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.prompts import load_prompts
from mopd_dataplane.records import Prompt
from mopd_dataplane.rollout.engines.hf import HfEngine
from mopd_dataplane.rollout.engines.kinds import EngineKind
from mopd_dataplane.rollout.tools.environments import Conversation, make_environment
from mopd_dataplane.score.reward import resolve_reward

TASKSET = '''
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "calc"

    async def setup_task(self, task):
        self.most = len(task.prompt)

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        if a > 900:
            raise ValueError("too large")
        return f"{a + b} of {self.most}"


class SumTask(vf.Task[SumData]):
    TOOLS

    @vf.stop
    async def asked_twice(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 3

    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        if trace.last_reply == "raise":
            raise ValueError("a reward that fails")
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.5)
    async def called(self, trace) -> float:
        calls = [c for m in trace.assistant_messages for c in m.tool_calls or []]
        return len(calls) + 10 * len([m for m in trace.tool_messages if m.content.startswith("7")])


class SumConfig(vf.TasksetConfig):
    count: int = 8


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for n in range(self.config.count):
            data = SumData(prompt=f"{n} + 4 =", answer=str(n + 4), system_prompt=SYSTEM)
            yield SumTask(data, self.config.task)


__all__ = ["SumTaskset"]
'''
TOOLS = "@classmethod\n    def toolsets(cls, config):\n        return [Calculator(vf.ToolsetConfig())]"
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = '<tool_call>{"name": "calc_add", "arguments": {"a": 3, "b": 4}}</tool_call>'


@pytest.fixture(scope="module", autouse=True)
def tasksets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two installed packages: one_turn_sums, and tool_sums with a tool and a system message."""
    folder = tmp_path_factory.mktemp("tasksets")
    (folder / "one_turn_sums.py").write_text(TASKSET.replace("TOOLS", "").replace("SYSTEM", "None"))
    (folder / "tool_sums.py").write_text(TASKSET.replace("TOOLS", TOOLS).replace("SYSTEM", '"Be short."'))
    state = TASKSET.replace("TOOLS", "async def setup(self, trace, runtime): pass").replace("SYSTEM", "None")
    (folder / "prepared_sums.py").write_text(state)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


def prompts(dataset: str, **more: Any) -> list[Prompt]:
    return load_prompts("sums", Domain(source="verifiers", dataset=dataset, train=3, eval=2, **more))


def test_a_task_is_a_prompt_and_its_rewards_score_one_turn() -> None:
    task_prompts = prompts("one-turn-sums", args={"count": 5})
    assert [(prompt.text, prompt.answer, prompt.messages) for prompt in task_prompts] == [
        (f"{n} + 4 =", str(n + 4), "") for n in range(5)
    ]
    reward = resolve_reward("verifiers")
    assert reward(task_prompts[3], ["7"]) == (2.0, None)
    assert reward(task_prompts[3], ["8"]) == (0.0, None)
    with pytest.raises(EngineError, match="a reward that fails"):
        reward(task_prompts[3], ["raise"])


def test_what_cannot_be_used_is_refused_by_name() -> None:
    with pytest.raises(PromptError, match="has 4 distinct prompts"):
        prompts("one-turn-sums", args={"count": 4})
    with pytest.raises(PromptError, match=r"refuses args.*nonsense"):
        prompts("one-turn-sums", args={"nonsense": 4})
    with pytest.raises(PromptError, match="'no-such-taskset' not found"):
        prompts("no-such-taskset")
    with pytest.raises(PromptError, match="its tasks need setup, which a rollout here does not have"):
        prompts("prepared-sums")
    with pytest.raises(PromptError, match="is no task of verifiers"):
        resolve_reward("verifiers")(Prompt(prompt_id="p", domain="d", text="?"), ["7"])
    with pytest.raises(InputError, match="refuses environment_args"):
        make_environment("verifiers", {"times": 3})


def test_tools_answer_and_rewards_read_the_whole_conversation() -> None:
    prompt = prompts("tool-sums")[3]
    system, user_message = json.loads(prompt.messages)
    assert user_message == {"role": "user", "content": "3 + 4 ="}
    assert system["content"].startswith("Be short.\n\n# Tools")
    [schema] = [json.loads(line) for line in system["content"].splitlines() if line.startswith('{"type"')]
    assert schema["function"]["name"] == "calc_add"
    assert schema["function"]["description"] == "Add two numbers."
    assert set(schema["function"]["parameters"]["properties"]) == {"a", "b"}
    tools = make_environment("verifiers", {"turns": 4})

    def reply(*said: str) -> str | None:
        return tools.reply(Conversation(prompt=prompt, said=list(said), run=pytest.fail))

    assert reply(CALL) == "7 of 7"
    assert reply("7") is None, "a turn without a call is the last"
    assert reply(CALL, "7 of 7", CALL, "7 of 7", CALL) is None, "the task's own stop"
    assert str(reply(CALL.replace("calc_add", "div"))) == "error: unknown tool 'div'"
    assert "error: no JSON object" in str(reply("<tool_call>{add}</tool_call>"))
    assert "too large" in str(reply(CALL.replace("3", "999")))
    assert "error" in str(reply(CALL.replace("3", '"x"')))
    assert resolve_reward("verifiers")(prompt, [CALL, "7 of 7", "7"]) == (2.0 + 0.5 * 11, None)
    assert resolve_reward("verifiers")(prompt, ["7"]) == (2.0, None)


class Scripted(HfEngine):
    """A policy that is certain of its words: it calls the tool first, and says 7 then."""

    def _forward(self) -> list[NDArray[np.float32]]:
        [logits] = super()._forward()
        for row, request in enumerate(self._requests):
            heard = len(request.prefix_ids)
            text = "7" if heard else CALL
            words = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
            logits[row] = -1e4
            logits[row, words[int(self._rows["length"][row] - self._rows["prompt"][row]) - heard]] = 0
        return [logits]


class Certain(EngineKind):
    """See Scripted."""

    here = True

    def open(
        self, folder: Path, version: int, settings: Any, *, dtype: str, mixed_teacher: Any, adapter: Any = None
    ) -> Any:
        return Scripted(folder, slots=settings.slots, policy_version=version, dtype=dtype, threads=settings.threads)


def test_a_job_rolls_out_rewards_evaluates_and_trains_through_a_taskset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scripted_policy", sys.modules[__name__])
    config = {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 2048,
    }  # fmt: skip
    folder = make_student(Student(config=config, tokenizer="characters"), tmp_path / "model", seed=0)
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    (folder / "checksums.json").unlink()  # a folder from elsewhere has none
    domain = {"source": "verifiers", "dataset": "tool-sums", "environment": "verifiers", "reward": "verifiers"}
    job = {
        "name": "tasks", "store": str(tmp_path / "store"), "student": {"path": str(folder), "prompt_template": "chat"},
        "domains": {"sums": {**domain, "train": 4, "eval": 2}},
        "teachers": {"same": {"source": "student"}}, "routing": {"sums": "same"},
        "engine": {"kind": "scripted_policy:Certain", "slots": 4},
        "rollout": {"max_prompt_tokens": 1500, "max_new_tokens": 200, "prompts_per_iteration": 4},
        "objectives": {"sampled": {"policy_gradient": {"correction": "icepop"}}},
        "plan": {"pack_tokens": 4096, "batch_samples": 4},
        "stages": [{"name": "student", "objective": "sampled", "iterations": 1}],
    }  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(job))
    run_job(load_job(tmp_path / "job.json"))
    store = open_store(str(tmp_path / "store"))
    samples = store.samples(["turns", "prompt_id", "loss_tokens"]).to_pylist()
    assert [sample["turns"] for sample in samples] == [2] * 4
    reply = len("\n<tool>7 of 7\n<assistant>") + 1  # and the end-of-sequence token of the tool's message
    for payload, sample in zip(store.read_tokens(np.arange(4)).to_pylist(), samples, strict=True):
        mask = payload["loss_mask"]
        assert sample["loss_tokens"] == sum(mask) == len(CALL) + 1 + len("7") + 1
        assert mask.count(0) == reply, "no loss on what the tool said"
    answers = {prompt.prompt_id: prompt.answer for prompt in store.prompts()}
    rewards = store.sql(
        "select s.prompt_id, r.reward, r.verifier from rewards r join samples s using (uid)"
    ).to_pylist()
    assert len(rewards) == 4
    for row in rewards:
        assert row["reward"] == 2.0 * (answers[row["prompt_id"]] == "7") + 0.5 * 11
        assert row["verifier"] == "verifiers"
    assert 2.0 + 0.5 * 11 in {row["reward"] for row in rewards}
    evals = store.table("evals", ["reward", "response"]).to_pylist()
    assert all("7 of 7" in row["response"] for row in evals)
    assert {row["reward"] for row in evals} <= {5.5, 7.5}
    assert store.sql("select count(*) as n from steps")["n"][0].as_py() == 1
