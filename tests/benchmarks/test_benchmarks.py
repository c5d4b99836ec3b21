"""The benchmarks' own arithmetic, and short runs of what they run."""

from __future__ import annotations

import argparse
import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as every
from benchmarks.paper import ablation, time_to_loss
from benchmarks.paper.learning import Curve, Recipe, trailing_mean, train, unigram_entropy
from benchmarks.speed import plan_check, scale, throughput
from hdet_scale.converge.costs import Cost
from hdet_scale.models.text import Text
from hdet_scale.plan.links import Link
from tests.support.fleet import Fleet


def test_every_benchmark_can_be_started() -> None:
    folder = Path(every.__file__).parent
    names = [path.relative_to(folder).with_suffix("").parts for path in folder.rglob("*.py")]
    assert len(names) > 20
    for name in names:
        importlib.import_module(".".join(("benchmarks", *name)))


def test_a_prediction_is_of_the_size_that_was_not_fitted() -> None:
    link = Link(latency=1e-3, bandwidth=1e9)
    costs = [Cost(2 * k, 1e7 * k**2) for k in (1, 2, 4, 8)]
    seconds = [link.seconds(c) for c in costs]
    found, ratio = plan_check.predicted(costs, seconds)
    assert found.bandwidth == pytest.approx(1e9)
    assert ratio == pytest.approx(1)
    _, off = plan_check.predicted(costs, [*seconds[:3], 2 * seconds[3]])
    assert off == pytest.approx(0.5)


def test_overhead_grows_with_the_replicas() -> None:
    found = scale.computed(("h100",), ("1B",))
    shares = [found["h100", "1B", n].overhead for n in scale.REPLICAS]
    assert scale.REPLICAS[0] == 8
    assert scale.REPLICAS[-1] == 16_384
    assert shares == sorted(shares)
    assert shares[0] > 0
    assert all(e.replicas == n for (_, _, n), e in found.items())


# -- throughput ----------------------------------------------------------------------------------


def test_what_a_converge_adds_is_told_from_the_steps_beside_it() -> None:
    """Rounds of four steps of 1 s; the last takes 0.5 s more, the first after an overlap 0.2."""
    took = [1.0, 1.0, 1.0, 1.5] * 3
    assert throughput.added_by_converge(took, "shared", 4) == pytest.approx(0.5)
    folded = [1.0, 1.0, 1.0, 1.5, *([1.2, 1.0, 1.0, 1.5] * 2)]
    assert throughput.added_by_converge(folded, "overlap", 4) == pytest.approx(0.7)
    assert [throughput.touched(i, 4, "overlap") for i in range(5)] == [
        True,
        False,
        False,
        True,
        True,
    ]
    assert [throughput.touched(i, 4, "local") for i in range(4)] == [False, False, False, True]


def test_exposed_communication_is_compared_turn_by_turn() -> None:
    """The machine is ten times slower in the second half; converges are left out."""
    alone = [0.0, 1.0, 1.0, 9.0, 0.0, 10.0, 10.0, 99.0]
    took = [5.0, 1.3, 1.3, 7.0, 5.0, 10.3, 10.3, 70.0]
    assert throughput.exposed(took, alone, 4) == pytest.approx(0.3)


def test_the_interval_of_a_median() -> None:
    generator = torch.Generator().manual_seed(1)
    values = (1 + 0.1 * torch.randn(400, generator=generator)).tolist()
    low, high = throughput.interval_of_median(values)
    assert low < 1 < high
    assert high - low < 0.04
    assert throughput.interval_of_median([2.0] * 5) == (2.0, 2.0)


MODES = ["ddp", "shared", "local", "local-own", "hsdp", "hsdp-hdet"]


def options(**changes: Any) -> argparse.Namespace:
    values = {"size": "tiny", "modes": MODES, "batch": 2}
    values |= {"context": 16, "turns": 6, "interval": 3, "shards": 1, "profile": None, "ranks": 2}
    return argparse.Namespace(**(values | changes))


def turns_in_rank(rank: int, size: int, traces: str) -> Any:
    sent: list[Any] = []
    throughput.work(sent.append, options(profile=traces))
    return sent


def test_bytes_of_a_step_are_those_of_the_method(pair: Fleet, tmp_path: Any) -> None:
    """Shared: the gradients and a converge in a thousand steps. Local: parameters and both
    moments; parameters alone where each replica keeps its moments."""
    found, nothing = pair.run(turns_in_rank, str(tmp_path))
    assert nothing == []
    results = {r["mode"]: r for r in throughput.summary(found[0], options())}
    over = {name: r["bytes_over_first"] for name, r in results.items()}
    assert over["ddp"] == 1
    assert over["shared"] == pytest.approx(1 + 1 / 1000, rel=1e-4)
    assert over["local"] == pytest.approx(3 / 1000, rel=1e-2)
    assert over["local-own"] == pytest.approx(1 / 1000, rel=1e-2)
    assert not [f for f in throughput.failures(list(results.values()), "tiny") if "bytes" in f]
    assert {p.name for p in tmp_path.iterdir()} == {f"{name}.json" for name in results}


