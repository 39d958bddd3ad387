"""Layouts: what Megatron is shown and gets back, equal groups, no leaks, models under several at once."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_real.errors import ConfigError, PeerError, PlanError
from megatron_real.hooks import cpu_device
from megatron_real.layout import Layout, Mesh, parse_placement, rank_groups
from megatron_real.process_groups import ProcessGroups
from tests.harness import run_ranks

cpu_device.install_cpu_device()
pytest.importorskip("megatron.core")

from megatron.core import mpu, num_microbatches_calculator, parallel_state  # noqa: E402
from megatron.core.tensor_parallel import random as megatron_random  # noqa: E402

from megatron_real.hooks.megatron_state import blank_globals, capture_globals  # noqa: E402
from megatron_real.hooks.parallel_state import (  # noqa: E402
    ParallelLayout,
    ParallelLayouts,
    active_layout,
)

pytestmark = [pytest.mark.megatron, pytest.mark.dist]

GLOBALS_0_19_2 = {
    "_CONTEXT_PARALLEL_GLOBAL_RANKS",
    "_CONTEXT_PARALLEL_GROUP",
    "_DATA_PARALLEL_GLOBAL_RANKS",
    "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP",
    "_DATA_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP_GLOO",
    "_DATA_PARALLEL_GROUP_WITH_CP",
    "_DATA_PARALLEL_GROUP_WITH_CP_GLOO",
    "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",
    "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
    "_EMBEDDING_GLOBAL_RANKS",
    "_EMBEDDING_GROUP",
    "_EXPERT_DATA_PARALLEL_GROUP",
    "_EXPERT_DATA_PARALLEL_GROUP_GLOO",
    "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
    "_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS",
    "_EXPERT_GTP_WEIGHT_REMAT_GROUP",
    "_EXPERT_MODEL_PARALLEL_GROUP",
    "_EXPERT_MODEL_PARALLEL_RANKS",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP",
    "_EXPERT_TENSOR_PARALLEL_GROUP",
    "_GLOBAL_MEMORY_BUFFER",
    "_GTP_WEIGHT_REMAT_GLOBAL_RANKS",
    "_GTP_WEIGHT_REMAT_GROUP",
    "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS",
    "_HYBRID_DP_CP_GROUPS",
    "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
    "_MODEL_PARALLEL_GLOBAL_RANKS",
    "_MODEL_PARALLEL_GROUP",
    "_MPU_DATA_PARALLEL_RANK",
    "_MPU_DATA_PARALLEL_WORLD_SIZE",
    "_MPU_EXPERT_MODEL_PARALLEL_RANK",
    "_MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE",
    "_MPU_EXPERT_TENSOR_PARALLEL_RANK",
    "_MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE",
    "_MPU_PIPELINE_MODEL_PARALLEL_RANK",
    "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
    "_MPU_TENSOR_MODEL_PARALLEL_RANK",
    "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE",
    "_PIPELINE_GLOBAL_RANKS",
    "_PIPELINE_MODEL_PARALLEL_GROUP",
    "_POSITION_EMBEDDING_GLOBAL_RANKS",
    "_POSITION_EMBEDDING_GROUP",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP",
    "_TENSOR_AND_DATA_PARALLEL_GROUP",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
    "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS",
    "_TENSOR_MODEL_PARALLEL_GROUP",
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK",
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
    "_global_process_group_list",
}
TEN = (
    "d1t4p1@0-3",
    "d4t1p1@0-3",
    "d1t1p4@0-3",
    "d2t2p1@0-3",
    "d1t2p2@0-3",
    "d2t1p2@0-3",
    "d1t2p1@0-1",
    "d2t1p1@2-3",
    "d1t1p2@0-1",
    "d1t1p2v2@2-3",
)


@pytest.fixture(autouse=True)
def _device(cpu_device: None) -> None:
    """The device, also after tests that took it away."""


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _build(layouts: ParallelLayouts, text: str) -> ParallelLayout:
    return layouts.build(*parse_placement(text))


def _side() -> list[Any]:
    return [
        megatron_random._CUDA_RNG_STATE_TRACKER,
        megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED,
        num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR,
    ]


@contextlib.contextmanager
def _unchanged() -> Iterator[None]:
    """What Megatron sees after the block is, object by object, what it saw before."""
    globals_, side, rng = capture_globals(), _side(), torch.get_rng_state()
    yield
    after = capture_globals()
    assert set(after) == set(globals_)
    for name, value in globals_.items():
        assert after[name] is value, name
    assert all(left is right for left, right in zip(_side(), side, strict=True))
    assert torch.equal(torch.get_rng_state(), rng)


def _assert_shows(text: str) -> None:
    mesh, layout = parse_placement(text)
    assert mpu.get_tensor_model_parallel_world_size() == layout.tp
    assert mpu.get_pipeline_model_parallel_world_size() == layout.pp
    assert mpu.get_data_parallel_world_size() == layout.dp
    vpp = mpu.get_virtual_pipeline_model_parallel_world_size()
    assert vpp == (layout.vpp if layout.vpp > 1 else None)
    assert dist.get_process_group_ranks(mpu.get_model_parallel_group()) == list(
        _group_of(dist.get_rank(), rank_groups(mesh, layout, "tp", "pp"))
    )


def _group_of(rank: int, groups: Iterator[tuple[int, ...]]) -> tuple[int, ...]:
    (found,) = [group for group in groups if rank in group]
    return found


# --- one process ----------------------------------------------------------------------------------


def test_known_globals() -> None:
    """A global that is new in a release must be looked at before it is captured blindly."""
    if version("megatron-core") != "0.19.2":
        pytest.skip(f"the known set is of 0.19.2; this is {version('megatron-core')}")
    assert set(capture_globals()) == GLOBALS_0_19_2


def test_blank_is_what_a_fresh_import_holds() -> None:
    assert not parallel_state.model_parallel_is_initialized(), "this process never initialised it"
    assert capture_globals() == blank_globals()


def test_needs_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_device, "is_active", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="install_cpu_device"):
        ParallelLayouts()


# --- groups ---------------------------------------------------------------------------------------

_AXES = {
    "tp": ("tp",),
    "pp": ("pp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "dp_cp": ("dp", "cp"),
    "mp": ("tp", "pp"),
    "tp_cp": ("tp", "cp"),
    "tp_dp_cp": ("tp", "dp", "cp"),
}
_EXPERT_AXES = {
    "ep": ("cp",),
    "expt_tp": ("tp",),
    "expt_dp": ("dp",),
    "tp_ep": ("tp", "cp"),
    "tp_ep_pp": ("tp", "cp", "pp"),
}


def _assert_groups(made: ParallelLayout) -> None:
    rank, layout = dist.get_rank(), made.layout
    assert made.member == (rank in made.mesh)
    if not made.member:
        assert made.pg_collection is None
        return
    for field, axes in _AXES.items():
        expected = _group_of(rank, rank_groups(made.mesh, layout, *axes))
        assert tuple(dist.get_process_group_ranks(getattr(made.pg_collection, field))) == expected, (
            made,
            field,
        )
    # The experts' grid is a decoder grid with ep in the place of cp (Megatron's order is tp-cp-ep-dp-pp).
    etp = layout.etp if layout.etp is not None else layout.tp
    experts = Layout(tp=etp, cp=layout.ep, pp=layout.pp, dp=layout.size // (etp * layout.ep * layout.pp))
    for field, axes in _EXPERT_AXES.items():
        expected = _group_of(rank, rank_groups(made.mesh, experts, *axes))
        assert tuple(dist.get_process_group_ranks(getattr(made.pg_collection, field))) == expected, (
            made,
            field,
        )


def _groups_equal_layouts() -> None:
    layouts = ParallelLayouts(ProcessGroups(timeout_s=20))
    for text in (*TEN, "d2t1p1c2@0-3", "d4t1p1e2@0-3", "d2t2p1e2x1@0-3", "d3t1p1@1-3", "d1t1p1@2-2"):
        _assert_groups(_build(layouts, text))
    layouts.close()


def _groups_of_large_worlds() -> None:
    """One process plays one rank of 64 through torch's fake backend."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    texts = ("d4t4p4@0-63", "d8t2p4v2@0-63", "d2t2p2c2@16-31", "d8t2p1e4x1@32-47", "d16t1p4e8@0-63")
    for rank in (0, 21, 37, 63):
        dist.init_process_group("fake", rank=rank, world_size=64, store=FakeStore())
        groups = ProcessGroups(timeout_s=5)
        groups.rendezvous = lambda name: None  # type: ignore[method-assign]  # nobody else would come
        layouts = ParallelLayouts(groups)
        for text in texts:
            _assert_groups(_build(layouts, text))
        layouts.close()
        dist.destroy_process_group()


