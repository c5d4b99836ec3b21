"""The report: its page in a real browser, every figure drawn, exports that hold the numbers."""

from __future__ import annotations

import csv
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hdet_scale import cli
from hdet_scale.runs import report
from hdet_scale.runs.searched import race_of
from hdet_scale.method.records import RoundRecord
from hdet_scale.runs.log import RunLog, read
from tests.support.browser import Browser, chromium
from tests.support.raced import raced

FIGURES = ("loss", "schedule", "fan", "evidence", "heat", "cost")


def a_run(folder: Path, *, rounds: int, replicas: int = 4, interval: int = 5) -> Path:
    """A run whose base climbs and falls, with a quarantine, a clamp and a resume."""
    draw = random.Random(rounds)
    for first, last in ((0, rounds // 2), (rounds // 2, rounds)):
        log = RunLog(folder, step=first * interval)
        log.begin({"engine": "ddp", "size": "tiny", "replicas": replicas, "shards": 1})
        for index in range(first, last):
            _round(log, draw, index, rounds, replicas, interval)
        if last == rounds and rounds:
            log.end(last * interval)
        log.close()
    return folder


def _round(
    log: RunLog, draw: random.Random, index: int, rounds: int, replicas: int, interval: int
) -> None:
    step = (index + 1) * interval
    base = 1e-3 * math.sin(math.pi * (index + 1) / (rounds + 1))
    loss = 2 + 4 * math.exp(-5 * index / rounds)
    bad = index == rounds // 3
    losses = [loss + draw.gauss(0, 0.01) for _ in range(replicas)]
    log.now = step
    if index == 1:
        log.event("info", "lr/group0: the rule asked for 1, below the floor </script> of it")
    log.step(step, loss, {"lr/group0": [base] * interval, "lr/group1": [2 * base] * interval})
    rates = tuple(base * (1 + 0.1 * (r - (replicas - 1) / 2)) for r in range(replicas))
    log.round(
        RoundRecord(
            round=index,
            step=step,
            losses=(math.nan, *losses[1:]) if bad else tuple(losses),
            values={"lr/group0": rates, "lr/group1": tuple(2 * x for x in rates)},
            bases={"lr/group0": base, "lr/group1": 2 * base},
            velocities={"lr/group0": draw.gauss(0, 1e-5), "lr/group1": draw.gauss(0, 1e-5)},
            quarantined=(0,) if bad else (),
            seconds=0.02 + draw.random() / 100,
            wire_bytes=4_000_000,
        )
    )


def say_more(folder: Path) -> Path:
    """The same lines with the fields of a rule that has phases, verdicts and evidence."""
    path = folder / "log.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rounds = [line for line in lines if line["kind"] == "round"]
    for i, line in enumerate(rounds):
        climbing = i < len(rounds) // 3
        line |= {"phase": "climb" if climbing else "hold", "probe_seconds": 0.01}
        line |= {"verdict": "up" if climbing and i % 3 == 2 else "", "probe_losses": [1.0, 2.0]}
        line["evidence"] = {"t/group0": -3.0 + i / 10, "slope/group0": -0.1}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def off_the_cliff(folder: Path) -> Path:
    """The highest level of the race's first stage diverged, and the one below it nearly."""
    path = folder / "log.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    coarse = [line for line in lines if line["kind"] == "round"][:8]
    coarse[-1]["losses"], coarse[-2]["losses"] = [None], [1e6]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def plain_run(folder: Path) -> Path:
    """Spread 0: sampled steps and no rounds."""
    with RunLog(folder) as log:
        log.begin({"engine": "ddp"})
        for step in range(5, 300, 5):
            log.step(step, 2 + 50 / step, {"lr/group0": [1e-3] * 5})
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if chromium() is None:
        pytest.skip("no chromium here: apt-get install chromium runs the tests of the page")
    home = tmp_path_factory.mktemp("browser")
    made = Browser(home)
    made.size(1400, 1000)
    made.ask("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(home))
    made.downloads = home  # type: ignore[attr-defined]
    yield made
    made.close()


def check_drawn(browser: Browser, figures: Sequence[str] = FIGURES) -> None:
    """Every figure has drawn marks, and its pixels are not the empty card; others are not seen."""
    seen = "[...document.querySelectorAll('figure')].filter((f) => f.offsetParent).map((f) => f.id)"
    assert set(browser.value(seen)) == set(figures)
    for name in figures:
        marks, share = browser.value(
            f"""(() => {{ const c = document.querySelector('#{name} canvas');
            const copy = Object.assign(document.createElement('canvas'),
              {{ width: c.width, height: c.height }});
            const context = copy.getContext('2d', {{ willReadFrequently: true }});
            context.drawImage(c, 0, 0);
            const p = context.getImageData(0, 0, c.width, c.height).data;
            let other = 0;
            for (let i = 0; i < p.length; i += 4)
              other += p[i] !== p[0] || p[i + 1] !== p[1] || p[i + 2] !== p[2];
            return [Number(c.dataset.marks), other / (p.length / 4)]; }})()"""
        )
        assert marks > 0, name
        assert share > 0.01, name
    assert browser.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_figure_draws_for_every_run(browser: Browser, tmp_path: Path, scheme: str) -> None:
    runs = [a_run(tmp_path / "paper", rounds=30), say_more(a_run(tmp_path / "climb", rounds=40))]
    runs += [plain_run(tmp_path / "plain"), a_run(tmp_path / "many", rounds=30, replicas=40)]
    page = tmp_path / "report.html"
    assert report.main([*map(str, runs), "-o", str(page)]) == 0
    browser.prefer(scheme)
    browser.open(page)
    dark = browser.value("document.documentElement.classList.contains('dark')")
    assert dark == (scheme == "dark")
    for index in range(len(runs)):
        browser.value(
            f"{{const s = document.getElementById('run'); s.value = {index}; s.onchange()}}"
        )
        check_drawn(browser)
    toggles = "[...document.querySelectorAll('button[aria-pressed]')].map((b) => b.click()).length"
    assert browser.value(toggles) == 3
    browser.value("document.getElementById('theme').click()")
    browser.size(500, 900)
    check_drawn(browser)
    wide = browser.value("document.documentElement.scrollWidth")
    browser.size(1400, 1000)
    assert wide <= 500
    events = browser.value("document.getElementById('events').textContent")
    for word in ("quarantine", "resume", "clamp", "climb \u2192 hold", "</script>"):
        assert word in events
    hover = "FIGURES.fan.hover(100, RUNS[0]).length + FIGURES.evidence.hover(9, RUNS[1]).length"
    assert browser.value(hover) == 5 + 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_race_has_its_own_figure_and_leaves_the_fan_to_the_run(
    browser: Browser, tmp_path: Path, scheme: str
) -> None:
    page, run = tmp_path / "report.html", tmp_path / "raced"
    raced(run)
    other = a_run(tmp_path / "paper", rounds=12)
    assert report.main([str(off_the_cliff(run)), str(other), "-o", str(page)]) == 0
    browser.prefer(scheme)
    browser.open(page)
    check_drawn(browser, ("loss", "schedule", "fan", "race"))
    race = race_of(read(run))
    assert race is not None
    found, peaks = race["found"]["lr/group0"], race["stages"][0]["rates"]["lr/group0"]
    low, high = browser.value("FIGURES.race.plot.x")
    assert low < min(peaks) < max(peaks) < high
    # A million nats are above the frame, and so is what diverged.
    assert browser.value("FIGURES.race.plot.y[1]") < 100
    words = browser.value("FIGURES.race.plot.legend.map((e) => e.label).join()")
    assert "above the frame, or diverged" in words
    assert browser.value(f"FIGURES.race.hover({max(peaks)}, RUNS[0])[0][1]") == "diverged"
    assert browser.value("FIGURES.fan.plot.y[1]") <= 10 * found
    note = browser.value("document.getElementById('race').textContent")
    for stage in race["stages"]:
        assert stage["verdict"].replace(" x the", " \u00d7 the") in note
    rows = browser.value("FIGURES.race.table(RUNS[0])")
    assert [row[2] for row in rows[1:9]] == [
        pytest.approx(x, rel=1e-5) if x is not None else None for x in race["stages"][0]["losses"]
    ]
    browser.value("{const s = document.getElementById('run'); s.value = 1; s.onchange()}")
    check_drawn(browser)


def test_ten_thousand_rounds_open_at_once_and_are_small(browser: Browser, tmp_path: Path) -> None:
    run, page = a_run(tmp_path / "long", rounds=10_000, replicas=8), tmp_path / "report.html"
    assert report.main([str(run), "-o", str(page)]) == 0
    assert page.stat().st_size < 5e6
    seconds = browser.open(page)
    check_drawn(browser)
    assert seconds < 3
    assert "mean of 5 rounds" in browser.value("document.getElementById('heat').textContent")


def test_exports_hold_the_numbers(browser: Browser, tmp_path: Path) -> None:
    run, page = a_run(tmp_path / "run", rounds=20), tmp_path / "report.html"
    assert report.main([str(run), "-o", str(page)]) == 0
    for kind in ("PNG", "CSV"):  # a page may save ten files without being asked
        browser.open(page)
        browser.value(
            "(async () => { for (const b of document.querySelectorAll('figure button')) "
            f"if (b.textContent === '{kind}') "
            "{ b.click(); await new Promise((r) => setTimeout(r, 60)); } })()"
        )
    home: Path = browser.downloads  # type: ignore[attr-defined]
    wanted = [home / f"{name}.{kind}" for name in FIGURES for kind in ("png", "csv")]
    deadline = time.monotonic() + 20
    while not all(p.exists() and p.stat().st_size for p in wanted):
        assert time.monotonic() < deadline, [p.name for p in wanted if not p.exists()]
        time.sleep(0.05)
    for path in wanted:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
            assert path.stat().st_size > 5000
    rounds = read(run).rounds
    fan = list(csv.DictReader((home / "fan.csv").open()))
    assert [int(row["step"]) for row in fan] == [line["step"] for line in rounds]
    got = [float(row["replica 2"]) for row in fan]
    assert got == pytest.approx([line["values"]["lr/group0"][2] for line in rounds], rel=1e-5)
    heat = list(csv.DictReader((home / "heat.csv").open()))
    assert heat[20 // 3]["replica 0"] == ""
    assert float(heat[0]["replica 0"]) == pytest.approx(rounds[0]["losses"][0], rel=1e-5)


def test_the_page_needs_no_network_and_no_code_of_others(tmp_path: Path) -> None:
    text = report.page([read(a_run(tmp_path / "run", rounds=6))])
    assert "://" not in text
    assert text.count("</script>") == 2


def test_thinning_keeps_means_edges_and_every_quarantine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = read(a_run(tmp_path / "run", rounds=20))
    monkeypatch.setattr(report, "POINTS", 7)
    monkeypatch.setattr(report, "STROKES", 10)
    found = report.collect(log)
    assert found["group"] == 3
    assert found["round"]["x"] == [15, 30, 45, 60, 75, 90, 100]
    assert found["round"]["from"] == [0, 15, 30, 45, 60, 75, 90]
    first = [line["losses"][1] for line in log.rounds[:3]]
    assert found["round"]["losses"][1][0] == pytest.approx(sum(first) / 3, rel=1e-5)
    # Round 6, replica 0 had no loss: the mean is of the other two.
    two = [line["losses"][0] for line in log.rounds[7:9]]
    assert found["round"]["losses"][0][2] == pytest.approx(sum(two) / 2, rel=1e-5)
    highest = max(max(line["values"]["lr/group0"]) for line in log.rounds[3:6])
    assert found["round"]["high"]["lr/group0"][1] == pytest.approx(highest, rel=1e-5)
    assert found["round"]["values"] == {}
    quarantines = [e for e in found["events"] if e["event"] == "quarantine"]
    assert [(e["step"], e["text"][:9]) for e in quarantines] == [(35, "replica 0")]
    assert found["totals"]["resumes"] == found["totals"]["quarantined"] == 1


def test_tables_have_every_round_and_step(tmp_path: Path) -> None:
    run, tables = a_run(tmp_path / "run", rounds=8), tmp_path / "tables"
    page = tmp_path / "deep" / "report.html"
    assert report.main([str(run), "-o", str(page), "--csv", str(tables)]) == 0
    rounds = list(csv.DictReader((tables / "rounds.csv").open()))
    log = read(run)
    assert [float(r["losses.3"]) for r in rounds] == [line["losses"][3] for line in log.rounds]
    steps = list(csv.DictReader((tables / "steps.csv").open()))
    assert [float(r["lr/group1"]) for r in steps] == log.bases()["lr/group1"]
    assert len(steps) == 40


def test_the_command_answers_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = str(tmp_path / "report.html")
    assert cli.main(["report", str(tmp_path / "nowhere"), "-o", page]) == 1
    err = capsys.readouterr().err
    assert "no run log at" in err
    assert err.count("\n") == 1
    with RunLog(tmp_path / "fresh") as log:
        log.begin({})
    assert cli.main(["report", str(tmp_path / "fresh"), "-o", page]) == 1
    assert "has no step yet" in capsys.readouterr().err
    run = a_run(tmp_path / "run", rounds=4)
    assert cli.main(["report", str(run), "-o", page, "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told == {"written": [page], "runs": ["run"]}
