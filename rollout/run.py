"""Runs actors over the tasks of a domain: plan slots, play them in parallel, try again where infrastructure failed.

    with RolloutSession(domain, policy, log, blobs, config, run_id=run_id) as session:
        summary = session.run("train", num_groups=16)

A run can be taken up again under its `run_id`: slots are planned from the seed alone, the log says which are done, what
a dead process left open is closed as aborted, and only the rest is played, as the next attempt of the same
trajectory. Two processes must not play one run at the same time; leases come with the scheduler.
"""

import hashlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Self

import uuid_utils
from msgspec import Struct
from msgspec.structs import replace

from domains.port import Domain
from ingest.port import EventLog
from ingest.recorder import Recorder
from rollout.actor import Actor, Assignment, Played
from rollout.history import PolicyFeed, RunHistory, SlotState
from rollout.loop import BackgroundLoop
from rollout.port import Policy
from sandbox.open import open_sandbox
from sandbox.port import Sandbox, SandboxError
from schemas.config.rollout import RolloutConfig
from schemas.events import AttemptAborted, GroupClosed, Split, stream_of_abort
from schemas.records import PolicyVersion, Task
from storage.blobs import BlobStore


class RolloutSummary(Struct, frozen=True, kw_only=True):
    """What a run did in one call."""

    run_id: str
    num_trajectories: int
    """Slots that are done, those found done included."""
    num_played: int
    """Attempts that were played now."""
    num_aborted: int
    """Attempts of dead processes that were closed."""
    statuses: dict[str, int]
    """Of the attempts that were played now: status → number; `infra` for those whose infrastructure failed."""
    given_up: tuple[str, ...]
    """Trajectories whose infrastructure failed too often."""
    seconds: float


Progress = Callable[[int, int], None]
"""Called with (slots done, slots in all) after each slot, in the thread that called `run`."""


