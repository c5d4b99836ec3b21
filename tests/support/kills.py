"""Kills: an `hdet train` that is ended at random moments and resumed, beside one that is not.

    python -m tests.support.kills --kills 10            # every engine, SIGKILL and SIGTERM; minutes

The log of the broken run must tell the same story as that of the unbroken one: every loss and every
base to the last bit, no torn line, no line twice.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hdet_scale.runs.log import FILE

CONFIGS = Path(__file__).parents[2] / "configs"
CLOCKS = ("time", "seconds", "probe_seconds", "tokens_per_second")
"""What no two runs have in common."""
LAYOUTS = {
    "ddp": ("ddp", 2, {"replicas": "auto"}),
    "fsdp": ("fsdp", 4, {"replicas": 2}),
    "fsdp local": ("fsdp", 2, {"replicas": 2, "gradients": "local"}),
    "deepspeed": ("deepspeed", 2, {"replicas": 2}),
    "ddp auto": ("ddp", 2, {"replicas": "auto", "rule": "auto"}),
    "fsdp auto": ("fsdp", 4, {"replicas": 2, "rule": "auto"}),
    "deepspeed auto": ("deepspeed", 2, {"replicas": 2, "rule": "auto"}),
}
RUN_SECONDS = 600


@dataclass
class Chain:
    """What happened to a run that was ended again and again."""

    layout: str
    signal: str
    kills: int
    at_steps: list[int]
    """The step that the log had reached at each kill; 0 before the first line."""
    codes: list[int]
    same_story: bool
    torn_or_double: int


def recipe(home: Path, engine: str, *, steps: int, **hdet: Any) -> Path:
    """A shipped recipe, made short."""
    name = "ds_hdet.json" if engine == "deepspeed" else "fsdp_hdet.json"
    values = json.loads((CONFIGS / name).read_text())
    if engine == "deepspeed":
        values["train_micro_batch_size_per_gpu"] = 2
        values["scheduler"]["params"]["total_steps"] = steps
    else:
        values["batch"] = 2
        values["schedule"]["total_steps"] = steps
    values["hdet"] |= {"rule": "paper", "interval": 4, "warmup_steps": 1, **hdet}
    if values["hdet"]["rule"] == "paper":
        values["hdet"].setdefault("spread", 0.2)
    path = home / f"{engine}.json"
    path.write_text(json.dumps(values))
    return path


def command(home: Path, layout: str, run: str, steps: int) -> list[str]:
    engine, workers, hdet = LAYOUTS[layout]
    config = recipe(home, engine, steps=steps, **hdet)
    text = home / "text"
    text.write_bytes(bytes(range(256)) * 64)
    words = ["--engine", engine, "--config", config, "--workers", workers, "--context", 16]
    words += ["--text", text, "--run", home / run, "--every", 8, "--log-every", 3, "--json"]
    return [sys.executable, "-m", "hdet_scale.cli", "train", *map(str, words)]


def start(words: list[str]) -> subprocess.Popen[str]:
    """In a session of its own, so that nothing of it can outlive a test."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )


def finish(words: list[str]) -> list[dict[str, Any]]:
    """Run to the end; its messages."""
    process = start(words)
    try:
        out, err = process.communicate(timeout=RUN_SECONDS)
    finally:
        _end(process)
    assert process.returncode == 0, out + err
    return [json.loads(line) for line in out.splitlines() if line.startswith('{"')]


def break_off(words: list[str], number: signal.Signals, *, heard: int, pause: float) -> int:
    """Start, hear so many messages, pause, and send the signal to the process that the user
    started; the exit code."""
    process = start(words)
    assert process.stdout is not None
    while heard:
        line = process.stdout.readline()
        assert line, "the run ended before it was to be: " + process.communicate()[1]
        heard -= line.startswith('{"')
    time.sleep(pause)
    os.kill(process.pid, number)
    try:
        process.communicate(timeout=RUN_SECONDS)
    finally:
        _end(process)
    return int(process.returncode)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def lines(run: Path) -> list[dict[str, Any]]:
    """Every line of the log; a torn one is an error."""
    raw = (run / FILE).read_bytes()
    assert raw.endswith(b"\n")
    return [json.loads(line) for line in raw.splitlines()]


def story(run: Path) -> list[dict[str, Any]]:
    """Steps and records, without clocks."""
    kinds = ("step", "round", "trial", "search", "evaluation")
    told = [line for line in lines(run) if line["kind"] in kinds]
    return [{k: v for k, v in line.items() if k not in CLOCKS} for line in told]


def doubles(run: Path) -> int:
    """Steps and records that are there more than once; trials side by side end at one step."""
    keys = [(line["kind"], line["step"], line.get("trial")) for line in story(run)]
    return len(keys) - len(set(keys))


def reached(run: Path) -> int:
    """The last step that the log knows; its last line may be torn."""
    if not (run / FILE).exists():
        return 0
    whole = (run / FILE).read_bytes().rpartition(b"\n")[0].splitlines()
    return max((json.loads(line)["step"] for line in whole), default=0)


def chain(home: Path, layout: str, number: signal.Signals, kills: int, steps: int) -> Chain:
    """A run with `kills` kills at random moments, beside the unbroken one, `home/whole`."""
    draw, name = random.Random(f"{layout} {number} {kills}"), f"broken by {number.name}"
    words = [*command(home, layout, name, steps), "--resume"]
    found = Chain(layout, number.name, 0, [], [], False, 0)
    while found.kills < kills:
        # One in five while it starts, the others at any moment of the training.
        starting = draw.random() < 0.2
        heard, pause = (0, draw.uniform(0, 5)) if starting else (draw.randint(1, 25), 0.0)
        code = break_off(words, number, heard=heard, pause=pause or draw.uniform(0, 0.1))
        assert code != 0, "the run was over before it was ended: make it longer"
        found.kills += 1
        found.codes.append(code)
        found.at_steps.append(reached(home / name))
    finish(words)
    found.same_story = story(home / name) == story(home / "whole")
    found.torn_or_double = doubles(home / name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    options = parser.parse_args()
    good = True
    for layout in options.layouts:
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            finish(command(home, layout, "whole", options.steps))
            for number in (signal.SIGKILL, signal.SIGTERM):
                found = chain(home, layout, number, options.kills, options.steps)
                print(json.dumps(asdict(found)), flush=True)
                good = good and found.same_story and not found.torn_or_double
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
