"""The tiny causal transformer that actor and learner share: a real policy that trains on a CPU in minutes.

A pre-norm decoder with learned positions. Its head covers only the first `num_outputs` ids of the vocabulary: what
the policy can say. So its probabilities are exact as they are, without a mask that actor and learner would have to
agree on.

Leaves out: key-value caching (contexts are some dozens of tokens) and dropout (logprobs must be reproducible).
"""

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.nn import functional


class TransformerConfig(Struct, frozen=True, kw_only=True):
    """Shape of a `TinyTransformer`; kept in every checkpoint."""

    vocabulary_size: int
    num_outputs: int
    """Ids below this can be sampled."""
    width: int = 64
    num_layers: int = 2
    num_heads: int = 4
    max_length: int = 64
    """Longest context in tokens."""


class _Block(nn.Module):
    """Attention and a two-layer network, each after a norm, each added to its input."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.attention_out = nn.Linear(config.width, config.width, bias=False)
        self.network_norm = nn.LayerNorm(config.width)
        self.network_in = nn.Linear(config.width, 4 * config.width)
        self.network_out = nn.Linear(4 * config.width, config.width)

    def forward(self, x_btd: Tensor) -> Tensor:
        batch, length, width = x_btd.shape
        qkv = self.qkv(self.attention_norm(x_btd)).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q_bhtk, k_bhtk, v_bhtk = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q_bhtk, k_bhtk, v_bhtk, is_causal=True)
        x_btd = x_btd + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        added: Tensor = self.network_out(functional.gelu(self.network_in(self.network_norm(x_btd))))
        return x_btd + added


class TinyTransformer(nn.Module):
    """Token ids [B, T] → logits [B, T, num_outputs]; position t sees positions ≤ t only."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary_size, config.width)
        self.positions = nn.Embedding(config.max_length, config.width)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.num_outputs)
        nn.init.normal_(self.tokens.weight, std=0.5)
        nn.init.normal_(self.positions.weight, std=0.1)
        nn.init.zeros_(self.head.weight)  # a new policy is uniform: exactly chance
        nn.init.zeros_(self.head.bias)

    def forward(self, ids_bt: Tensor) -> Tensor:
        """Logits of the token that follows each position.

        Raises:
            ValueError: the context is longer than the model's `max_length`.
        """
        length = ids_bt.shape[1]
        if length > self.config.max_length:
            raise ValueError(f"context of {length} tokens; this model takes {self.config.max_length}")
        x_btd = self.tokens(ids_bt) + self.positions(torch.arange(length, device=ids_bt.device))
        for block in self.blocks:
            x_btd = block(x_btd)
        logits: Tensor = self.head(self.norm(x_btd))
        return logits


def new_transformer(config: TransformerConfig, seed: int) -> TinyTransformer:
    """A model with weights that depend on the seed only; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyTransformer(config)
