"""`hdet train` and `python -m hdet_scale.train`: train a GPT with replicas on one of three engines.

In the order to read:

    command         the command line, its manual, and how ranks are started
    training_loop   the steps of a run on every rank: train, exchange, save, stop
    job             what the loop asks of an engine, and which one the command line asks for
    torch_job       a job on DDP or FSDP2
    deepspeed_job   a job on DeepSpeed
    saving          the folders of checkpoints
    writer          what rank 0 writes to the log and the screen
    progress        how messages are shown
    workers         processes on this machine that form a process group

This file imports nothing: `doctor` and `demo` use `workers` without the rest.
"""
