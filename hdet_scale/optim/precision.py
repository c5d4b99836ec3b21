"""In what precision an optimizer's state is kept, whatever a checkpoint holds it in.

A checkpoint holds fp32 or 16-bit moments, and fp32 masters: what torch's optimizers load too. A
state of 8-bit codes is decoded when it is saved and encoded when it is loaded; codes that were
saved come back as the same codes.
"""

from typing import Any

import torch

from hdet_scale.kernels import int8_state
from hdet_scale.kernels.table import Combination
from hdet_scale.optim.shards import local_shard

LOW = "master_low"
"""The state's key of the lower half of a split master."""


def scales_key(name: str) -> str:
    """The state's key of the scales of a moment's 8-bit codes."""
    return f"{name}_scales"


def is_coded(combination: Combination) -> bool:
    """Whether the moments are 8-bit codes."""
    return combination.moment == torch.int8


def master_key(combination: Combination) -> str:
    """The state's key of what a 16-bit parameter's master is kept in."""
    return LOW if is_coded(combination) else "master"


def create_moment(
    entry: dict[str, Any], name: str, at: int, param: torch.Tensor, combination: Combination
) -> None:
    """A moment of zeros, in the memory order of its parameter.

    Args:
        entry: The state, filled in place.
        name: Of the moment.
        at: Its index among the moments.
        param: The parameter.
        combination: Its dtypes.
    """
    dtype = int8_state.CODES[at] if is_coded(combination) else combination.moment
    entry[name] = torch.zeros_like(param, dtype=dtype).detach()
    if is_coded(combination):
        shard = local_shard(param)
        count = int8_state.scales_of(shard.numel())
        entry[scales_key(name)] = torch.zeros(count, device=shard.device)


def create_master(entry: dict[str, Any], param: torch.Tensor, combination: Combination) -> None:
    """The fp32 master of a 16-bit parameter, or the lower half of a split one, which begins as
    zeros: the parameter is the master."""
    if is_coded(combination):
        entry[LOW] = torch.zeros_like(param, dtype=torch.int16).detach()
    else:
        entry["master"] = param.detach().to(torch.float32, copy=True)


def widened(
    entry: dict[str, Any], param: torch.Tensor, combination: Combination, names: tuple[str, ...]
) -> dict[str, Any]:
    """A state as a checkpoint holds it: 8-bit codes decoded to fp32, a split master joined."""
    if not is_coded(combination):
        return entry
    kept = {k: v for k, v in entry.items() if k != LOW and k not in map(scales_key, names)}
    for name in names:
        if name in entry:
            kept[name] = torch.empty_like(param, dtype=torch.float32).detach()
            values = int8_state.decode(local_shard(entry[name]), entry[scales_key(name)])
            local_shard(kept[name]).copy_(values)
    if LOW in entry:
        kept["master"] = param.detach().to(torch.float32, copy=True)
        joined = int8_state.join(
            int8_state.flat(local_shard(param.detach())), int8_state.flat(local_shard(entry[LOW]))
        )
        int8_state.flat(local_shard(kept["master"])).copy_(joined)
    return kept


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
    for at, name in enumerate(names if combination.moment is not None else ()):
        if not isinstance(saved.get(name), torch.Tensor):
            continue
        if is_coded(combination):
            _encode(entry, name, at, saved[name], param, combination)
        else:
            entry[name] = saved[name].to(param.device, combination.moment)
    master = saved.get("master")
    entry.pop("master", None)
    if combination.master and isinstance(master, torch.Tensor):
        create_master(entry, param, combination)
        _put_master(entry, master, combination)


def _encode(
    entry: dict[str, Any],
    name: str,
    at: int,
    saved: torch.Tensor,
    param: torch.Tensor,
    combination: Combination,
) -> None:
    create_moment(entry, name, at, param, combination)
    # In the parameter's memory order, whatever the file's is.
    values = torch.zeros_like(param, dtype=torch.float32).detach().copy_(saved)
    int8_state.encode(local_shard(values), local_shard(entry[name]), entry[scales_key(name)])


def _put_master(entry: dict[str, Any], master: torch.Tensor, combination: Combination) -> None:
    kept = entry[master_key(combination)]
    if not is_coded(combination):
        kept.copy_(master)
        return
    # The lower half of the file's master; the upper half is the parameter, which the model loads.
    values = torch.empty_like(kept, dtype=torch.float32).copy_(master)
    low = local_shard(kept)
    _, rest = int8_state.split(int8_state.flat(local_shard(values)))
    int8_state.flat(low).copy_(rest)
