"""Triton kernels, one op a file, a torch reference beside each. Installed as `hdet_scale.kernels`.

Importing a file defines its kernels; where Triton is missing the references still work. The room
imports nothing of `hdet_scale` but itself. In reading order:

    choice, launch       whether a kernel runs here, and how it is started
    addresses, table,    what a launch over all tensors reads: addresses, and each group's numbers
    scalars
    advance, update      count the steps, then update every tensor by an optimizer's rule
    adamw, sgd, lion     the rules
    int8_state,          moments as 8-bit codes, and masters split in two halves
    state_codes
    random_words,        stochastic rounding to 16 bits
    rounding
    pieces               tensors to a flat bucket and back (gather, scatter)
    bucket_scale,        a bucket times a scalar; the mean of the replicas' 16-bit buckets
    row_mean
    int8_format,         a bucket as int8 codes with scales, and the weighted sum of such buckets
    pack, unpack
    cases, occupancy,    every kernel compiled ahead of time, and what its machine code shows:
    machine_code,        `hdet kernels`
    inspect
    interpreter          run a function where Triton interprets the kernels, for tests

A new optimizer's kernel is one file that defines a rule, its reference in torch and an
`update.Update` of the two; `cases` finds it.
"""