def test_a_missed_limit_is_told() -> None:
    fine = {"step_over_first": 1.0, "converge_share_at_1000": 1e-4, "tokens_over_first": 1.3}
    rows = [{"mode": name, **fine, "bytes_over_first": 1e-3} for name in ("shared", "local-own")]
    assert throughput.failures(rows, "124m") == []
    rows[0]["step_over_first"] = 1.02
    rows[1] |= {"tokens_over_first": 1.2, "bytes_over_first": 2e-3}
    missed = throughput.failures(rows, "124m")
    assert [line.split(" 1")[0] for line in missed[:1]] == ["shared: step_over_first"]
    assert len(missed) == 3
    assert len(throughput.failures(rows, "tiny")) == 2


# -- runs that learn -----------------------------------------------------------------------------


def curve(name: str, validation: list[float], seed: int = 0, losses: Any = (1.0,)) -> Curve:
    recipe = Recipe(name=name, lr=1.0, steps=len(losses), seed=seed)
    places = [(10 * (i + 1), v) for i, v in enumerate(validation)]
    return Curve(recipe=recipe, losses=list(losses), validation=places)


def test_steps_to_a_loss() -> None:
    vanilla = curve("vanilla DDP", [5, 4, 3, 2, 1.9])
    quick, never = curve("quick", [4, 2, 1, 1, 1]), curve("never", [5, 5, 5, 5, 5])
    found = {r["mode"]: r for r in time_to_loss.summary([vanilla, quick, never], window=1)}
    # The last entry is the long evaluation at the end: the goal is 2, vanilla's at step 40.
    assert found["vanilla DDP"]["steps"] == [40]
    assert found["quick"]["steps"] == [20]
    assert found["quick"]["ratio"] == 0.5
    assert found["never"]["steps"] == [None]
    assert found["never"]["ratio"] is None
    assert time_to_loss.steps_to(quick, 2.0, window=2) == 30


def test_divergence_is_measured_against_the_frequencies_of_bytes() -> None:
    text = Text(torch.tensor([0, 1] * 50, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8))
    entropy = unigram_entropy(text)
    assert entropy == pytest.approx(math.log(2))
    assert not ablation.diverged(curve("", [1], losses=[0.5] * 10), entropy)
    assert ablation.diverged(curve("", [1], losses=[0.67] * 10), entropy)
    assert ablation.diverged(curve("", [1], losses=[math.nan] * 10), entropy)
    stopped = curve("", [1], losses=[0.1] * 10)
    stopped.error = "none is finite"
    assert ablation.diverged(stopped, entropy)


def test_the_table_has_the_papers_rows() -> None:
    made = ablation.six_rows(0.003, 0.3)
    assert [r.lr for r in made] == [0.003] + [0.3] * 8
    assert [r.plain for r in made] == [True, True] + [False] * 7
    full = made[5]
    assert (full.spread, full.rule, full.warm, full.gradients) == (1 / 9, True, True, "shared")


def test_trailing_mean() -> None:
    assert trailing_mean([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]


def learn(rank: int, size: int, recipes: list[Recipe]) -> list[Curve]:
    text = Text.read([__file__])
    return [train(r, text) for r in recipes]


def test_runs_are_the_same_on_every_rank_and_plain_training_is_plain(pair: Fleet) -> None:
    """A run with a spread too small to change an fp32 learning rate is vanilla DDP's curve."""
    common = {"lr": 0.01, "steps": 8, "interval": 4}
    plain = Recipe(name="plain", **common)
    still = Recipe(name="still", spread=1e-12, **common)
    local = Recipe(name="local", gradients="local", rule=True, spread=0.1, warm=True, **common)
    mine, theirs = pair.run(learn, [plain, still, local])
    assert mine == theirs
    first, second, third = mine
    assert first.losses == pytest.approx(second.losses, rel=1e-6)
    assert first.final_validation == pytest.approx(second.final_validation, rel=1e-6)
    assert third.losses[0] != first.losses[0]
    assert all(math.isfinite(x) for x in third.losses)
    assert [step for step, _ in first.validation] == [4, 8]


def test_what_make_bench_runs_is_there_and_short() -> None:
    folder = Path(every.__file__).parent
    runnable = {
        ".".join(p.relative_to(folder).with_suffix("").parts)
        for p in folder.rglob("*.py")
        if "def main(" in p.read_text()
    }
    assert set(every.SHORT) <= runnable
    assert all({"--no-rows", "--short"} & set(words) for words in every.SHORT.values())


def test_the_one_table_has_figures_and_failures() -> None:
    code, lines = every.run("speed.scale", ["--no-rows"])
    assert code == 0
    assert [line[0] for line in lines] == ["speed.scale", "", "", ""]
    assert lines[2][1].startswith("70B on 1,024 replicas")
    code, lines = every.run("nothing_of_this_name", [])
    assert code != 0
    assert lines[-1][1] == "FAILED with exit code 1"
