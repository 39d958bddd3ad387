"""Where tensors lie in memory: read byte by byte from the addresses of the table."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_real.realloc_ops.execution.regions import Regions, Runs, bytes_from

_DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)


@st.composite
def _views(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    gaps = [draw(st.tuples(st.integers(0, 2), st.integers(0, 2))) for _ in shape]
    whole = [extent + before + behind for extent, (before, behind) in zip(shape, gaps, strict=True)]
    dtype = draw(st.sampled_from(_DTYPES))
    count = int(np.prod(whole, dtype=int)) * dtype.itemsize
    values = (torch.arange(count) * 37 % 251).to(torch.uint8).view(dtype).view(whole)
    view = values[tuple(slice(b, b + n) for n, (b, _) in zip(shape, gaps, strict=True))]
    if draw(st.booleans()):
        view = view.permute(draw(st.permutations(range(view.dim()))))
    if view.dim() and draw(st.booleans()):
        view = view.narrow(0, 0, 1).expand(draw(st.integers(1, 3)), *view.shape[1:])
    return view


def _read(table: np.ndarray) -> bytes:
    return b"".join(ctypes.string_at(int(address), int(size)) for address, size in table)


def _bytes(views: list[torch.Tensor]) -> bytes:
    dense = [torch.empty(view.shape, dtype=view.dtype).copy_(view) for view in views]
    return b"".join(bytes(tensor.view(-1).view(torch.uint8).tolist()) for tensor in dense)


@given(views=st.lists(_views(), min_size=1, max_size=4))
def test_regions_in_order_are_the_bytes(views: list[torch.Tensor]) -> None:
    regions = Regions(*views)
    table = regions.table()
    assert _read(table) == _bytes(views)
    assert regions.num_bytes == table[:, 1].sum() == len(_bytes(views))


@given(views=st.lists(_views(), min_size=1, max_size=4), data=st.data(), most=st.integers(1, 5))
def test_a_table_is_read_from_any_byte(views: list[torch.Tensor], data: st.DataObject, most: int) -> None:
    table = Regions(*views).table()
    before, content = table.copy(), _bytes(views)
    start = data.draw(st.integers(0, len(content) - 1))
    stop = data.draw(st.one_of(st.none(), st.integers(start + 1, len(content))))
    window = bytes_from(table, start, most, stop)
    assert 1 <= len(window) <= most
    found = _read(window)
    assert content[start:stop].startswith(found)
    assert found == content[start:stop] or len(window) == most
    assert np.array_equal(table, before)


def test_neighbours_are_one_region() -> None:
    whole = torch.zeros(6, 8, 10)
    for view, expected in (
        (whole, (1920, ())),
        (whole[2:4], (640, ())),
        (whole[:, 2:4], (80, ((6, 320),))),
        (whole[:, :, 3:5], (8, ((48, 40),))),
        (whole[1:3, 2:5, 3:5], (8, ((2, 320), (3, 40)))),
        (whole[3, 5, 7], (4, ())),
        (whole[:, 5:6, 7], (4, ((6, 320),))),
    ):
        assert Runs.of(view) == Runs(*expected)
        assert Runs.of(view).num_regions == len(Regions(view).table())


def test_a_storage_may_come_and_go() -> None:
    tensor = torch.arange(6.0)
    regions = Regions(tensor)
    first = regions.table()[0, 0]
    others = [torch.zeros(6) for _ in itertools.repeat(None, 3)]
    tensor.set_(others[1].untyped_storage(), 0, (6,))
    assert regions.table()[0, 0] == others[1].data_ptr() != first
