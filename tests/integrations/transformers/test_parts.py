"""Fine-tunings by Transformers' and TRL's Trainers in packs: each as alone, with PEFT's adapters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="PEFT is not installed")
pytest.importorskip("trl", reason="TRL is not installed")

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from hpcsched.errors import ConfigError
from hpcsched.integrations.transformers import parts_of
from hpcsched.worker.packed import free, load, pack
from hpcsched.worker.packing.adapters.saving import write_adapter
from hpcsched.worker.packing.member import Member
from hpcsched.worker.session.trainer import Parts, build

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples" / "adapters"))

from tuning import Tuning, byte_tokenizer, frozen_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
STEPS, CLOSE = 10, 1e-6


@pytest.fixture(autouse=True)
def _one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)  # where Trainers leave something
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tuned(**args: Any) -> Callable[[], Member]:
    return lambda: load(build(Tuning(), args), steps=50)


def classified(rank: int, batch: int, lr: float) -> Callable[[], Member]:
    """A classifier of sentences: it looks both ways, has dropout, and a head that is trained."""

    def made() -> Member:
        set_seed(0)
        model = BertForSequenceClassification(
            BertConfig(
                vocab_size=64,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=64,
                max_position_embeddings=32,
                num_labels=3,
            )
        )
        model = get_peft_model(
            model, LoraConfig(task_type="SEQ_CLS", r=rank, target_modules=["query", "value"])
        )
        draw = torch.Generator().manual_seed(rank)
        data = [
            {"input_ids": torch.randint(1, 64, (int(length),), generator=draw).tolist(), "labels": label % 3}
            for label, length in enumerate(torch.randint(3, 20, (80,), generator=draw))
        ]

        def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            longest = max(len(sample["input_ids"]) for sample in samples)
            ids = [sample["input_ids"] + [0] * (longest - len(sample["input_ids"])) for sample in samples]
            found = torch.tensor(ids)
            labels = torch.tensor([sample["labels"] for sample in samples])
            return {"input_ids": found, "attention_mask": (found > 0).long(), "labels": labels}

        args = TrainingArguments(
            per_device_train_batch_size=batch, learning_rate=lr, use_cpu=True, report_to="none", max_steps=60
        )
        trainer = Trainer(model=model, args=args, train_dataset=data, data_collator=padded)  # type: ignore[arg-type]
        return load(parts_of(trainer))

    return made


def trained(member: Member) -> dict[str, torch.Tensor]:
    named = member.parts.model.named_parameters()
    return {name: p.detach().clone() for name, p in named if p.requires_grad}


def alone(make: Callable[[], Member], steps: int = STEPS) -> Member:
    member = make()
    together = pack([member], mode="loop")
    for _ in range(steps):
        together.step()
    return member


@pytest.mark.parametrize(
    "makes",
    [
        (tuned(rank=2), tuned(rank=16, lr=1e-3, alpha=8), tuned(rank=4, batch=5)),
        (classified(2, 8, 1e-3), classified(8, 4, 1e-2), classified(4, 8, 3e-3)),
    ],
    ids=["trl", "classifier"],
)
def test_each_is_what_it_is_alone(makes: Any) -> None:
    made = [make() for make in makes]
    together = pack(made, mode="adapters")
    while min(member.session.step for member in made) < STEPS:
        together.step()
    assert [group.mode for group in together.groups] == ["adapters"]
    for make, member in zip(makes, made, strict=True):
        one, other = trained(alone(make)), trained(member)
        assert max(float((one[name] - other[name]).abs().max()) for name in one) <= CLOSE


def test_an_adapter_is_saved_as_peft_reads_it_and_goes_on(tmp_path: Path) -> None:
    make = tuned(rank=4)
    member, other = make(), tuned(rank=8)()
    together = pack([member, other], mode="adapters")
    for _ in range(6):
        together.step()
    checkpoint = free(member, together)
    assert sum(t.numel() for t in checkpoint["model"].values()) < sum(
        p.numel() for p in member.parts.model.parameters()
    )
    write_adapter(member.parts.model, tmp_path / "adapter")
    back = PeftModel.from_pretrained(frozen_model(byte_tokenizer()), str(tmp_path / "adapter"))
    ids = torch.arange(5).unsqueeze(0)
    member.parts.model.eval()
    back.eval()
    assert torch.equal(back(input_ids=ids).logits, member.parts.model(input_ids=ids).logits)
    again = load(build(Tuning(), {"rank": 4}), steps=50, checkpoint=checkpoint)
    going = pack([again], mode="loop")
    for _ in range(4):
        going.step()
    one, two = trained(alone(make)), trained(again)
    assert max(float((one[name] - two[name]).abs().max()) for name in one) <= CLOSE


def test_its_steps_schedule_and_evaluation_are_the_trainers() -> None:
    parts = build(Tuning(), {"batch": 24, "epochs": 2})
    member = load(parts)
    assert member.session.total_steps == 84  # 1000 samples twice; the last step is a whole one
    numbers = member.evaluate()
    assert set(numbers) == {"eval_loss", "eval_entropy", "eval_mean_token_accuracy"}


@pytest.mark.parametrize(
    "odd", [{"fp16": True}, {"neftune_noise_alpha": 5.0}, {"torch_compile": True}], ids=str
)
def test_what_cannot_be_packed_is_refused_in_a_line(odd: dict[str, Any]) -> None:
    def made() -> Parts:
        args = TrainingArguments(use_cpu=True, report_to="none", max_steps=2)
        (key,) = odd
        setattr(args, key, odd[key])
        model = torch.nn.Linear(1, 1)
        return parts_of(Trainer(model=model, args=args, train_dataset=[{"a": 1}]))  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match=f"Trainer: {next(iter(odd))}: .*to be packed"):
        made()


def test_a_merged_adapter_changes_nobody_elses_frozen_model() -> None:
    one, other = (classified(rank, 8, 1e-2)() for rank in (2, 4))
    together = pack([one, other], mode="loop")
    for _ in range(6):
        together.step()

    def frozen(member: Member) -> dict[str, torch.Tensor]:
        named = member.parts.model.named_parameters()
        return {name: p.detach().clone() for name, p in named if name.endswith("base_layer.weight")}

    before = frozen(other)
    one.parts.evaluate = lambda model: {"parts": float(len(list(model.merge_and_unload().parameters())))}
    one.evaluate()
    assert before
    for name, now in frozen(other).items():
        assert torch.equal(before[name], now)
