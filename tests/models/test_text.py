"""Bytes, the split, and batches that are a pure function of (seed, step, rank)."""

from pathlib import Path

import pytest
import torch

from hdet_scale.models.text import Text, batch, evaluation, standard_library


@pytest.fixture
def counting() -> torch.Tensor:
    """A text whose bytes tell their place, as long as it is below 256."""
    return torch.arange(200, dtype=torch.uint8)


def test_the_standard_library_is_there_in_one_order() -> None:
    paths = standard_library()
    assert paths == standard_library()
    names = [p.name for p in paths]
    assert "argparse.py" in names
    assert all(n.endswith(".py") for n in names)
    assert not any("site-packages" in p.parts or "__pycache__" in p.parts for p in paths)
    root = next(p.parent for p in paths if p.name == "argparse.py")
    inside = [p.relative_to(root).as_posix() for p in paths]
    assert inside == sorted(inside)


def test_files_lie_one_behind_the_other_and_the_end_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abcdef")
    (tmp_path / "b").write_bytes("ü\x00z".encode())
    text = Text.read([tmp_path / "a", str(tmp_path / "b")], held_out=0.3)
    assert bytes(text.train.tolist()) == b"abcdef\xc3"
    assert bytes(text.validation.tolist()) == b"\xbc\x00z"
    assert text.train.dtype == torch.uint8
    shared = text.train.untyped_storage().data_ptr() == text.validation.untyped_storage().data_ptr()
    assert shared, "the split must be views: a copy would double the memory"


def test_held_out_text_is_never_drawn(counting: torch.Tensor) -> None:
    text = Text(counting[:150], counting[150:])
    for step in range(200):
        inputs, targets = batch(text.train, size=4, context=8, seed=0, step=step, rank=0)
        assert int(inputs.max()) < 150
        assert int(targets.max()) < 150


def test_a_batch_depends_on_seed_step_and_rank_alone(counting: torch.Tensor) -> None:
    def draw(seed: int = 0, step: int = 0, rank: int = 0) -> list[int]:
        return batch(counting, size=16, context=4, seed=seed, step=step, rank=rank)[0][
            :, 0
        ].tolist()

    before = torch.get_rng_state()
    first = draw(step=7)
    draw(step=8)
    torch.rand(3)
    assert draw(step=7) == first
    assert len({tuple(draw(*key)) for key in [(0, 7, 0), (1, 7, 0), (0, 8, 0), (0, 7, 1)]}) == 4
    torch.set_rng_state(before)
    draw()
    assert torch.equal(before, torch.get_rng_state())


def test_targets_are_the_inputs_one_byte_on(counting: torch.Tensor) -> None:
    inputs, targets = batch(counting, size=5, context=12, seed=0, step=0, rank=0)
    assert inputs.shape == targets.shape == (5, 12)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)


def test_every_window_can_be_drawn(counting: torch.Tensor) -> None:
    short = counting[:7]
    starts = batch(short, size=200, context=4, seed=0, step=0, rank=0)[0][:, 0]
    assert set(starts.tolist()) == {0, 1, 2}
    only = batch(short[:5], size=2, context=4, seed=0, step=0, rank=0)
    assert only[0].tolist() == [[0, 1, 2, 3]] * 2


def test_evaluation_reaches_from_the_first_byte_to_the_last(counting: torch.Tensor) -> None:
    batches = list(evaluation(counting, size=4, context=10, batches=3))
    assert [tuple(x.shape) for x, _ in batches] == [(4, 10)] * 3
    assert int(batches[0][0][0, 0]) == 0
    assert int(batches[-1][1][-1, -1]) == 199
    again = evaluation(counting, size=4, context=10, batches=3)
    assert all(torch.equal(x, y) for (x, _), (y, _) in zip(batches, again, strict=True))


def test_wrong_input_is_refused(tmp_path: Path, counting: torch.Tensor) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="empty"):
        Text.read([tmp_path / "empty"])
    with pytest.raises(ValueError, match=r"held_out must be a share in \[0, 1\), got 1"):
        Text.read([tmp_path / "empty"], held_out=1)
    with pytest.raises(FileNotFoundError):
        Text.read([tmp_path / "missing"])
    with pytest.raises(ValueError, match=r"context=200 and its target need 201 tokens.*has 200"):
        batch(counting, size=1, context=200, seed=0, step=0, rank=0)


@pytest.mark.parametrize(("kind", "top"), [("uint8", 255), ("uint16", 65_535), ("uint32", 2**31)])
def test_a_token_file_is_mapped(kind: str, top: int, tmp_path: Path) -> None:
    tokens = [0, 1, top, top - 1, 7, 300 % (top + 1)] * 20
    path = tmp_path / "tokens.bin"
    width = {"uint8": 1, "uint16": 2, "uint32": 4}[kind]
    path.write_bytes(b"".join(t.to_bytes(width, "little") for t in tokens))
    found = Text.mapped(path, kind, held_out=0.1)
    assert found.train.numel() == 108
    assert found.validation.numel() == 12
    inputs, targets = batch(found.train, size=4, context=6, seed=0, step=0, rank=0)
    assert inputs.dtype == torch.int64
    for row, following in zip(inputs.tolist(), targets.tolist(), strict=True):
        window = [*row, following[-1]]
        assert any(window == tokens[i : i + 7] for i in range(102))


def test_a_token_file_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(b"123")
    with pytest.raises(ValueError, match="3 bytes, which is no whole number of uint16 tokens"):
        Text.mapped(path)
    with pytest.raises(ValueError, match="token_type must be one of"):
        Text.mapped(path, "int64")
    with pytest.raises(FileNotFoundError, match="no token file at"):
        Text.mapped(tmp_path / "none.bin")
