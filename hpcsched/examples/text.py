"""The next character of Python's own help texts, by a small transformer: a training job of a minute.

[[job]]
name = "text"
trainer = "hpcsched.examples.text:Text"
args = { width = 64, layers = 2, lr = 0.001 }
steps = 2000
"""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpcsched.errors import ConfigError
from hpcsched.examples.models.transformer import Block
from hpcsched.worker.session.trainer import Parts, Trainer

DEFAULTS: dict[str, Any] = {
    "width": 64,
    "layers": 2,
    "heads": 4,
    "length": 32,
    "samples": None,  # to train on, from the beginning of the text (all but the last tenth)
    "lr": 0.001,
    "batch": 16,
    "seed": 0,
}
_TEST_PART = 0.1
_TEST_BATCH = 256


class Text(Trainer):
    """A causal transformer with Adam; evaluates loss and accuracy on the last tenth of the text.

    Arguments: hidden units (`width`, a multiple of `heads`), blocks (`layers`), characters that a sample
    predicts (`length`), `samples` to train on (all but the last tenth), `lr`, `batch`
    and `seed`. The text differs from one Python version to the next.
    """

    def build(self, args: dict[str, Any]) -> Parts:
        if unknown := sorted(set(args) - set(DEFAULTS)):
            raise ConfigError(
                where="Text", key=unknown[0], got="unknown argument", accepted=", ".join(DEFAULTS)
            )
        chosen = DEFAULTS | args
        for key in ("width", "layers", "heads", "length"):
            if type(chosen[key]) is not int or chosen[key] < 1:
                got, accepted = repr(chosen[key]), "a whole number of at least 1"
                raise ConfigError(where="Text", key=key, got=got, accepted=accepted)
        if chosen["width"] % chosen["heads"]:
            accepted = f"a multiple of heads = {chosen['heads']}"
            raise ConfigError(where="Text", key="width", got=repr(chosen["width"]), accepted=accepted)
        train, test, vocabulary = _samples(chosen["length"])
        wanted = len(train) if chosen["samples"] is None else chosen["samples"]
        if type(wanted) is not int or not 1 <= wanted <= len(train):
            accepted = f"a whole number from 1 to {len(train)}"
            raise ConfigError(where="Text", key="samples", got=repr(wanted), accepted=accepted)
        model = Characters(vocabulary, chosen["width"], chosen["layers"], chosen["heads"], chosen["length"])

        def evaluate(model: nn.Module) -> dict[str, float]:
            device = next(model.parameters()).device
            loss = right = 0.0
            for piece in test.split(_TEST_BATCH):
                logits, following = model(piece[:, :-1].to(device)), piece[:, 1:].to(device)
                loss += cross_entropy(logits.transpose(1, 2), following, reduction="sum").item()
                right += (logits.argmax(2) == following).sum().item()
            predicted = test.size(0) * chosen["length"]
            return {"loss": loss / predicted, "accuracy": right / predicted}

        return Parts(
            model=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=chosen["lr"]),
            dataset=(train[:wanted],),
            global_batch=chosen["batch"],
            loss=_loss,
            evaluate=evaluate,
            seed=chosen["seed"],
        )


class Characters(nn.Module):
    """Logits of the character behind each one; [samples, length] to [samples, length, vocabulary]."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads, 0.0, True) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.size(1)]
        result: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return result


def _loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Mean over the characters of each sample; shape [samples]."""
    (piece,) = batch
    return cross_entropy(model(piece[:, :-1]).transpose(1, 2), piece[:, 1:], reduction="none").mean(1)


def _samples(length: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Samples to train on and to test on, int64, [samples, length + 1]; and how many characters there are.

    A sample's last character is the next one's first: every character is predicted once.
    """
    text = "\n".join(topics[topic] for topic in sorted(topics))
    known = {character: token for token, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([known[character] for character in text])
    train = int(len(tokens) * (1 - _TEST_PART))
    if length >= len(tokens) - train:
        raise ConfigError(
            where="Text", key="length", got=str(length), accepted="less than the text to test on"
        )
    read, held = (part.unfold(0, length + 1, length).contiguous() for part in tokens.tensor_split([train]))
    return read, held, len(known)
