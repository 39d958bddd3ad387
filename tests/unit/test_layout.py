"""Ranks, coordinates, groups and the text form."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_real.errors import PlanError
from megatron_real.layout import (
    Coordinates,
    Layout,
    Mesh,
    coordinates_of,
    format_placement,
    parse_placement,
    rank_groups,
    rank_of,
    stage_layers,
)
from tests.property.strategies import layouts


def test_tp_varies_fastest_and_pp_slowest() -> None:
    """d2t2p2 on ranks 4..11, written out."""
    mesh, layout = Mesh(4, 12), Layout(dp=2, tp=2, pp=2)
    at = [coordinates_of(rank, mesh, layout) for rank in mesh.ranks]
    assert [c.tp for c in at] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [c.dp for c in at] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [c.pp for c in at] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert list(rank_groups(mesh, layout, "tp")) == [(4, 5), (6, 7), (8, 9), (10, 11)]
    assert list(rank_groups(mesh, layout, "dp")) == [(4, 6), (5, 7), (8, 10), (9, 11)]
    assert list(rank_groups(mesh, layout, "pp")) == [(4, 8), (5, 9), (6, 10), (7, 11)]
    assert list(rank_groups(mesh, layout, "tp", "pp")) == [(4, 5, 8, 9), (6, 7, 10, 11)]


def test_context_parallel_ranks_lie_between_tp_and_dp() -> None:
    mesh, layout = Mesh(0, 8), Layout(dp=2, tp=2, cp=2)
    assert list(rank_groups(mesh, layout, "cp")) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert list(rank_groups(mesh, layout, "dp")) == [(0, 4), (1, 5), (2, 6), (3, 7)]


@given(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]).flatmap(layouts), st.integers(0, 5))
def test_groups_partition_the_mesh_and_coordinates_invert(layout: Layout, start: int) -> None:
    mesh = Mesh(start, start + layout.size)
    for rank in mesh.ranks:
        assert rank_of(coordinates_of(rank, mesh, layout), mesh, layout) == rank
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp}
    for count in range(5):
        for axes in itertools.combinations(sizes, count):
            groups = list(rank_groups(mesh, layout, *axes))
            assert sorted(rank for group in groups for rank in group) == list(mesh.ranks)
            expected = 1
            for axis in axes:
                expected *= sizes[axis]
            assert {len(group) for group in groups} == {expected}


@given(
    layout=st.builds(
        Layout,
        dp=st.integers(1, 99),
        tp=st.integers(2, 64),
        pp=st.integers(2, 4),
        cp=st.integers(1, 8),
        ep=st.integers(1, 8),
        etp=st.none() | st.integers(1, 8),
        sp=st.booleans(),
    ),
    start=st.integers(0, 1000),
    uneven=st.booleans(),
    vpp=st.integers(1, 3),
)
def test_what_is_printed_is_parsed(layout: Layout, start: int, uneven: bool, vpp: int) -> None:
    layers = tuple(range(layout.pp * vpp)) if uneven else None
    layout = Layout(
        dp=layout.dp,
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.etp,
        sp=layout.sp,
        vpp=vpp,
        layers=layers,
    )
    assert Layout.parse(str(layout)) == layout
    mesh = Mesh(start, start + layout.size)
    assert parse_placement(format_placement(mesh, layout)) == (mesh, layout)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(dp=2, tp=2, pp=2), "d2t2p2"),
        (Layout(pp=2, vpp=2), "d1t1p2v2"),
        (Layout(pp=2, layers=(1, 3)), "d1t1p2l1.3"),
        (Layout(tp=2, cp=2, ep=4, etp=1, sp=True), "d1t2p1c2e4x1s"),
    ],
)
def test_text_form(layout: Layout, text: str) -> None:
    assert str(layout) == text
    assert Layout.parse(text) == layout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("d2t2", "expected dNtNpN"),
        ("d0t1p1", "found dp=0; expected at least 1"),
        ("d1t1p1v2", "vpp=2 with pp=1"),
        ("d1t1p1s", "sp with tp=1"),
        ("d1t1p2l1", "found 1 entries in layers; expected pp.vpp = 2"),
    ],
)
def test_bad_layouts_are_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("d2t2p2", "found window ''"),
        ("d2t2p2@0", "expected FIRST-LAST"),
        ("d2t2p2@0-3", r"needs 8 ranks \(dp.tp.pp.cp\); the window names 4"),
        ("d1t1p1@3-2", r"found ranks \[3, 3\)"),
    ],
)
def test_bad_placements_are_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_placement(text)


def test_meshes() -> None:
    mesh = Mesh(2, 4)
    assert (mesh.size, list(mesh.ranks), str(mesh)) == (2, [2, 3], "2-3")
    assert 3 in mesh
    assert 4 not in mesh
    assert mesh.overlaps(Mesh(3, 8))
    assert not mesh.overlaps(Mesh(0, 2))
    assert not mesh.overlaps(Mesh(4, 6))
    with pytest.raises(PlanError, match=r"\[2, 2\)"):
        Mesh(2, 2)
    with pytest.raises(PlanError, match="rank 4 is not in the mesh 2-3"):
        coordinates_of(4, mesh, Layout(dp=2))
    with pytest.raises(PlanError, match=r"axes .'ep'."):
        list(rank_groups(mesh, Layout(dp=2), "ep"))
    assert rank_of(Coordinates(tp=0, cp=0, dp=1, pp=0), mesh, Layout(dp=2)) == 3


def test_layers_of_stages() -> None:
    assert stage_layers(4, Layout(pp=2)) == (((0, 1),), ((2, 3),))
    # Interleaved: chunk c of stage s is virtual stage c * pp + s.
    assert stage_layers(8, Layout(pp=2, vpp=2)) == (((0, 1), (4, 5)), ((2, 3), (6, 7)))
    assert stage_layers(4, Layout(pp=2, layers=(1, 3))) == (((0,),), ((1, 2, 3),))
    assert stage_layers(4, Layout(pp=2, vpp=2, layers=(1, 0, 2, 1))) == (((0,), (1, 2)), ((), (3,)))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
def test_every_layer_is_in_one_stage(pp: int, vpp: int, per_stage: int) -> None:
    vpp = vpp if pp > 1 else 1
    stages = stage_layers(pp * vpp * per_stage, Layout(pp=pp, vpp=vpp))
    assert sorted(layer for stage in stages for chunk in stage for layer in chunk) == list(
        range(pp * vpp * per_stage)
    )


def test_layers_that_do_not_divide_are_refused() -> None:
    with pytest.raises(
        PlanError, match=r"30 layers do not divide over pp\*vpp = 4 stages \(2 would be left over\)"
    ):
        stage_layers(30, Layout(pp=4))
    with pytest.raises(PlanError, match=r"layers \[1, 2\] sum to 3; the model has 4"):
        stage_layers(4, Layout(pp=2, layers=(1, 2)))
