"""The HF Trainer and Accelerate, the real ones, on two gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hdet_scale.config import HDETConfig
from hdet_scale.runs.log import read
from hdet_scale.runs.replay import ReplayLR, discovered
from tests.support.fleet import Fleet
from tests.support.launched import as_launched

pytestmark = pytest.mark.slow

CONFIG = HDETConfig(rule="paper", spread=0.3, interval=4)


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def rows(count: int, *, alike: bool) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    made = [torch.randint(64, (16,)) for _ in range(count)]
    return [{"input_ids": ids, "labels": ids} for ids in ([made[0]] * count if alike else made)]


def hf_train(
    rank: int, size: int, home: str, resume: str | None, alike: bool, **options: Any
) -> dict[str, Any]:
    """12 steps of the Trainer; what the callback saw and what is left behind."""
    as_launched(rank, size)
    from transformers import Trainer, TrainingArguments

    from hdet_scale.hf import HDETCallback

    model, records, rates, bases = gpt2(), [], [], []
    callback = HDETCallback(CONFIG, log=Path(home, "log"))

    class Watch(HDETCallback):
        """Beside ours: the rounds, and the rate of each step on this rank."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            callback.scheduler.on_round(records.append)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rates.append(callback.scheduler.get_last_lr()[0])
            bases.append(callback.scheduler.get_base_lr())

        def on_step_end(self, *_: Any, **__: Any) -> None: ...
        def on_log(self, *_: Any, **__: Any) -> None: ...
        def on_save(self, *_: Any, **__: Any) -> None: ...
        def on_train_end(self, *_: Any, **__: Any) -> None: ...

    chosen = {"learning_rate": 1e-3, "per_device_train_batch_size": 2, "max_steps": 12}
    chosen |= {"logging_steps": 3, **options}
    arguments = TrainingArguments(
        output_dir=home,
        use_cpu=True,
        report_to=[],
        save_steps=4,
        disable_tqdm=True,
        seed=7,
        **chosen,
    )
    trainer = Trainer(
        model, arguments, train_dataset=rows(96, alike=alike), callbacks=[callback, Watch()]
    )
    trainer.train(resume_from_checkpoint=resume)
    schedule = trainer.lr_scheduler
    return {
        "weights": [p.detach().clone() for p in model.parameters()],
        "rounds": [(r.step, r.losses, r.bases["lr/group0"]) for r in records],
        "rates": rates,
        "bases": [list(values) for values in zip(*bases, strict=True)],
        "logged": [(x["step"], x["loss"]) for x in trainer.state.log_history if "loss" in x],
        "counted": getattr(schedule, "scheduler", schedule).last_epoch,
        "own step again": type(schedule) is torch.optim.lr_scheduler.LambdaLR,
    }


def test_the_trainer_explores_counts_once_and_resumes(pair: Fleet, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    first, second = pair.run(hf_train, str(tmp_path), None, False)
    assert [step for step, _, _ in first["rounds"]] == [4, 8, 12]
    assert first["rounds"] == second["rounds"]
    assert first["counted"] == 12
    assert first["own step again"]
    assert all(a != b for a, b in zip(first["rates"], second["rates"], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first["weights"], second["weights"], strict=True))
    check_log(tmp_path / "log", first["bases"], first["logged"])
    checkpoint = str(tmp_path / "checkpoint-8")
    again = pair.run(hf_train, str(tmp_path), checkpoint, False)[0]
    assert again["rounds"] == first["rounds"][2:]
    # The Trainer's own loss of step 9 is now the mean since the resume.
    check_log(tmp_path / "log", first["bases"], again["logged"])
    assert [line["kind"] for line in read(tmp_path / "log").starts] == ["start", "resume"]
    assert all(torch.equal(a, b) for a, b in zip(first["weights"], again["weights"], strict=True))


def check_log(folder: Path, bases: list[list[float]], logged: list[tuple[int, float]]) -> None:
    """The log has every round and, for a replay, the base of every step."""
    log = read(folder)
    assert [line["step"] for line in log.rounds] == [4, 8, 12]
    # Where the Trainer logged, and where it saved: 4 and 8 have no loss of its.
    assert [line["step"] for line in log.steps] == [3, 4, 6, 8, 9, 12]
    assert [(x["step"], x["loss"]) for x in log.steps if x["loss"] is not None] == logged
    made = discovered(log)
    assert list(made["bases"].values()) == bases
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))]} for _ in bases])
    replayed, rates = ReplayLR(optimizer, made), []
    for _ in range(12):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        replayed.step()
    assert [list(column) for column in zip(*rates, strict=True)] == bases


def test_the_loss_is_this_replicas_mean_whatever_the_trainer_divides_by(
    pair: Fleet, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    found = pair.run(hf_accumulated, str(tmp_path))[0]
    model, row = gpt2(), rows(1, alike=True)[0]
    loss = float(model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss)
    assert found["counted"] == 12
    for _, losses, _ in found["rounds"]:
        assert losses == pytest.approx([loss, loss], rel=1e-5)


def hf_accumulated(rank: int, size: int, home: str) -> dict[str, Any]:
    """The weights stand still and every row is the same: every loss is that of the row."""
    return hf_train(
        rank, size, home, None, True, learning_rate=1e-12, gradient_accumulation_steps=2
    )


def accelerated(rank: int, size: int) -> tuple[list[tuple[int, Any]], int, list[Tensor]]:
    """A loop with Accelerate whose scheduler it steps once for each process."""
    as_launched(rank, size)
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from hdet_scale.hf import attach

    accelerator = Accelerator(cpu=True)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    loader = DataLoader(rows(32, alike=False), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    hdet = attach(model, optimizer, schedule, CONFIG)
    records: list[Any] = []
    hdet.exploring.on_round(records.append)
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    hdet.exploring.finalize()
    hdet.detach()
    weights = [p.detach().clone() for p in model.parameters()]
    return [(r.step, r.losses) for r in records], schedule.scheduler.last_epoch, weights


def test_accelerate_counts_once(pair: Fleet) -> None:
    pytest.importorskip("accelerate", reason="the hf extra is not installed")
    (rounds, counted, first), (_, _, second) = pair.run(accelerated)
    assert counted == 8
    assert [step for step, _ in rounds] == [4, 8]
    assert len({loss for _, losses in rounds for loss in losses}) == 4
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_does_not_fit_is_refused() -> None:
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    from hdet_scale.hf import HDETCallback, attach

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    local = HDETConfig(rule="paper", gradients="local")
    with pytest.raises(ValueError, match='use "shared"'):
        attach(nn.Linear(1, 1), optimizer, schedule, local)
    with pytest.raises(ValueError, match="rule='auto' trains replicas on their own gradients"):
        attach(nn.Linear(1, 1), optimizer, schedule, HDETConfig())
    assert HDETCallback().config.rule == "paper"