def test_groups_equal_those_of_layout_py() -> None:
    run_ranks(4, _groups_equal_layouts)


def test_groups_equal_those_of_layout_py_in_large_worlds() -> None:
    run_ranks(1, _groups_of_large_worlds)


# --- entering and leaving -------------------------------------------------------------------------


def _fail_inside(layout: ParallelLayout) -> None:
    def stage() -> None:
        with layout.active():
            _assert_shows(layout.name)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stage()


def _stages(primary: bool) -> None:
    """Enter, leave, fail and nest, with or without a layout that the launch script made itself."""
    rank = dist.get_rank()
    if primary:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        megatron_random.model_parallel_cuda_manual_seed(5)
        num_microbatches_calculator.init_num_microbatches_calculator(rank, None, 8, 1, 2)
    with _unchanged():
        layouts = ParallelLayouts(ProcessGroups(timeout_s=20))
        made = {text: _build(layouts, text) for text in TEN}
    assert active_layout() is None
    assert parallel_state.model_parallel_is_initialized() == primary
    for text, layout in made.items():
        if not layout.member:
            with pytest.raises(PlanError, match=rf"{text}: rank {rank} is not in its mesh"), layout.active():
                pass
            continue
        with _unchanged():
            with layout.active() as shown:
                assert shown is layout is active_layout()
                _assert_shows(text)
                parallel_state.set_virtual_pipeline_model_parallel_rank(1)
            _fail_inside(layout)
    members = [text for text in TEN if made[text].member]
    for outer, inner in itertools.product(members[:4], repeat=2):
        with _unchanged(), made[outer].active():
            with _unchanged() if outer != inner else contextlib.nullcontext():
                _fail_inside(made[inner])
            _assert_shows(outer)
    layouts.close()


