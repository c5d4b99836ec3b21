"""The column of gradient addresses: what is uploaded, and what a CUDA graph capture gets."""

import pytest
import torch

from hdet_scale.kernels import addresses
from hdet_scale.kernels.addresses import CAPTURES, AddressColumn

CPU = torch.device("cpu")


def with_spares(rows: int) -> AddressColumn:
    """A column with what a GPU sets aside for captures; pinned memory needs one."""
    column = AddressColumn(rows, CPU)
    blank = torch.zeros(rows, dtype=torch.int64)
    column._spares = [(blank.clone(), blank.clone()) for _ in range(CAPTURES)]
    return column


def test_addresses_are_uploaded_only_when_one_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads: list[list[int]] = []
    upload = addresses.upload

    def noted(target: torch.Tensor, host: torch.Tensor) -> None:
        uploads.append(host.tolist())
        upload(target, host)

    monkeypatch.setattr(addresses, "upload", noted)
    column = AddressColumn(2, CPU)
    places = {column.point_to(at).data_ptr() for at in ([16, 32], [16, 32], [16, 48])}
    assert uploads == [[16, 32], [16, 48]]
    assert places == {column.values.data_ptr()}
    assert column.values.tolist() == [16, 48]
    assert not column.captured


def test_each_capture_has_a_column_that_later_steps_leave_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph that was captured with gradients at 1 must not read the addresses of a later step."""
    column = with_spares(1)
    column.point_to([5])
    monkeypatch.setattr(addresses, "capturing", lambda _: True)
    captured = [column.point_to([at]) for at in (1, 2)]
    monkeypatch.setattr(addresses, "capturing", lambda _: False)
    assert column.point_to([7]).tolist() == [7]
    assert [c.item() for c in captured] == [1, 2]
    assert len({c.data_ptr() for c in (*captured, column.values)}) == 3
    assert column.captured


def test_a_capture_takes_no_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory cannot be allocated inside a capture: what was set aside is filled."""
    column = with_spares(1)
    hosts = {host.data_ptr() for _, host in column._spares}
    monkeypatch.setattr(addresses, "capturing", lambda _: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda _: pytest.fail("pinned in a capture"))
    for at in range(CAPTURES):
        column.point_to([at])
    assert {host.data_ptr() for _, host in column._captured} == hosts
    assert [host.item() for _, host in column._captured] == list(range(CAPTURES))
    with pytest.raises(RuntimeError, match="take one step"):
        column.point_to([0])
