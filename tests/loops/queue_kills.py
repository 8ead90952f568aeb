"""Kill verl's queue at random moments and count what a restart finds again.

    python tests/loops/queue_kills.py --kills 300 --backend MopdStore --seed 0 --out runs/kills

Real: TransferQueue's controller, client, storage units and checkpoints; verl's ReplayBufferAsync, agent-loop worker,
and the methods of its trainer that draw, submit and issue prompts again. Stand-ins: a policy whose every field follows
from prompt, session, policy version and a number of its own; the dataset, the reward and the optimizer's step; plain
processes instead of Ray's actors, and a pipe instead of its calls.

A kill is a SIGKILL of the trainer, a worker, the controller or the storage (SimpleStorage: a storage unit; MopdStore:
the process that folds). Up to 0.3 s later all others are killed too, as a framework's job ends with one of its
processes, and the job starts again from its last checkpoint. The process that folds is no part of the job and lives on.

Kills come in rounds of ROUND, each over a store of its own. A line of `<out>/<backend>-<seed>.jsonl` is a restart or
the end of a round; the command goes on with the first round that is not there. Needs what `make test-loops` installs.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import faulthandler
import json
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "TQ_NUM_THREADS": "1",
    "TQ_LOGGING_LEVEL": "ERROR",
    "VERL_LOGGING_LEVEL": "ERROR",
}

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import lance  # noqa: F401  # loaded once, in the process that the others are forked from, and not used there
import numpy as np
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue import interface
from transfer_queue.controller import TransferQueueController
from transfer_queue.storage.simple_storage import SimpleStorageUnit
from verl.experimental.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from mopd_dataplane import open_store
from mopd_dataplane.models.initial_weights import character_tokenizer
from mopd_dataplane.store.queue.logged import LoggedQueue
from mopd_dataplane.transferqueue import backend as mopd
from mopd_dataplane.transferqueue.promote import WAITING
from mopd_dataplane.transferqueue.verl_manager import StoredGroupManager

ROUND = 25
"""Kills over one store."""
BATCH, SESSIONS, WARMUP = 4, 2, 2
"""Prompts of a step, answers to each, and batches that are drawn ahead."""
SAVE_EVERY = 3
"""Steps from one checkpoint to the next."""
GENERATE_S = (0.05, 0.6)
"""Seconds that the stand-in takes for an answer: from, to."""
TRAIN_S = 0.1
READY_S = 120.0
PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process gets when the one that forked it ends."""
TARGETS = ("trainer", "worker", "controller", "storage")
FIELDS = ["prompts", "responses", "rollout_log_probs", "rm_scores", "uid", "session_id", "raw_prompt", "extra_fields"]
CONFIG = OmegaConf.create({
    "actor_rollout_ref": {
        "rollout": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "calculate_log_probs": True, "n": SESSIONS,
                    "agent": {"default_agent_loop": "single_turn_agent"}},
    },
    "data": {"train_batch_size": BATCH, "gen_batch_size": 1},
    "skip": {"rollout_tq": {"enable": False}},
})  # fmt: skip


def content_of(row: int, session: int, version: int, own: int) -> dict[str, list[Any]]:
    """What the stand-in answers: own is a number that no other answer has."""
    digits = [5 + int(digit) for digit in f"{own:09d}"]
    response = digits + [5 + session, 5 + version % 30] + [5 + (own + row + j) % 30 for j in range(own % 6)]
    return {
        "prompts": [5 + int(digit) for digit in f"{row:06d}"],
        "responses": response,
        "rollout_log_probs": [-((own * 7 + row + j) % 97 + 1) / 100 for j in range(len(response))],
        "reward": [(row + 3 * session + own) % 5 / 4],
    }


class Answer(SimpleNamespace):
    """An answer as it was read from the queue: uid, session, row, version, own, is_right."""


def read_answers(keys: list[str], partition: str) -> list[Answer]:
    """Read answers of the queue and check each of their fields."""
    data = dict(tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=FIELDS).items())
    columns = {
        name: [*values.unbind()] if isinstance(values, torch.Tensor) else values.tolist()
        for name, values in data.items()
    }
    return [_answer(key, {name: values[row] for name, values in columns.items()}) for row, key in enumerate(keys)]


