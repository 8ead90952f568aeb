"""Tasksets of verifiers (its v1 API): prompts, tools and rewards of a domain.

    source = "verifiers"    dataset = "my_taskset"    environment = "verifiers"    reward = "verifiers"

verifiers itself drives a model through a program that talks to an HTTP server. A rollout of this project asks for one
reply at a time, so only the parts of a taskset are used: its tasks give prompts, the `@tool` methods of its toolsets
answer, the `@stop` methods end a conversation, and the `@reward` methods score it. A task that needs more, such as a
runtime, a state that its tools share, or a second model as user, is refused by name.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import re
import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any

from mopd_dataplane.errors import DeadlineError, EngineError, InputError, PromptError, UnknownNameError
from mopd_dataplane.records import Prompt
from mopd_dataplane.rollout.tools.environments import Conversation, Environment

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_TOOLS = """# Tools

You may call a function before you answer. These are the functions, in <tools></tools> XML tags:
<tools>
{tools}
</tools>

To call one, write a JSON object with its name and its arguments in <tool_call></tool_call> XML tags, and end your turn:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""The tools of a task in its system message, in the tags that Hermes and Qwen models were trained on."""
_LONG_S = 600.0
"""Longest that the set-up of a toolset, or the rewards of a conversation, may take."""
_UNUSED = ("text", "prompt", "question", "messages", "verifier_data", "teacher_context")
"""Fields of a task that a row says itself, or that a prompt's reader would take for what is asked."""


