"""The tiny torch transformer as a policy: exact token ids, exact log-probabilities, calls batched.

A response is one token: the name of a tool. What is sampled depends on the trajectory's seed and turn, not on which
calls happened to share a batch: each call draws one uniform number and inverts the distribution's cumulative sum.

`logprobs_mode` is `raw` where the temperature is 1 (or 0: then the log-probabilities are those of temperature 1, of
the likeliest token), and `processed` otherwise: those of the softened distribution that the token was drawn from.
"""

import asyncio
import random
import time
from typing import Any

import torch
import uuid_utils
from msgspec import Struct

from models.checkpoint import load_checkpoint
from models.errors import ModelError
from models.logprobs import next_token_logprobs, prefix_sha256
from models.tokenizer import Vocabulary, WordTokenizer
from models.transformer import TinyTransformer
from rollout.errors import PolicyError
from rollout.port import Context, Move
from schemas.events import Action, ModelCall, Observation
from schemas.records import PolicyVersion


class _Loaded(Struct, frozen=True):
    """A model with what names it; replaced as a whole, so that a batch never mixes versions."""

    model: TinyTransformer
    policy_id: str
    version: int


class _Waiting(Struct, frozen=True):
    context: Context
    delta: list[int]
    """Prompt tokens beyond the last call."""
    tokens: list[int]
    """The full prompt."""
    answer: "asyncio.Future[Move]"


