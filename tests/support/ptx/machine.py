"""Runs a program for all threads of a launch at once.

Threads may branch apart: each has the number of its next block, and the lowest of them runs next
with the threads that are there, so that threads meet again where their ways do. A barrier lets the
threads of a block go on when all of them have come.
"""

import functools
from dataclasses import dataclass

import numpy as np

from tests.support.ptx.accesses import ACCESSES, HINTS
from tests.support.ptx.arithmetic import ARITHMETIC
from tests.support.ptx.lanes import Lanes
from tests.support.ptx.memory import Memory
from tests.support.ptx.parse import Instruction, Program, PTXError
from tests.support.ptx.shared import Shared

MOST_STEPS = 100_000
"""Blocks that a launch may run: a loop without an end stops here."""

_BARRIERS = ("bar.sync", "barrier.sync", "barrier.sync.aligned")
_JUMPS = ("bra", "bra.uni", "ret", "exit", *_BARRIERS)


@functools.cache
def _plain(opcode: str) -> str:
    """Without what only a cache reads."""
    for hint in HINTS:
        opcode = opcode.replace(hint, "")
    return opcode


def unknown(program: Program) -> set[str]:
    """The opcodes of a program that no table has."""
    used = {_plain(i.opcode) for block in program.blocks for i in block}
    return used - set(_JUMPS) - set(ARITHMETIC) - set(ACCESSES)


@dataclass(slots=True)
class _Run:
    program: Program
    lanes: Lanes
    memory: Memory
    shared: Shared
    at: np.ndarray
    """The next block of every lane."""
    done: np.ndarray
    waiting: np.ndarray
    """Of every lane, the block that follows the barrier it waits at; -1 for none."""

    def run(self) -> None:
        for _ in range(MOST_STEPS):
            ready = ~self.done & (self.waiting < 0)
            if ready.any():
                self._block(int(self.at[ready].min()), ready)
            elif self.done.all():
                return
            self._release()
        raise PTXError(f"{self.program.name}: {MOST_STEPS} blocks have run: a loop without an end")

    def _block(self, number: int, ready: np.ndarray) -> None:
        here = ready & (self.at == number)
        if number >= len(self.program.blocks):
            self.done |= here
            return
        self.lanes.activate(here)
        self.at = np.where(here, number + 1, self.at)
        for instruction in self.program.blocks[number]:
            try:
                self._step(instruction, here, number)
            except PTXError as error:
                where = f"{self.program.name}, block {number}, `{instruction.text}`"
                raise PTXError(f"{where}: {error}") from None

    def _step(self, i: Instruction, here: np.ndarray, number: int) -> None:
        mask = here
        if i.guard is not None:
            mask = here & (self.lanes.read(i.guard, np.dtype("?")) != i.negated)
            if not mask.any():
                return
        opcode = _plain(i.opcode)
        if opcode in _JUMPS:
            self._jump(i, mask, number)
            return
        if i.guard is not None:
            self.lanes.activate(mask)
        if opcode in ARITHMETIC:
            ARITHMETIC[opcode](self.lanes, i.operands)
        else:
            ACCESSES[opcode](self.lanes, i.operands, self.memory, self.shared)
        if i.guard is not None:
            self.lanes.activate(here)

    def _jump(self, i: Instruction, mask: np.ndarray, number: int) -> None:
        if i.target is not None:
            if i.target not in self.program.labels:
                raise PTXError(f"no label {i.target}")
            self.at = np.where(mask, self.program.labels[i.target], self.at)
        elif i.opcode in ("ret", "exit"):
            self.done |= mask
        else:
            if [o.bits for o in i.operands if hasattr(o, "bits")] != [0]:
                raise PTXError("only barrier 0 of a whole block is understood")
            self.waiting = np.where(mask, number + 1, self.waiting)

    def _release(self) -> None:
        """Let go on the blocks of threads in which everyone waits.

        Raises:
            PTXError: Threads of one block wait at different barriers, or for one that has ended.
        """
        if not (self.waiting >= 0).any():
            return
        x = self.lanes
        waiting = self.waiting.reshape(x.blocks, x.threads)
        done = self.done.reshape(x.blocks, x.threads)
        for block in np.flatnonzero(((waiting >= 0) | done).all(1) & (waiting >= 0).any(1)):
            if done[block].any():
                raise PTXError(f"{self.program.name}: a barrier waits for threads that have ended")
            if (waiting[block] != waiting[block, 0]).any():
                raise PTXError(f"{self.program.name}: threads of a block at different barriers")
            self.shared.barrier(int(block))
            self.memory.barrier(int(block))
            waiting[block] = -1


def execute(
    program: Program, blocks: int, parameters: list[int], memory: Memory, shared_bytes: int
) -> None:
    """Run a kernel to its end.

    Args:
        program: What to run.
        blocks: Thread blocks of the grid.
        parameters: Bits of each parameter, in order; those that are missing are 0.
        memory: What its addresses lead to.
        shared_bytes: Of each thread block.

    Raises:
        PTXError: An opcode is not known, or an access is wrong.
    """
    missing = unknown(program)
    if missing:
        raise PTXError(f"{program.name}: opcodes without a meaning here: {sorted(missing)}")
    names = [name for name, _ in program.parameters]
    if len(parameters) > len(names):
        raise PTXError(f"{program.name} has {len(names)} parameters, received {len(parameters)}")
    values = dict.fromkeys(names, 0) | dict(zip(names, parameters, strict=False))
    lanes = Lanes(blocks, program.threads, program.registers, values)
    memory.begin(blocks, program.threads)
    zeros = np.zeros(lanes.count, np.int64)
    shared = Shared(blocks, program.threads, shared_bytes)
    with np.errstate(all="ignore"):
        _Run(program, lanes, memory, shared, zeros, zeros > 0, zeros - 1).run()
