"""The patches of torch itself that make "cuda" mean the CPU. See `cpu_device`."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import time
from collections.abc import Callable
from types import FunctionType, SimpleNamespace, TracebackType
from typing import Any

import torch

from megatron_real.hooks.patching import Patch

__all__ = ["TORCH_PATCHES", "to_cpu"]

_CPU = torch.device("cpu")


def to_cpu(device: Any) -> Any:
    """`device`, with every spelling of CUDA (``"cuda:1"``, ``torch.device("cuda")``, ``0``) made the CPU."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda")):
        return _CPU
    if isinstance(device, torch.device) and device.type == "cuda":
        return _CPU
    return device


def _factory(original: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor factory that maps ``device=`` and forgets ``pin_memory=``."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = to_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return make


def _tensor_to(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.to` and `Module.to`: the device is the first positional argument, or ``device=``."""

    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (to_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = to_cpu(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def _tensor_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type`: without an argument name the CUDA type, with one drop the ``cuda``."""

    @functools.wraps(original)
    def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            name: str = original(self)
            return name.replace("torch.", "torch.cuda.", 1) if self.device.type == "cpu" else name
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original(self, dtype, non_blocking, **kwargs)

    return type_


def _itself(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _false(*args: Any, **kwargs: Any) -> bool:
    return False


def _compile(model: Any = None, **kwargs: Any) -> Any:
    """`torch.compile` that leaves the function as it is."""
    return model if model is not None else (lambda function: function)


class _Event:
    """`torch.cuda.Event`: everything before it has happened when it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at_s = 0.0

    def record(self, stream: Any = None) -> None:
        self._at_s = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds from this event to `end`."""
        return (end._at_s - self._at_s) * 1e3

    def query(self) -> bool:
        return True

    wait = synchronize = _nothing


class _Stream:
    """`torch.cuda.Stream`: the CPU has one, and it is never behind."""

    cuda_stream = 0
    device = _CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event if event is not None else _Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    wait_event = wait_stream = synchronize = _nothing


_STREAM = _Stream()


def _current_stream(device: Any = None) -> _Stream:
    return _STREAM


def _null_context(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _device_count() -> int:
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="cpu",
        major=8,
        minor=0,
        total_memory=_host_memory_bytes(),
        multi_processor_count=os.cpu_count() or 1,
    )


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"), _host_memory_bytes()


def _memory_stats(device: Any = None) -> dict[str, int]:
    return collections.defaultdict(int)


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    torch.default_generator.set_state(new_state)


def _manual_seed(seed: int) -> None:
    # Not torch.manual_seed: that one calls torch.cuda.manual_seed_all.
    torch.default_generator.manual_seed(int(seed))


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """`all_gather` whose outputs may differ in shape, as NCCL's does."""

    @functools.wraps(original)
    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if all(out.shape == tensor_list[0].shape for out in tensor_list):
            return original(tensor_list, tensor, group, async_op)
        group = group if group is not None else torch.distributed.group.WORLD
        tensor_list[torch.distributed.get_rank(group)].copy_(tensor)
        work = None
        for index, out in enumerate(tensor_list):
            source = torch.distributed.get_global_rank(group, index)
            work = torch.distributed.broadcast(out, source, group=group, async_op=async_op)
        return work

    return all_gather


def _init_process_group(original: Callable[..., Any]) -> Callable[..., Any]:
    """`init_process_group` with gloo where NCCL is asked for, and no device to bind to."""

    @functools.wraps(original)
    def init(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return original("gloo" if backend == "nccl" else backend, *args, **kwargs)

    return init


_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "logspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "scalar_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
)
_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")

_STAND_INS: tuple[tuple[str, Any, str], ...] = (
    ("current_device", _zero, "Megatron passes it as device=; 0 maps to the CPU"),
    ("set_device", _nothing, "there is one device"),
    ("device", _null_context, "`with torch.cuda.device(i)` selects among devices that are not there"),
    ("device_count", _device_count, "Megatron builds its parallel state only where there are devices"),
    ("get_device_properties", _properties, "read for the architecture and the memory size"),
    ("get_device_capability", lambda device=None: (8, 0), "read for the architecture"),
    ("get_device_name", lambda device=None: "cpu", "logged"),
    ("synchronize", _nothing, "the CPU is never behind"),
    ("Stream", _Stream, "side streams for communication"),
    ("Event", _Event, "timing and ordering between streams"),
    ("stream", _null_context, "`with torch.cuda.stream(s)`"),
    ("set_stream", _nothing, "one stream"),
    ("current_stream", _current_stream, "ordering against side streams"),
    ("default_stream", _current_stream, "ordering against side streams"),
    ("is_current_stream_capturing", _false, "raises without a driver; nothing is captured"),
    ("get_rng_state", _get_rng_state, "the RNG tracker: the CPU generator is the device generator"),
    ("set_rng_state", _set_rng_state, "the RNG tracker"),
    ("manual_seed", _manual_seed, "seeds the device generator, which is the CPU's"),
    ("manual_seed_all", _nothing, "torch.manual_seed calls it and then seeds the CPU generator itself"),
    ("empty_cache", _nothing, "no caching allocator"),
    ("ipc_collect", _nothing, "raises without a driver"),
    ("mem_get_info", _mem_get_info, "raises without a driver"),
    ("memory_stats", _memory_stats, "Megatron's memory report indexes keys that are missing without CUDA"),
    ("reset_peak_memory_stats", _nothing, "raises without a driver"),
    ("reset_max_memory_allocated", _nothing, "raises without a driver"),
)


def _own(stand_in: Any) -> Any:
    """A function object of its own for each symbol: dynamo refuses one object under two names of torch."""
    if not isinstance(stand_in, FunctionType):
        return stand_in
    copy = FunctionType(
        stand_in.__code__,
        stand_in.__globals__,
        stand_in.__name__,
        stand_in.__defaults__,
        stand_in.__closure__,
    )
    copy.__kwdefaults__ = stand_in.__kwdefaults__
    return copy


def _torch_patches() -> tuple[Patch, ...]:
    patches = [
        Patch(target=f"torch:{name}", factory=_factory, reason="device= may name CUDA, pin_memory= needs it")
        for name in _FACTORIES
    ]
    patches += [
        Patch(target=f"torch:Tensor.{name}", factory=_factory, reason="device= may name CUDA")
        for name in _NEW
    ]
    patches += [
        Patch(target="torch:Tensor.to", factory=_tensor_to, reason="the device may name CUDA"),
        Patch(target="torch.nn:Module.to", factory=_tensor_to, reason="the device may name CUDA"),
        Patch(target="torch:Tensor.cuda", replacement=_itself, reason="moves to CUDA"),
        Patch(target="torch.nn:Module.cuda", replacement=_itself, reason="moves to CUDA"),
        Patch(target="torch:Tensor.pin_memory", replacement=_itself, reason="page-locks through CUDA"),
        Patch(target="torch:Tensor.record_stream", replacement=_nothing, reason="takes a CUDA stream"),
        Patch(
            target="torch:Tensor.type",
            factory=_tensor_type,
            reason="DistributedOptimizer and clip_grads compare the name with torch.cuda.FloatTensor",
        ),
        Patch(
            target="torch:compile",
            replacement=_compile,
            reason="Megatron's jit_fuser compiles small functions: seconds of C++ in every process",
        ),
        Patch(
            target="torch.distributed:all_gather",
            factory=_all_gather,
            reason="gloo refuses outputs of different shapes (expert tensor with expert parallelism)",
            parameters=("tensor_list", "tensor", "group", "async_op"),
        ),
        Patch(
            target="torch.distributed:init_process_group",
            factory=_init_process_group,
            reason="Megatron's default backend is NCCL",
        ),
    ]
    patches += [
        Patch(target=f"torch.cuda:{name}", replacement=_own(stand_in), reason=reason, optional=True)
        for name, stand_in, reason in _STAND_INS
    ]
    for name, stand_in in (("get_rng_state", _get_rng_state), ("set_rng_state", _set_rng_state)):
        patches.append(
            Patch(
                target=f"torch.cuda.random:{name}",
                replacement=_own(stand_in),
                reason="the RNG tracker reaches it through torch.cuda.random",
            )
        )
    for name, stand_in in (
        ("range_push", _nothing),
        ("range_pop", _nothing),
        ("mark", _nothing),
        ("range", _null_context),
    ):
        patches.append(
            Patch(
                target=f"torch.cuda.nvtx:{name}",
                replacement=_own(stand_in),
                reason="raises in builds of torch without CUDA",
            )
        )
    return tuple(patches)


TORCH_PATCHES: tuple[Patch, ...] = _torch_patches()
