"""A lake with rows that a real policy sampled, written as the projections write them."""

import random
from collections import defaultdict

import pyarrow as pa
import pytest
from msgspec import Struct

from ingest.open import create_log
from lake.open import Lake
from learner.trainer import model_config
from models.logprobs import next_token_logprobs
from models.tokenizer import Vocabulary
from models.transformer import new_transformer
from schemas.config.learner import LearnerConfig
from schemas.tables import TABLES
from schemas.wire import decode_event

VOCABULARY = Vocabulary(outputs=("left", "right"), inputs=("door", "wall"))
CONFIG = LearnerConfig(
    groups_per_step=2, num_epochs=2, minibatch_size=4, model_width=16, model_heads=2, model_max_length=16
)


class Home(Struct):
    """Log, lake and folder of a run."""

    url: str
    log: object
    lake: Lake
    checkpoints: object

    def write(self, table, rows):
        """Commit rows; columns that they lack are null."""
        schema = TABLES[table]
        data = pa.Table.from_pylist([{name: row.get(name) for name in schema.names} for row in rows], schema)
        target = self.lake.table(table)
        target.commit([target.write_file(data)])

    def write_trajectories(self, pairs):
        """Commit (trajectory, its steps); steps first, as project does."""
        self.write("steps", [step for _, steps in pairs for step in steps])
        self.write("trajectories", [row for row, _ in pairs])

    def bodies(self):
        """Bodies by stream, in order."""
        found = defaultdict(list)
        for partition in self.log.partitions():
            for batch in self.log.read(partition, 0, self.log.bounds(partition).next, 1 << 20):
                for value in batch["value"]:
                    event = decode_event(value.as_py())
                    found[event.envelope.stream].append(event.body)
        return dict(found)


@pytest.fixture
def new_home(tmp_path):
    """Make homes; they are closed with the test."""
    homes = []

    def make(name):
        folder = tmp_path / name
        folder.mkdir()
        url = f"sqlite:///{folder}/log.sqlite"
        lake = Lake(str(folder / "lake"))
        lake.create()
        homes.append(Home(url, create_log(url), lake, folder / "checkpoints"))
        return homes[-1]

    yield make
    for home in homes:
        home.log.close()


@pytest.fixture
def home(new_home):
    return new_home("home")


def sample_trajectory(group, sample_idx, version=0, **changes):
    """A trajectory row and its two step rows, sampled by a new model; `left` twice earns 1."""
    model = new_transformer(model_config(CONFIG, VOCABULARY), CONFIG.seed)
    trajectory_id = f"{group}-{sample_idx}"
    rng = random.Random(trajectory_id)
    prompts, context, steps, reward = [[2, 4], [5]], [], [], 0.0
    for index, prompt in enumerate(prompts):
        context += prompt
        token = rng.randrange(2)
        logprob = next_token_logprobs(model, [context])[0, token].item()
        context.append(token)
        reward += 0.5 * (token == 0)
        steps.append(
            {
                "trajectory_id": trajectory_id,
                "run_id": "run",
                "step_idx": index,
                "call_id": f"c{index}",
                "parent_call_id": f"c{index - 1}" if index else None,
                "trainable": True,
                "prompt_token_ids": prompt,
                "response_token_ids": [token],
                "loss_mask": [True],
                "logprobs": [logprob],
                "temperature": 1.0,
            }
        )
    row = {
        "trajectory_id": trajectory_id,
        "run_id": "run",
        "split": "train",
        "trainable": True,
        "group_id": group,
        "group_size": 4,
        "sample_idx": sample_idx,
        "reward": reward,
        "policy_id": "policy-0",
        "min_policy_version": version,
    }
    return row | changes, steps


@pytest.fixture
def sample():
    """`sample_trajectory`."""
    return sample_trajectory


@pytest.fixture
def sample_group():
    """Make all members of a group."""
    return lambda group, size=4, **changes: [sample_trajectory(group, n, **changes) for n in range(size)]


@pytest.fixture
def config():
    return CONFIG


@pytest.fixture
def vocabulary():
    return VOCABULARY
