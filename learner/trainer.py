"""The learner: consume rows of the lake, update the policy, publish it; every step a record that outlives it.

One step, in this order, and why:

1. `consumed` is durable before anything is computed: no row is ever trained on that no event names.
2. the update.
3. optimizer state, then checkpoint, each whole or not there.
4. `step_trained` and `policy_published`, durable before the step returns.

After a kill the learner goes on from the last published version. Rows that were consumed by a step that never
published are not trained on again: their `consumed` without a `step_trained` says what became of them.
"""

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from msgspec import Struct

from ingest.port import EventLog
from ingest.recorder import Recorder, last_of_stream
from lake.open import Lake
from learner.dataset import Batch, GroupBuilder
from learner.errors import StarvedError
from learner.source import LakeSource
from learner.state import read_state
from learner.update import finite, update_policy
from models.checkpoint import load_checkpoint, load_optimizer, optimizer_path, save_checkpoint, save_optimizer
from models.tokenizer import Vocabulary
from models.transformer import TinyTransformer, TransformerConfig, new_transformer
from schemas.config.learner import LearnerConfig
from schemas.events import Consumed, PolicyPublished, StepTrained, stream_of_learner, stream_of_policy
from schemas.records import PolicyVersion

POLL_SECONDS = 0.2


class TrainedStep(Struct, frozen=True, kw_only=True):
    """What one step did."""

    train_step: int
    published: PolicyVersion
    statistics: dict[str, float | None]


