from hdet_scale.optim.fused_adamw import FusedAdamW, FusedLion, FusedSGD, effective_lr, write_lr

__all__ = ["FusedAdamW", "FusedLion", "FusedSGD", "effective_lr", "write_lr"]
