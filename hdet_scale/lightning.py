"""Lightning: a callback for its Trainer; every process of the DDP strategy is a replica.

    Trainer(strategy="ddp", callbacks=[HDETCallback(HDETConfig(rule="paper", interval=100))])

The module has one optimizer and one scheduler of interval "step". Let the checkpoint callback's
`every_n_train_steps` be a multiple of `interval`: there the replicas are equal.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from hdet_scale.config import HDETConfig
from hdet_scale.loops.counted import Counted

try:
    from lightning.pytorch import Callback
except ImportError as missing:
    raise ImportError(
        "hdet_scale.lightning needs Lightning: pip install hdet_scale[lightning]"
    ) from missing

logger = logging.getLogger("hdet_scale")


class HDETCallback(Callback):  # type: ignore[misc]  # no types for us
    """HDET in a Lightning Trainer.

    Args:
        config: what is explored, and how; rule="paper" where it is None.

    Raises:
        ValueError: for local gradients.

    Limitations:
        Shared gradients only, and no search. A checkpoint in the middle of a round holds replica
        0's weights.
    """

    def __init__(self, config: HDETConfig | None = None) -> None:
        self.config = config or HDETConfig(rule="paper")
        if self.config.gradients == "local":
            raise ValueError(
                'gradients="local" is not for a strategy that wraps the model: use "shared"'
            )
        self.counted: Counted | None = None
        self._loaded: dict[str, Any] | None = None

    @property
    def scheduler(self) -> Any:
        """The AutoLR while training runs."""
        return None if self.counted is None else self.counted.exploring

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the one optimizer and its schedule."""
        schedules = trainer.lr_scheduler_configs
        if len(trainer.optimizers) != 1 or len(schedules) != 1 or schedules[0].interval != "step":
            told = [s.interval for s in schedules]
            raise ValueError(
                f"{len(trainer.optimizers)} optimizers and schedulers of interval {told}: HDET "
                'needs one optimizer and one scheduler with "interval": "step"'
            )
        self.counted = Counted(
            trainer.optimizers[0], schedules[0].scheduler, self.config, pl_module
        )
        if self._loaded is not None:
            self.scheduler.load_state_dict(self._loaded)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Lightning has divided the loss for accumulation: the parts add up to it."""
        if self.counted is not None:
            self.counted.add_loss(loss * trainer.accumulate_grad_batches)

    def state_dict(self) -> dict[str, Any]:
        """Into every checkpoint of Lightning's."""
        if self.counted is None:
            return {}
        if not self.scheduler.at_boundary:
            logger.warning(
                "a checkpoint in the middle of a round holds replica 0's weights: let "
                "every_n_train_steps be a multiple of interval=%d",
                self.config.interval,
            )
        held: dict[str, Any] = self.scheduler.state_dict()
        return held

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = dict(state_dict) or None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Every replica the same model, and the module's scheduler its own again."""
        if self.counted is not None:
            self.scheduler.finalize()
            self.counted.detach()
            self.counted = None
