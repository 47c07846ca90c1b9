import os

import pytest
import torch

from models.checkpoint import (
    atomic_write,
    load_checkpoint,
    load_optimizer,
    optimizer_path,
    save_checkpoint,
    save_optimizer,
)
from models.errors import CheckpointError
from models.logprobs import output_logprobs
from models.tokenizer import Vocabulary
from models.transformer import TransformerConfig, new_transformer

VOCABULARY = Vocabulary(outputs=("a", "b"), inputs=("c",))
CONFIG = TransformerConfig(vocabulary_size=5, num_outputs=2, width=16, num_heads=2, max_length=8)
IDS = torch.tensor([[2, 4, 0, 4]])


def descend(model, optimizer):
    optimizer.zero_grad()
    output_logprobs(model, IDS)[0, -1, 0].neg().backward()
    optimizer.step()


def test_a_checkpoint_brings_back_the_same_model_and_vocabulary(tmp_path):
    model = new_transformer(CONFIG, seed=1)
    descend(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    saved = save_checkpoint(tmp_path / "deep" / "p.safetensors", model, VOCABULARY)
    loaded, vocabulary = load_checkpoint(saved.uri, saved.sha256)
    assert vocabulary == VOCABULARY
    assert torch.equal(output_logprobs(loaded, IDS), output_logprobs(model, IDS))
    again = {save_checkpoint(tmp_path / "again.safetensors", loaded, vocabulary).sha256 for _ in range(20)}
    assert again == {saved.sha256}
    assert load_checkpoint(f"file://{saved.uri}")[1] == VOCABULARY


def test_a_changed_file_is_refused_by_its_digest(tmp_path):
    saved = save_checkpoint(tmp_path / "p.safetensors", new_transformer(CONFIG, seed=1), VOCABULARY)
    data = bytearray((tmp_path / "p.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "p.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{saved.sha256} was published; the file was changed"):
        load_checkpoint(saved.uri, saved.sha256)


@pytest.mark.parametrize("content", [b"", b"not safetensors", b"\x08\0\0\0\0\0\0\0{}      "])
def test_a_file_that_is_no_checkpoint_is_named(tmp_path, content):
    (tmp_path / "p.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"p\.safetensors: not a trajlake checkpoint"):
        load_checkpoint(str(tmp_path / "p.safetensors"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: can't read the checkpoint"):
        load_checkpoint(str(tmp_path / "gone.safetensors"))


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "p"
    atomic_write(path, b"old")

    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        atomic_write(path, b"new")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["p"]


def test_an_optimizer_that_was_brought_back_goes_on_bit_by_bit(tmp_path):
    model = new_transformer(CONFIG, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        descend(model, optimizer)
    saved = save_checkpoint(tmp_path / "p.safetensors", model, VOCABULARY)
    save_optimizer(optimizer_path(saved.uri), optimizer)
    descend(model, optimizer)

    restored, _ = load_checkpoint(saved.uri)
    again = torch.optim.AdamW(restored.parameters(), lr=0.01)
    load_optimizer(optimizer_path(saved.uri), again)
    descend(restored, again)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), restored.parameters(), strict=True))


def test_a_missing_optimizer_is_named(tmp_path):
    optimizer = torch.optim.AdamW(new_transformer(CONFIG, seed=1).parameters())
    with pytest.raises(CheckpointError, match=r"x\.optimizer\.safetensors: can't restore"):
        load_optimizer(tmp_path / "x.optimizer.safetensors", optimizer)
