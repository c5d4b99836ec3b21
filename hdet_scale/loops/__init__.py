"""Training loops that are not ours: what the integrations of HF, Accelerate and Lightning share.

counted    an AutoLR around a trainer's own scheduler, counted once an optimizer step
"""

from hdet_scale.loops.counted import Counted

__all__ = ["Counted"]
