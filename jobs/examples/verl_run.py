"""verl's V1 loop without a GPU: its own agent-loop worker, replay buffer and queue, around a tiny policy.

    python jobs/examples/verl_run.py runs/verl STEPS
    mopd run jobs/examples/after_verl.toml

With --teacher the trainer waits in each step for the log-probs that another process puts beside the trajectories:

    mopd score jobs/examples/after_verl.toml --stage train --queue verl

verl's own: AgentLoopWorkerTQ from the start of a prompt to its puts, AgentLoopOutput, ReplayBufferAsync, and
TransferQueue with its controller and checkpoints. Stand-ins: the server that samples (a random model, written to
runs/verl.model), the reward (the share of even tokens), the dataset, and the step of the optimizer.

After a kill the same command goes on from the last checkpoint, and takes the groups that were finished after it from
the store. A line of `runs/verl.acknowledged` is a trajectory whose put has returned. Needs what `make test-loops`
installs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from verl.experimental.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

import mopd_dataplane.transferqueue  # noqa: F401
from mopd_dataplane.transferqueue.verl_manager import take_stored_groups

DOMAINS = ("sums", "words")
PROMPTS, GROUP = 4, 2
"""Prompts of a step, and answers to each."""
NEW_TOKENS = 12
CONFIG = OmegaConf.create({
    "actor_rollout_ref": {
        "rollout": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "calculate_log_probs": True, "n": GROUP,
                    "agent": {"default_agent_loop": "single_turn_agent"}},
    },
})  # fmt: skip


class Worker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # type: ignore[misc]
    """verl's worker in this process, whose server is a tiny model."""

    def __init__(self, model: Path, acknowledged: Path) -> None:
        self.config = CONFIG
        self.background_tasks: set[asyncio.Task[None]] = set()
        self.processor = self.reward_loop_worker_handles = None
        self.distillation_enabled = False
        self.model = AutoModelForCausalLM.from_pretrained(model, use_safetensors=True).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.acknowledged = acknowledged
        self.steps = 0

    async def _run_agent_loop(self, sampling_params: Any, *, trajectory: Any, trace: bool, **kwargs: Any) -> None:
        prompt = self.tokenizer.encode(kwargs["raw_prompt"][0]["content"], add_special_tokens=False)
        ids, logprobs = await asyncio.to_thread(self._sample, prompt)
        output = AgentLoopOutput(
            prompt_ids=prompt, response_ids=ids, response_mask=[1] * len(ids), response_logprobs=logprobs,
            reward_score=sum(token % 2 == 0 for token in ids) / len(ids), num_turns=2, metrics=AgentLoopMetrics(),
            extra_fields={"min_global_steps": self.steps, "max_global_steps": self.steps, "reward_extra_info": {}},
        )  # fmt: skip
        await self._agent_loop_postprocess(output, trajectory["validate"], **kwargs)
        with self.acknowledged.open("a") as file:
            file.write(json.dumps([kwargs["uid"], kwargs["session_id"], prompt + ids]) + "\n")

    @torch.no_grad()
    def _sample(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        ids, logprobs = list(prompt), []
        for _ in range(NEW_TOKENS):
            row = self.model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
            token = int(torch.multinomial(row.exp(), 1))
            ids.append(token)
            logprobs.append(float(row[token]))
        return ids[len(prompt) :], logprobs


class Run:
    """What verl's trainer does around a step."""

    def __init__(self, store: Path, model: Path, *, has_teacher: bool) -> None:
        self.has_teacher = has_teacher
        self.checkpoints = store.with_name(store.name + ".checkpoints")
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.worker = Worker(model, store.with_name(store.name + ".acknowledged"))
        self.buffer = ReplayBufferAsync("async", OmegaConf.create({}), None, "drop", OmegaConf.create({}), 0.1)

    def go(self, steps: int) -> None:
        first = self.resume()
        for step in range(first, steps):
            self.worker.steps = step
            self.submit(step)
            batch, _ = self.buffer.sample(step, "train", PROMPTS)
            data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["rollout_log_probs"])
            if self.has_teacher:
                print(f"step {step}: {self.gap(batch.keys, data):.6f} nat between sampler and teacher", flush=True)
            tq.kv_batch_put(
                keys=batch.keys, partition_id="train",
                fields=TensorDict({"old_log_probs": data["rollout_log_probs"]}, batch_size=len(batch.keys)),
            )  # fmt: skip
            tq.kv_clear(keys=batch.keys, partition_id="train")
            self.save(step + 1)
            print(f"step {step}: {len(batch.keys)} trajectories", flush=True)

    def gap(self, keys: list[str], data: TensorDict) -> float:
        """Wait for the teacher's log-probs, and return their mean distance from the sampler's."""
        while "teacher_logprobs" not in tq.get_client().kv_retrieve_meta(keys=keys, partition_id="train").field_names:
            time.sleep(0.1)
        scored = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["teacher_logprobs"])
        pairs = zip(data["rollout_log_probs"].unbind(), scored["teacher_logprobs"].unbind(), strict=True)
        # Row t is of the token t + 1, so the response of R tokens has the R rows before the last one.
        return float(torch.cat([(own - teacher[-len(own) - 1 : -1, 0]).abs() for own, teacher in pairs]).mean())

    def submit(self, step: int) -> None:
        numbers, truths = range(PROMPTS), [str(step + number) for number in range(PROMPTS)]
        questions = [[{"role": "user", "content": f"{step} + {number} ="}] for number in numbers]
        batch = TensorDict({
            "uid": NonTensorStack(*(uuid.uuid4().hex for _ in numbers)),
            "raw_prompt": NonTensorStack(*questions),
            "data_source": NonTensorStack(*(DOMAINS[number % 2] for number in numbers)),
            "reward_model": NonTensorStack(*({"ground_truth": truth, "style": "rule"} for truth in truths)),
            "index": torch.arange(PROMPTS),
        }, batch_size=PROMPTS)  # fmt: skip
        tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in numbers]
        tq.kv_batch_put(keys=list(batch["uid"]), partition_id="train", tags=tags, fields=batch)
        rest = take_stored_groups(batch)
        if rest is not None:
            self.generate(rest, step)

    def generate(self, batch: TensorDict, step: int) -> None:
        batch["global_steps"] = NonTensorStack(*[step] * len(batch))
        batch["agent_name"] = NonTensorStack(*["single_turn_agent"] * len(batch))
        asyncio.run_coroutine_threadsafe(self.worker.generate_sequences(batch), self.loop).result()

    def save(self, step: int) -> None:
        """As `trainer_base.py` saves: the queue beside a file that names the step, which comes last."""
        folder = self.checkpoints / str(step)
        tq.save_checkpoint(str(folder))
        latest = self.checkpoints / "latest.tmp"
        latest.write_text(str(step))
        latest.rename(self.checkpoints / "latest")

    def resume(self) -> int:
        """Restore the queue and begin with the step after the checkpoint, whose prompts are drawn anew."""
        latest = self.checkpoints / "latest"
        if not latest.exists():
            return 0
        step = int(latest.read_text())
        tq.load_checkpoint(str(self.checkpoints / str(step)))
        return step


def make_model(folder: str) -> None:
    """Write a random model that reads one token per character."""
    vocabulary = {"<eos>": 0} | {chr(32 + number): 1 + number for number in range(95)}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    characters.pre_tokenizer, characters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=len(vocabulary), num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=512, initializer_range=0.2, eos_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(shape).save_pretrained(folder)


def main(store: str, steps: int, *, has_teacher: bool) -> None:
    model = f"{store}.model"
    if not Path(model).exists():
        make_model(model)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    backend = {"store": store, "queue": "verl", "mapping": "verl", "tokenizer": model, "policy": "actor",
               "promote": "verl"}  # fmt: skip
    tq.init(OmegaConf.create({
        "controller": {"polling_mode": True},
        "backend": {"storage_backend": "MopdStore", "MopdStore": backend},
    }))  # fmt: skip
    print(f"ray: {ray.get_runtime_context().gcs_address}", flush=True)
    Run(Path(store), Path(model), has_teacher=has_teacher).go(steps)
    tq.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("steps", type=int)
    parser.add_argument("--teacher", action="store_true", help="wait for a teacher's log-probs in each step")
    args = parser.parse_args()
    main(args.store, args.steps, has_teacher=args.teacher)