class RolloutSession:
    """Actors, ready to play round after round in one warm process.

    Args:
        domain: whose tasks are played.
        policy: gives the moves.
        log: where events go.
        blobs: where workspaces and large payloads go.
        config: how to play.
        run_id: of a run that may have begun before; a new UUIDv7 by default.
        producer_id: who records; host and process by default.
        policy_id: policy to follow: between trajectories the newest version that the run published is loaded. None:
            the policy stays what it is, unless `load` is called.
        open_sandbox: gives a fresh sandbox.
    """

    def __init__(  # noqa: PLR0913 - each part is given from outside, so that tests and the demo choose it
        self,
        domain: Domain,
        policy: Policy,
        log: EventLog,
        blobs: BlobStore,
        config: RolloutConfig,
        *,
        run_id: str | None = None,
        producer_id: str | None = None,
        policy_id: str | None = None,
        open_sandbox: Callable[[], Sandbox] = open_sandbox,
    ) -> None:
        self._domain, self._policy, self._config = domain, policy, config
        self._recorder = Recorder(log, blobs, run_id=run_id, producer_id=producer_id)
        self._history = RunHistory(log, self._recorder.run_id)
        self._feed = PolicyFeed(log, self._recorder.run_id, policy_id) if policy_id else None
        self._next_look = 0.0
        self._look_lock = threading.Lock()
        self._stop = threading.Event()
        self._loop = BackgroundLoop()
        self._threads = ThreadPoolExecutor(config.concurrency, thread_name_prefix="actor")
        self._actor = Actor(
            domain,
            policy,
            self._loop,
            self._recorder,
            blobs,
            open_sandbox=open_sandbox,
            stop=self._stop,
            image_digest=_image_digest(open_sandbox),
            max_turns=min(config.max_turns, getattr(domain, "max_turns", config.max_turns)),
        )

    @property
    def run_id(self) -> str:
        """The run."""
        return self._recorder.run_id

    def load(self, version: PolicyVersion) -> None:
        """Let the policy answer with a published version from now on.

        Raises:
            PolicyError: it can't be loaded.
        """
        self._loop.submit(self._policy.load(version)).result()

    def run(
        self, split: Split, num_groups: int, *, round_idx: int = 0, on_progress: Progress | None = None
    ) -> RolloutSummary:
        """Play one round: groups of trajectories over tasks of a split.

        Returns once every event is durable. On Ctrl-C the attempts in flight end as aborted, durably, before
        KeyboardInterrupt goes on.

        Args:
            split: whose tasks are played; groups outside `train` have one member.
            num_groups: number of tasks, each the task of one group.
            round_idx: number of the round; together with seed and split it fixes the tasks.
            on_progress: called after each slot.

        Raises:
            LogError: events can no longer be written.
            ValueError: the split has no tasks.
        """
        began = time.perf_counter()
        plan = list(self._plan(split, num_groups, round_idx))
        self._history.refresh()
        given_up: list[str] = []
        todo, num_aborted = self._take_up(plan, given_up)
        statuses: Counter[str] = Counter()
        num_done = len(plan) - len(todo) - len(given_up)
        for slot in self._play_all(todo):
            statuses.update("infra" if played.is_infra else played.finished.status for played in slot)
            if slot[-1].is_infra:
                given_up.append(slot[-1].assignment.trajectory_id)
                self._close_group(slot[-1].assignment, slot[-1].finished.error)
            num_done += not slot[-1].is_infra
            if on_progress:
                on_progress(num_done + len(given_up), len(plan))
        self._recorder.flush()
        return RolloutSummary(
            run_id=self.run_id,
            num_trajectories=num_done,
            num_played=statuses.total(),
            num_aborted=num_aborted,
            statuses=dict(statuses),
            given_up=tuple(given_up),
            seconds=time.perf_counter() - began,
        )

    def close(self) -> None:
        """Stop what is in flight, make every event durable, free threads; idempotent.

        Raises:
            LogError: events could not be written.
        """
        self._stop.set()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._loop.close()
        self._recorder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _plan(self, split: Split, num_groups: int, round_idx: int) -> Iterator[Assignment]:
        tasks = self._domain.tasks(split)
        if not tasks:
            raise ValueError(f"domain {self._domain.name} has no tasks in split {split!r}")
        size = self._config.group_size if split == "train" else 1
        for group, task in enumerate(choose_tasks(tasks, num_groups, round_idx, self._config.seed)):
            group_id = f"{self.run_id}/{split}-{round_idx}/{group}"
            for sample_idx in range(size):
                yield Assignment(
                    task=task,
                    group_id=group_id,
                    group_size=size,
                    sample_idx=sample_idx,
                    trajectory_id=str(uuid_utils.uuid7()),
                    seed=seed_of(self._config.seed, split, round_idx, group, sample_idx),
                )

    def _take_up(self, plan: list[Assignment], given_up: list[str]) -> tuple[list[Assignment], int]:
        """What is left to play of a plan, and how many attempts of dead processes were closed.

        Adds to `given_up` the trajectories whose infrastructure has failed too often before.
        """
        todo, num_aborted = [], 0
        for assignment in plan:
            state = self._history.slots.get((assignment.group_id, assignment.sample_idx))
            if state is None:
                todo.append(assignment)
                continue
            if state.is_open:
                self._abort(state)
                num_aborted += 1
            if state.is_done:
                continue
            if state.infra_failures < self._config.max_attempts:
                todo.append(replace(assignment, trajectory_id=state.trajectory_id, attempt=state.attempt + 1))
            else:
                given_up.append(state.trajectory_id)
                # Again, as whoever gave it up may have died before it could say so; else it counts as a duplicate.
                self._close_group(assignment, "infrastructure failed too often")
        return todo, num_aborted

    def _abort(self, state: SlotState) -> None:
        """Close an attempt that a dead process left open."""
        producer = self._recorder.producer_id
        self._recorder.emit(
            AttemptAborted(reason="its process ended before the attempt did", by=producer),
            stream=stream_of_abort(producer, state.trajectory_id, state.attempt),
            trajectory_id=state.trajectory_id,
            attempt=state.attempt,
            seq=0,
        )
        state.is_open = False

    def _close_group(self, assignment: Assignment, reason: str | None) -> None:
        """Say which member of a group will never come."""
        self._recorder.emit(
            GroupClosed(group_id=assignment.group_id, given_up=[assignment.sample_idx], reason=reason),
            stream=f"{self.run_id}/scheduler/{assignment.group_id}/{assignment.sample_idx}",
            seq=0,
        )

    def _play_all(self, todo: list[Assignment]) -> Iterator[list[Played]]:
        """Play slots in parallel; each as it is done, with all its attempts."""
        left = iter(todo)
        running: set[Future[list[Played]]] = set()
        try:
            while True:
                while len(running) < 2 * self._config.concurrency and (slot := next(left, None)) is not None:
                    running.add(self._threads.submit(self._play_slot, slot))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        except BaseException:
            self._interrupt(running)
            raise

    def _interrupt(self, running: set[Future[list[Played]]]) -> None:
        """Let everything in flight end as aborted, and make that durable."""
        self._stop.set()
        self._loop.request_stop()
        for future in running:
            future.cancel()
        wait(running)
        self._recorder.flush()

    def _play_slot(self, assignment: Assignment) -> list[Played]:
        """Attempts at one trajectory, until the infrastructure holds or has failed too often."""
        self._follow_policy()
        attempts = [self._actor.play(assignment)]
        while attempts[-1].is_infra and len(attempts) < self._config.max_attempts:
            following = replace(assignment, attempt=attempts[-1].assignment.attempt + 1)
            attempts.append(self._actor.play(following))
        return attempts

    def _follow_policy(self) -> None:
        """Load the newest version that the run has published, looking at most so often."""
        if self._feed is None:
            return
        with self._look_lock:
            if time.monotonic() < self._next_look:
                return
            newest = self._feed.newest()
            if newest is not None and (self._policy.version is None or newest.version > self._policy.version):
                self.load(newest)
            self._next_look = time.monotonic() + self._config.policy_poll_seconds


