"""The text example learns the next character, looks at nothing later, and is the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hpcsched.errors import ConfigError  # noqa: E402
from hpcsched.examples.text import Text  # noqa: E402
from hpcsched.worker.session.trainer import Parts, build, evaluate  # noqa: E402

pytestmark = pytest.mark.torch

SMALL: dict[str, Any] = {"width": 16, "layers": 1, "heads": 2, "length": 8, "lr": 0.01, "batch": 32}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many tiny operations: threads that wait for each other cost more than they give."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _train(parts: Parts, steps: int) -> None:
    order = torch.randperm(parts.size, generator=torch.Generator().manual_seed(0)).tolist()
    for step in range(steps):
        batch = parts.batch(order[step * parts.global_batch : (step + 1) * parts.global_batch])
        parts.optimizer.zero_grad()
        parts.loss(parts.model, batch).mean().backward()
        parts.optimizer.step()


def test_it_learns() -> None:
    parts = build(Text(), SMALL)
    before = evaluate(parts)
    parts.model.train()
    _train(parts, 150)
    after = evaluate(parts)
    assert before["loss"] > 4 and before["accuracy"] < 0.1  # about as good as guessing
    assert after["loss"] < 2.6 and after["accuracy"] > 0.3  # spaces alone: 0.25


def test_the_parts_of_one_seed_are_the_same_and_of_another_seed_others() -> None:
    first, second, other = (build(Text(), {**SMALL, "seed": seed}) for seed in (1, 1, 2))
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name])
    assert torch.equal(first.batch([0, 5])[0], other.batch([0, 5])[0])  # the text is no matter of chance
    assert not torch.equal(first.model.tokens.weight, other.model.tokens.weight)
    assert other.seed == 2


def test_samples_follow_each_other_and_each_has_a_loss_of_its_own() -> None:
    parts = build(Text(), SMALL)
    (pieces,) = parts.batch(range(3))
    assert pieces.shape == (3, SMALL["length"] + 1)
    assert torch.equal(pieces[:-1, -1], pieces[1:, 0])
    with torch.no_grad():
        losses = parts.loss(parts.model, (pieces,))
        alone = torch.cat([parts.loss(parts.model, (piece.unsqueeze(0),)) for piece in pieces])
    assert losses.shape == (3,)
    assert torch.allclose(losses, alone, atol=1e-5)


def test_a_character_is_predicted_from_those_before_it_only() -> None:
    model = build(Text(), SMALL).model.eval()
    tokens = torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 5] = 50
    with torch.no_grad():
        first, second = model(tokens), model(changed)
    assert torch.equal(first[0, :5], second[0, :5])
    assert not torch.allclose(first[0, 5:], second[0, 5:])


class Spaces(torch.nn.Module):
    """Thinks that spaces follow everywhere, and keeps what it is asked about."""

    def __init__(self, characters: list[str]) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(len(characters)))
        self.logits.data[characters.index(" ")] = 1.0
        self.asked: list[int] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.asked += tokens.flatten().tolist()
        return self.logits.expand(*tokens.shape, -1)


def test_it_trains_on_the_first_nine_tenths_of_the_text_and_is_tested_on_the_rest() -> None:
    text = "\n".join(topics[topic] for topic in sorted(topics))
    characters = sorted(set(text))
    parts = build(Text(), SMALL)
    (pieces,) = parts.batch(range(parts.size))
    read = "".join(characters[token] for token in pieces[:, :-1].flatten().tolist())
    assert text.startswith(read)
    assert 0.899 * len(text) < len(read) < 0.9 * len(text)

    (fewer,) = build(Text(), {**SMALL, "samples": 10}).dataset
    assert torch.equal(fewer, pieces[:10])

    spaces = Spaces(characters)
    parts.model = spaces
    found = evaluate(parts)
    held = text[int(0.9 * len(text)) :]
    predicted = len(spaces.asked)
    assert len(held) - SMALL["length"] <= predicted < len(held)
    assert "".join(characters[token] for token in spaces.asked) == held[:predicted]
    share = held[1 : predicted + 1].count(" ") / predicted
    assert found["accuracy"] == pytest.approx(share)
    assert found["loss"] == pytest.approx(math.log(math.e + len(characters) - 1) - share)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (
            {"depth": 2},
            "Text: depth: unknown argument; accepted: width, layers, heads, length, samples, lr, batch, seed",
        ),
        ({"width": 30}, "Text: width: 30; accepted: a multiple of heads = 4"),
        ({"layers": 0}, "Text: layers: 0; accepted: a whole number of at least 1"),
        ({"samples": 10**6}, "Text: samples: 1000000; accepted: a whole number from 1 to "),
        ({"length": 1.5}, "Text: length: 1.5; accepted: a whole number of at least 1"),
        ({"length": 10**7}, "Text: length: 10000000; accepted: less than the text to test on"),
    ],
)
def test_other_arguments_are_refused_by_name(args: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Text(), args)
    assert text in str(caught.value)
