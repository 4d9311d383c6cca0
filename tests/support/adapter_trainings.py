"""Small trainings of adapters on one frozen model, in the shape that PEFT gives them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hpcsched.worker.packed import load
from hpcsched.worker.packing.member import Member
from hpcsched.worker.session.trainer import Parts

WORDS, WIDTH, HEADS = 32, 16, 2


class PeftModel(nn.Module):
    """Stands in for PEFT's: a base model, and what lies around it."""

    def __init__(self, base: nn.Module, *, prompt: bool = False) -> None:
        super().__init__()
        self.base_model = base
        self.peft_config = {"default": type("Config", (), {"is_prompt_learning": prompt})()}

    def get_base_model(self) -> nn.Module:
        return self.base_model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)

    def save_pretrained(self, folder: str, **_: Any) -> None:
        """As PEFT does: what is trained, and nothing else."""
        from pathlib import Path

        Path(folder).mkdir()
        trained = {name: p.detach().clone() for name, p in self.named_parameters() if p.requires_grad}
        torch.save(trained, Path(folder) / "adapter_model.pt")


class Lora(nn.Module):
    """A low-rank adapter around a frozen layer (Hu et al. 2021), with the names that PEFT gives it."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        dropped = nn.Dropout(dropout) if dropout else nn.Identity()
        self.lora_dropout, self.scaling = nn.ModuleDict({"default": dropped}), {"default": alpha / rank}
        self.lora_bias = {"default": False}
        self.active_adapters, self.disable_adapters, self.merged = ["default"], False, False

    def get_base_layer(self) -> nn.Module:
        return self.base_layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base_layer(x)
        kind = result.dtype
        if self.disable_adapters or self.merged:
            return result
        for name in self.active_adapters:
            down, up = self.lora_A[name], self.lora_B[name]
            dropped = self.lora_dropout[name](x.to(down.weight.dtype))
            result = result + up(down(dropped)) * self.scaling[name]
        return result.to(kind)

    def merge(self) -> None:
        """As PEFT does: in place."""
        product = self.lora_B["default"].weight.data @ self.lora_A["default"].weight.data
        self.base_layer.weight.data += product * self.scaling["default"]


class Copied(nn.Module):
    """A module of which a copy is trained, as by `modules_to_save`."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.original_module = original
        self.modules_to_save = nn.ModuleDict(
            {"default": nn.Linear(original.in_features, original.out_features)}
        )
        self.modules_to_save["default"].load_state_dict(original.state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.modules_to_save["default"](x)
        return found


class Layer(nn.Module):
    """A block of a transformer, of the kind that looks back only."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop, self.attention_drop = nn.Dropout(dropout), dropout

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        rows, tokens, _ = x.shape
        y = self.norm(x)
        query, value = (
            layer(y).view(rows, tokens, HEADS, WIDTH // HEADS).transpose(1, 2)
            for layer in (self.query, self.value)
        )
        found = functional.scaled_dot_product_attention(
            query,
            query,
            value,
            attn_mask=mask,
            dropout_p=self.attention_drop if self.training else 0.0,
            is_causal=mask is None,
        )
        x = x + self.drop(self.out(found.transpose(1, 2).reshape(rows, tokens, WIDTH)))
        return x + self.drop(functional.gelu(self.inner(self.norm2(x))))


class Backbone(nn.Module):
    """The model without its head."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(2))

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, use_cache: bool = False
    ) -> dict[str, Any]:
        tokens = input_ids.shape[1]
        mask = None
        if attention_mask is not None:
            back = torch.ones(tokens, tokens, dtype=torch.bool).tril()
            mask = back & attention_mask[:, None, None, :].bool() | torch.eye(tokens, dtype=torch.bool)
        x = self.embed(input_ids)
        states = []
        for layer in self.layers:
            states.append(x := layer(x, mask))
        return {"last": x, "first": states[0], "cache": None}


class Base(nn.Module):
    """A model with its head; `base_model` is what Transformers calls the part without."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.backbone = Backbone(dropout)
        self.head = nn.Linear(WIDTH, WORDS)

    @property
    def base_model(self) -> nn.Module:
        return self.backbone

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        found: torch.Tensor = self.head(self.backbone(input_ids=input_ids, **kwargs)["last"])
        return found


def adapted(
    base: Base, *, rank: int = 4, alpha: float = 8.0, dropout: float = 0.0, targets: Any = ("query", "value")
) -> PeftModel:
    """Freeze a model, and put adapters into it."""
    base.requires_grad_(False)
    for layer in base.backbone.layers:
        for name in targets:
            if name == "norm":
                layer.norm.requires_grad_(True)
            elif name.startswith("copy:"):
                setattr(layer, name[5:], Copied(getattr(layer, name[5:])))
            else:
                setattr(layer, name, Lora(getattr(layer, name), rank, alpha, dropout))
    return PeftModel(base)


class Sentences:
    """Of unequal lengths, from `shortest` words on."""

    def __init__(self, seed: int, shortest: int, longest: int, count: int = 60) -> None:
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(shortest, longest + 1, (count,), generator=draw).tolist()
        self.all = [torch.randint(1, WORDS, (length,), generator=draw) for length in lengths]

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.all[index]


def padded(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sentences as a batch, as long as the longest of them."""
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def next_words(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean loss of each sentence."""
    ids = batch["input_ids"]
    scores = model(input_ids=ids, attention_mask=batch["attention_mask"])
    losses = functional.cross_entropy(
        scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0, reduction="none"
    )
    return losses.view(len(ids), -1).mean(1)


def adapter(
    seed: int = 0,
    *,
    batch: int = 4,
    lr: float = 1e-2,
    lengths: tuple[int, int] = (8, 8),
    frozen: int = 0,
    drop: float = 0.0,
    loss: Callable[..., torch.Tensor] = next_words,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    clip_norm: float | None = None,
    precision: str | None = None,
    **lora: Any,
) -> Callable[[], Parts]:
    """How a training is built: `frozen` is the seed of the model, `seed` that of its adapter and data."""

    def build() -> Parts:
        torch.manual_seed(frozen)
        base = Base(drop)
        torch.manual_seed(1000 + seed)
        model = adapted(base, **lora)
        trained = [p for p in model.parameters() if p.requires_grad]
        return Parts(
            model=model,
            optimizer=optimizer(trained, lr=lr),
            dataset=Sentences(seed, *lengths),
            collate=padded,
            global_batch=batch,
            loss=loss,
            seed=seed,
            epochs=math.inf,
            clip_norm=clip_norm,
            precision=precision,
        )

    return build


def members(*builds: Callable[[], Parts], steps: int | None = 40) -> list[Member]:
    """Brought to the device, each by itself."""
    return [load(build(), name=f"job {number}", steps=steps) for number, build in enumerate(builds, 1)]


def trained(member: Member) -> dict[str, torch.Tensor]:
    """What of its model is trained."""
    named = member.parts.model.named_parameters()
    return {name: p.detach().clone() for name, p in named if p.requires_grad}


@pytest.fixture(autouse=True)
def peft(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PEFT is there, as far as it is looked at."""
    module = ModuleType("peft")
    module.PeftModel = PeftModel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "peft", module)
    layers = ModuleType("peft.tuners.lora.layer")
    layers.Linear = Lora  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "peft.tuners.lora.layer", layers)
    yield
