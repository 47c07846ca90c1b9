"""Settings: one typed class per process, loaded from `trajlake.toml` and `TRAJLAKE_*` variables.

    config = load_config(Path(".trajlake/trajlake.toml"), os.environ)
    config.pipeline.max_epoch_bytes

Unknown sections, keys and variables fail, with the nearest known name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from schemas.config._load import ConfigError, build, read_toml, variable_of, variables
from schemas.config.home import HomeConfig
from schemas.config.learner import LearnerConfig
from schemas.config.pipelines import PipelineConfig
from schemas.config.rollout import RolloutConfig

__all__ = [
    "SECTIONS",
    "Config",
    "ConfigError",
    "HomeConfig",
    "LearnerConfig",
    "PipelineConfig",
    "RolloutConfig",
    "load_config",
    "variable_of",
    "variables",
]


class Config(Struct, kw_only=True, frozen=True):
    """All sections of one `trajlake.toml`."""

    home: HomeConfig = HomeConfig()
    pipeline: PipelineConfig = PipelineConfig()
    rollout: RolloutConfig = RolloutConfig()
    learner: LearnerConfig = LearnerConfig()


SECTIONS: dict[str, type[Struct]] = {field.name: field.type for field in msgspec.structs.fields(Config)}
"""Section of the file → its class."""


def load_config(path: Path | None, environ: Mapping[str, str]) -> Config:
    """Settings from a file (None: only defaults), overridden by variables.

    Raises:
        ConfigError: for a file that can't be read, unknown names, wrong types and values out of range.
    """
    document: dict[str, Any] = {} if path is None else read_toml(path)
    where = "defaults" if path is None else str(path)
    return msgspec.convert(build(SECTIONS, document, environ, where), Config, from_attributes=True)
