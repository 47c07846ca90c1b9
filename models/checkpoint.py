"""Checkpoints: one safetensors file that holds the weights, the model's shape and the vocabulary.

A file appears under its name whole or not at all, and is on disk before its name is given out. Nothing in it can run
code when it is loaded.
"""

import hashlib
import os
import tempfile
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from models.errors import CheckpointError
from models.tokenizer import Vocabulary
from models.transformer import TinyTransformer, TransformerConfig, new_transformer


class Checkpoint(Struct, frozen=True, kw_only=True):
    """A file that was written: what `policy_published` names."""

    uri: str
    sha256: str
    size: int


class _Header(Struct, frozen=True, kw_only=True):
    config: TransformerConfig
    vocabulary: Vocabulary


def atomic_write(path: Path, data: bytes) -> None:
    """Write durably under a temporary name, then rename: readers see the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save_checkpoint(path: Path, model: TinyTransformer, vocabulary: Vocabulary) -> Checkpoint:
    """Write a model; its digest is over the file's bytes."""
    header = _Header(config=model.config, vocabulary=vocabulary)
    # One key only: safetensors writes several in random order, and equal models are to give equal files.
    metadata = {"trajlake": msgspec.json.encode(header).decode()}
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    data = save_tensors(tensors, metadata)
    atomic_write(path, data)
    return Checkpoint(uri=str(path.resolve()), sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def load_checkpoint(uri: str, sha256: str | None = None) -> tuple[TinyTransformer, Vocabulary]:
    """Read a model back.

    Args:
        uri: path or `file://` URL.
        sha256: hex digest that the file must have; null skips the check.

    Raises:
        CheckpointError: the file is missing, has another digest, or is no checkpoint of ours.
    """
    path = Path(uri.removeprefix("file://"))
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: can't read the checkpoint: {error.strerror}") from error
    found = hashlib.sha256(data).hexdigest()
    if sha256 is not None and found != sha256:
        raise CheckpointError(f"{path}: SHA-256 is {found}, but {sha256} was published; the file was changed")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        header = msgspec.json.decode(metadata["trajlake"], type=_Header)
        model = new_transformer(header.config, seed=0)
        model.load_state_dict(load_tensors(data))
    except (SafetensorError, KeyError, msgspec.MsgspecError, RuntimeError) as error:
        raise CheckpointError(f"{path}: not a trajlake checkpoint: {error}") from error
    return model, header.vocabulary


def optimizer_path(checkpoint_uri: str) -> Path:
    """Where the optimizer's state lies: beside the checkpoint that it belongs to."""
    return Path(checkpoint_uri.removeprefix("file://")).with_suffix(".optimizer.safetensors")


def save_optimizer(path: Path, optimizer: torch.optim.Optimizer) -> None:
    """Write an optimizer's tensors; its hyperparameters come from the configuration."""
    state = optimizer.state_dict()["state"]
    tensors = {
        f"{index}.{name}": torch.as_tensor(value) for index, slots in state.items() for name, value in slots.items()
    }
    atomic_write(path, save_tensors(tensors))


def load_optimizer(path: Path, optimizer: torch.optim.Optimizer) -> None:
    """Bring an optimizer's tensors back.

    Raises:
        CheckpointError: the file is missing or is not for this optimizer.
    """
    state: dict[int, dict[str, torch.Tensor]] = {}
    try:
        for name, tensor in load_tensors(path.read_bytes()).items():
            index, slot = name.split(".", 1)
            state.setdefault(int(index), {})[slot] = tensor
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path}: can't restore the optimizer: {error}") from error
