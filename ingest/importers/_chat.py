"""Chat messages → event bodies, for every format that holds OpenAI-style conversations.

    system, developer   part of the next call's `messages`
    user                an observation without an action, and part of the next call's `messages`
    assistant           a model call; each of its tool calls is an action
    tool, function      the observation of its action, and part of the next call's `messages`

A call's `messages` are those since the call before and its own answer last, so a conversation costs O(N). Token ids
and log-probabilities are null: a chat log doesn't hold them.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from schemas.events import Action, Body, ModelCall, Observation


class _Function(Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class _ToolCall(Struct, frozen=True):
    function: _Function
    id: str | None = None


class _Message(Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[_ToolCall] | None = None
    function_call: _Function | None = None
    tool_call_id: str | None = None
    weight: float | None = None
    """OpenAI's fine-tuning format: 0 keeps an answer out of training."""


def bodies_of(messages: Sequence[dict[str, Any]]) -> Iterator[Body]:
    """Event bodies between start and finish.

    Raises:
        ValueError: for a message of another shape, or a conversation without an answer.
    """
    conversation = _Conversation()
    for index, message in enumerate(messages):
        try:
            parsed = msgspec.convert(message, _Message)
        except msgspec.ValidationError as error:
            raise ValueError(f"message {index}: {error}") from error
        yield from conversation.bodies(parsed, message)
    if conversation.num_calls == 0:
        raise ValueError("no message of role assistant")


class _Conversation:
    """What has to be remembered from message to message."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._call_id: str | None = None
        self._unseen: list[dict[str, Any]] = []
        self._actions: dict[str, str] = {}
        self._num_actions = 0

    def bodies(self, message: _Message, raw: dict[str, Any]) -> Iterator[Body]:
        self._unseen.append(raw)
        match message.role:
            case "assistant":
                yield self._call(message)
                yield from self._new_actions(message)
            case "user":
                yield Observation(call_id=self._call_id, content=_text(message.content))
            case "tool" | "function":
                action_id = self._action_of(message.tool_call_id)
                yield Observation(action_id=action_id, call_id=self._call_id, content=_text(message.content))

    def _call(self, message: _Message) -> ModelCall:
        parent, self._call_id = self._call_id, f"call-{self.num_calls}"
        self.num_calls += 1
        messages, self._unseen = self._unseen, []
        return ModelCall(call_id=self._call_id, parent_call_id=parent, trainable=message.weight != 0, messages=messages)

    def _new_actions(self, message: _Message) -> Iterator[Action]:
        calls = list(message.tool_calls or ())
        if message.function_call is not None:
            calls.append(_ToolCall(message.function_call))
        for call in calls:
            action_id = f"action-{self._num_actions}"
            self._num_actions += 1
            # A source's own ids may repeat within a conversation; its latest use is meant by a result.
            self._actions[call.id or ""] = action_id
            yield Action(
                action_id=action_id,
                call_id=self._call_id,
                name=call.function.name,
                arguments=_arguments(call.function.arguments),
            )

    def _action_of(self, tool_call_id: str | None) -> str | None:
        return self._actions.get(tool_call_id or "")


def _text(content: str | list[dict[str, Any]] | None) -> str | None:
    """The text of a message; other parts (images, audio) stay in the call's `messages` only."""
    if not isinstance(content, list):
        return content
    texts = [part["text"] for part in content if isinstance(part.get("text"), str)]
    return "\n".join(texts) if texts else None


def _arguments(arguments: str | dict[str, Any] | None) -> dict[str, Any] | None:
    """Arguments as a mapping; text that is no JSON object is kept under `unparsed`, as the model wrote it."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError):
        return {"unparsed": arguments}
