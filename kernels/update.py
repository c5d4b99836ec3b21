"""The update of every tensor of a dtype combination in one launch, for any optimizer.

One kernel does what all optimizers share: a program goes through the blocks of its span. It reads
the parameter (or its fp32 master), the gradient and the moments, calls the optimizer's rule on them
in fp32, and writes back what the rule returns, rounded to each array's dtype. Each array is read
once and written once. Nothing is written when found_inf is set.

A rule is a `jit` function, one to a file (`adamw.py`, `sgd.py`, `lion.py`):

    rule(p, g, m, v, lr, group, correction, MOMENTS: tl.constexpr) -> p, m, v

    p, g        parameter, and gradient with sign, clip factor and loss scale already applied
    m, v        first and second moment; where the optimizer has fewer, any value, not stored
    lr          base LR times the replica's multiplier
    group       address of the group's row of scalars (`scalars.py`)
    correction  address of (t, c1, c2) of the tensor (`advance.py`)
    MOMENTS     how many moments there are: 0, 1 or 2
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hdet_scale.kernels import scalars, table
from hdet_scale.kernels.advance import CORRECTIONS
from hdet_scale.kernels.int8_state import RUN
from hdet_scale.kernels.launch import device_block_size, jit, launch, tl, tl_dtype
from hdet_scale.kernels.rounding import store_rounded, words_at
from hdet_scale.kernels.state_codes import (
    load_codes,
    load_joined,
    runs_of,
    store_codes,
    store_split,
)

_COLUMNS = tl.constexpr(table.COLUMNS)
_PARAM = tl.constexpr(table.PARAM)
_FIRST = tl.constexpr(table.FIRST)
_SECOND = tl.constexpr(table.SECOND)
_MASTER = tl.constexpr(table.MASTER)
_FIRST_SCALES = tl.constexpr(table.FIRST_SCALES)
_SECOND_SCALES = tl.constexpr(table.SECOND_SCALES)
_NUMEL = tl.constexpr(table.NUMEL)
_GROUP = tl.constexpr(table.GROUP)
_KEY = tl.constexpr(table.KEY)
_OFFSET = tl.constexpr(table.OFFSET)
_WIDTH = tl.constexpr(scalars.ROW_WIDTH)
_LR = tl.constexpr(scalars.LR)
_MULTIPLIER = tl.constexpr(scalars.MULTIPLIER)
_SIGN = tl.constexpr(scalars.SIGN)
_CORRECTIONS = tl.constexpr(CORRECTIONS)
_RUN = tl.constexpr(RUN)


@jit
def _arrays(row, grad, start, P: tl.constexpr, M: tl.constexpr, VECTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """The addresses of element `start` of a tensor's arrays: parameter, gradient, first and second
    moment, master. An array that is not used costs nothing: the compiler drops its load.

    The addresses come from memory, where the compiler cannot see their alignment: the hint is what
    makes the accesses 128 bits wide.
    """
    p = tl.load(row + _PARAM).to(tl.pointer_type(P))
    g = tl.load(grad).to(tl.pointer_type(P))
    m = tl.load(row + _FIRST).to(tl.pointer_type(M))
    CODED: tl.constexpr = tl.int8 == M
    v = tl.load(row + _SECOND).to(tl.pointer_type(tl.uint8 if CODED else M))
    w = tl.load(row + _MASTER).to(tl.pointer_type(tl.int16 if CODED else tl.float32))
    if VECTOR:
        p = tl.multiple_of(p, 16)
        g = tl.multiple_of(g, 16)
        m = tl.multiple_of(m, 16)
        v = tl.multiple_of(v, 16)
        w = tl.multiple_of(w, 16)
    return p + start, g + start, m + start, v + start, w + start


@jit
def _scales(row, start):  # type: ignore[no-untyped-def]
    """The addresses of the scales of the run that starts at element `start`, of both moments. Not
    used without 8-bit codes, and then dropped by the compiler."""
    first = tl.load(row + _FIRST_SCALES).to(tl.pointer_type(tl.float32))
    second = tl.load(row + _SECOND_SCALES).to(tl.pointer_type(tl.float32))
    return first + start // _RUN, second + start // _RUN


@jit
def _update_block(  # type: ignore[no-untyped-def]
    row,
    grad,
    group,
    correction,
    factor,
    start,
    RULE: tl.constexpr,
    MOMENTS: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    MASTER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    CODED: tl.constexpr = tl.int8 == M
    i = runs_of(BLOCK) if CODED else tl.arange(0, BLOCK)
    left = tl.load(row + _NUMEL) - start
    mask = None
    if not VECTOR:
        if not CODED:
            left = tl.minimum(left, BLOCK).to(tl.int32)
            # Adds 0, which the compiler cannot know: it would keep each element's address over the
            # turns of the loop, in registers that halve the occupancy.
            start += tl.minimum(left, 0)
        mask = i < left
    p_at, g_at, m_at, v_at, w_at = _arrays(row, grad, start, P, M, VECTOR)
    if MASTER and CODED:
        p = load_joined(p_at + i, w_at + i, mask)
    elif MASTER:
        p = tl.load(w_at + i, mask=mask)
    else:
        p = tl.load(p_at + i, mask=mask).to(tl.float32)
    g = tl.load(g_at + i, mask=mask).to(tl.float32) * factor
    m = g
    v = g
    first_scales, second_scales = _scales(row, start)
    if CODED:
        m = load_codes(m_at, i, first_scales, left, False, BLOCK, VECTOR)
        v = load_codes(v_at, i, second_scales, left, True, BLOCK, VECTOR)
    else:
        if MOMENTS > 0:
            m = tl.load(m_at + i, mask=mask).to(tl.float32)
        if MOMENTS > 1:
            v = tl.load(v_at + i, mask=mask).to(tl.float32)
    lr = tl.load(group + _LR) * tl.load(group + _MULTIPLIER)

    p, m, v = RULE(p, g, m, v, lr, group, correction, MOMENTS)

    words = 0
    if STOCHASTIC:
        step = tl.load(correction).to(tl.int32)
        words = words_at(tl.load(row + _KEY), step, tl.load(row + _OFFSET) + start, i)
    if CODED:
        store_codes(m_at, m, i, first_scales, left, False, BLOCK, VECTOR)
        store_codes(v_at, v, i, second_scales, left, True, BLOCK, VECTOR)
    else:
        if MOMENTS > 0:
            store_rounded(m_at + i, m, mask, words, M, 1, STOCHASTIC)
        if MOMENTS > 1:
            store_rounded(v_at + i, v, mask, words, M, 2, STOCHASTIC)
    if MASTER and CODED:
        store_split(p_at + i, w_at + i, p, mask)
    else:
        store_rounded(p_at + i, p, mask, words, P, 0, STOCHASTIC)
        if MASTER:
            tl.store(w_at + i, p, mask=mask)


def _named(specialization: Any) -> str:
    """What a profiler shows for the kernel: `adamw_kernel` where the rule is `adamw_rule`."""
    rule: str = specialization.constants["RULE"].__name__
    return rule.removesuffix("_rule") + "_kernel"


@jit
def _aligned(row, grad):  # type: ignore[no-untyped-def]
    """Whether every array of the tensor starts at a multiple of 16 bytes; 0 is an absent array."""
    bits = tl.load(grad) | tl.load(row + _PARAM) | tl.load(row + _MASTER)
    return ((bits | tl.load(row + _FIRST) | tl.load(row + _SECOND)) & 15) == 0


@functools.partial(jit, name=_named)
def update_kernel(  # type: ignore[no-untyped-def]
    tensors,
    grads,
    chunks,
    groups,
    corrections,
    found_inf,
    grad_scale,
    clip,
    RULE: tl.constexpr,
    MOMENTS: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    MASTER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
):
    if tl.load(found_inf) == 0.0:
        chunk = chunks + tl.program_id(0) * 2
        index = tl.load(chunk)
        start = tl.load(chunk + 1).to(tl.int64) * SPAN
        row = tensors + index * _COLUMNS
        grad = grads + index
        group = groups + tl.load(row + _GROUP) * _WIDTH
        at = corrections + index * _CORRECTIONS
        # Ascent or descent, clipping, and the inverse of the loss scale.
        factor = tl.load(group + _SIGN) * tl.load(clip) / tl.load(grad_scale)
        # A block that is not whole is masked: a mask that can end anywhere stops the compiler from
        # using 128-bit accesses, and an unmasked access would leave the tensor. The bound is loaded
        # at each turn, so that the compiler cannot count the turns and does not unroll them.
        end = start + SPAN
        wide_end = tl.where(_aligned(row, grad), end, start)
        first = start
        while (first < wide_end) & (first + BLOCK <= tl.load(row + _NUMEL)):
            _update_block(
                row, grad, group, at, factor, first,
                RULE, MOMENTS, P, M, MASTER, STOCHASTIC, BLOCK, True,
            )  # fmt: skip
            first += BLOCK
        while (first < end) & (first < tl.load(row + _NUMEL)):
            _update_block(
                row, grad, group, at, factor, first,
                RULE, MOMENTS, P, M, MASTER, STOCHASTIC, BLOCK, False,
            )  # fmt: skip
            first += BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """An optimizer's arithmetic: its rule for the kernel, and the same in torch.

    `cases.py` finds every `Update` that a file of this folder defines, to inspect its machine code.
    """

    name: str
    """What `hdet kernels --kernel` calls it."""
    rule: Any
    """The `jit` function described at the top of the file."""
    reference: Callable[..., None]
    """The same equations in torch: one tensor, in place."""
    options: tuple[str, ...]
    """The options of a param group that the reference takes by name."""
    moments: tuple[str, ...]
    """The names of the moments in the optimizer's state, at most two."""
    momentless: bool = False
    """Whether a group may have no moments at all (SGD without momentum)."""
    coded: bool = False
    """Whether the moments may be 8-bit codes: a first and a second one (`int8_state.py`)."""

    @property
    def combinations(self) -> list[table.Combination]:
        """The dtype combinations that have a kernel."""
        return table.combinations(momentless=self.momentless, coded=self.coded)

    def constants(self, combination: table.Combination) -> dict[str, Any]:
        """What the kernel is compiled for, except the sizes of a block and a span."""
        coded = combination.moment == torch.int8
        return {
            "RULE": self.rule,
            "MOMENTS": 0 if combination.moment is None else len(self.moments),
            "P": tl_dtype(combination.param),
            "M": tl.int8 if coded else tl_dtype(combination.moment or combination.param),
            "MASTER": combination.master,
            "STOCHASTIC": combination.stochastic,
        }

    def launch(
        self,
        tensors: table.TensorTable,
        grads: torch.Tensor,
        combination: table.Combination,
        groups: torch.Tensor,
        corrections: torch.Tensor,
        found_inf: torch.Tensor,
        grad_scale: torch.Tensor,
        clip: torch.Tensor,
    ) -> None:
        """Update every tensor of one dtype combination in one launch.

        Args:
            tensors: The table of all tensors.
            grads: What its `refresh` returned for their gradients.
            combination: Which of them to update.
            groups: `ScalarTable.values`.
            corrections: What `advance` has written.
            found_inf: One fp32 element; other than 0, nothing is written.
            grad_scale: One fp32 element that every gradient is divided by.
            clip: One fp32 element that every gradient is multiplied by.

        Raises:
            ValueError: `combination` has no moments and the optimizer needs them.
        """
        if combination.moment is None and not self.momentless:
            raise ValueError(
                f"{self.name} keeps {list(self.moments)}: received moment=None, valid is a dtype"
            )
        chunks = tensors.chunks[combination]
        args = (tensors.tensors, grads, chunks, groups, corrections, found_inf, grad_scale, clip)
        launch(
            update_kernel,
            chunks.shape[0],
            tensors.device,
            *args,
            **self.constants(combination),
            BLOCK=device_block_size(tensors.device),
            SPAN=tensors.span,
        )
