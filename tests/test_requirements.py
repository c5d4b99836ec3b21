"""The pins, resolved against what torch's CUDA build requires, without a network.

torch's CPU build requires no triton. On Linux `pip install torch` installs the CUDA build, which
requires one release of it: with another one pinned, pip replaces torch.
"""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Iterable, Iterator
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from hdet_scale.doctor import LEAST_TORCH

ROOT = Path(__file__).parents[1]
METADATA = ROOT / "tests" / "support" / "torch_cuda_metadata.txt"
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]


def lines(path: Path) -> list[str]:
    """The lines of a file that are no comments."""
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def pins() -> dict[str, Version]:
    """requirements.txt: the one version that it allows of each package."""
    found = {}
    for requirement in map(Requirement, lines(ROOT / "requirements.txt")):
        (pin,) = requirement.specifier
        assert pin.operator == "==", requirement
        found[canonicalize_name(requirement.name)] = Version(pin.version)
    return found


def setup_requires() -> dict[str, list[Requirement]]:
    """setup.py: the requirements of the package ("") and of each extra."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    (extras,) = [n.value for n in tree.body if isinstance(n, ast.Assign)]
    (base,) = [
        k.value for n in ast.walk(tree) if isinstance(n, ast.Call) for k in n.keywords
        if k.arg == "install_requires"
    ]  # fmt: skip
    found = {"": ast.literal_eval(base), **ast.literal_eval(extras)}
    return {extra: [Requirement(text) for text in texts] for extra, texts in found.items()}


def torch_metadata() -> tuple[Version, list[Requirement]]:
    """The version of torch's CUDA build, and what it requires."""
    fields = HeaderParser().parsestr("\n".join(lines(METADATA)))
    return Version(fields["Version"]), [Requirement(r) for r in fields.get_all("Requires-Dist")]


def on_linux(required: Iterable[Requirement], python: str) -> Iterator[Requirement]:
    """Those that hold on Linux x86-64."""
    here = {
        "platform_system": "Linux",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
        "python_version": python,
        "python_full_version": f"{python}.0",
        "extra": "",
    }
    return (r for r in required if r.marker is None or r.marker.evaluate(here))


def conflicts(chosen: dict[str, Version], required: Iterable[Requirement]) -> list[str]:
    """The requirements that the chosen versions do not satisfy; of what was not chosen, none."""
    pairs = [(r, chosen.get(canonicalize_name(r.name))) for r in required]
    return [f"{r} and {v}" for r, v in pairs if v is not None and not r.specifier.contains(v)]


def test_the_metadata_is_that_of_the_pinned_torch() -> None:
    version, required = torch_metadata()
    assert pins()["torch"] == version
    assert {"triton", "filelock", "sympy", "nvidia-nccl-cu13"} <= {r.name for r in required}


@pytest.mark.parametrize("python", PYTHONS)
def test_the_pins_keep_torch_and_its_triton(python: str) -> None:
    required = list(on_linux(torch_metadata()[1], python))
    assert conflicts(pins(), required) == []
    assert [str(r.specifier) for r in required if r.name == "triton"] == [f"=={pins()['triton']}"]


def test_all_that_torch_requires_beside_cuda_is_pinned() -> None:
    """What is not pinned could be resolved to a release that torch does not work with."""
    of_cuda = ("nvidia-", "cuda-")
    required = [r.name for r in torch_metadata()[1] if not r.name.startswith(of_cuda)]
    assert [name for name in required if canonicalize_name(name) not in pins()] == []


@pytest.mark.parametrize(
    ("package", "version"), [("triton", "3.9.0"), ("sympy", "1.12"), ("setuptools", "70.0")]
)
def test_another_version_is_a_conflict(package: str, version: str) -> None:
    required = on_linux(torch_metadata()[1], "3.11")
    found = conflicts({**pins(), package: Version(version)}, required)
    (named,) = [conflict for conflict in found if conflict.startswith(package)]
    assert named.endswith(f" and {version}")


@pytest.mark.parametrize("extra", sorted(setup_requires()))
def test_the_package_and_its_extras_admit_the_pins(extra: str) -> None:
    """So that `pip install .[EXTRA]` beside the pinned torch and its triton replaces neither."""
    assert conflicts(pins(), setup_requires()[extra]) == []


def test_the_package_asks_for_torch_and_the_extra_for_its_triton() -> None:
    names = {extra: {r.name for r in required} for extra, required in setup_requires().items()}
    assert names[""] == {"torch"}
    assert names["triton"] == {"triton"}


def test_the_doctor_asks_for_the_torch_that_the_package_asks_for() -> None:
    (torch,) = setup_requires()[""]
    assert str(torch.specifier) == f">={'.'.join(map(str, LEAST_TORCH))}"


def test_the_pins_agree_among_themselves() -> None:
    """Every pinned package that is installed here, torch by the metadata of its CUDA build."""
    chosen, wrong, seen = pins(), [], 0
    for name in chosen:
        try:
            texts = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        seen += 1
        required = torch_metadata()[1] if name == "torch" else map(Requirement, texts)
        wrong += [f"{name}: {c}" for c in conflicts(chosen, on_linux(required, "3.11"))]
    assert wrong == []
    assert seen > 80