def _random_streams_and_microbatches() -> None:
    rank = dist.get_rank()
    layouts = ParallelLayouts(ProcessGroups(timeout_s=20), seed=11)
    tp, dp = _build(layouts, "d1t4p1@0-3"), _build(layouts, "d4t1p1@0-3")

    def draw() -> tuple[float, float]:
        with megatron_random.get_cuda_rng_tracker().fork():
            parallel_draw = float(torch.rand((), device="cuda"))
        return float(torch.rand((), device="cuda")), parallel_draw

    torch.manual_seed(99)
    expected = torch.rand(2).tolist()
    torch.manual_seed(99)
    first_outside = float(torch.rand(()))
    drawn: list[tuple[float, float]] = []
    for _ in range(2):
        with tp.active():
            drawn.append(draw())
            with dp.active():
                inner = draw()
            with tp.active():
                drawn.append(draw())
            drawn.append(draw())
    assert [first_outside, float(torch.rand(()))] == expected, "draws outside are not disturbed"
    for kind in zip(*drawn, strict=True):
        assert len(set(kind)) == 6, "draws go on where the layout was left, also when it is nested in itself"

    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, (drawn, inner))
    for step in range(6):
        assert len({everyone[peer][0][step][0] for peer in range(4)}) == 1, (
            "alike over tp outside parallel regions"
        )
        assert len({everyone[peer][0][step][1] for peer in range(4)}) == 4, "different over tp inside"
    assert len({everyone[peer][1] for peer in range(4)}) == 1, "alike over dp"

    tp.set_num_microbatches(3, micro_batch_size=2)
    dp.set_num_microbatches(5)
    with tp.active():
        assert num_microbatches_calculator.get_num_microbatches() == 3
        with dp.active():
            assert num_microbatches_calculator.get_num_microbatches() == 5
            assert num_microbatches_calculator.get_current_global_batch_size() == 20
            tp.set_num_microbatches(7, micro_batch_size=2)
        assert num_microbatches_calculator.get_num_microbatches() == 7
        tp.set_num_microbatches(8)
        assert num_microbatches_calculator.get_num_microbatches() == 8
    pipeline = _build(layouts, "d1t1p4@0-3")
    assert tp.p2p_communicator(None) is None
    config = type("Config", (), {"virtual_pipeline_model_parallel_size": None})()
    communicator = pipeline.p2p_communicator(config)
    assert communicator is not None
    assert communicator.next_rank == (rank + 1) % 4
    layouts.close()