class Trainer:
    """One learner of one policy; use in a `with` block. One process per (run, learner).

    Args:
        config: how to train.
        run_id: whose rows are trained on; a run that was interrupted goes on where its log ends.
        log: where its events go.
        lake: where rows come from.
        checkpoints: folder for published policies.
        vocabulary: of the domain that is played.
        producer_id: who records; host and process by default.

    Raises:
        CheckpointError: the last published version can't be read back.
    """

    def __init__(
        self,
        config: LearnerConfig,
        *,
        run_id: str,
        log: EventLog,
        lake: Lake,
        checkpoints: Path,
        vocabulary: Vocabulary,
        producer_id: str | None = None,
    ) -> None:
        torch.set_num_threads(config.num_threads)
        self._config, self._run_id, self._checkpoints, self._vocabulary = config, run_id, checkpoints, vocabulary
        state = read_state(log, run_id, config.learner_id, config.policy_id)
        self._train_step = state.train_step
        self._builder = GroupBuilder(
            run_id=run_id,
            policy_id=config.policy_id,
            max_staleness=config.max_staleness,
            consumed=state.consumed,
        )
        self._source = LakeSource(lake, run_id, self._builder)
        self._recorder = Recorder(log, run_id=run_id, producer_id=producer_id)
        learner_stream = stream_of_learner(run_id, config.learner_id)
        policy_stream = stream_of_policy(run_id, config.policy_id)
        self._steps = self._recorder.stream(learner_stream, after=last_of_stream(log, learner_stream, learner_stream))
        self._policies = self._recorder.stream(policy_stream, after=last_of_stream(log, policy_stream, policy_stream))
        self._model, self._optimizer = self._restore(state.newest)
        self.published = state.newest or self._publish(0, {})

    @property
    def model(self) -> TinyTransformer:
        """The model as of the last step; for reading."""
        return self._model

    @property
    def train_step(self) -> int:
        """Number of the next step."""
        return self._train_step

    def next_batch(self) -> Batch | None:
        """Read what is new in the lake; a batch, or None while there are too few complete groups."""
        self._source.poll()
        return self._builder.take(self._config.groups_per_step, self.published.version)

    def wait_for_batch(self, timeout_seconds: float) -> Batch:
        """The next batch.

        Raises:
            StarvedError: none within the time.
        """
        deadline = time.monotonic() + timeout_seconds
        while (batch := self.next_batch()) is None:
            if time.monotonic() > deadline:
                dropped = self._builder.pop_dropped() or "nothing"
                raise StarvedError(
                    f"no batch of {self._config.groups_per_step} complete groups within {timeout_seconds:g} s; "
                    f"{self._builder.num_waiting} groups wait, dropped: {dropped}. Do actors and pipelines run?"
                )
            time.sleep(POLL_SECONDS)
        return batch

    def train(self, batch: Batch) -> TrainedStep:
        """One step, recorded and published.

        Raises:
            LogError: events can't be written.
        """
        began = time.perf_counter()
        train_step, version = self._train_step, self.published.version
        self._record_consumed(batch)
        self._train_step += 1
        statistics = update_policy(self._model, self._optimizer, batch, self._config, train_step)
        statistics |= describe(batch, version)
        statistics |= {f"dropped:{reason}": float(num) for reason, num in sorted(self._builder.pop_dropped().items())}
        statistics["update_seconds"] = time.perf_counter() - began
        self._steps.record(
            StepTrained(
                learner_id=self._config.learner_id,
                train_step=train_step,
                policy_id=self._config.policy_id,
                policy_version=version,
                statistics=statistics,
            )
        )
        self.published = self._publish(version + 1, {"train_step": train_step})
        return TrainedStep(train_step=train_step, published=self.published, statistics=statistics)

    def run(
        self,
        num_steps: int,
        *,
        timeout_seconds: float = 600.0,
        on_step: Callable[[TrainedStep], None] | None = None,
    ) -> list[TrainedStep]:
        """Train for a number of steps, waiting for batches as they come.

        Raises:
            StarvedError: no batch within `timeout_seconds`.
            LogError: events can't be written.
        """
        done = []
        for _ in range(num_steps):
            done.append(self.train(self.wait_for_batch(timeout_seconds)))
            if on_step:
                on_step(done[-1])
        return done

    def close(self) -> None:
        """Make every event durable; idempotent."""
        self._recorder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._recorder.__exit__(kind, error, traceback)

    def _record_consumed(self, batch: Batch) -> None:
        """Durable before the step."""
        self._steps.record(
            Consumed(
                learner_id=self._config.learner_id,
                train_step=self._train_step,
                policy_id=self._config.policy_id,
                policy_version=self.published.version,
                trajectory_ids=[row.trajectory_id for row in batch.rows],
                row_sha256s=batch.row_sha256s,
                advantages=batch.advantages,
                masked=batch.masked or None,
                baseline_members=batch.baseline_members,
                table_versions=self._source.table_versions,
            )
        )
        self._recorder.flush()

    def _restore(self, newest: PolicyVersion | None) -> tuple[TinyTransformer, torch.optim.Optimizer]:
        config = self._config
        if newest is None:
            model = new_transformer(model_config(config, self._vocabulary), config.seed)
        else:
            model, _ = load_checkpoint(newest.checkpoint_uri, newest.sha256)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, betas=(0.9, 0.95)
        )
        if newest is not None:
            load_optimizer(optimizer_path(newest.checkpoint_uri), optimizer)
        return model, optimizer

    def _publish(self, version: int, metadata: dict[str, int]) -> PolicyVersion:
        """Write optimizer and checkpoint, then say so; durable."""
        policy_id = self._config.policy_id
        path = self._checkpoints / self._run_id / f"{policy_id}-{version:06d}.safetensors"
        save_optimizer(optimizer_path(str(path)), self._optimizer)
        checkpoint = save_checkpoint(path, self._model, self._vocabulary)
        published = PolicyVersion(
            policy_id=policy_id,
            version=version,
            checkpoint_uri=checkpoint.uri,
            sha256=checkpoint.sha256,
            metadata={"learner_id": self._config.learner_id, **metadata},
        )
        self._policies.record(
            PolicyPublished(
                policy_id=published.policy_id,
                version=published.version,
                checkpoint_uri=published.checkpoint_uri,
                sha256=published.sha256,
                metadata=published.metadata,
            )
        )
        self._recorder.flush()
        return published


def model_config(config: LearnerConfig, vocabulary: Vocabulary) -> TransformerConfig:
    """Shape of a new policy for a domain."""
    return TransformerConfig(
        vocabulary_size=len(vocabulary.words),
        num_outputs=len(vocabulary.outputs),
        width=config.model_width,
        num_layers=config.model_layers,
        num_heads=config.model_heads,
        max_length=config.model_max_length,
    )


def describe(batch: Batch, policy_version: int) -> dict[str, float | None]:
    """What a batch is like, before anything is trained: rewards, staleness, masks."""
    rewards = [row.reward for row in batch.rows]
    staleness = [policy_version - row.min_policy_version for row in batch.rows]
    return {
        "reward_mean": finite(sum(rewards) / len(rewards)),
        "staleness_mean": sum(staleness) / len(staleness),
        "staleness_max": float(max(staleness)),
        "num_trajectories": float(len(batch.rows)),
        "num_groups": float(len(batch.baseline_members)),
        "num_masked": float(len(batch.masked)),
    }