def task_rows(taskset: str, args: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """The first tasks of a taskset as prompt rows: what is asked, `answer` where a task has one, the task as JSON.

    taskset: the package's name, as verifiers knows it. args: fields of its config. size: most tasks.
    Raises InputError without the package, for a config that the taskset refuses, or for a task that needs what a
    rollout here does not have; UnknownNameError for a taskset that is not installed.
    """
    tasks = _load(taskset, json.dumps(args, sort_keys=True))
    return [_row(taskset, args, task) for task in itertools.islice(tasks, size)]


def _row(taskset: str, args: dict[str, Any], task: Any) -> dict[str, Any]:
    data = task.data
    _refuse(taskset, task)
    messages = data.prompt if isinstance(data.prompt, str) else _messages(data.prompt)
    system = "\n\n".join(part for part in (data.system_prompt, _tools_text(taskset, args, task)) if part)
    if system:
        heard = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        messages = [{"role": "system", "content": system}, *heard]
    fields = {name: value for name, value in data.model_dump(mode="json").items() if name not in _UNUSED}
    config = task.config.model_dump(mode="json")
    verifier_data = {"taskset": taskset, "args": args, "task": data.model_dump(mode="json"), "config": config}
    return {**fields, "text": messages, "answer": fields.get("answer") or "", "verifier_data": verifier_data}


def task_reward(prompt: Prompt, said: list[str]) -> float:
    """The weighted sum of a task's rewards for a conversation.

    said: what the policy and the tools said in turn, the policy first and last. The trace that the rewards are given
    has messages and no tokens. Raises PromptError for a prompt that is no task, EngineError for a reward that raises.
    """
    _, task = _task(prompt)
    trace = _trace(task, said)
    try:
        _Loop.of_process().run(task.score(trace))
    except Exception as error:
        raise EngineError(
            f"rewards of {type(task).__name__} for prompt {prompt.prompt_id!r} failed: {error!s:.300}"
        ) from error
    return float(trace.reward)


class TasksetTools(Environment):
    """Calls the tools of a prompt's task, named in `<tool_call>` tags; a turn without a call ends the conversation.

    turns: most calls of a conversation. timeout_s: seconds a call may take. Of several in a turn the first is made.
    A tool is called in the process that samples; verifiers repeats a call whose connection failed, and here a turn
    that is played again after a crash is called again, so a tool must bear that. A toolset of the task is made for each
    call; one of the whole taskset is made once.
    """

    def __init__(self, *, turns: int = 8, timeout_s: float = 60.0) -> None:
        self._turns, self._timeout_s = turns, timeout_s

    def reply(self, conversation: Conversation) -> str | None:
        """See Environment. Raises PromptError for a prompt that is no task of verifiers."""
        taskset, task = _task(conversation.prompt)
        called = _CALL.search(conversation.said[-1])
        if called is None or conversation.turns > self._turns or _stops(task, conversation.said):
            return None
        try:
            call = json.loads(called[1])
            name, arguments = call["name"], call.get("arguments", {})
        except (json.JSONDecodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
            return f"error: no JSON object with a name and arguments ({error}); write the call again"
        if not isinstance(arguments, dict):
            return (
                f"error: tool arguments must be a JSON object, got {type(arguments).__name__}; write them as an object"
            )
        shared = _shared(taskset)
        try:
            return str(_Loop.of_process().run(_call(shared, task, str(name), arguments), self._timeout_s))
        except DeadlineError:
            return f"error: no result after {self._timeout_s:g} s"


class _Loop:
    """An event loop in a thread of its own: toolsets keep what belongs to the loop that they were made in."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="mopd-verifiers").start()

    @staticmethod
    @cache
    def of_process() -> _Loop:
        return _Loop()

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float = _LONG_S) -> Any:
        """Wait for a coroutine. Raises DeadlineError after timeout_s, and what the coroutine raises."""
        waiting = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return waiting.result(timeout_s)
        except TimeoutError:
            waiting.cancel()
            raise DeadlineError(f"a toolset or a task of verifiers has not answered in {timeout_s:g} s") from None


@cache
def _load(taskset: str, args: str) -> Any:
    try:
        from verifiers.v1.configs.taskset import TasksetConfig
        from verifiers.v1.envs.single_agent import SingleAgentEnv
        from verifiers.v1.utils.generic import concrete_type
        from verifiers.v1.utils.loaders import environment_class, taskset_class
    except ImportError as error:
        raise InputError(
            f"tasksets of verifiers are read by a package: pip install 'verifiers>=0.4' ({error})"
        ) from None
    if not taskset:
        raise InputError('source = "verifiers" needs `dataset`: the name of an installed taskset')
    try:
        cls = taskset_class(taskset)
    except (ImportError, AttributeError, TypeError) as error:
        raise UnknownNameError(f"taskset {taskset!r}: {error!s:.300}") from None
    if environment_class(taskset) is not SingleAgentEnv:
        raise InputError(
            f"taskset {taskset!r} brings an environment of its own, which plays several agents; here a policy speaks "
            "with its tools alone. Run it with verifiers, and import its traces: mopd import verifiers"
        )
    config = concrete_type(cls, TasksetConfig) or TasksetConfig
    try:
        return cls(config.model_validate({**json.loads(args), "id": taskset}))
    except ValueError as error:
        raise InputError(f"taskset {taskset!r} refuses args {args:.120}: {error!s:.300}") from None


def _task(prompt: Prompt) -> tuple[Any, Any]:
    """The taskset of a prompt, and its task."""
    try:
        task_data = json.loads(prompt.verifier_data)
        name, args, data, config = (task_data[key] for key in ("taskset", "args", "task", "config"))
    except (ValueError, KeyError, TypeError):
        raise PromptError(
            f"prompt {prompt.prompt_id!r} is no task of verifiers; give its domain source 'verifiers', or another "
            "environment and reward"
        ) from None
    taskset = _load(name, json.dumps(args, sort_keys=True))
    kind = type(taskset).task_type()
    task = kind(kind.data_type().model_validate(data), kind.config_type().model_validate(config))
    _refuse(name, task)
    return taskset, task


def _refuse(taskset: str, task: Any) -> None:
    """Raises InputError for a task of which something would silently not happen."""
    from verifiers.v1.state import State, state_cls
    from verifiers.v1.task import Task
    from verifiers.v1.utils.decorators import discover_decorated

    kind = type(task)
    needs = [name for name in ("setup", "finalize", "stage_verifier") if getattr(kind, name) is not getattr(Task, name)]
    needs += [f"@intercept {hook.__name__}" for hook in discover_decorated(task, "intercept")]
    needs += [f"reward {hook.__name__}(runtime)" for hook in task.hooks("reward") if _needs(hook, "runtime")]
    needs += [f"stop {hook.__name__} of a request" for hook in task.hooks("stop") if not _of_a_trace(hook)]
    if task.data.prompt is None:
        needs.append("a user who opens the conversation")
    if kind.NEEDS_CONTAINER or task.data.image:
        needs.append("a container")
    if state_cls(kind) is not State:
        needs.append("a state that its tools and rewards share")
    if needs:
        raise InputError(
            f"taskset {taskset!r}: its tasks need {', '.join(needs)}, which a rollout here does not have. Run it with "
            "verifiers, and import its traces: mopd import verifiers"
        )


def _needs(hook: Any, name: str) -> bool:
    parameter = inspect.signature(hook).parameters.get(name)
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _of_a_trace(hook: Any) -> bool:
    from verifiers.v1.session import hook_boundary
    from verifiers.v1.trace import Trace

    return hook_boundary(hook, allow_trace=True) is Trace


def _messages(messages: list[Any]) -> list[dict[str, Any]]:
    return [message.model_dump(mode="json", exclude_none=True) for message in messages]


def _tools_text(taskset: str, args: dict[str, Any], task: Any) -> str:
    key = json.dumps(args, sort_keys=True)
    schemas = _schemas(taskset, key, task.config.model_dump_json())
    return _TOOLS.format(tools="\n".join(schemas)) if schemas else ""


@cache
def _schemas(taskset: str, args: str, config: str) -> list[str]:
    """The functions that a task's tools are called by, each as JSON."""
    found_in = _load(taskset, args)
    kind = type(found_in).task_type()
    servers = [
        *_shared(found_in),
        *map(_served, kind.toolsets(kind.config_type().model_validate_json(config))),
    ]
    names = []
    for prefix, server in servers:
        for tool in _Loop.of_process().run(server.list_tools()):
            name = f"{prefix}_{tool.name}" if prefix else tool.name
            function = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
            names.append(json.dumps({"type": "function", "function": function}))
    return names


@cache
def _shared(taskset: Any) -> list[tuple[str, Any]]:
    """Tool servers of a whole taskset, set up once in this process."""
    toolsets = type(taskset).toolsets(taskset.config)
    for toolset in toolsets:
        _Loop.of_process().run(toolset.setup())
    return list(map(_served, toolsets))


def _served(toolset: Any) -> tuple[str, Any]:
    """(prefix of its tools, a toolset's tools as verifiers serves them)."""
    from mcp.server.mcpserver import MCPServer
    from verifiers.v1.state import State, state_cls

    if state_cls(type(toolset)) is not State or getattr(toolset.config, "url", None):
        raise InputError(
            f"toolset {type(toolset).__name__} keeps a state or runs elsewhere, which a rollout here cannot use"
        )
    server = MCPServer(toolset.server_name or type(toolset).__name__)
    toolset.register(server)
    return toolset.server_name, server


async def _call(shared: list[tuple[str, Any]], task: Any, name: str, arguments: dict[str, Any]) -> str:
    """Output of a tool, or the reason why no tool was called."""
    own = type(task).toolsets(task.config)
    for prefix, server in [*shared, *map(_served, own)]:
        bare = name.removeprefix(f"{prefix}_") if prefix else name
        if (prefix and bare == name) or bare not in {tool.name for tool in await server.list_tools()}:
            continue
        for toolset in own:
            await toolset.setup()
            await toolset.setup_task(task.data)
        try:
            done = await server.call_tool(bare, arguments)
        except Exception as error:
            return f"error: {error!s:.1000}"
        return "\n".join(getattr(part, "text", None) or str(part) for part in done.content)
    return f"error: unknown tool {name!r}"


def _trace(task: Any, said: list[str]) -> Any:
    """A conversation as verifiers' trace of messages, without tokens."""
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask, WireAgentConfig
    from verifiers.v1.types import SystemMessage, ToolMessage, UserMessage

    data = task.data
    heard: list[Any] = [SystemMessage(content=data.system_prompt)] if data.system_prompt else []
    heard += [UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
    nodes = [MessageNode(message=message) for message in heard]
    for number, text in enumerate(said):
        own = number % 2 == 0
        message = _answer(text, number) if own else ToolMessage(tool_call_id=f"call_{number - 1}", content=text)
        nodes.append(MessageNode(message=message, sampled=own))
    for number, node in enumerate(nodes):
        node.parent = number - 1 if number else None
    trace_task = TraceTask(type=type(task).__name__, data=data, key=task.key, hash=task.hash)
    return Trace(task=trace_task, agent=AgentInfo(config=WireAgentConfig()), nodes=nodes, is_completed=True, ok=True)


def _answer(text: str, number: int) -> Any:
    from verifiers.v1.types import AssistantMessage, ToolCall

    called = _CALL.search(text)
    if called is None:
        return AssistantMessage(content=text)
    try:
        tool_call = json.loads(called[1])
        name, arguments = str(tool_call["name"]), json.dumps(tool_call.get("arguments", {}))
    except (json.JSONDecodeError, RecursionError, KeyError, TypeError, AttributeError):
        return AssistantMessage(content=text)
    call = ToolCall(id=f"call_{number}", name=name, arguments=arguments)
    return AssistantMessage(content=_CALL.sub("", text, count=1).strip(), tool_calls=[call])


def _stops(task: Any, said: list[str]) -> bool:
    """Whether one of a task's `@stop` methods ends the conversation here."""
    from verifiers.v1.session import call_hook
    from verifiers.v1.trace import Trace

    hooks = task.hooks("stop")
    if not hooks:
        return False
    trace = _trace(task, said)

    async def ask() -> bool:
        return any([await call_hook(hook, {Trace: trace}) for hook in hooks])

    return bool(_Loop.of_process().run(ask()))
