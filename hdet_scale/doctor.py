"""`hdet doctor`: try what this machine can run, and say for each failure what to do.

On a GPU it is an acceptance test (`acceptance/`): it launches every kernel against its torch
reference, replays a CUDA graph at several learning rates, moves the gradients, averages on NCCL
where there are two GPUs, and compares the driver with what torch and Triton compile. What needs a
GPU says "not checked: no CUDA device" elsewhere. `TRITON_INTERPRET=1 hdet doctor` runs the kernels
on a CPU, in Triton's interpreter.

An optional package that is not installed is reported and is no failure. One that is installed and
does not work is a failure. The output is one block of text that names versions, GPU and driver, to
be sent along with a report of a fault.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist

from hdet_scale.acceptance import ABSENT, BAD, NO_DEVICE, OK, Finding, tried
from hdet_scale.acceptance.findings import in_one_line
from hdet_scale.acceptance.machine import describe_machine
from hdet_scale.train.workers import Send, WorkerError, messages

LEAST_TORCH = (2, 8)
DEEPSPEED = "0.19"
OPTIONS = {
    "triton": ("triton", "fused kernels on a GPU"),
    "deepspeed": ("deepspeed", "hdet_scale.deepspeed"),
    "rich": ("report", "the demo and progress bars"),
    "tensorboard": ("boards", "--board tensorboard"),
    "wandb": ("boards", "--board wandb"),
    "transformers": ("hf", "hdet_scale.hf"),
    "accelerate": ("hf", "hdet_scale.hf"),
    "lightning": ("lightning", "hdet_scale.lightning"),
}
"""Package: the extra that brings it, and what it is for."""


def examine() -> Iterator[Finding]:
    """Run every check, in the order in which they are shown."""
    yield from (_python(), _torch(), *_options(), _devices(), _backends())
    yield _collective("gloo")
    if torch.cuda.device_count() > 1:
        yield _collective("nccl")
    yield _kernels()
    yield from _acceptance()
    yield _average()
    yield from (_deepspeed(), _compiler())


def _python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    good = sys.version_info >= (3, 10)
    return Finding("python", OK if good else BAD, found, "" if good else "use Python 3.10 or newer")


def _torch() -> Finding:
    version = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])
    good = version >= LEAST_TORCH
    return Finding("torch", OK if good else BAD, torch.__version__, "" if good else _upgrade())


def _upgrade() -> str:
    return f"pip install 'torch>={'.'.join(map(str, LEAST_TORCH))}'"


def _options() -> Iterator[Finding]:
    for package, (extra, use) in OPTIONS.items():
        try:
            yield Finding(package, OK, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            hint = f"for {use}: pip install hdet_scale[{extra}]"
            yield Finding(package, ABSENT, "not installed", hint)


def _devices() -> Finding:
    count = torch.cuda.device_count()
    names = {torch.cuda.get_device_name(i) for i in range(count)}
    if count:
        return Finding("devices", OK, f"{count} x {', '.join(sorted(names))}")
    built = torch.version.cuda or torch.version.hip
    if built and os.path.exists("/dev/nvidia0"):
        todo = (
            "torch sees no GPU though /dev/nvidia0 is there: compare the driver with torch's CUDA"
        )
        return Finding("devices", BAD, f"torch for CUDA {built}, no device", todo)
    return Finding("devices", OK, f"no GPU, {os.cpu_count()} CPU cores")


def _backends() -> Finding:
    if not dist.is_available():
        todo = "this torch has no distributed package: " + _upgrade()
        return Finding("backends", BAD, "none", todo)
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return Finding("backends", OK, ", ".join(name for name, is_there in there.items() if is_there))


def _sum(send: Send, backend: str) -> None:
    """In a worker: an all-reduce whose sum every rank checks."""
    device = f"cuda:{dist.get_rank()}" if backend == "nccl" else "cpu"
    total = torch.full((1 << 18,), float(dist.get_rank() + 1), device=device)
    begin = time.perf_counter()
    dist.all_reduce(total)
    wrong = int((total != 3.0).sum())
    send((wrong, time.perf_counter() - begin))


def _collective(backend: str) -> Finding:
    """An all-reduce of a megabyte between two real processes."""
    name = f"{backend}, 2 processes"
    try:
        told = list(messages(_sum, 2, backend, backend=backend))
    except (WorkerError, OSError, RuntimeError) as error:
        last = str(error).strip().splitlines()[-1]
        todo = (
            "set GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME to an interface that is up, and see that"
        )
        return Finding(name, BAD, last, f"{todo} /dev/shm and the temporary folder have room")
    if any(wrong for wrong, _ in told) or len(told) != 2:
        todo = "do not train on this machine: " + _upgrade()
        return Finding(name, BAD, f"a wrong sum: {told}", todo)
    slowest = max(seconds for _, seconds in told)
    return Finding(name, OK, f"1 MiB added in {1e3 * slowest:.1f} ms")


def _kernels() -> Finding:
    from hdet_scale.kernels import cases, launch, machine_code

    try:
        launch.require_triton()
    except ModuleNotFoundError as error:
        return Finding("kernels", ABSENT, "torch's own optimizers run", str(error))
    if launch.interpreting():
        todo = "unset TRITON_INTERPRET, unless you debug a kernel"
        return Finding("kernels", BAD if torch.cuda.is_available() else OK, "interpreted", todo)
    try:
        target = next(iter(machine_code.TARGETS))
        machine_code.compile_case(cases.cases()[0], target)
    except Exception as error:
        todo = "Triton cannot compile: clear ~/.triton/cache, or pip install -U triton"
        return Finding("kernels", BAD, f"{type(error).__name__}: {error}".splitlines()[0], todo)
    return Finding("kernels", OK, f"Triton compiles for {target}")


def _acceptance() -> Iterator[Finding]:
    """Every kernel on the device that is here; nothing where Triton is missing or broken."""
    try:
        from hdet_scale.acceptance import checklist
        from hdet_scale.kernels.launch import require_triton

        require_triton()
    except ModuleNotFoundError:
        yield Finding("kernels run", ABSENT, "not checked: Triton is not installed")
    except Exception as error:
        yield Finding("kernels run", BAD, in_one_line(error), "pip install -U triton")
    else:
        yield from checklist.accept()


def _average(kind: str = "cuda", backend: str = "nccl") -> Finding:
    """A converge of two real processes, each on a GPU of its own."""
    name, count = f"converge on {backend}", torch.cuda.device_count()
    if kind == "cuda" and count < 2:
        found = NO_DEVICE if count == 0 else "not checked: one CUDA device, two are needed"
        return Finding(name, ABSENT, found)

    def check() -> str:
        from hdet_scale.acceptance import average

        told = list(messages(average.average_two, 2, kind, backend=backend))
        return average.judge_average(told)

    return tried(name, check, "do not train on more than one GPU here, and send us this block")


def _deepspeed() -> Finding:
    name = "deepspeed fits"
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, ABSENT, "not installed", "pip install hdet_scale[deepspeed]")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if not version.startswith(DEEPSPEED + "."):
        todo = f"pip install 'deepspeed=={DEEPSPEED}.*': hdet_scale uses internals of that version"
        return Finding(name, BAD, version, todo)
    try:
        from deepspeed.runtime.engine import DeepSpeedEngine

        from hdet_scale import deepspeed
        from hdet_scale.deepspeed import engine as zero_engine
    except Exception as error:
        todo = f"its import fails: pip install 'deepspeed=={DEEPSPEED}.*'"
        return Finding(name, BAD, f"{type(error).__name__}: {error}".splitlines()[0], todo)
    methods = [n for n in zero_engine.NEEDS if n.startswith(("_get_", "_take"))]
    missing = [n for n in methods if not hasattr(DeepSpeedEngine, n)]
    if missing:
        todo = f"pip install 'deepspeed=={DEEPSPEED}.*'"
        return Finding(name, BAD, f"{version} has no {', '.join(missing)}", todo)
    return Finding(name, OK, f"{version}, {deepspeed.initialize.__module__} is ready")


def _compiler() -> Finding:
    tools = {name: shutil.which(name) for name in ("c++", "ninja")}
    missing = [name for name, path in tools.items() if path is None]
    if not missing:
        return Finding("c++, ninja", OK, "there, for DeepSpeed's ops")
    todo = "DeepSpeed compiles ops with them: install g++, pip install ninja, and put both on PATH"
    return Finding("c++, ninja", ABSENT, f"no {', '.join(missing)}", todo)


# -- the command --------------------------------------------------------------------------------

SIGNS = {OK: "ok  ", ABSENT: "-   ", BAD: "BAD "}
FIRST_LINE = "--- hdet doctor: to report a fault, send all lines from here ---"
LAST_LINE = "--- to here ---"


def main(
    argv: Sequence[str] | None = None, checks: Callable[[], Iterator[Finding]] = examine
) -> int:
    """Print the findings and return the exit code: 1 if something installed does not work, else 0.

    Args:
        argv: the words after `hdet doctor`. Default: those of this process.
        checks: what to run. Default: every check.
    """
    parser = argparse.ArgumentParser(
        prog="hdet doctor",
        description="Try what this machine can run: versions, GPUs, a collective of two processes, "
        "kernels, DeepSpeed; and say what to do about what fails. On a GPU every kernel is "
        "launched and compared with torch, which takes minutes the first time.",
        epilog="example: hdet doctor --json",
    )
    parser.add_argument("--json", action="store_true", help="the findings as JSON")
    options = parser.parse_args(argv)
    bad = 0
    found = []
    machine = describe_machine()
    if not options.json:
        print(FIRST_LINE, *machine, sep="\n", flush=True)
    for finding in checks():
        found.append(finding)
        bad += finding.state == BAD
        if not options.json:
            todo = f"   -> {finding.todo}" if finding.todo and finding.state != OK else ""
            print(f"{SIGNS[finding.state]}{finding.name:<18}{finding.found}{todo}", flush=True)
    if options.json:
        told = {"bad": bad, "machine": machine, "findings": [asdict(f) for f in found]}
        print(json.dumps(told))
    else:
        print(f"{bad} of {len(found)} checks failed" if bad else "nothing is wrong")
        print(LAST_LINE)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
