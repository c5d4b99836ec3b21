"""What a step is told beside its gradients: skip it, unscale them, clip them."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Controls:
    """Tensors of one element, on any device; None where the caller has none.

    On a GPU nothing here is read by the host: the kernels read the three from device memory.
    """

    found_inf: torch.Tensor | None = None
    """A GradScaler's: other than 0, the step writes nothing and is not counted."""
    grad_scale: torch.Tensor | None = None
    """A GradScaler's: what the gradients are divided by."""
    clip_factor: torch.Tensor | None = None
    """What the gradients are multiplied by."""

    def clip_folded(self, device: torch.device) -> "Controls":
        """The same without a clip factor. torch's fused kernels divide by a scale: the factor is
        folded into it as its inverse."""
        if self.clip_factor is None:
            return self
        clip = self.clip_factor.to(device, torch.float32)
        scale = (1.0 if self.grad_scale is None else self.grad_scale.to(device)) / clip
        return Controls(self.found_inf, scale)

    @property
    def skips(self) -> bool:
        """Whether the step is to be skipped; waits for the device that `found_inf` is on."""
        return self.found_inf is not None and bool(self.found_inf)