def _answer(key: str, fields: dict[str, Any]) -> Answer:
    response = fields["responses"].reshape(-1).tolist()
    own, session = int("".join(str(token - 5) for token in response[:9])), int(fields["session_id"])
    row = int(fields["raw_prompt"][0]["content"].split()[0])
    version = int(fields["extra_fields"]["min_global_steps"])
    right = content_of(row, session, version, own)
    is_right = (
        key == f"{fields['uid']}_{session}_0"
        and response == right["responses"]
        and fields["prompts"].reshape(-1).tolist() == right["prompts"]
        and np.allclose(fields["rollout_log_probs"].reshape(-1), right["rollout_log_probs"], atol=1e-6)
        and abs(float(fields["rm_scores"].sum()) - right["reward"][0]) < 1e-6
    )
    return Answer(uid=fields["uid"], session=session, row=row, version=version, own=own, is_right=is_right)


def connect(controller: Any, section: dict[str, Any], name: str) -> None:
    """Make TransferQueue's client of this process, as its `init` does with Ray."""
    config = OmegaConf.create({}, flags={"allow_objects": True})
    config.controller = {"zmq_info": controller}
    config.backend = {"storage_backend": name, name: section}
    interface._TQ_CLIENT, interface._TQ_CONTROLLER = None, object()
    manager = interface._maybe_create_tq_client(config).storage_manager
    # It asks Ray for the size of its thread pool.
    manager._num_threads, manager._multi_threads_executor = 2, ThreadPoolExecutor(2)


def controller_main(pipe: Connection, section: dict[str, Any], name: str) -> None:
    controller = TransferQueueController.__ray_metadata__.modified_class(polling_mode=True)
    if name == mopd.NAME:
        mopd.keep_groups_of(controller, mopd.Backend(**section))
    pipe.send(controller.zmq_server_info)
    signal.pause()


def unit_main(pipe: Connection) -> None:
    unit = SimpleStorageUnit.__ray_metadata__.modified_class({"num_data_storage_units": 2})
    pipe.send(unit.zmq_server_info)
    signal.pause()


