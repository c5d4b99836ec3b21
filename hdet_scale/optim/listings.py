"""Listings: what was listed and built for a set of tensors that have gradients, kept between steps.

A set that comes again finds its listing: experts of a mixture that take turns, ZeRO-3's sub-groups,
which are stepped one after another.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hdet_scale.optim.batches import Batch

if TYPE_CHECKING:
    from hdet_scale.optim.kernel_step import Launches

LIMIT = 16
"""Listings that are kept; where more sets than these take turns, the oldest is listed again."""


@dataclass(slots=True)
class Listing:
    """The tensors of one set, and what the kernels read of them."""

    batches: list[Batch]
    """One for each group that has gradients."""
    launches: dict[torch.device, "Launches"] = field(default_factory=dict)

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph reads what belongs to this listing."""
        return any(launches.captured for launches in self.launches.values())


class Listings:
    """The listings of the last LIMIT sets, and every listing that a CUDA graph has captured."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Listing] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> Listing | None:
        """The listing of a set, which becomes the last to be dropped."""
        listing = self._kept.get(key)
        if listing is not None:
            self._kept.move_to_end(key)
        return listing

    def keep(self, key: Hashable, listing: Listing) -> None:
        """Keep a listing; the one whose turn is longest ago is dropped if there are too many."""
        self._kept[key] = listing
        if len(self._kept) > LIMIT:
            oldest = next((k for k, p in self._kept.items() if not p.captured), key)
            if oldest != key:
                del self._kept[oldest]

    def clear(self) -> None:
        """Drop all listings."""
        self._kept.clear()
