"""What `hdet_scale` and `hdet_scale.optim` export, and when Triton is imported for it."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import hdet_scale
from hdet_scale import optim


def test_triton_is_imported_only_when_an_optimizer_is_asked_for() -> None:
    program = """
        import sys
        import hdet_scale.optim
        import hdet_scale.converge.pipeline
        assert "triton" not in sys.modules
        from hdet_scale import FusedAdamW
        assert "hdet_scale.kernels.adamw" in sys.modules
        assert "hdet_scale.kernels.lion" not in sys.modules
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_new_optimizer_is_exported_by_the_name_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file fused_newcomer.py is enough; nothing else names it."""
    (tmp_path / "fused_newcomer.py").write_text("class FusedNewcomer: ...\n")
    monkeypatch.setattr(optim, "__path__", [*optim.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "hdet_scale.optim.fused_newcomer", raising=False)
    assert hdet_scale.FusedNewcomer is optim.FusedNewcomer
    assert optim.FusedNewcomer.__module__ == "hdet_scale.optim.fused_newcomer"
    sys.modules.pop("hdet_scale.optim.fused_newcomer")


def test_what_is_listed_is_there_and_nothing_else_is_made_up() -> None:
    assert all(getattr(optim, name).__name__ == name for name in optim.__all__)
    for name in ("FusedNothing", "Fused", "nothing"):
        with pytest.raises(AttributeError, match=name):
            getattr(optim, name)
