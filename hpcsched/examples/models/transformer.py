"""A stack of transformer blocks (Vaswani et al. 2017) that classifies sequences of tokens.

Normalisation stands before attention and MLP, inside the residual branch (Xiong et al. 2020). With
`causal` a token sees only those before it, as in a decoder.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


class Attention(nn.Module):
    """Self-attention of several heads; [samples, length, hidden] to the same."""

    def __init__(self, hidden: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.rate, self.causal = heads, dropout, causal
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        rate = self.rate if self.training else 0.0
        seen = scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=self.causal)
        result: torch.Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """Attention, then an MLP of four times the hidden units, each beside a residual."""

    def __init__(self, hidden: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, dropout, causal)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        result: torch.Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return result


class Transformer(nn.Module):
    """12 blocks of 768 units by default: 85 million parameters in them, as in the base size of BERT.

    Args:
        width: part of the hidden units, 1.0 for all; rounded to a multiple of `heads`.
        classes: of the result, shape [samples, classes].
        blocks: how many.
        hidden: units at full width.
        heads: of each attention.
        length: tokens of a sample.
        vocabulary: different tokens.
        dropout: behind embedding, attention and MLP.
        causal: a token sees only those before it.
    """

    def __init__(
        self,
        width: float = 1.0,
        classes: int = 1000,
        blocks: int = 12,
        hidden: int = 768,
        heads: int = 12,
        length: int = 128,
        vocabulary: int = 32000,
        dropout: float = 0.1,
        causal: bool = False,
    ) -> None:
        super().__init__()
        if heads < 1:
            raise ValueError(f"{heads} heads cannot share the hidden units")
        units = heads * max(1, round(hidden * width / heads))
        self.length, self.vocabulary = length, vocabulary
        self.tokens = nn.Embedding(vocabulary, units)
        self.positions = nn.Parameter(0.02 * torch.randn(length, units))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(units, heads, dropout, causal) for _ in range(blocks)))
        self.norm = nn.LayerNorm(units)
        self.head = nn.Linear(units, classes)

    def example(self, samples: int) -> tuple[torch.Tensor, ...]:
        """Random tokens; int64, shape [samples, length]."""
        return (torch.randint(self.vocabulary, (samples, self.length)),)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of token sequences; [samples, length] to [samples, classes]."""
        x = self.dropout(self.tokens(tokens) + self.positions[: tokens.size(1)])
        result: torch.Tensor = self.head(self.norm(self.blocks(x)).mean(1))
        return result
