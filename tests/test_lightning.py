"""The Lightning Trainer, the real one, on two gloo ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hdet_scale.config import HDETConfig
from tests.support.fleet import Fleet
from tests.support.launched import as_launched

pytestmark = pytest.mark.slow

CONFIG = HDETConfig(rule="paper", spread=0.3, interval=4)


def lightning_fit(rank: int, size: int, home: str) -> dict[str, Any]:
    """The Lightning Trainer with DDP; 8 optimizer steps of two micro-batches."""
    as_launched(rank, size)
    os.environ["NODE_RANK"] = "0"
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    from hdet_scale.lightning import HDETCallback

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(4, 1)
            self.seen: list[float] = []

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss = (self.inner(batch) - batch.sum(1, keepdim=True)).square().mean()
            self.seen.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    torch.manual_seed(1)
    module, callback, records = Module(), HDETCallback(CONFIG), []

    class Watch(pl.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            callback.scheduler.on_round(records.append)

    trainer = pl.Trainer(
        default_root_dir=home,
        accelerator="cpu",
        devices=size,
        strategy="ddp",
        max_steps=8,
        accumulate_grad_batches=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[callback, Watch()],
    )
    trainer.fit(module, DataLoader(torch.randn(64, 4), batch_size=2))  # type: ignore[arg-type]
    return {
        "rounds": [(r.step, r.losses) for r in records],
        "seen": module.seen,
        "counted": trainer.lr_scheduler_configs[0].scheduler.last_epoch,
        "weights": [p.detach().clone() for p in module.parameters()],
        "state": callback.state_dict(),
    }


def test_lightning_explores_and_counts_once(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="the lightning extra is not installed")
    fleet = Fleet(2)  # Lightning ends the process group of its processes
    try:
        first, second = fleet.run(lightning_fit, str(tmp_path))
    finally:
        fleet.stop()
    assert first["counted"] == 8
    assert [step for step, _ in first["rounds"]] == [4, 8]
    for (_, losses), at in zip(first["rounds"], (slice(0, 8), slice(8, 16)), strict=True):
        own = [sum(r["seen"][at]) / 8 for r in (first, second)]
        assert losses == pytest.approx(own, rel=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(first["weights"], second["weights"], strict=True))
    assert first["state"] == {}


def test_local_gradients_are_refused() -> None:
    pytest.importorskip("lightning", reason="the lightning extra is not installed")
    from hdet_scale.lightning import HDETCallback

    with pytest.raises(ValueError, match='use "shared"'):
        HDETCallback(HDETConfig(rule="paper", gradients="local"))
    assert HDETCallback().config.rule == "paper"
