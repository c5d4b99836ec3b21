"""The demo through its real workers, and what it does when something goes wrong."""

import io
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from hdet_scale import demo
from hdet_scale.demo import HDET, PLAIN, DemoRun, DemoSettings, Progress
from hdet_scale.method.records import RoundRecord
from hdet_scale.runs.log import read
from hdet_scale.train.workers import Send

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "hdet_scale.demo"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def fail_on_rank_1(send: Send, *_: object) -> None:
    if dist.get_rank() == 1:
        raise ArithmeticError("the third law does not hold")
    dist.barrier()


def a_run(name: str, loss: float, scale: float) -> DemoRun:
    schedule = [1e-3, 2e-3, 1e-3, 1e-4]
    record = RoundRecord(
        round=0,
        step=4,
        losses=(loss, loss + 0.02),
        values={},
        bases={},
        velocities={},
        quarantined=(),
        seconds=0.1,
        wire_bytes=0,
    )
    return DemoRun(
        name=name,
        losses=[[4.0, 3.0, 2.0, loss], [4.0, 3.0, 2.0, loss + 0.02]],
        bases=[schedule[0], *(scale * x for x in schedule[1:])],
        rounds=[record] if name == HDET else [],
        validation=loss,
        seconds=10.0,
        converge_seconds=0.25 if name == HDET else 0.0,
    )


def wait_until_gone(group: int) -> None:
    """multiprocessing's own tracker of semaphores ends a moment after its parent."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail(f"processes of group {group} are still there")


def test_a_short_run_ends_with_the_table_and_the_report(tmp_path: Path) -> None:
    options = ["--steps", "20", "--interval", "4", "--out", str(tmp_path / "new")]
    done = subprocess.run(
        COMMAND + options, capture_output=True, text=True, env=ENVIRONMENT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    cells = {
        row[1].strip(): [c.strip() for c in row[2:4]]
        for row in (line.split("│") for line in done.stdout.splitlines())
        if len(row) == 5
    }
    for loss in ("training loss, last tenth (nats/byte)", "validation loss (nats/byte)"):
        for run in cells[loss]:
            assert 2.0 < float(run) < math.log(256) + 0.1
    assert cells["base LR, highest"][0] == "2.00e-03"
    assert cells["LR found: base / schedule, from - to"][0] == "1"
    assert all(float(seconds) > 0 for seconds in cells["seconds"])
    assert 0 < float(cells["converge, share of the time"][1].rstrip("%")) < 100
    # Without a terminal: plain lines for both runs, no control codes.
    assert done.stdout.count(f"{PLAIN}  step") == done.stdout.count(f"{HDET}       step") == 5
    assert "\x1b" not in done.stdout
    page = tmp_path / "new" / "report.html"
    assert done.stdout.splitlines()[-1] == f"report:  {page}   open it in a browser"
    plain, hdet = (read(tmp_path / "new" / name) for name in ("plain", "hdet"))
    assert len(plain.bases()["lr/group0"]) == len(hdet.bases()["lr/group0"]) == 20
    assert [len(log.rounds) for log in (plain, hdet)] == [0, 5]
    assert all(log.name in page.read_text() for log in (plain, hdet))


def test_the_table_and_the_verdict_say_what_happened() -> None:
    plain, hdet = a_run(PLAIN, 1.0, 1.0), a_run(HDET, 1.1, 1.5)
    table = {name: (a, b) for name, a, b in demo.rows(plain, hdet)}
    assert table["validation loss (nats/byte)"] == ("1.0000", "1.1000")
    assert table["training loss, last tenth (nats/byte)"] == ("1.0100", "1.1100")
    assert table["base LR, highest"] == ("2.00e-03", "3.00e-03")
    assert table["base LR, last step"] == ("1.00e-04", "1.50e-04")
    assert table["LR found: base / schedule, from - to"] == ("1", "1.00 - 1.50")
    assert table["LR found: sum of base / of schedule"] == ("1", "1.38")
    assert table["converge, share of the time"] == ("none", "2.5%")
    assert "10.0% higher" in demo.verdict(plain, hdet, DemoSettings())
    assert "differ by 0.014" in demo.verdict(plain, hdet, DemoSettings())
    assert "9.1% lower" in demo.verdict(a_run(PLAIN, 1.1, 1), a_run(HDET, 1.0, 1), DemoSettings())


def test_a_ratio_is_told_only_where_the_schedule_is_not_near_zero() -> None:
    plain, hdet = a_run(PLAIN, 1.0, 1.0), a_run(HDET, 1.0, 1.0)
    plain.bases[-1], hdet.bases[-1] = 1e-8, 1e-5
    assert ("LR found: base / schedule, from - to", "1", "1.00 - 1.00") in demo.rows(plain, hdet)


def test_a_terminal_gets_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    said = [Progress(run=n, step=s, loss=3.25, base=1e-3) for n in (PLAIN, HDET) for s in (1, 10)]
    runs = [DemoRun(name=PLAIN), DemoRun(name=HDET)]
    monkeypatch.setattr(demo, "messages", lambda *_: iter([*said, *runs]))
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=110)
    assert demo.watch(DemoSettings(steps=10), console) == runs
    assert "10/10" in screen.getvalue()
    assert "loss 3.250  base LR 1.00e-03" in screen.getvalue()


def test_a_failing_worker_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "train_both", fail_on_rank_1)
    assert demo.main(["--steps", "10"]) == 1
    err = capfd.readouterr().err
    assert "error: worker 1 failed" in err
    assert "ArithmeticError: the third law does not hold" in err


@pytest.mark.parametrize("moment", ["starting", "training"])
def test_ctrl_c_ends_cleanly(moment: str, tmp_path: Path) -> None:
    options = ["--steps", "100", "--out", str(tmp_path)]
    # A session of its own: the signal goes to all its processes, as from a terminal.
    running = subprocess.Popen(
        [*COMMAND, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    assert running.stdout is not None
    while "step" not in running.stdout.readline() and moment == "training":
        pass
    if moment == "starting":
        time.sleep(1)
    os.killpg(running.pid, signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert "interrupted" in err
    assert "Traceback" not in err
    wait_until_gone(running.pid)


def test_what_is_missing_is_named_with_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("rich", "rich.console"):
        monkeypatch.setitem(sys.modules, name, None)
    assert demo.main(["--steps", "10"]) == 1
    err = capsys.readouterr().err
    assert "rich" in err
    assert "pip install hdet_scale[report]" in err


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (["--steps", "3"], "steps must be at least 10, got 3"),
        (["--steps", "20", "--interval", "21"], "interval must be in [1, steps] = [1, 20], got 21"),
        (["--lr", "nan"], "lr must be above 0, got nan"),
    ],
)
def test_wrong_options_are_answered_in_one_line(
    options: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(options) == 1
    err = capsys.readouterr().err
    assert answer in err
    assert err.count("\n") == 1


def test_the_help_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        demo.main(["--help"])
    assert leaving.value.code == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 24
    assert "example:" in out
