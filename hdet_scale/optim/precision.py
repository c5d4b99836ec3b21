"""In what precision an optimizer's state is kept, whatever a checkpoint holds it in."""

from typing import Any

import torch

from hdet_scale.kernels.table import Combination


def restore(
    entry: dict[str, Any],
    saved: dict[str, Any],
    param: torch.Tensor,
    combination: Combination,
    names: tuple[str, ...],
) -> None:
    """Put a saved state in the precision of this optimizer: torch casts it to the parameter's.

    Args:
        entry: The state that torch has loaded, changed in place.
        saved: The same as it was saved.
        param: The parameter.
        combination: Its dtypes.
        names: Of the moments.
    """
    for name in names if combination.moment is not None else ():
        if isinstance(saved.get(name), torch.Tensor):
            entry[name] = saved[name].to(param.device, combination.moment)
    if not combination.master:
        entry.pop("master", None)
    elif "master" in saved:
        entry["master"] = saved["master"].to(param.device, torch.float32)
