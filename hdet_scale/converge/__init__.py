"""The averaging of parameters across replicas, in place, on local shards.

Read in this order:

    policy          what a user decides; outer and checks beside it
    buckets         tensors as spans of memory, packed into flat buckets
    staging         a bucket copied into a flat buffer and back; shelf keeps the buffers
    wire_interface  what a wire is asked; costs, remembered and peers are what wires are made of
    full_precision, bf16, int8_wire (and its messages, int8): the wires; wires is the table of them
    transfers       what is done with one bucket, and what that takes
    flights         the means of the buckets, several under way at once; side_stream on CUDA; clock
    pipeline        Converge: check, exchange of flags, averaging
    overlap         the same in the background; groups, which backend a process group has
"""

from hdet_scale.converge.outer import OuterStep
from hdet_scale.converge.overlap import with_own_group
from hdet_scale.converge.pipeline import Converge, NoHealthyReplicaError
from hdet_scale.converge.policy import ConvergePolicy
from hdet_scale.converge.transfers import Outcome
from hdet_scale.converge.wires import WIRES

__all__ = [
    "WIRES",
    "Converge",
    "ConvergePolicy",
    "NoHealthyReplicaError",
    "Outcome",
    "OuterStep",
    "with_own_group",
]
