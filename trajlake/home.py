"""A home: the folder with `trajlake.toml`, and on the embedded default the log, the lake and the blobs.

    home = Home.find()          # --home, else TRAJLAKE_HOME, else .trajlake
    home.init()                 # once
    with home.open_log() as log: ...

Leaves out: what is done with the parts. Libraries are imported when a part is opened.
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

from schemas.config import Config, load_config

if TYPE_CHECKING:
    import lake.open
    from ingest.port import EventLog
    from storage.blobs import BlobStore

DEFAULT_FOLDER = ".trajlake"
CONFIG_NAME = "trajlake.toml"
KEY_NAME = "home.key"
KEY_BYTES = 32

_NEW_CONFIG = """\
# Settings of this home; docs/configuration.md lists them all. Every one has a default.
# Variables override: TRAJLAKE_LOG is log in [home], TRAJLAKE_PIPELINE_NUM_WORKERS is num_workers in [pipeline].

[home]
# log = "sqlite:///srv/run/log.sqlite"
# lake = "file:///srv/run/lake"
# blobs = "file:///srv/run/blobs"
partitions = {partitions}

[pipeline]
# max_epoch_records = {max_epoch_records}
# num_workers = {num_workers}
"""


class HomeNotFoundError(ValueError):
    """There is no home at the path; `trajlake init` makes one."""


class Home:
    """Where a user's log, lake, blobs and checkpoints are.

    Args:
        root: The folder; need not exist yet.
        config: Its settings.
    """

    def __init__(self, root: Path, config: Config) -> None:
        self.root = root.absolute()
        self.config = config

    @classmethod
    def find(
        cls, root: Path | str | None = None, environ: Mapping[str, str] | None = None, config: Path | None = None
    ) -> Self:
        """The home at `root`, else at `TRAJLAKE_HOME`, else `.trajlake` here, with its settings.

        Args:
            root: The folder.
            environ: Variables; the process's own where None.
            config: A settings file to use instead of the home's own.

        Raises:
            ConfigError: if the settings can't be used.
        """
        environ = os.environ if environ is None else environ
        folder = Path(root or environ.get("TRAJLAKE_HOME") or DEFAULT_FOLDER)
        own = folder / CONFIG_NAME
        return cls(folder, load_config(config or (own if own.exists() else None), environ))

    @property
    def config_path(self) -> Path:
        """The settings file."""
        return self.root / CONFIG_NAME

    @property
    def log_url(self) -> str:
        """URL of the event log."""
        return self.config.home.log or f"sqlite://{self.root / 'log.sqlite'}"

    @property
    def lake_url(self) -> str:
        """URL of the lake."""
        return self.config.home.lake or (self.root / "lake").as_uri()

    @property
    def blobs_url(self) -> str:
        """URL of the blob store."""
        return self.config.home.blobs or (self.root / "blobs").as_uri()

    @property
    def checkpoints_url(self) -> str:
        """URL of the folder for published policies."""
        return self.config.home.checkpoints or (self.root / "checkpoints").as_uri()

    @property
    def checkpoints_folder(self) -> Path:
        """Local folder for published policies.

        Raises:
            ValueError: the URL is no local folder.
        """
        from storage.blobs import local_root  # noqa: PLC0415 - heavy; only where a part is opened

        folder = local_root(self.checkpoints_url)
        if folder is None:
            raise ValueError(f"{self.checkpoints_url}: checkpoints need a local folder, as in file:///srv/checkpoints")
        return folder

    def init(self, partitions: int | None = None) -> list[str]:
        """Create what is missing: settings, key, log, tables, blob store. Leaves what is there as it is.

        Args:
            partitions: Of the log; where None, as the settings say.

        Returns:
            What was created, by name.

        Raises:
            LogError: as the log's backend says.
        """
        from ingest.open import create_log  # noqa: PLC0415 - heavy; only where a part is opened
        from ingest.port import LogExistsError  # noqa: PLC0415 - as above
        from lake.open import Lake  # noqa: PLC0415 - as above

        partitions = partitions or self.config.home.partitions
        created = [CONFIG_NAME] if self._write_config(partitions) else []
        created += [KEY_NAME] if self._write_key() else []
        try:
            create_log(self.log_url, partitions).close()
            created.append("event log")
        except LogExistsError:
            pass
        tables = Lake(self.lake_url)
        if missing := tables.missing():
            tables.create()
            created.append(f"{len(missing)} tables")
        self.blobs()
        return created

    def _write_config(self, partitions: int) -> bool:
        self.root.mkdir(parents=True, exist_ok=True)
        if self.config_path.exists():
            return False
        pipeline = self.config.pipeline
        text = _NEW_CONFIG.format(
            partitions=partitions,
            max_epoch_records=pipeline.max_epoch_records,
            num_workers=pipeline.num_workers,
        )
        self.config_path.write_text(text, encoding="utf-8")
        return True

    def _write_key(self) -> bool:
        """Make the key from which salts of imports are derived; 0600, written once."""
        try:
            descriptor = os.open(self.root / KEY_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        return True

    def require(self) -> Self:
        """This home, once it is known to exist.

        Raises:
            HomeNotFoundError: if nothing was made here.
        """
        if not self.config_path.exists():
            raise HomeNotFoundError(f"{self.root}: there is no home here; make one with: trajlake init")
        return self

    def open_log(self) -> "EventLog":
        """The event log; the caller closes it.

        Raises:
            LogError: as its backend says.
        """
        from ingest.open import open_log  # noqa: PLC0415 - heavy; only where a part is opened

        return open_log(self.log_url)

    def open_lake(self) -> "lake.open.Lake":
        """The tables.

        Raises:
            LakeNotFoundError: if some are missing.
        """
        from lake.open import open_lake  # noqa: PLC0415 - heavy; only where a part is opened

        return open_lake(self.lake_url)

    def blobs(self) -> "BlobStore":
        """The blob store."""
        from storage.blobs import BlobStore  # noqa: PLC0415 - heavy; only where a part is opened

        return BlobStore(self.blobs_url)

    def key(self) -> bytes:
        """The key (32 bytes) from which salts of imports are derived, so that a second import repeats them.

        Raises:
            HomeNotFoundError: if it is not there or is damaged.
        """
        path = self.root / KEY_NAME
        try:
            key = path.read_bytes()
        except FileNotFoundError as error:
            raise HomeNotFoundError(f"{path}: the home's key is missing; trajlake init makes a new one") from error
        if len(key) != KEY_BYTES:
            raise HomeNotFoundError(f"{path}: {len(key)} bytes, where a key has {KEY_BYTES}; restore it from a backup")
        return key
