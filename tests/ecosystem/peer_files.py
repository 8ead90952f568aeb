"""Rollout files as the real packages write them: `python peer_files.py OUT PACKAGE…`, in an environment that has them.

The files under tests/data/peers were written by this script; peers.json beside them says by which versions.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""A template that adds nothing in front of what is there already, for the character tokenizer."""


def written_by(package: str, module: str, function: str) -> Callable[..., Any]:
    """A function of an installed package by its source, where importing its module asks for a cluster's packages."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    file = Path(spec.submodule_search_locations[0]) / module
    tree = ast.parse(file.read_text())
    [definition] = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function]
    definition.decorator_list = []
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    body = ast.fix_missing_locations(ast.Module([future, definition], []))
    import os
    from types import SimpleNamespace

    names: dict[str, Any] = {"os": os, "json": json, "logger": SimpleNamespace(info=print)}
    exec(compile(body, str(file), "exec"), names)
    return names[function]


def verifiers(out: Path) -> None:
    """Two episodes: tokens with a reference model's log-probs, a tool call and a branch; and text alone."""
    from verifiers.v1.episode import EnvInfo, Episode, PolicySpan, TrainRunInfo, TrainWorkInfo
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.task import WireTaskData
    from verifiers.v1.trace import AgentInfo, ModelCall, Trace, TraceTask, WireAgentConfig
    from verifiers.v1.types import AssistantMessage, Sampling, SystemMessage, ToolCall, ToolMessage, UserMessage
    from verifiers.v1.utils.trace_store import write_episode

    def trace(nodes: list[MessageNode], **more: Any) -> Trace:
        task = TraceTask(type="Sums", data=WireTaskData(idx=0, prompt="3 + 4 ="))
        task_trace = Trace(task=task, agent=AgentInfo(config=WireAgentConfig()), nodes=nodes, **more)
        task_trace.ok = True
        return task_trace

    def said(parent: int, ids: list[int], sampled: int, message: Any, reference: bool = True) -> MessageNode:
        own = [-0.125 * (1 + i) for i in range(sampled)]
        return MessageNode(
            parent=parent, message=message, sampled=True, token_ids=ids,
            mask=[False] * (len(ids) - sampled) + [True] * sampled, logprobs=own,
            reference_logprobs=[value - 0.25 for value in own] if reference else None,
        )  # fmt: skip

    def heard(parent: int | None, ids: list[int], message: Any) -> MessageNode:
        return MessageNode(parent=parent, message=message, token_ids=ids, mask=[False] * len(ids))

    call = ToolCall(id="c1", name="add", arguments='{"a": 3, "b": 4}')
    tokens = trace(
        [
            heard(None, [50, 51], SystemMessage(content="Add.")),
            heard(0, [52, 53], UserMessage(content="3 + 4 =")),
            said(1, [60, 61, 62, 63], 3, AssistantMessage(content=None, tool_calls=[call])),
            heard(2, [54], ToolMessage(tool_call_id="c1", content="7")),
            said(3, [60, 64], 1, AssistantMessage(content="7")),
            said(1, [60, 65, 66], 2, AssistantMessage(content="no"), reference=False),
        ],
        calls=[ModelCall(node=4, sampling=Sampling(temperature=0.5), finish_reason="stop")],
    )
    tokens.record_reward("right", 1.0, weight=0.5)
    tokens.record_reward("short", 0.5, weight=2.0)
    other = trace([heard(None, [50], UserMessage(content="?")), said(0, [60], 1, AssistantMessage(content="!"))])
    other.agent.trainable = False
    texts = trace(
        [
            MessageNode(message=UserMessage(content="1 + 1 =")),
            MessageNode(parent=0, message=AssistantMessage(content="2"), sampled=True),
        ]
    )
    work = TrainWorkInfo(step=9, policy=PolicySpan(start=8, end=9))
    for traces in ([tokens, other], [texts]):
        episode = Episode(env=EnvInfo(id="sums", name="sums"), task=traces[0].task, traces=traces, ok=True)
        episode.record_run(TrainRunInfo(id="r", work=work))
        write_episode(out, episode)


def verl(out: Path) -> None:
    """The rollout dump of a training step, by the trainer's own writer."""
    write = written_by("verl", "trainer/ppo/ray_trainer.py", "_write_generations")
    write(["3 + 4 =", "3 + 4 ="], [" 7", " 8"], ["7", "7"], [1.0, 0.0], {"acc": [True, False]}, str(out), 5)


def skyrl(out: Path) -> None:
    """The dump of an evaluation, by the trainer's own writer; the decoder stands in for a tokenizer."""
    write = written_by("skyrl", "train/utils/trainer_utils.py", "dump_per_dataset_eval_results")
    write.__globals__["sanitize_data_source"] = lambda name: name.replace("/", "_")

    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return "".join(map(chr, ids))

    def ids(text: str) -> list[int]:
        return list(map(ord, text))

    generated = {
        "prompt_token_ids": [ids("3 + 4 ="), ids("1 + 1 =")],
        "response_ids": [ids(" 7"), ids(" 2, and so on")],
        "rewards": [[0.0, 1.0], 0.25],
        "stop_reasons": ["stop", "length"],
    }
    extras = [{"reward_spec": {"method": "rule", "ground_truth": "7"}}, {}]
    write(
        out, Tokenizer(), generated, ["math/sums", "math/sums"], ["sums", "sums"], extras, {"eval/all/avg_score": 0.5}
    )