def test_stages_restore_what_was_there() -> None:
    for primary in (False, True):
        run_ranks(4, _stages, primary)


def test_random_streams_microbatches_and_pipeline_communicator() -> None:
    run_ranks(4, _random_streams_and_microbatches)


# --- life -----------------------------------------------------------------------------------------


def _life() -> dict[str, Any]:
    start = _descriptors()
    layouts = ParallelLayouts(ProcessGroups(timeout_s=20))
    first = _build(layouts, "d2t2p1@0-3")
    assert _build(layouts, "d2t2p1@0-3") is first
    assert len(layouts) == 1
    assert layouts.build(Mesh(0, 4), Layout(dp=2, tp=2, sp=True)) is not first
    layouts.destroy(first)
    with first.active(), pytest.raises(PlanError, match="leave `active"):
        layouts.destroy(first)
    layouts.destroy(first)
    with pytest.raises(PlanError, match="destroyed more often"):
        layouts.destroy(first)
    with pytest.raises(PlanError, match="it was destroyed"), first.active():
        pass
    if dist.get_rank() == 0:  # refused before anything collective: alone, this would hang
        for mesh, layout, text in (
            (Mesh(0, 2), Layout(tp=4), "degrees for 4 ranks"),
            (Mesh(2, 6), Layout(tp=4), "a mesh up to rank 5; the world has 4"),
            (Mesh(0, 4), Layout(dp=4, ep=8), r"etp\*ep\*pp = 8"),
        ):
            with pytest.raises(PlanError, match=text):
                layouts.build(mesh, layout)
    layouts.close()
    assert len(layouts) == len(layouts.groups) == 0

    cycles = []
    for _ in range(11):
        made = [_build(layouts, text) for text in TEN[:4]]
        for layout in made:
            layouts.destroy(layout)
        del made, layout
        gc.collect()
        layouts.groups.rendezvous("cycle")
        cycles.append((_descriptors(), len(dist.distributed_c10d._world.pg_map)))
    alive = [_build(layouts, text) for text in TEN]
    descriptors = _descriptors() - start
    layouts.close()
    del alive
    return {"cycles": cycles, "alive": descriptors}


def _missing_rank(entered: str) -> tuple[str, float]:
    layouts = ParallelLayouts(ProcessGroups(timeout_s=1.5))
    _build(layouts, "d1t2p1@0-1")
    began_s = time.monotonic()
    if dist.get_rank() == 3:
        if entered == "other":
            with pytest.raises(PeerError):
                _build(layouts, "d4t1p1@0-3")
        time.sleep(3)
        return "", 0.0
    with _unchanged(), pytest.raises(PeerError) as error:
        _build(layouts, "d1t4p1@0-3")
    return str(error.value), time.monotonic() - began_s


def test_layouts_are_shared_and_leak_nothing() -> None:
    for result in run_ranks(4, _life):
        first, *others = result["cycles"]
        assert max(count for count, _ in others) <= first[0], result
        assert {groups for _, groups in others} == {first[1]}, result
        assert result["alive"] < 300, result


@pytest.mark.parametrize("entered", ["nothing", "other"])
def test_missing_rank_is_named_within_the_timeout(entered: str) -> None:
    for text, waited_s in run_ranks(4, _missing_rank, entered)[:3]:
        assert "layout d1t4p1@0-3" in text
        assert "rank 3 of 4 did not come" in text
        assert 1.0 < waited_s < 4.0
