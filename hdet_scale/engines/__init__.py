"""What the method, the search, the converge and checkpoints ask of a training engine.

Read in this order:

    protocol         Engine: the questions, and the answers of a plain torch loop
    gradient_mean    the mean of gradients over replicas, where the engine does not take it
    replica_state    a replica's weights and optimizer state, given to all replicas

The engines themselves are the doors hdet_scale.ddp, hdet_scale.fsdp and hdet_scale.deepspeed.
"""

from hdet_scale.engines.protocol import Engine

__all__ = ["Engine"]
