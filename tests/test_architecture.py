"""The architecture itself: who imports whom, how large things are, what is named how."""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = {"hdet_scale": ROOT / "hdet_scale", "hdet_scale.kernels": ROOT / "kernels"}
ORDER = [
    # from the bottom: each may import what stands before it
    "topology", "kernels", "optim", "factors", "converge", "engines", "method", "rules", "search",
    "config", "runs", "phases", "ddp", "schedulers", "fsdp", "deepspeed", "find", "models", "plan",
    "loops", "acceptance", "train", "hf", "lightning", "doctor", "demo", "cli",
]  # fmt: skip
DOORS = {
    "config", "schedulers", "factors", "topology", "ddp", "fsdp", "deepspeed", "find", "hf",
    "lightning", "cli", "doctor", "demo", "train",
}  # fmt: skip
VOCABULARY = {"topology", "factors", "config"}
"""Doors that name what the rooms speak of: Replicas, Factor, HDETConfig. Rooms may import them."""
MOST_LINES = 400
THIN = 300
"""Lines of code of a door's file, without docstrings, comments and blank lines. OneCycleAutoLR's
signature is the authors' and takes a quarter of that; what has more to do belongs in a room."""
ENGINE_WORDS = {"DistributedDataParallel", "DTensor", "FSDPModule", "ds_tensor", "ds_id"}
KNOWS_ENGINES = {"ddp", "fsdp", "deepspeed", "topology", "optim.shards", "train.torch_job", "demo"}
"""An engine's own files; topology, which reads meshes; the optimizers' shards; and the two commands
that build and wrap a model as a user's script does."""


def modules() -> dict[str, Path]:
    """Every module by its name below hdet_scale; a folder's `__init__` by the folder's."""
    found = {}
    for name, home in PACKAGE.items():
        for path in sorted(home.rglob("*.py")):
            if path.is_symlink() or "kernels" in path.relative_to(home).parts[:-1]:
                continue  # an editable install may link kernels/ into the package
            parts = [p for p in path.relative_to(home).with_suffix("").parts if p != "__init__"]
            found[".".join([*name.split(".")[1:], *parts])] = path
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imported(name: str) -> set[str]:
    """The modules of the package that a module imports, inside of functions too; not for types
    alone."""
    found: set[str] = set()
    typed = {
        id(n)
        for test in ast.walk(TREES[name])
        if isinstance(test, ast.If) and "TYPE_CHECKING" in ast.dump(test.test)
        for n in ast.walk(test)
    }
    for node in ast.walk(TREES[name]):
        if id(node) in typed:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hdet_scale"):
            base = (node.module or "").removeprefix("hdet_scale").removeprefix(".")
            below = [f"{base}.{alias.name}".removeprefix(".") for alias in node.names]
            deeper = {x for x in below if x in MODULES}
            found |= deeper or {base}
        elif isinstance(node, ast.Import):
            found |= {
                a.name.removeprefix("hdet_scale.")
                for a in node.names
                if a.name.startswith("hdet_scale.")
            }
    return {x for x in found if x in MODULES and x not in ("", name)}


def unit(name: str) -> str:
    """The room or door that a module belongs to."""
    return name.partition(".")[0]


def test_every_room_and_door_has_its_place_in_the_order() -> None:
    assert {unit(name) for name in MODULES if name} == set(ORDER)


def test_imports_go_downwards_only() -> None:
    place = {name: i for i, name in enumerate(ORDER)}
    upwards = [
        f"{name} imports {other}"
        for name in MODULES
        if name
        for other in imported(name)
        if unit(other) != unit(name) and place[unit(other)] > place[unit(name)]
    ]
    assert not upwards


def test_rooms_import_no_doors_but_the_vocabulary() -> None:
    """Except loops, which wrap a trainer's scheduler in an AutoLR."""
    wrong = [
        f"{name} imports {other}"
        for name in MODULES
        if name and unit(name) not in DOORS
        for other in imported(name)
        if unit(other) in DOORS - VOCABULARY
        and (unit(name), unit(other)) != ("loops", "schedulers")
    ]
    assert not wrong


def test_there_are_no_cycles() -> None:
    graph = {name: imported(name) for name in MODULES if name}

    def reaches(start: str) -> bool:
        seen, open_ = set(), list(graph[start])
        while open_:
            name = open_.pop()
            if name == start:
                return True
            if name not in seen:
                seen.add(name)
                open_ += graph.get(name, ())
        return False

    assert not [name for name in graph if reaches(name)]