class Worker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # type: ignore[misc]
    """verl's worker, whose server is the stand-in."""

    def __init__(self, folder: Path) -> None:
        self.config = CONFIG
        self.background_tasks: set[asyncio.Task[None]] = set()
        self.processor = self.reward_loop_worker_handles = None
        self.distillation_enabled = False
        self.chance = random.Random(time.time_ns() ^ os.getpid())
        self.version = 0
        self.told = os.open(folder / "told", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def tell(self, *words: Any) -> None:
        """Note what was acknowledged, in one write that a kill does not divide."""
        os.write(self.told, (json.dumps(words) + "\n").encode())

    async def _run_prompt(self, prompt: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        uid = prompt["uid"]
        await super()._run_prompt(prompt, *args, **kwargs)
        self.tell("group", uid)

    async def _run_agent_loop(self, sampling_params: Any, *, trajectory: Any, trace: bool, **kwargs: Any) -> None:
        session, version = kwargs["session_id"], self.version
        row, own = int(kwargs["raw_prompt"][0]["content"].split()[0]), self.chance.randrange(10**9)
        seconds = self.chance.uniform(*GENERATE_S)
        await asyncio.sleep(seconds)
        right = content_of(row, session, version, own)
        output = AgentLoopOutput(
            prompt_ids=right["prompts"], response_ids=right["responses"], response_mask=[1] * len(right["responses"]),
            response_logprobs=right["rollout_log_probs"], reward_score=right["reward"][0], num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={"min_global_steps": version, "max_global_steps": version, "reward_extra_info": {}},
        )  # fmt: skip
        await self._agent_loop_postprocess(output, trajectory["validate"], **kwargs)
        self.tell("answer", kwargs["uid"], session, row, version, own, round(seconds, 4))


def worker_main(pipe: Connection, trainer: Connection, controller: Any, section: Any, name: str, folder: Path) -> None:
    connect(controller, section, name)
    worker, loop = Worker(folder), asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    pipe.send("ready")
    while True:
        uids, step, worker.version = trainer.recv()
        if uids:
            batch = tq.kv_batch_get(keys=uids, partition_id="train")
            batch["global_steps"] = NonTensorStack(*[step] * len(uids))
            batch["agent_name"] = NonTensorStack(*["single_turn_agent"] * len(uids))
            asyncio.run_coroutine_threadsafe(worker.generate_sequences(batch), loop).result()
        trainer.send("issued")


class Rows:
    """A dataset without end whose position is part of a checkpoint."""

    def __init__(self, position: int) -> None:
        self.position = position

    def __iter__(self) -> Rows:
        return self

    def __next__(self) -> dict[str, Any]:
        row, self.position = self.position, self.position + 1
        prompt, truth = np.empty(1, object), np.empty(1, object)
        prompt[0], truth[0] = [{"role": "user", "content": f"{row} + 1 ="}], {"ground_truth": str(row + 1)}
        source = np.array(["sums"], dtype=object)
        return {"raw_prompt": prompt, "reward_model": truth, "data_source": source, "index": torch.tensor([row])}


class Manager(StoredGroupManager):
    """verl's manager with a pipe to the worker in place of an actor."""

    def __init__(self, worker: Connection) -> None:
        self.pipe, self.version = worker, 0
        self.agent_loop_workers = [SimpleNamespace(generate_sequences=SimpleNamespace(remote=self.send))]
        agent_loop_tq.ray = SimpleNamespace(get=lambda results: results)

    def send(self, batch: TensorDict) -> None:
        columns = dict(batch.items())
        self.call([*columns["uid"].tolist()], int(columns["global_steps"].data))

    def call(self, uids: list[str], step: int) -> None:
        self.pipe.send((uids, step, self.version))
        self.pipe.recv()


class Trainer(PPOTrainer):
    """What verl's asynchronous trainer does with its queue, by its own methods where these need no model."""

    def __init__(self, folder: Path, worker: Connection) -> None:
        self.config, self.trainer_mode, self.folder = CONFIG, "colocate_async", folder
        self.replay_buffer = ReplayBufferAsync(
            "colocate_async", OmegaConf.create({}), None, "drop", OmegaConf.create({}), poll_interval=0.05,
            refill_fn=self._add_prompts_to_generate,
        )  # fmt: skip
        self.agent_loop_manager = Manager(worker)
        self._restored_tq_prompt_count = 0
        self.trained: list[int] = []
        """`own` of each answer that these weights were trained on"""
        self.rows: list[int] = []
        self.notes = os.open(folder / "notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, **words: Any) -> None:
        os.write(self.notes, (json.dumps(words) + "\n").encode())

    def load(self) -> None:
        """As `_load_checkpoint` of verl; then note what the queue has."""
        self.global_steps, position, latest = 0, 0, self.folder / "latest"
        if latest.exists():
            self.global_steps = int(latest.read_text())
            step = self.folder / f"step-{self.global_steps}"
            state = json.loads((step / "state.json").read_text())
            position, self.trained, self.rows = state["position"], state["trained"], state["rows"]
            tq.load_checkpoint(step / "transfer_queue")
            self._restored_tq_prompt_count = sum(
                bool(tag.get("is_prompt")) for tag in (tq.kv_list("train") or {}).get("train", {}).values()
            )
        self.train_dataloader = Rows(position)
        self.train_dataloader_it = iter(self.train_dataloader)
        self.note(event="restart", step=self.global_steps, trained=len(self.trained), **self.inventory())

    def inventory(self) -> dict[str, Any]:
        """What the queue has: answers of finished groups, and what is wrong with them; and other answers."""
        finished, others, mislabelled, fragments = [], [], 0, 0
        for name in ("train", WAITING + "train"):
            entries = (tq.kv_list(name) or {}).get(name, {})
            uids = {key for key, tag in entries.items() if tag.get("is_prompt") and tag["status"] == "finished"}
            keys = [key for key, tag in entries.items() if not tag.get("is_prompt")]
            whole = [key for key in keys if key.partition("_")[0] in uids]
            answers = read_answers(whole, name) if whole else []
            for key in set(keys).difference(whole):
                with suppress(ValueError):  # a key without fields: its put was under way when the checkpoint was saved
                    answers += read_answers([key], name)
            mislabelled += sum(not answer.is_right for answer in answers)
            finished += [answer.own for answer in answers if answer.uid in uids]
            others += [answer.own for answer in answers if answer.uid not in uids]
            sizes = Counter(answer.uid for answer in answers)
            fragments += sum(sizes[uid] != SESSIONS for uid in uids)
        return {"finished": finished, "others": others, "mislabelled": mislabelled, "fragments": fragments}

    def go(self) -> None:
        """As `fit` of verl."""
        self.global_steps += 1
        self._reissue_inflight_prompts()
        self._add_async_warmup_batches(WARMUP)
        while True:
            self.agent_loop_manager.version = self.global_steps - 1
            self._add_prompts_to_generate(BATCH)
            batch, _ = self.replay_buffer.sample(self.global_steps, "train", BATCH)
            answers = read_answers(batch.keys, "train")
            sizes = Counter(answer.uid for answer in answers)
            seen, rows = {*self.trained}, {*self.rows}
            self.note(
                event="step", step=self.global_steps, mislabelled=sum(not answer.is_right for answer in answers),
                fragments=sum(size != SESSIONS for size in sizes.values()) + (len(sizes) != BATCH),
                twice=sum(answer.own in seen or answer.row in rows for answer in answers),
            )  # fmt: skip
            scores = TensorDict({"old_log_probs": torch.zeros(len(answers), 1)}, batch_size=len(answers))
            tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=scores)
            time.sleep(TRAIN_S)
            self.trained += [answer.own for answer in answers]
            self.rows += sorted({answer.row for answer in answers})
            if self.global_steps % SAVE_EVERY == 0:
                self.save()
            tq.kv_clear(keys=batch.keys, partition_id="train")
            self.global_steps += 1

    def save(self) -> None:
        """As `_save_checkpoint` of verl: weights, dataset, queue, and at last the name of the newest one."""
        step = self.folder / f"step-{self.global_steps}"
        shutil.rmtree(step, ignore_errors=True)
        step.mkdir()
        state = {"position": self.train_dataloader.position, "trained": self.trained, "rows": self.rows}
        (step / "state.json").write_text(json.dumps(state))
        tq.save_checkpoint(step / "transfer_queue", metadata={"global_steps": self.global_steps})
        latest = self.folder / "latest.tmp"
        latest.write_text(str(self.global_steps))
        latest.rename(self.folder / "latest")

    def on_step_end(self) -> None:
        """Nothing."""

    def on_sample_end(self) -> None:
        """Nothing."""


def trainer_main(pipe: Connection, worker: Connection, controller: Any, section: Any, name: str, folder: Path) -> None:
    connect(controller, section, name)
    trainer = Trainer(folder, worker)
    pipe.send("started")
    trainer.load()
    pipe.send("ready")
    trainer.go()


class Job:
    """The processes of one start."""

    context = get_context("fork")

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.processes = folder, name, {}
        section: dict[str, Any] = {"store": str(folder / "store"), "queue": "verl", "mapping": "verl"}
        section["promote"] = "verl"
        if name != mopd.NAME:
            section = {"zmq_info": {}}
            for number in range(2):
                info = self.start(f"storage{number}", unit_main)[1]
                section["zmq_info"][info.id] = info
        else:
            section["tokenizer"] = str(folder / "tokenizer")
        self.controller = self.start("controller", controller_main, section, name)[1]
        near, far = self.context.Pipe()
        self.start("worker", worker_main, near, self.controller, section, name, folder)
        self.ready = self.start("trainer", trainer_main, far, self.controller, section, name, folder)[0]

    def start(self, role: str, main: Any, *args: Any) -> tuple[Connection, Any]:
        """Fork a process; returns its pipe and its first message."""
        pipe, far = self.context.Pipe()
        process = self.context.Process(target=self._run, args=(main, far, *args), daemon=True)
        process.start()
        far.close()
        self.processes[role] = process
        if not pipe.poll(READY_S):
            raise RuntimeError(f"{role} did not start within {READY_S} s")
        return pipe, pipe.recv()

    def _run(self, main: Any, *args: Any) -> None:
        messages = os.open(self.folder / "messages", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(messages, 1)
        os.dup2(messages, 2)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if traces := float(os.environ.get("TRACES_S", "0")):
            faulthandler.dump_traceback_later(traces)
        main(*args)

    def kill(self, target: str, grace_s: float, chance: random.Random) -> None:
        """Kill one process, and the others after a moment."""
        if target == "storage":
            if self.name == mopd.NAME:
                for number in folding(self.folder / "store"):
                    os.kill(number, signal.SIGKILL)
            else:
                self.processes[f"storage{chance.randrange(2)}"].kill()
        else:
            self.processes[target].kill()
        time.sleep(grace_s)
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.join()


def apart(function: Any, *args: Any) -> Any:
    """Call a function in a process of its own: one that has used lance cannot be forked."""
    pipe, far = Job.context.Pipe()
    process = Job.context.Process(target=lambda: far.send(function(*args)))
    process.start()
    far.close()
    result = pipe.recv()
    process.join()
    return result


def folding(store: Path) -> list[int]:
    """Ids of the processes that fold the queue of a store."""
    numbers = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"mopd_dataplane.store.queue" in words and os.fsencode(store) in words:
                numbers.append(int(entry.name))
    return numbers


class Accounts:
    """What was acknowledged in a round, and what became of it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.settled: set[int] = set()
        """`own` of answers that must be generated again"""
        self.read = 0

    def told(self) -> tuple[dict[int, list[Any]], set[str]]:
        """(answers by `own`: uid, session, row, version, own, seconds; prompts whose end was)."""
        path = self.folder / "told"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return {words[5]: words[1:] for words in lines if words[0] == "answer"}, {
            w[1] for w in lines if w[0] == "group"
        }

    def new_notes(self) -> list[dict[str, Any]]:
        path = self.folder / "notes"
        lines = path.read_text().splitlines() if path.exists() else []
        new, self.read = lines[self.read :], len(lines)
        return [json.loads(line) for line in new]

    def restart(self, answers: dict[int, list[Any]], groups: set[str], note: dict[str, Any]) -> dict[str, Any]:
        """What a restart costs. answers, groups: what was acknowledged before it."""
        trained: set[int] = set()
        if note["step"]:
            state = json.loads((self.folder / f"step-{note['step']}" / "state.json").read_text())
            trained = {*state["trained"]}
        owed = answers.keys() - trained - self.settled
        again = owed - {*note["finished"]}
        self.settled |= again
        whole = Counter(answers[own][0] for own in again if answers[own][0] in groups)
        gone = again - {*note["others"]} if self.name != mopd.NAME else set()
        return {
            "owed": len(owed), "again": len(again), "again_s": round(sum(answers[own][5] for own in again), 3),
            "groups_again": sum(count >= SESSIONS for count in whole.values()), "lost": len(gone),
            "mislabelled": note["mislabelled"], "fragments": note["fragments"],
        }  # fmt: skip

    def lost_of_store(self) -> dict[str, Any]:
        """Compare the samples of the store with every answer that was acknowledged in the round."""
        answers, _ = self.told()
        queue = LoggedQueue(self.folder / "store", "verl", starts_folding=False)
        queue.fold()
        store = open_store(str(self.folder / "store"))
        ids = np.concatenate([ids for ids, _ in store.scan_samples(["uid"])])
        groups = store.take_samples(ids, ["group_id", "group_index"]).to_pylist()
        tokens = store.read_tokens(ids, ["tokens"], verify=True)["tokens"].to_pylist()
        stored = Counter(
            (row["group_id"], row["group_index"], tuple(own)) for row, own in zip(groups, tokens, strict=True)
        )
        counts = []
        for uid, session, row, version, own, _ in answers.values():
            right = content_of(row, session, version, own)
            counts.append(stored[uid, session, (*right["prompts"], *right["responses"])])
        return {"acknowledged": len(counts), "lost": counts.count(0), "doubled": sum(count > 1 for count in counts)}


def run_round(folder: Path, name: str, seed: int, number: int, kills: int) -> list[dict[str, Any]]:
    """Kill a job `kills` times; returns a line for each kill and one for the round."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if name == mopd.NAME:
        character_tokenizer().save_pretrained(folder / "tokenizer")
        rollouts = {"store": str(folder / "store"), "queue": "verl", "mapping": "verl"}
        apart(mopd._record, mopd.Backend(**rollouts, tokenizer=str(folder / "tokenizer")))
    accounts, lines, begin = Accounts(folder, name), [], time.monotonic()
    before: tuple[dict[int, list[Any]], set[str]] = ({}, set())
    for kill in range(kills + 1):
        chance = random.Random(f"{seed}/{number}/{kill}")
        target, grace_s, extra = chance.choice(TARGETS), chance.uniform(0, 0.3), chance.uniform(0, 1)
        line: dict[str, Any] = {
            "backend": name, "seed": seed, "round": number, "kill": kill, "target": target, "owed": 0, "again": 0,
            "again_s": 0.0, "groups_again": 0, "lost": 0, "mislabelled": 0, "fragments": 0, "twice": 0, "steps": 0,
        }  # fmt: skip
        job = Job(folder, name)
        is_early = chance.random() < 0.15 and 0 < kill < kills
        if not is_early and not job.ready.poll(READY_S):
            raise RuntimeError(f"no trainer after {READY_S} s: see {folder / 'messages'}")
        deadline = time.monotonic() + READY_S
        while not (folder / "latest").exists() and time.monotonic() < deadline:
            time.sleep(0.05)  # without a checkpoint there is nothing to come back to
        time.sleep(extra if is_early else 4 * extra)
        if kill == kills:
            target = "trainer"
        job.kill(target, grace_s, chance)
        for note in accounts.new_notes():
            if note["event"] == "restart":
                line |= accounts.restart(*before, note)
            else:
                line["steps"] += 1
                line |= {key: line[key] + note[key] for key in ("mislabelled", "fragments", "twice")}
        before = accounts.told()
        line |= {"early": is_early, "round_s": round(time.monotonic() - begin, 1)}
        lines.append(line)
        print({key: line[key] for key in line if key not in ("backend", "seed", "early")}, flush=True)
    end = {"backend": name, "seed": seed, "round": number, "kill": "end", "s": round(time.monotonic() - begin, 1)}
    end |= apart(accounts.lost_of_store) if name == mopd.NAME else {"acknowledged": len(before[0])}
    for own in folding(folder / "store"):
        os.kill(own, signal.SIGKILL)
    print(end, flush=True)
    return [*lines, end]


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the lines of a run. The last line of a round's starts is no kill that was restarted from."""
    names = (
        "owed",
        "again",
        "again_s",
        "groups_again",
        "lost",
        "mislabelled",
        "fragments",
        "twice",
        "steps",
        "doubled",
    )
    ends = [line for line in lines if line["kill"] == "end"]
    sums = {name: round(sum(line.get(name, 0) for line in lines), 1) for name in names}
    kills = sum(line["kill"] != "end" for line in lines) - len(ends)
    return {"kills": kills, "acknowledged": sum(line["acknowledged"] for line in ends), **sums}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=ROUND)
    parser.add_argument("--backend", choices=(mopd.NAME, "SimpleStorage"), default=mopd.NAME)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/kills"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results = (args.out / f"{args.backend}-{args.seed}.jsonl").absolute()
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    for number in range((args.kills + ROUND - 1) // ROUND):
        if not any(line["round"] == number and line["kill"] == "end" for line in lines):
            kills = min(ROUND, args.kills - number * ROUND)
            folder = (args.out / f"{args.backend}-{args.seed}-{number}").absolute()
            new = run_round(folder, args.backend, args.seed, number, kills)
            with results.open("a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in new))
            lines += new
            shutil.rmtree(folder)
    print(json.dumps(summary(lines)))


if __name__ == "__main__":
    main()
