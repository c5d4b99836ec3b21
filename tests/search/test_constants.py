"""The tuned numbers are few, in one file, and each says what it rests on."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import hdet_scale.search

MOST = 25
FILES = sorted(Path(hdet_scale.search.__file__).parent.glob("*.py"))
TUNED = "constants"
SHAPES = {"decision.NEAR"}
"""Containers with numbers in them: which rates are tried is the method itself."""


def assigned(body: list[ast.stmt]) -> Iterator[tuple[int, str, ast.expr]]:
    """Position, name and value of each upper-case name that is assigned, in classes too."""
    for at, statement in enumerate(body):
        if isinstance(statement, ast.ClassDef):
            yield from assigned(statement.body)
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            one = isinstance(statement, ast.AnnAssign)
            for target in [statement.target] if one else statement.targets:
                if isinstance(target, ast.Name) and target.id.isupper():
                    yield at, target.id, statement.value


def parsed(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text()).body


def constants() -> list[str]:
    return [name for _, name, _ in assigned(parsed(FILES[0].with_name(f"{TUNED}.py")))]


def test_there_are_few_and_each_is_one_number() -> None:
    module = importlib.import_module(f"hdet_scale.search.{TUNED}")
    names = constants()
    assert 0 < len(names) == len(set(names)) <= MOST
    assert all(type(getattr(module, name)) in (int, float) for name in names)
    assert set(names) == {name for name in vars(module) if name.isupper()}


def test_each_has_a_docstring() -> None:
    body = parsed(FILES[0].with_name(f"{TUNED}.py"))
    for at, name, _ in assigned(body):
        below = body[at + 1] if at + 1 < len(body) else None
        value = below.value if isinstance(below, ast.Expr) else None
        text = value.value if isinstance(value, ast.Constant) else None
        assert isinstance(text, str), f"{name} has no docstring"
        assert len(text) > 20, f"{name} does not say what it rests on"


def test_each_is_used() -> None:
    used = {
        node.id
        for file in FILES
        if file.stem != TUNED
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Name)
    }
    assert set(constants()) <= used


@pytest.mark.parametrize("file", [f for f in FILES if f.stem != TUNED], ids=lambda f: f.stem)
def test_no_other_file_of_the_search_has_one(file: Path) -> None:
    """Versions of states are not tuned."""
    for _, name, value in assigned(parsed(file)):
        numbers = [
            node
            for node in ast.walk(value)
            if isinstance(node, ast.Constant) and type(node.value) in (int, float)
        ]
        allowed = name.endswith("VERSION") or f"{file.stem}.{name}" in SHAPES
        assert allowed or not numbers, f"{file.name} defines {name}"
