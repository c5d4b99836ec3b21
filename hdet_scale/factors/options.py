"""GroupOption: numbers of an optimizer's param group as factors: weight decay, betas, momentum."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from hdet_scale.factors.pair import Pair, one_number
from hdet_scale.factors.space import Bounds
from hdet_scale.optim.rates import put


class GroupOption(Pair):
    """A number of one param group.

    Args:
        optimizer: any torch optimizer.
        option: the key in the param group: "weight_decay", "momentum", "betas".
        index: of the param group. Default 0.
        position: which element, if the option is a tuple. Default None: the option is a number.
        space: "log" (default), "linear" or "logit".
        bounds: (low, high). Default: those of the space, see `Pair`.

    Raises:
        ValueError: if there is no such group, option or position.
        TypeError: if the option is not a number.
    """

    in_step = True

    def __init__(
        self,
        optimizer: Optimizer,
        option: str,
        index: int = 0,
        *,
        position: int | None = None,
        space: str = "log",
        bounds: Bounds | None = None,
    ) -> None:
        groups = optimizer.param_groups
        if not 0 <= index < len(groups):
            raise ValueError(f"the optimizer has {len(groups)} param groups, got index {index}")
        if option not in groups[index]:
            have = sorted(k for k in groups[index] if k != "params")
            raise ValueError(
                f"{type(optimizer).__name__} has no option {option!r}: choose one of {have}"
            )
        self.optimizer, self.option, self.index, self.position = optimizer, option, index, position
        self.moves_moments = option not in ("weight_decay", "eps")
        which = option if position is None else f"{option}[{position}]"
        super().__init__(
            f"{which}/group{index}", self._fetch, self._store, space=space, bounds=bounds
        )

    def _fetch(self) -> float | Tensor:
        value = self.optimizer.param_groups[self.index][self.option]
        if self.position is None:
            return one_number(value, self.option)
        if not isinstance(value, list | tuple) or not 0 <= self.position < len(value):
            raise ValueError(f"{self.option}={value!r} has no position {self.position}")
        return one_number(value[self.position], self.option)

    def _store(self, value: float) -> None:
        group = self.optimizer.param_groups[self.index]
        if self.position is None:
            put(group, self.option, value)
            return
        held = group[self.option]
        if isinstance(held[self.position], Tensor):
            held[self.position].fill_(value)
        else:
            group[self.option] = type(held)(
                value if i == self.position else x for i, x in enumerate(held)
            )


def weight_decay(
    optimizer: Optimizer, index: int = 0, *, bounds: Bounds = (1e-8, 10.0)
) -> GroupOption:
    """The weight decay of one param group, in log space.

    Args:
        optimizer: an optimizer with a "weight_decay" above 0.
        index: of the param group. Default 0.
        bounds: default (1e-8, 10).
    """
    return GroupOption(optimizer, "weight_decay", index, bounds=bounds)


def beta(
    optimizer: Optimizer, position: int, index: int = 0, *, bounds: Bounds = (0.01, 0.99999)
) -> GroupOption:
    """betas[position] of one param group, in logit space: near 1, rho divides 1 - beta.

    Args:
        optimizer: an optimizer with "betas".
        position: 0 for the first moment, 1 for the second.
        index: of the param group. Default 0.
        bounds: default (0.01, 0.99999).
    """
    return GroupOption(optimizer, "betas", index, position=position, space="logit", bounds=bounds)