class TorchPolicy:
    """A batching sampler over a `TinyTransformer`.

    Args:
        model: the first model.
        vocabulary: of the domain that is played.
        policy_id: name of the policy.
        version: of `model`.
        temperature: 0 takes the likeliest token.
        batch_wait_ms: how long a call waits for others.
        max_batch: contexts in one forward pass.
    """

    def __init__(
        self,
        model: TinyTransformer,
        vocabulary: Vocabulary,
        *,
        policy_id: str,
        version: int = 0,
        temperature: float = 1.0,
        batch_wait_ms: float = 1.0,
        max_batch: int = 256,
    ) -> None:
        self._tokenizer = WordTokenizer(vocabulary)
        self._loaded = _Loaded(model.eval(), policy_id, version)
        self.temperature = temperature
        self._batch_wait_seconds = batch_wait_ms / 1000
        self._max_batch = max_batch
        self._waiting: list[_Waiting] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def model_id(self) -> str:
        """Kind and size of the model."""
        config = self._loaded.model.config
        return f"tiny-transformer-{config.num_layers}x{config.width}"

    @property
    def tokenizer_sha256(self) -> str:
        """Hex digest of the vocabulary."""
        return self._tokenizer.sha256

    @property
    def version(self) -> int:
        """Version that answers now."""
        return self._loaded.version

    def encode(self, observation: Observation) -> list[int]:
        """Token ids of an observation."""
        return self._tokenizer.encode(observation.content or "")

    async def load(self, version: PolicyVersion) -> None:
        """Read, check and switch to a published checkpoint.

        Raises:
            PolicyError: the checkpoint can't be used here.
        """
        try:
            model, vocabulary = await asyncio.to_thread(load_checkpoint, version.checkpoint_uri, version.sha256)
        except ModelError as error:
            raise PolicyError(str(error)) from error
        if vocabulary.sha256 != self._tokenizer.sha256:
            raise PolicyError(f"{version.checkpoint_uri}: its vocabulary is not the domain's; it plays another domain")
        self._loaded = _Loaded(model.eval(), version.policy_id, version.version)

    async def act(self, context: Context, partial: ModelCall | None, stop: asyncio.Event) -> Move:
        """Sample one tool, in a batch with the calls of other trajectories.

        Raises:
            PolicyError: the context outgrew the model.
        """
        if partial is not None and partial.response_token_ids:
            return self._move(context, partial)  # one token is a whole response
        if stop.is_set():
            raise PolicyError("asked to stop before a token was sampled")
        waiting = self._enqueue(context)
        return await waiting.answer

    def _enqueue(self, context: Context) -> _Waiting:
        loop = asyncio.get_running_loop()
        delta = self.encode(context.observations[-1])
        if not context.calls:
            delta = [self._tokenizer.begin_id, *delta]
        waiting = _Waiting(context, delta, full_prompt(context.calls) + delta, loop.create_future())
        limit = self._loaded.model.config.max_length
        if len(waiting.tokens) > limit:
            raise PolicyError(f"context of {len(waiting.tokens)} tokens; the model takes {limit}")
        self._waiting.append(waiting)
        if len(self._waiting) >= self._max_batch:
            self._answer_waiting()
        elif self._timer is None:
            self._timer = loop.call_later(self._batch_wait_seconds, self._answer_waiting)
        return waiting

    def _answer_waiting(self) -> None:
        """Run one batch; an error goes to every call of it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting = [one for one in self._waiting if not one.answer.done()], []
        if not batch:
            return
        try:
            moves = self._sample(batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, each caller gets it as its policy's failure
            for waiting in batch:
                waiting.answer.set_exception(PolicyError(f"sampling failed: {error}"))
            return
        for waiting, move in zip(batch, moves, strict=True):
            waiting.answer.set_result(move)

    @torch.inference_mode()
    def _sample(self, batch: list[_Waiting]) -> list[Move]:
        started = time.perf_counter()
        loaded = self._loaded
        raw = next_token_logprobs(loaded.model, [waiting.tokens for waiting in batch])
        greedy = self.temperature == 0
        logprobs = raw if greedy else torch.log_softmax(raw / self.temperature, dim=-1)
        tokens = raw.argmax(-1) if greedy else draw(logprobs, [_uniform(waiting.context) for waiting in batch])
        chosen = logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
        llm_ms = (time.perf_counter() - started) * 1000
        return [
            self._move(waiting.context, self._call(waiting, token, logprob, loaded, llm_ms))
            for waiting, token, logprob in zip(batch, tokens.tolist(), chosen, strict=True)
        ]

    def _call(self, waiting: _Waiting, token: int, logprob: float, loaded: _Loaded, llm_ms: float) -> ModelCall:
        calls = waiting.context.calls
        return ModelCall(
            call_id=str(uuid_utils.uuid7()),
            parent_call_id=calls[-1].call_id if calls else None,
            prompt_token_ids=waiting.delta,
            response_token_ids=[token],
            sampled_run_lengths=[1],
            logprobs=[logprob],
            logprobs_mode="raw" if self.temperature in (0, 1) else "processed",
            prefix_sha256=prefix_sha256(waiting.tokens),
            temperature=self.temperature,
            policy_id=loaded.policy_id,
            policy_version_runs=[(loaded.version, 1)],
            finish_reason="tool_calls",
            messages=self._messages(waiting.context, token),
            usage={"prompt_tokens": len(waiting.tokens), "completion_tokens": 1},
            llm_ms=llm_ms,
        )

    def _messages(self, context: Context, token: int) -> list[dict[str, Any]]:
        return [
            {"role": "tool" if context.calls else "user", "content": context.observations[-1].content or ""},
            {"role": "assistant", "content": self._tokenizer.decode([token])},
        ]

    def _move(self, context: Context, call: ModelCall) -> Move:
        name = self._tokenizer.decode(call.response_token_ids or [])
        return Move(call=call, action=Action(action_id=f"a{context.turn}", call_id=call.call_id, name=name))


def full_prompt(calls: tuple[ModelCall, ...]) -> list[int]:
    """Tokens of a chain of calls, each the parent of the next: prompts and responses in order."""
    return [token for call in calls for token in (*(call.prompt_token_ids or []), *(call.response_token_ids or []))]


def draw(logprobs: torch.Tensor, uniforms: list[float]) -> torch.Tensor:
    """Token ids [B] by inversion: the first whose cumulative probability exceeds the row's uniform number.

    Args:
        logprobs: normalised, [B, V].
        uniforms: B numbers in [0, 1).
    """
    cumulative = logprobs.exp().double().cumsum(-1)
    targets = torch.tensor(uniforms, dtype=torch.double)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp(max=logprobs.shape[-1] - 1)


def _uniform(context: Context) -> float:
    return random.Random(f"{context.seed}/{context.turn}").random()  # noqa: S311 - reproducible, not secret