def tinker_cookbook(out: Path) -> None:
    """A captured sampling call and an evaluated conversation."""
    import tinker
    from tinker_cookbook.capture import CaptureExporter, JsonlFileSink, capture, instrument
    from tinker_cookbook.eval.benchmarks._types import StoredTrajectory, StoredTurn
    from tinker_cookbook.stores.eval_store import EvalStore
    from tinker_cookbook.stores.storage import LocalStorage

    sequence = tinker.SampledSequence(
        stop_reason="stop", sequence_id="s", _tokens_list=[60, 61, 62], _logprobs_list=[-0.5, -0.25, -0.125]
    )

    def sample(self: object, prompt: object, num_samples: int, sampling_params: object) -> Future[Any]:
        answered: Future[Any] = Future()
        answered.set_result(tinker.SampleResponse(sequences=[sequence]))
        return answered

    exporter = CaptureExporter(JsonlFileSink(LocalStorage(out)))
    instrument._exporter = exporter
    prompt = tinker.ModelInput.from_ints([50, 51])
    with capture(run_id="r", iteration=4):
        wrapped = instrument._make_sample_wrapper(sample)
        wrapped(object(), prompt, 1, tinker.SamplingParams(max_tokens=3, temperature=0.7))
    exporter.wait_pending(timeout=5.0)
    exporter.shutdown()
    turns = [StoredTurn("user", "3 + 4 ="), StoredTurn("assistant", "7"), StoredTurn("grader", "right")]
    EvalStore(out / "evals").write_trajectory("r", "sums", StoredTrajectory(0, "sums", turns=turns, reward=1.0))


def openai(out: Path) -> None:
    """A request with its response, with and without the token ids that vLLM adds."""
    from openai.types.chat import ChatCompletion

    message = {"role": "assistant", "content": "7"}
    told = [{"token": "7", "logprob": -0.5, "top_logprobs": []}, {"token": "", "logprob": -0.25, "top_logprobs": []}]
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    with_ids = {**choice, "token_ids": [60, 61], "logprobs": {"content": told}}
    served = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
    request = {"model": "m", "temperature": 0.5, "messages": [{"role": "user", "content": "3 + 4 ="}]}
    with (out / "chats.jsonl").open("w") as file:
        for more in ({"choices": [choice]}, {"choices": [with_ids], "prompt_token_ids": [50, 51]}):
            response = ChatCompletion.model_validate({**served, **more}).model_dump(exclude_none=True)
            file.write(json.dumps({"request": request, "response": response}) + "\n")


def trl(out: Path) -> None:
    """One step of GRPO on a tiny model, with text and with messages; its log of completions."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from mopd_dataplane.job.sections import Student
    from mopd_dataplane.models.hf import load_tokenizer
    from mopd_dataplane.models.initial_weights import make_student

    config = {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    folder = make_student(Student(config=config, tokenizer="characters"), out / "model", seed=0)
    prompts_by_format: dict[str, list[Any]] = {
        "text": ["3 + 4 =", "1 + 1 ="],
        "messages": [[{"role": "user", "content": "3 + 4 ="}], [{"role": "user", "content": "1 + 1 ="}]],
    }
    for name, prompts in prompts_by_format.items():
        tokenizer = load_tokenizer(folder)
        tokenizer.chat_template = CHAT_TEMPLATE
        settings = GRPOConfig(
            output_dir=str(out / name), per_device_train_batch_size=4, num_generations=2, max_completion_length=6,
            max_steps=1, log_completions=True, report_to=[], use_cpu=True, bf16=False, logging_steps=1, seed=0,
            save_strategy="no",
        )  # fmt: skip

        def digits(completions: list[Any], **_: Any) -> list[float]:
            return [float(sum(c.isdigit() for c in str(said))) for said in completions]

        GRPOTrainer(
            str(folder), reward_funcs=digits, args=settings, train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
        ).train()  # fmt: skip


WRITERS: dict[str, Callable[[Path], None]] = {
    "verifiers": verifiers, "verl": verl, "skyrl": skyrl, "tinker_cookbook": tinker_cookbook, "openai": openai,
    "trl": trl,
}  # fmt: skip


def main(out: Path, packages: list[str]) -> None:
    """Write the files of each package into a folder of its name."""
    versions = {}
    for package in packages:
        folder = out / package
        folder.mkdir(parents=True)
        WRITERS[package](folder)
        versions[package] = importlib.metadata.version(package)
    (out / "peers.json").write_text(json.dumps(versions, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(WRITERS))
