"""A GPT and its data, for `hdet train`, the demo, the benchmarks and the tests.

In the order to read:

    gpt    GPTConfig, SIZES by name, GPT: weights depend on the seed alone
    text   Text: bytes of files or a token file; batch: depends on (seed, step, rank) alone

Import from these files. This one imports nothing.
"""
