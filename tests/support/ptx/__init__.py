"""The compiled kernels, executed without a GPU: an interpreter for the PTX that Triton emits.

All threads of a launch run together: a register is a numpy array with an element a thread. Every
access is checked (bounds, alignment, races) and counted. An opcode that the table does not know is
an error that names it. In reading order:

    parse           PTX text to a program: parameters, blocks, instructions, operands
    lanes           the registers of all threads, and which threads are active
    floats          the arithmetic that numpy lacks: fused multiply-add, bfloat16, f16x2
    memory          global memory with guarded allocations, and its traffic
    shared          the shared memory of every thread block
    races           who touched a byte last, since the launch or the last barrier
    arithmetic,     the table of opcodes: what computes, what moves between registers and memory,
    accesses        what exchanges between the threads of a warp
    machine         runs the blocks of a program; branches, barriers
    device          compiles what a launch of ours would compile, for a target, and runs it
    executions      for each kernel of `cases.py`, how its variants are executed and compared

Limitations: no asynchronous copies, tensor cores, clusters or memory order beyond barriers.
Divisions, square roots and exponentials that a GPU approximates are rounded correctly here.
"""
