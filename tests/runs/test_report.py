"""The report: its page in a real browser, every figure drawn, exports that hold the numbers."""

from __future__ import annotations

import csv
import json
import math
import random
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hdet_scale import cli
from hdet_scale.method.records import ProbeRecord, RoundRecord
from hdet_scale.runs import report
from hdet_scale.runs.log import RunLog, read
from hdet_scale.runs.search_log import search_of
from hdet_scale.search.constants import STEP
from tests.support.browser import Browser, chromium
from tests.support.sample_records import a_search, a_trial, an_evaluation
from tests.support.searched import searched

FIGURES = ("loss", "schedule", "fan", "evidence", "replicas", "cost")


def a_run(
    folder: Path, *, rounds: int, replicas: int = 4, interval: int = 5, probed: int = 0
) -> Path:
    """A run whose base climbs and falls, with a quarantine, a clamp and a resume; its rule is fed
    by a probe in the first rounds."""
    draw = random.Random(rounds)
    for first, last in ((0, rounds // 2), (rounds // 2, rounds)):
        log = RunLog(folder, step=first * interval)
        log.begin({"engine": "ddp", "size": "tiny", "replicas": replicas, "shards": 1})
        for index in range(first, last):
            probe = _probe(index) if index < probed else None
            _round(log, draw, index, rounds, replicas, interval, probe)
        if last == rounds and rounds:
            log.end(last * interval)
        log.close()
    return folder


def _round(
    log: RunLog,
    draw: random.Random,
    index: int,
    rounds: int,
    replicas: int,
    interval: int,
    probe: ProbeRecord | None,
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
    log.record(
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
            probe=probe,
        )
    )


def _probe(index: int) -> ProbeRecord:
    return ProbeRecord(
        losses=(1.0, 2.0),
        seconds=0.01,
        verdict="up" if index % 3 == 2 else "",
        evidence={"t/group0": -3.0 + index / 10, "slope/group0": -0.1},
    )


def off_the_cliff(folder: Path) -> Path:
    """The highest rate of the second stage diverged nearly, and one above it, which is added."""
    path = folder / "log.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    last = max(i for i, line in enumerate(lines) if line.get("stage") == "second")
    rates = {name: STEP * rate for name, rate in lines[last]["rates"].items()}
    diverged = {"rates": rates, "loss": None, "error": None, "losses": [None] * 8}
    lines.insert(last + 1, {**lines[last], **diverged})
    lines[last] |= {"loss": 1e6, "losses": [1e6 + i for i in range(8)], "verdict": ""}
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
    """Every figure has drawn something, and its pixels are not the empty card; no other is seen."""
    seen = "[...document.querySelectorAll('figure')].filter((f) => f.offsetParent).map((f) => f.id)"
    assert set(browser.value(seen)) == set(figures)
    for name in figures:
        drawn, share = browser.value(
            f"""(() => {{ const c = document.querySelector('#{name} canvas');
            const copy = Object.assign(document.createElement('canvas'),
              {{ width: c.width, height: c.height }});
            const context = copy.getContext('2d', {{ willReadFrequently: true }});
            context.drawImage(c, 0, 0);
            const p = context.getImageData(0, 0, c.width, c.height).data;
            let other = 0;
            for (let i = 0; i < p.length; i += 4)
              other += p[i] !== p[0] || p[i + 1] !== p[1] || p[i + 2] !== p[2];
            return [Number(c.dataset.drawn), other / (p.length / 4)]; }})()"""
        )
        assert drawn > 0, name
        assert share > 0.01, name
    assert browser.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_figure_draws_for_every_run(browser: Browser, tmp_path: Path, scheme: str) -> None:
    runs = [a_run(tmp_path / "paper", rounds=30), a_run(tmp_path / "slope", rounds=40, probed=13)]
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
    for word in ("quarantine", "resume", "clamp", "exploring \u2192 hold", "</script>"):
        assert word in events
    hover = "FIGURES.fan.hover(100, RUNS[0]).length + FIGURES.evidence.hover(9, RUNS[1]).length"
    assert browser.value(hover) == 5 + 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_search_has_its_own_figure_and_leaves_the_fan_to_the_run(
    browser: Browser, tmp_path: Path, scheme: str
) -> None:
    page, run = tmp_path / "report.html", tmp_path / "searched"
    searched(run, overfits=True)
    other = a_run(tmp_path / "paper", rounds=12)
    assert report.main([str(off_the_cliff(run)), str(other), "-o", str(page)]) == 0
    browser.prefer(scheme)
    browser.open(page)
    check_drawn(browser, ("loss", "schedule", "fan", "search", "watch"))
    search = search_of(read(run))
    assert search is not None
    taken, rates = search["taken"]["lr/group0"], search["rates"]["lr/group0"]
    low, high = browser.value("FIGURES.search.plot.x")
    assert low < min(rates) < max(rates) < high
    # A million nats are above the frame, and so is what diverged.
    assert browser.value("FIGURES.search.plot.y[1]") < 100
    words = browser.value("FIGURES.search.plot.legend.map((e) => e.label).join()")
    assert words == "first stage,second stage,above the frame, or diverged"
    assert browser.value(f"FIGURES.search.hover({max(rates)}, RUNS[0])[1][1]") == "diverged"
    assert browser.value("FIGURES.fan.plot.y[1]") <= 10 * taken
    note = browser.value("document.getElementById('search').textContent")
    for stage in search["stages"]:
        said = stage["verdict"][0].upper() + stage["verdict"][1:]
        assert re.sub(r"(\d) x\b", "\\1 \u00d7", said) in note
    assert f"the search took {search['steps']} of 1,600 steps" in note
    rows = browser.value("FIGURES.search.table(RUNS[0])")
    assert [tuple(row) for row in rows[1:]] == [
        (stage["name"], *(None if x is None else pytest.approx(x, rel=1e-5) for x in row))
        for stage in search["stages"]
        for row in zip(stage["rates"]["lr/group0"], stage["losses"], stage["errors"], strict=True)
    ]
    browser.value("{const s = document.getElementById('run'); s.value = 1; s.onchange()}")
    check_drawn(browser)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_weights_that_went_back_are_in_the_figure_of_the_watch(
    browser: Browser, tmp_path: Path, scheme: str
) -> None:
    page, run = tmp_path / "report.html", tmp_path / "overfits"
    searched(run, overfits=True, restart_budget=0.5)
    assert report.main([str(run), "-o", str(page)]) == 0
    browser.prefer(scheme)
    browser.open(page)
    check_drawn(browser, ("loss", "schedule", "fan", "search", "watch"))
    lines = read(run).evaluations
    (back,) = [i for i, line in enumerate(lines) if line["restart"]]
    first, second = browser.value("FIGURES.watch.stretches(RUNS[0])")
    assert first["xs"] == [line["step"] for line in lines[: back + 1]]
    assert second["xs"] == [line["step"] for line in lines[back + 1 :]]
    search = search_of(read(run))
    assert search is not None
    began = search["taken"]["lr/group0"] / search["initial"]["lr/group0"]
    assert first["scale"] == pytest.approx(began, rel=1e-4)
    assert second["scale"] == pytest.approx(lines[back]["scale"], rel=1e-5)
    note = browser.value("document.getElementById('watch').textContent")
    told = "The rate was lowered once, and the weights went back to those of the lowest loss once"
    assert told in note
    rows = browser.value("FIGURES.watch.table(RUNS[0])")[1:]
    assert [row[0] for row in rows] == [line["step"] for line in lines]


def test_a_rate_that_was_lowered_in_place_is_in_the_figure_of_the_watch(
    browser: Browser, tmp_path: Path
) -> None:
    page, run = tmp_path / "report.html", tmp_path / "overfits"
    searched(run, overfits=True)
    assert report.main([str(run), "-o", str(page)]) == 0
    browser.open(page)
    check_drawn(browser, ("loss", "schedule", "fan", "search", "watch"))
    lines = read(run).evaluations
    moves = [i for i, line in enumerate(lines) if line["verdict"]]
    first, *later = browser.value("FIGURES.watch.stretches(RUNS[0])")
    assert first["xs"] == [line["step"] for line in lines[: moves[0] + 1]]
    assert [s["xs"][0] for s in later] == [lines[i]["step"] for i in moves]
    assert [s["scale"] for s in later] == pytest.approx(
        [lines[i]["scale"] for i in moves], rel=1e-4
    )
    note = browser.value("document.getElementById('watch').textContent")
    assert len(moves) == 1
    assert "The rate was lowered once; the events say why" in note


def test_a_search_under_way_or_given_up_says_so(browser: Browser, tmp_path: Path) -> None:
    page, run, early = tmp_path / "report.html", tmp_path / "under_way", tmp_path / "given_up"
    searched(run, stop=50)
    with RunLog(early) as log:
        log.record(a_trial(4))
        log.record(a_search(20, completed=False, verdict="given up: too many checkpoints"))
        log.step(30, 2.0, {"lr/group0": [1e-4] * 30, "lr/group1": [1e-5] * 30})
    assert report.main([str(run), str(early), "-o", str(page)]) == 0
    browser.open(page)
    check_drawn(browser, ("loss", "schedule", "fan", "search"))
    assert "under_way: a search of 2 trials" in browser.value("document.body.textContent")
    note = "document.getElementById('search').textContent"
    assert "the search is under way, 50 steps so far" in browser.value(note)
    browser.value("{const s = document.getElementById('run'); s.value = 1; s.onchange()}")
    check_drawn(browser, ("loss", "schedule", "fan", "search"))
    assert "ended early after 20 steps (given up: too many checkpoints)" in browser.value(note)


def test_ten_thousand_rounds_open_at_once_and_are_small(browser: Browser, tmp_path: Path) -> None:
    run, page = a_run(tmp_path / "long", rounds=10_000, replicas=8), tmp_path / "report.html"
    assert report.main([str(run), "-o", str(page)]) == 0
    assert page.stat().st_size < 5e6
    seconds = browser.open(page)
    check_drawn(browser)
    assert seconds < 3
    assert "mean of 5 rounds" in browser.value("document.getElementById('replicas').textContent")


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
    losses = list(csv.DictReader((home / "replicas.csv").open()))
    assert losses[20 // 3]["replica 0"] == ""
    assert float(losses[0]["replica 0"]) == pytest.approx(rounds[0]["losses"][0], rel=1e-5)


def test_the_page_needs_no_network_and_no_code_of_others(tmp_path: Path) -> None:
    text = report.page([read(a_run(tmp_path / "run", rounds=6))])
    assert "://" not in text
    assert text.count("</script>") == 2


def test_every_file_of_the_page_is_in_it() -> None:
    home = Path(report.__file__).parent / "page"
    parts = {p.relative_to(home).with_suffix("").as_posix() for p in home.rglob("*.js")}
    assert parts == set(report.SCRIPTS)
    for path in home.rglob("*.*"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, path.name


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


def test_phases_of_a_rule_that_is_fed_by_a_probe(tmp_path: Path) -> None:
    """It holds where no probe is in a round, or where steps go on without a round."""
    page = report.collect(read(a_run(tmp_path / "local", rounds=9, probed=6)))
    assert page["round"]["phase"] == ["exploring"] * 6 + ["hold"] * 3
    assert page["round"]["probe"] == [0.01] * 6 + [None] * 3
    assert page["round"]["evidence"]["t/group0"][5:] == [-2.5, None, None, None]
    assert page["verdicts"] == [[15, "up"], [30, "up"]]
    changes = [(e["step"], e["text"]) for e in page["events"] if e["event"] == "phase"]
    assert changes == [(5, "start \u2192 exploring"), (30, "exploring \u2192 hold")]
    run = a_run(tmp_path / "shared", rounds=6, probed=6)
    page = report.collect(read(run))
    assert [e["text"] for e in page["events"] if e["event"] == "phase"] == [changes[0][1]]
    with RunLog(run, step=30) as log:
        log.step(35, 2.0, {"lr/group0": [1e-3] * 5, "lr/group1": [1e-3] * 5})
    page = report.collect(read(run))
    told = [(e["step"], e["text"]) for e in page["events"] if e["event"] == "phase"]
    assert told == changes
    page = report.collect(read(a_run(tmp_path / "paper", rounds=3)))
    assert page["round"]["phase"] == ["", "", ""]
    assert not [e for e in page["events"] if e["event"] == "phase"]


def test_a_verdict_that_the_library_also_logs_is_one_event(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.event("info", "search, step 8: first stage, held-out loss by rate 1: 2; next", 8)
        log.record(a_trial(8))
        log.record(a_trial(8, trial=1, verdict="next"))
        log.record(a_trial(10, trial=2, stage="second", verdict="10 x"))
        log.record(a_search(10, trials=3, verdict="10 x"))
        log.event("warning", "watch, step 12: the rate is divided by 10", 12)
        log.record(an_evaluation(12))
        log.event("warning", "something else: as well", 12)
    events = report.collect(read(tmp_path))["events"]
    assert [(e["step"], e["event"], e["text"]) for e in events] == [
        (8, "search", "next"),
        (10, "search", "10 x"),
        (12, "warning", "something else: as well"),
        (12, "watch", an_evaluation(12).verdict),
    ]


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
    assert sorted(p.name for p in tables.iterdir()) == ["rounds.csv", "steps.csv"]


def test_tables_of_a_search_have_every_trial_and_evaluation(tmp_path: Path) -> None:
    run, tables = tmp_path / "run", tmp_path / "tables"
    with RunLog(run) as log:
        trials = (a_trial(4), a_trial(8, trial=1, diverged=True))
        for record in (*trials, a_search(8), an_evaluation(12)):
            log.record(record)
    page = ["-o", str(tmp_path / "report.html")]
    assert report.main([str(run), *page, "--csv", str(tables)]) == 0
    rows = {p.stem: list(csv.DictReader(p.open())) for p in tables.iterdir()}
    assert {k: len(v) for k, v in rows.items()} == {
        "rounds": 0, "steps": 0, "trials": 2, "searches": 1, "evaluations": 1,
    }  # fmt: skip
    assert [row["rates.lr/group0"] for row in rows["trials"]] == ["0.001", "0.01"]
    assert [row["loss"] for row in rows["trials"]] == ["2.5", ""]
    assert rows["searches"][0]["taken.lr/group0"] == "0.001"
    assert (rows["evaluations"][0]["restart"], rows["evaluations"][0]["loss"]) == ("True", "")


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
