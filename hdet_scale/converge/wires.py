"""The table of wires: the name that a user gives, and the class that forms the mean.

| name | class | bytes an element | extra memory | error of the mean |
|---|---|---|---|---|
| fp32 | AllReduce: NCCL, or two replicas | 2 (N-1)/N x 4 | none | the backend's summation |
| fp32 | Exact: gloo, from three replicas on | 2 (N-1)/N x 4 | one bucket received | rounded once |
| bf16 | Bf16 | 2 (N-1)/N x 2 | one bucket sent, one received, in bf16 | 2^-9 relative |
| int8 | Int8 | N = 2: 1; else (N-1)/N x 3 | last point and residual, fp32 each | fed back |

To add a wire, write a subclass of `Wire` (hdet_scale.converge.wire_interface) in a file of its own
and name it here. Nothing else knows which wires there are.
"""

from __future__ import annotations

from hdet_scale.converge.bf16 import Bf16
from hdet_scale.converge.full_precision import FullPrecision
from hdet_scale.converge.int8_wire import Int8
from hdet_scale.converge.wire_interface import Wire

WIRES: dict[str, type[Wire]] = {"fp32": FullPrecision, "bf16": Bf16, "int8": Int8}
"""Every wire by its name; a recommendation tries them in this order."""
FULL_PRECISION = "fp32"
"""The wire that a converge has beside the one asked for: for float64, and for the first mean of a
bucket where the other wire sends differences."""