@pytest.mark.parametrize("name", [n for n in MODULES if n])
def test_no_file_is_too_long(name: str) -> None:
    assert len(MODULES[name].read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("door", sorted(DOORS))
def test_doors_are_thin(door: str) -> None:
    path = MODULES[door]
    docs = {
        line
        for node in ast.walk(TREES[door])
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    code = {t.start[0] for t in tokens if t.type not in skipped and t.string} - docs
    assert len(code) <= THIN
    assert len(ast.get_docstring(TREES[door]) or "") > 60, "a door's docstring is its manual"


@pytest.mark.parametrize("room", sorted(set(ORDER) - DOORS))
def test_a_room_says_what_happens_in_it(room: str) -> None:
    assert MODULES[room].name == "__init__.py"
    assert len(ast.get_docstring(TREES[room]) or "") > 60


def test_no_two_modules_have_one_name_or_differ_by_a_letter() -> None:
    names = [n.rpartition(".")[2] for n in MODULES if n and not n.endswith("__main__")]
    rooms = set(ORDER)
    leaves = sorted(n for n in names if n not in rooms or names.count(n) > 1)
    alike = [(a, b) for a, b in itertools.combinations(leaves, 2) if _distance_below_two(a, b)]
    assert not alike


def _distance_below_two(a: str, b: str) -> bool:
    """Whether one change, insertion or deletion makes them the same."""
    if abs(len(a) - len(b)) > 1:
        return False
    if len(a) == len(b):
        return sum(x != y for x, y in zip(a, b, strict=True)) <= 1
    short, long = sorted((a, b), key=len)
    return any(long[:i] + long[i + 1 :] == short for i in range(len(long)))


def test_no_two_public_classes_have_one_name() -> None:
    found = [
        node.name
        for tree in TREES.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    found.remove("HDETCallback")  # the Trainer's and Lightning's: each is found in its own door
    assert sorted(found) == sorted(set(found))


def test_no_constant_of_one_name_has_two_values() -> None:
    values: dict[str, set[str]] = {}
    for tree in TREES.values():
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if name.isupper() and isinstance(node.value, ast.Constant | ast.BinOp):
                    values.setdefault(name, set()).add(ast.unparse(node.value))
    assert not {name: seen for name, seen in values.items() if len(seen) > 1}


def _classes_derived_from(root: str) -> set[str]:
    found = {root}
    while True:
        more = {
            node.name
            for tree in TREES.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            and any(isinstance(b, ast.Name) and b.id in found for b in node.bases)
        }
        if more <= found:
            return found
        found |= more


def _isinstance_checks(classes: set[str]) -> Iterator[tuple[str, str]]:
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            if node.func.id == "isinstance":
                asked = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                yield from ((name, kind) for kind in asked & classes)


@pytest.mark.parametrize("root", ["Wire", "Engine"])
def test_nobody_asks_which_wire_or_engine_it_is(root: str) -> None:
    classes = _classes_derived_from(root)
    assert len(classes) > 3
    homes = {
        node.name: unit(name)
        for name, tree in TREES.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    asked = [
        f"{name} asks for {kind}"
        for name, kind in _isinstance_checks(classes)
        if root == "Wire" or unit(name) != homes[kind]
    ]
    assert not asked


def test_only_engines_know_ddp_dtensor_and_zero() -> None:
    knowing = {
        name
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and node.id in ENGINE_WORDS)
        or (isinstance(node, ast.Attribute) and node.attr in ENGINE_WORDS)
        or (isinstance(node, ast.alias) and node.name in ENGINE_WORDS)
    }
    assert {n for n in knowing if n not in KNOWS_ENGINES and unit(n) not in KNOWS_ENGINES} == set()


@pytest.mark.slow
def test_a_step_descends_into_few_files() -> None:
    from tests.support import descents
    from tests.support.fleet import Fleet

    fleet = Fleet(2)
    try:
        found = fleet.run(descents.measured)[0]
    finally:
        fleet.stop()
    assert {
        kind: len(calls) for kind, calls in found.items() if len(calls) > descents.LIMITS[kind]
    } == {}


TASKS = {
    "a wire format, e.g. fp8",
    "how often the watch evaluates",
    "a new engine",
    "a new factor, e.g. gradient clip norm",
    "the share of steps that a search may cost",
    "a new figure of the report",
    "a new fused optimizer",
    "what an FSDP2 checkpoint holds",
    "the message for ZeRO with one replica",
    "a new config key",
}


def test_contributing_names_at_most_two_files_for_each_task() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    table = {row[0]: row[1] for row in rows if row[0] in TASKS}
    assert set(table) == TASKS
    for task, said in table.items():
        paths = re.findall(r"(a new )?`((?:hdet_scale|kernels|tests)/[\w/.]+\.\w+)`", said)
        assert 1 <= len(paths) <= 2, task
        for fresh, path in paths:
            assert fresh or (ROOT / path).is_file(), path
