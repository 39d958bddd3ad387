"""What a search chooses for a call: an option (a way to run it on any window of a size), and the window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron_real.layout import Layout, Mesh
from megatron_real.plan import LayoutSpec, OffloadTo, Placement

__all__ = ["Assignment", "Choice", "Option"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Option:
    """A way to run a call on any window of a size. Bytes are of the rank that needs most."""

    layout: Layout
    num_microbatches: int = 1
    recompute: str = "none"
    offload: OffloadTo = "none"
    drop_trained_weights: bool = False
    stream: bool = False
    seconds: float
    """Of the run, with the data that it receives and sends."""
    weights_bytes: int = 0
    state_bytes: int = 0
    """Gradients and optimizer state, resident where the call trains."""
    active_bytes: int = 0
    """Activations, logits and key-value cache while the call runs."""
    leave_s: float = 0.0
    """Of the `Offload` of its copy's weights (to the host, or dropped)."""
    return_s: float = 0.0
    """Of the `Reload` of its copy's weights; where the model lives in the nodes' host stores, of each call's copy."""
    state_leave_s: float = 0.0
    """Of the `Offload` of its copy's optimizer state."""
    state_return_s: float = 0.0
    first_share: float = 1.0
    """Of a streamed reallocation: the part of its time after which the call can start."""
    first_pass_s: float = 0.0
    """Of the call's first forward pass over a rank's layers: the rest of a streamed reallocation hides behind it."""

    @property
    def size(self) -> int:
        return self.layout.size

    def exposed_s(self, realloc_s: float) -> float:
        """What a reallocation to this option's copy adds to an iteration, if it takes `realloc_s` by itself.

        Streamed: the time until the first layers are there, ``first_share * realloc_s``, and the time by which the
        other layers arrive later than the first pass comes to them, ``(1 - first_share) * max(0, realloc_s -
        first_pass_s)``: a pass and a reallocation that take the layers in one order, each at an even pace.
        """
        if not self.stream:
            return realloc_s
        late_s = max(0.0, realloc_s - self.first_pass_s)
        return self.first_share * realloc_s + (1.0 - self.first_share) * late_s

    def placement(self, mesh: Mesh) -> Placement:
        """This option on `mesh`, as a plan has it."""
        layout = self.layout
        return Placement(
            ranks=(mesh.start, mesh.stop),
            layout=LayoutSpec(**{name: getattr(layout, name) for name in LayoutSpec.model_fields}),
            num_microbatches=self.num_microbatches,
            recompute=self.recompute,
            offload=self.offload,
            drop_trained_weights=self.drop_trained_weights,
            stream=self.stream,
        )


class Choice(NamedTuple):
    """Where and how a call runs."""

    mesh: Mesh
    option: Option

    def same_copy(self, other: Choice) -> bool:
        """Whether two calls of one model share their weights."""
        return self.mesh == other.mesh and self.option.layout == other.option.layout


Assignment = Mapping[str, Choice]
"""A choice for every call."""
