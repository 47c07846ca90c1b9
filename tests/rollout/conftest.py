"""A home with log and blobs, a domain without a sandbox, and a reader of what was recorded."""

import threading
from collections import defaultdict

import pytest
from msgspec import Struct

from domains.unwrap import Unwrap
from ingest.open import create_log
from models.transformer import TransformerConfig, new_transformer
from rollout.loop import BackgroundLoop
from rollout.torch_policy import TorchPolicy
from schemas.events import Action, Event, Observation
from schemas.records import StepResult, Task
from schemas.wire import decode_event
from storage.blobs import BlobStore


class Home(Struct):
    """Where a run writes."""

    url: str
    log: object
    blobs: BlobStore

    def events(self) -> list[Event]:
        """All events, partition by partition."""
        return [
            decode_event(value.as_py())
            for partition in self.log.partitions()
            for batch in self.log.read(partition, 0, self.log.bounds(partition).next, 1 << 20)
            for value in batch["value"]
        ]

    def streams(self) -> dict[str, list[Event]]:
        """Events by stream, in order."""
        found = defaultdict(list)
        for event in self.events():
            found[event.envelope.stream].append(event)
        return dict(found)

    def bodies(self, stream: str) -> list[object]:
        """Bodies of one stream, in order."""
        return [event.body for event in self.streams()[stream]]


@pytest.fixture
def home(tmp_path):
    url = f"sqlite:///{tmp_path}/log.sqlite"
    log = create_log(url)
    yield Home(url, log, BlobStore(tmp_path / "blobs"))
    log.close()


@pytest.fixture
def loop():
    with BackgroundLoop() as running:
        yield running


@pytest.fixture
def stop():
    return threading.Event()


class Counting:
    """A domain without workspace and verifier: each `up` earns 0.5, the third turn is the last."""

    name = "counting"

    def __init__(self, num_tasks=5, rewards=True):
        self._tasks = [Task(key=f"counting/{n}", domain=self.name) for n in range(num_tasks)]
        self._rewards = rewards

    def tasks(self, split):
        return self._tasks if split == "train" else []

    def task(self, key):
        return next(task for task in self._tasks if task.key == key)

    def environment(self):
        return CountingEnvironment(self._rewards)

    def verifier(self):
        return None

    def reference_actions(self, task):
        return [Action(action_id=f"a{turn}", name="up") for turn in range(3)]


class CountingEnvironment:
    """Environment of `Counting`."""

    version = "1"

    def __init__(self, rewards):
        self._rewards, self._turns = rewards, 0

    def reset(self, task, runtime):
        return Observation(content="count")

    def step(self, action):
        self._turns += 1
        return StepResult(
            observation=Observation(content=str(self._turns)),
            reward=0.5 * (action.name == "up") if self._rewards else None,
            terminated=self._turns == 3,
            truncated=False,
        )

    def workspace(self):
        return None

    def close(self):
        self._turns = 0


@pytest.fixture
def counting():
    return Counting()


@pytest.fixture
def counting_without_rewards():
    return Counting(rewards=False)


@pytest.fixture(scope="session")
def unwrap():
    return Unwrap()


@pytest.fixture
def new_policy(unwrap):
    def make(seed=0, **options):
        config = TransformerConfig(
            vocabulary_size=len(unwrap.vocabulary.words), num_outputs=len(unwrap.vocabulary.outputs), width=32
        )
        return TorchPolicy(new_transformer(config, seed), unwrap.vocabulary, policy_id="policy-0", **options)

    return make
