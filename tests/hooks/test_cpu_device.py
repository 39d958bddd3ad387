"""The CPU device: its patches work, have reasons, are undone, and are not there beside CUDA."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_real.errors import MegatronCompatError
from megatron_real.hooks import cpu_device
from megatron_real.hooks.patching import (
    Patch,
    applied,
    apply_patches,
    cancel_on_import,
    is_applied,
    patch_on_import,
    require_parameters,
    resolve,
)
from tests.harness import run_ranks

pytestmark = pytest.mark.megatron

_ABSENT = object()


@pytest.fixture
def installed() -> Iterator[None]:
    """The CPU device for one test, then as it was."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device: the CPU device is never active beside it")
    was_active = cpu_device.is_active()
    cpu_device.install_cpu_device()
    yield
    if not was_active:
        cpu_device.uninstall_cpu_device()
    else:
        cpu_device.install_cpu_device()


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two modules, not imported yet; the second imports a function of the first by name."""
    (tmp_path / "toy_source.py").write_text(
        "def answer(a, b=1):\n    return 'original'\n\n"
        "class Base:\n    def method(self):\n        return 'base'\n\n"
        "class Child(Base):\n    pass\n"
    )
    (tmp_path / "toy_user.py").write_text("from toy_source import answer\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("toy_source", "toy_user"):
        sys.modules.pop(name, None)


def _wrap(original: Any) -> Any:
    return lambda *args: f"wrapped {original(*args)}"


def _held(patch: Patch) -> Any:
    """What the owner itself holds under the patched name: of a class without inheritance and descriptors."""
    owner, name = resolve(patch.target)
    return vars(owner).get(name, _ABSENT) if isinstance(owner, type) else getattr(owner, name)


# --- patching -------------------------------------------------------------------------------------


def test_patch_is_undone_to_the_same_object(toy: None) -> None:
    source = importlib.import_module("toy_source")
    original = source.answer
    patches = [
        Patch(target="toy_source:answer", factory=_wrap, parameters=("a", "b"), reason="test"),
        Patch(target="toy_source:Child.method", factory=_wrap, reason="test"),
        Patch(target="toy_source:answer", factory=_wrap, reason="on top"),
    ]
    with applied(patches):
        assert source.answer(1) == "wrapped wrapped original"
        assert source.Child().method() == "wrapped base"
        assert source.Base().method() == "base"
        assert apply_patches(patches) == (), "they are in force"
    assert source.answer is original
    assert "method" not in vars(source.Child)


def test_missing_symbol_is_named_and_the_earlier_patches_are_undone(toy: None) -> None:
    source = importlib.import_module("toy_source")
    original = source.answer
    good = Patch(target="toy_source:answer", factory=_wrap, reason="test")
    bad = {
        "toy_source:gone": r"toy_source:gone: not found in megatron-core \d.*torch \d",
        "toy_source:Base.gone": "toy_source:Base.gone: not found",
        "toy_nowhere:gone": "module toy_nowhere cannot be imported",
    }
    for target, text in bad.items():
        with pytest.raises(MegatronCompatError, match=text):
            apply_patches([good, Patch(target=target, replacement=None, reason="test")])
        assert source.answer is original
        assert not is_applied(good)
    assert apply_patches([Patch(target="toy_source:gone", reason="test", optional=True)]) == ()


def test_other_parameters_are_refused(toy: None) -> None:
    patch = Patch(target="toy_source:answer", factory=_wrap, parameters=("a", "c"), reason="test")
    with pytest.raises(
        MegatronCompatError, match=r"toy_source:answer: found parameters \(a, b\), expected \(a, c\)"
    ):
        apply_patches([patch])
    require_parameters("toy_source:answer", ["a"])
    with pytest.raises(MegatronCompatError, match="toy_source:answer: parameters c are missing"):
        require_parameters("toy_source:answer", ["a", "c"])


def test_patches_wait_for_their_module(toy: None) -> None:
    patches = tuple(
        Patch(target=f"{module}:answer", factory=_wrap, reason="test")
        for module in ("toy_source", "toy_user")
    )
    assert patch_on_import(patches) == ()
    assert "toy_source" not in sys.modules
    user = importlib.import_module("toy_user")
    source = sys.modules["toy_source"]
    assert source.answer(1) == user.answer(1) == "wrapped original", "not wrapped twice"
    assert type(source.__loader__).__name__ == "SourceFileLoader"
    cancel_on_import(patches)
    assert source.answer is user.answer
    assert source.answer(1) == "original"


def test_cancelled_patch_does_not_come_later(toy: None) -> None:
    patch = Patch(target="toy_source:answer", factory=_wrap, reason="test")
    finders = list(sys.meta_path)
    patch_on_import([patch])
    cancel_on_import([patch])
    assert sys.meta_path == finders
    assert importlib.import_module("toy_source").answer(1) == "original"


# --- the device -----------------------------------------------------------------------------------


def test_every_patch_has_one_symbol_and_a_reason() -> None:
    patches = cpu_device.cpu_patches()
    assert len({patch.target for patch in patches}) == len(patches)
    for patch in patches:
        assert patch.reason.strip(), patch.target
        assert patch.factory is not None or patch.replacement is not None or patch.target.endswith("disable")


def test_every_symbol_is_patched_and_put_back() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device: the CPU device is never active beside it")
    was_active = cpu_device.is_active()
    cpu_device.uninstall_cpu_device()
    patches = cpu_device.cpu_patches()
    for patch in patches:
        importlib.import_module(patch.module)
    before = {patch.target: _held(patch) for patch in patches}
    try:
        assert cpu_device.install_cpu_device()
        assert cpu_device.install_cpu_device()
        for patch in patches:
            assert is_applied(patch), patch.target
            assert _held(patch) is not before[patch.target], patch.target
    finally:
        cpu_device.uninstall_cpu_device()
    cpu_device.uninstall_cpu_device()
    for patch in patches:
        assert _held(patch) is before[patch.target], patch.target
        assert not is_applied(patch)
    if was_active:
        cpu_device.install_cpu_device()


def test_nothing_is_active_beside_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    was_active = cpu_device.is_active()
    cpu_device.uninstall_cpu_device()
    before = {patch.target: _held(patch) for patch in cpu_device.cpu_patches() if patch.module in sys.modules}
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        assert cpu_device.install_cpu_device() is False
    assert not cpu_device.is_active()
    for patch in cpu_device.cpu_patches():
        assert not is_applied(patch)
        assert patch.target not in before or _held(patch) is before[patch.target]
    if was_active:
        cpu_device.install_cpu_device()


def test_cuda_means_the_cpu(installed: None) -> None:
    assert cpu_device.device() == torch.device("cpu")
    assert not torch.cuda.is_available(), "the stand-ins do not pretend to be CUDA"
    made = [
        torch.zeros(2, device="cuda"),
        torch.empty(2, device=torch.device("cuda", 1), pin_memory=True),
        torch.tensor([1.0], device=torch.cuda.current_device()),
        torch.ones(2).new_zeros(2, device="cuda:1"),
        torch.ones_like(torch.ones(2), device="cuda"),
        torch.ones(2).to("cuda:0", torch.bfloat16),
        torch.ones(2).to(device=0, dtype=torch.int64),
        torch.ones(2).cuda().pin_memory(),
        torch.nn.Linear(2, 2, device="cuda").to("cuda").cuda().weight,
    ]
    assert {tensor.device.type for tensor in made} == {"cpu"}
    assert made[5].dtype == torch.bfloat16
    assert made[6].dtype == torch.int64
    assert torch.ones(2).to(torch.ones(1, dtype=torch.int8)).dtype == torch.int8
    assert torch.ones(2, device="meta").to("meta").device.type == "meta"
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1).bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(1).type("torch.cuda.HalfTensor").dtype == torch.float16
    assert torch.ones(1).type(torch.float64).dtype == torch.float64


def test_cuda_means_the_cpu_in_other_threads_and_in_backward(installed: None) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * torch.full((), 2.0, device="cuda")

    got: list[float] = []

    def work() -> None:
        value = torch.ones(1, device="cuda", requires_grad=True)
        Double.apply(value).backward()
        got.append(float(value.grad))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert got == [2.0]


def test_functions_compiled_before_run_as_they_are() -> None:
    was_active = cpu_device.is_active()
    cpu_device.uninstall_cpu_device()
    compilations: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(1)
        return graph.forward

    early = torch.compile(lambda value: value + 1, backend=backend)
    cpu_device.install_cpu_device()
    try:
        late = torch.compile(dynamic=True)(lambda value: value + 2)
        assert float(early(torch.zeros(()))) == 1.0
        assert float(late(torch.zeros(()))) == 2.0
        assert compilations == []
    finally:
        cpu_device.uninstall_cpu_device()
    again = torch.compile(lambda value: value + 3, backend=backend)
    assert float(again(torch.zeros(()))) == 3.0
    assert compilations == [1], "the backend counts"
    if was_active:
        cpu_device.install_cpu_device()


def test_streams_events_and_random_states(installed: None) -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0):
        start.record()
        end.record(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    torch.cuda.synchronize()
    assert 0.0 <= start.elapsed_time(end) < 1e3
    assert end.query()
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), drawn)


def _uneven_all_gather() -> None:
    cpu_device.install_cpu_device()
    rank = dist.get_rank()
    out = [torch.zeros(1), torch.zeros(3)]
    dist.all_gather(out, torch.full((1 + 2 * rank,), rank + 1.0))
    assert out[0].tolist() == [1.0]
    assert out[1].tolist() == [2.0, 2.0, 2.0]
    even = [torch.zeros(1), torch.zeros(1)]
    work = dist.all_gather(even, torch.full((1,), rank + 1.0), async_op=True)
    work.wait()
    assert [float(value) for value in even] == [1.0, 2.0]


@pytest.mark.dist
def test_all_gather_of_different_shapes(installed: None) -> None:
    run_ranks(2, _uneven_all_gather)


def test_norms_under_sequence_parallelism_mark_their_gradients(installed: None) -> None:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        normalization="RMSNorm",
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        persist_layer_norm=True,
    )
    norm = WrappedTorchNorm(config, hidden_size=8, eps=1e-3)
    assert isinstance(norm, torch.nn.RMSNorm)
    assert norm.eps == 1e-3
    assert norm.weight.sequence_parallel is True
    config.memory_efficient_layer_norm = True
    with pytest.raises(AssertionError, match="memory_efficient_layer_norm"):
        WrappedTorchNorm(config, hidden_size=8)


def test_initialize_megatron_gets_past_the_cuda_assertion(installed: None) -> None:
    import megatron.training
    import megatron.training.training

    for module in (
        megatron.training,
        megatron.training.training,
        sys.modules["megatron.training.initialize"],
    ):
        with pytest.raises(AssertionError, match="args is not initialized"):
            module.initialize_megatron()


def _distributed_optimizer_round_trip() -> None:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    cpu_device.install_cpu_device()
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=True), module
    )
    settings = OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.0, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(settings, [model])

    def step() -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        model.finish_grad_sync()
        assert optimizer.step()[0]

    def steps() -> list[float]:
        return [float(state["step"]) for state in optimizer.chained_optimizers[0].optimizer.state.values()]

    before = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer.state_dict()
    assert steps() == [0.0] * 4, "asking for the state is no step"
    for parameter, held in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter, held)
    step()
    optimizer.load_state_dict(optimizer.state_dict())
    step()
    assert steps() == [2.0] * 4, "each parameter counts its own steps"


@pytest.mark.dist
def test_distributed_optimizer_without_te(installed: None) -> None:
    run_ranks(1, _distributed_optimizer_round_trip)
