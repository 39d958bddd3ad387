"""The optimizer state of a trained copy rests in host memory while nobody trains it.

Main parameters and Adam's moments go to the host and come back bit for bit; gradients are freed and not saved, since
they live inside one optimizer step only. Tensors stay the same objects: their storages are freed and allocated again,
so views of them, and the optimizer's dictionaries, stay right.

On CUDA the host memory is page-locked. `offload` returns when the device memory is free. `reload` returns at once: the
copies run on a stream of their own beside the forward and backward passes, and the optimizer step waits for them.

Invariants (tests/hooks/test_offload.py):
    - while the state is away its storages are zero bytes and the ledger holds none for state and gradients;
    - training that went to the host and back between steps is bit-equal to training that did not;
    - a step, and whatever else reads or writes the state, is refused by name while it is away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import CapacityError, PlanError, RealError
from megatron_real.realloc_ops.storage.host_memory import HostBuffer

__all__ = ["StateOffload"]

_ALIGN_BYTES = 128


class StateOffload:
    """Moves the state of one copy's optimizer, and the gradients of its buffers, off the device and back."""

    def __init__(
        self,
        subject: str,
        optimizer: MegatronOptimizer,
        wrapped: Sequence[Any],
        *,
        owners: Sequence[str],
        ledger: MemoryLedger | None = None,
        host_ledger: MemoryLedger | None = None,
    ) -> None:
        """Touches nothing.

        Args:
            subject: for messages, for example ``copy actor d2t1p1@0-1``.
            optimizer: a distributed optimizer, or a chain of such.
            wrapped: the DDP modules whose buffers have the gradients.
            owners: under which names the ledger holds state and gradients.
            ledger: of device memory.
            host_ledger: of host memory.
        """
        self._subject = subject
        self._optimizer = optimizer
        self._wrapped = tuple(wrapped)
        self._owners = tuple(owners)
        self._ledger = ledger
        self._host_ledger = host_ledger
        self._host: HostBuffer | None = None
        self._resting: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
        """While away: each state tensor, freed, and its values on the host."""
        self._booked: dict[str, int] = {}
        self._arrival: torch.cuda.Event | None = None
        self.away = False
        """Whether the state is on the host."""

    @property
    def host_bytes(self) -> int:
        """Host memory that is held, also while the state is on the device: it is kept for the next time."""
        return self._host.data.nbytes if self._host is not None else 0

    @torch.no_grad()
    def offload(self) -> None:
        """Bring the state to the host and free it and the gradients; nothing to do when it is there.

        Between optimizer steps only. Not collective.

        Raises:
            PlanError: this optimizer's state cannot leave the device.
            CapacityError: there is not enough host memory; the state stays then.
        """
        if self.away:
            return
        self.wait()
        tensors = self._state_tensors()
        slots = self._host_slots(tensors)
        self._optimizer.zero_grad(set_to_none=True)
        for tensor, slot in zip(tensors, slots, strict=True):
            slot.copy_(tensor, non_blocking=True)
        _synchronize([*tensors, *self._gradients()])
        self._resting = tuple(zip(tensors, slots, strict=True))
        self._free()
        if self._ledger is not None:
            self._booked = {owner: self._ledger.free(owner) for owner in self._owners}
        self.away = True
        for target, method in self._guarded():
            setattr(target, method, self._refusal(method))

    @torch.no_grad()
    def reload(self) -> None:
        """Bring the state back, gradients zero; nothing to do when it is on the device. Not collective.

        Raises:
            CapacityError: it does not fit on the device; it stays on the host then.
        """
        if not self.away:
            return
        self._book()
        try:
            for tensor in (*(tensor for tensor, _ in self._resting), *self._gradients()):
                tensor.untyped_storage().resize_(tensor.nbytes)
        except RuntimeError as error:  # torch.OutOfMemoryError on CUDA, a plain RuntimeError on CPU
            self._free()
            self._unbook()
            raise CapacityError(
                f"{self._subject}: the device could not allocate its optimizer state ({error}). Lower "
                "cluster.device_memory to what is really free, so that the plan is refused beforehand."
            ) from error
        for gradients in self._gradients():
            gradients.zero_()
        self._copy_back()
        self._resting = ()
        self.away = False
        for target, method in self._guarded():
            delattr(target, method)
        if self._arrival is not None:
            self._step_when_arrived()

    def wait(self) -> None:
        """Order the current stream behind a reload that is under way: before anything reads or writes the state."""
        if self._arrival is not None:
            torch.cuda.current_stream().wait_event(self._arrival)
            self._arrival = None
            del self._optimizer.step  # the wrapper of `_step_when_arrived`

    def require(self, what: str) -> None:
        """Refuse to go on with `what` unless the state is on the device, and wait until it is there.

        Raises:
            RealError: it is on the host.
        """
        if self.away:
            raise RealError(
                f"{self._subject}: found its optimizer state on the host; expected it on the device for {what}. Call "
                "reload_state first."
            )
        self.wait()

    def close(self) -> None:
        """Give the host memory back; the state is gone if it was there."""
        self._resting, self._host = (), None
        if self._host_ledger is not None:
            self._host_ledger.free(self._host_owner)

    # -- what is moved ------------------------------------------------------------------------------------------------

    def _parts(self) -> Iterator[Any]:
        for part in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            if not getattr(part, "is_stub_optimizer", False):
                yield part

    def _state_tensors(self) -> list[torch.Tensor]:
        """Main parameters, and what the inner optimizers hold: nothing of that exists before the first step."""
        found: dict[int, torch.Tensor] = {}
        for part in self._parts():
            if not isinstance(part, DistributedOptimizer) or isinstance(
                part.optimizer, HybridDeviceOptimizer
            ):
                raise PlanError(
                    f"{self._subject}: found {type(part).__name__} around {type(part.optimizer).__name__}; its state "
                    "cannot rest on the host, only that of Megatron's distributed optimizer can. Set offload to 'none'."
                )
            main = [one for group in part.shard_fp32_from_float16_groups for one in group if one is not None]
            inner = [value for state in part.optimizer.state.values() for value in state.values()]
            for tensor in (*main, *inner):
                # Counters of steps are scalars and stay.
                if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.numel():
                    self._require_own_storage(tensor)
                    found[tensor.untyped_storage()._cdata] = tensor.detach()
        return list(found.values())

    def _require_own_storage(self, tensor: torch.Tensor) -> None:
        if tensor.untyped_storage().nbytes() != tensor.nbytes or not tensor.is_contiguous():
            raise PlanError(
                f"{self._subject}: found a tensor of its optimizer state, of {tensor.nbytes} bytes, in a storage of "
                f"{tensor.untyped_storage().nbytes()}; expected a storage of its own. Set offload to 'none'."
            )

    @property
    def _host_owner(self) -> str:
        return f"{self._subject} optimizer state"

    def _host_slots(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Where each tensor goes in the host buffer, which is made anew if its size changed."""
        starts, num_bytes = [], 0
        for tensor in tensors:
            starts.append(num_bytes)
            num_bytes += -(-tensor.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        if self._host is None or self._host.data.nbytes != num_bytes:
            self.close()
            if self._host_ledger is not None:
                self._host_ledger.reserve(self._host_owner, num_bytes)
            try:
                on_cuda = any(tensor.device.type == "cuda" for tensor in tensors)
                self._host = HostBuffer(self._host_owner, num_bytes, lock=on_cuda)
            except CapacityError:
                self.close()
                raise
        data = self._host.data
        return [
            data[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]

    def _gradients(self) -> Iterator[torch.Tensor]:
        for ddp in self._wrapped:
            for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
                yield buffer.grad_data

    def _free(self) -> None:
        for tensor in (*(tensor for tensor, _ in self._resting), *self._gradients()):
            tensor.untyped_storage().resize_(0)

    def _copy_back(self) -> None:
        device = next((tensor.device for tensor, _ in self._resting), torch.device("cpu"))
        if device.type != "cuda":
            for tensor, slot in self._resting:
                tensor.copy_(slot)
            return
        stream = torch.cuda.Stream(device)
        # The memory came from the current stream, whose earlier work may still use what lay there before.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for tensor, slot in self._resting:
                tensor.copy_(slot, non_blocking=True)
        self._arrival = stream.record_event()

    # -- the ledger and the guards ------------------------------------------------------------------------------------

    def _book(self) -> None:
        if self._ledger is None:
            return
        try:
            for owner, num_bytes in self._booked.items():
                self._ledger.reserve(owner, num_bytes)
        except CapacityError:
            self._unbook()
            raise

    def _unbook(self) -> None:
        if self._ledger is not None:
            for owner in self._booked:
                self._ledger.free(owner)

    def _guarded(self) -> list[tuple[Any, str]]:
        """Methods that touch the state or the gradients, shadowed on their objects while these are away."""
        buffers = [
            (ddp, method) for ddp in self._wrapped for method in ("zero_grad_buffer", "finish_grad_sync")
        ]
        return [(self._optimizer, "step"), (self._optimizer, "prepare_grads"), *buffers]

    def _refusal(self, method: str) -> Callable[..., NoReturn]:
        def refuse(*_: Any, **__: Any) -> NoReturn:
            self.require(f"{method}, which trains it")
            raise AssertionError("the guards stand only while the state is away")

        return refuse

    def _step_when_arrived(self) -> None:
        step = self._optimizer.step

        def wait_and_step(*args: Any, **kwargs: Any) -> Any:
            self.wait()
            return step(*args, **kwargs)

        self._optimizer.step = wait_and_step


def _synchronize(tensors: Sequence[torch.Tensor]) -> None:
    for device in {tensor.device for tensor in tensors}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