def choose_tasks(tasks: Sequence[Task], num: int, round_idx: int, seed: int) -> Iterator[Task]:
    """Tasks of a round: the split is walked through again and again, in a new order each time.

    Rounds of equal size follow each other without overlap; what is chosen depends on the arguments only.
    """
    order: list[int] = []
    current = -1
    for position in range(round_idx * num, (round_idx + 1) * num):
        walk, index = divmod(position, len(tasks))
        if walk != current:
            current, order = walk, list(range(len(tasks)))
            random.Random(f"{seed}/{walk}").shuffle(order)  # noqa: S311 - reproducible, not secret
        yield tasks[order[index]]


def seed_of(*parts: object) -> int:
    """A seed of 63 bits that depends on the parts only."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _image_digest(open_sandbox: Callable[[], Sandbox]) -> str | None:
    """Digest of what sandboxes run; null where none can be had, which the attempts will tell by name."""
    try:
        with open_sandbox() as sandbox:
            return sandbox.image_digest
    except SandboxError:
        return None


def run_rollout(  # noqa: PLR0913 - the parts of a session, and of a round
    domain: Domain,
    policy: Policy,
    log: EventLog,
    blobs: BlobStore,
    config: RolloutConfig,
    *,
    split: Split,
    num_groups: int,
    run_id: str | None = None,
    policy_id: str | None = None,
    on_progress: Progress | None = None,
) -> RolloutSummary:
    """One round in a session of its own; see `RolloutSession` and its `run`."""
    with RolloutSession(domain, policy, log, blobs, config, run_id=run_id, policy_id=policy_id) as session:
        return session.run(split, num_groups, on_progress=on_progress)
