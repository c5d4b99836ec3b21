"""The acceptance test of a machine, run by `hdet doctor`: do our kernels give the right numbers?

Each check is a function that takes a device, returns what it found and raises `WrongResultError`
where a result is not the expected one; `findings.tried` makes a `Finding` of it. The same functions
run on a GPU and, in Triton's interpreter, on a CPU. In reading order:

    findings       what a check leaves: a name, a state, what was found, what to do
    guarded        tensors with guards around them, and the comparison of results
    twins          two optimizers in lockstep: one on our kernels, one on torch
    optimizers     every variant of the update kernels, skipped steps, gradients that move
    transports     gather, scatter, scale, row_mean, pack and unpack against torch
    captured_step  a captured CUDA graph whose learning rate changes between replays
    average        a converge of two real processes, on NCCL where there are two GPUs
    driver         whether the driver can run what torch and Triton compile
    machine        versions, GPU and driver: what a report of a fault has to name
    checklist      all of them, and on which device they run here

This file brings no Triton: `doctor` has to start where Triton is broken.
"""

from hdet_scale.acceptance.findings import ABSENT, BAD, NO_DEVICE, OK, Finding, tried

__all__ = ["ABSENT", "BAD", "NO_DEVICE", "OK", "Finding", "tried"]
