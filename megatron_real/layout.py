"""Meshes and layouts: which rank holds which part of a model.

A *mesh* is a contiguous window of global ranks, a *layout* the parallel degrees over it. Rank order inside a mesh is
Megatron's default, ``tp-cp-ep-dp-pp``: tp varies fastest, pp slowest
(`megatron.core.parallel_state.RankGenerator`). Everything here is arithmetic: no torch, no processes.

Invariants (tests/unit/test_layout.py):
    - the groups of each axis partition the mesh;
    - `rank_of(coordinates_of(rank)) == rank`;
    - `parse_placement(str(...))` gives back what was printed;
    - groups equal Megatron's own (tests/hooks).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_real.errors import PlanError

__all__ = [
    "Coordinates",
    "Layout",
    "Mesh",
    "coordinates_of",
    "format_placement",
    "parse_placement",
    "rank_groups",
    "rank_of",
    "stage_layers",
]

_TEXT = re.compile(
    r"^d(?P<dp>\d+)t(?P<tp>\d+)p(?P<pp>\d+)(?:c(?P<cp>\d+))?(?:e(?P<ep>\d+))?(?:x(?P<etp>\d+))?"
    r"(?:v(?P<vpp>\d+))?(?:l(?P<layers>\d+(?:\.\d+)*))?(?P<sp>s)?$"
)
_WINDOW = re.compile(r"^(?P<first>\d+)-(?P<last>\d+)$")


@dataclass(frozen=True, slots=True, order=True)
class Mesh:
    """A half-open window ``[start, stop)`` of global ranks."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise PlanError(f"mesh: found ranks [{self.start}, {self.stop}); expected 0 <= start < stop.")

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def ranks(self) -> range:
        return range(self.start, self.stop)

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and self.start <= rank < self.stop

    def overlaps(self, other: Mesh) -> bool:
        return self.start < other.stop and other.start < self.stop

    def __str__(self) -> str:
        return f"{self.start}-{self.stop - 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallel degrees of a model over a mesh of ``dp * tp * pp * cp`` ranks."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    """Expert tensor parallelism; None means the same as `tp` (Megatron's default)."""
    vpp: int = 1
    """Model chunks per pipeline stage (interleaved schedule)."""
    sp: bool = False
    """Sequence parallelism of the activations between tp regions."""
    layers: tuple[int, ...] | None = field(default=None)
    """Decoder layers per virtual stage in model order (``pp * vpp`` entries); None is an even split."""

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep", "vpp"):
            value = getattr(self, name)
            if value < 1:
                raise PlanError(f"layout: found {name}={value}; expected at least 1.")
        if self.etp is not None and self.etp < 1:
            raise PlanError(f"layout: found etp={self.etp}; expected at least 1.")
        if self.vpp > 1 and self.pp == 1:
            raise PlanError(f"layout: found vpp={self.vpp} with pp=1; expected pp > 1. Drop vpp.")
        if self.layers is not None and len(self.layers) != self.pp * self.vpp:
            raise PlanError(
                f"layout: found {len(self.layers)} entries in layers; expected pp*vpp = {self.pp * self.vpp}."
            )
        if self.sp and self.tp == 1:
            raise PlanError("layout: found sp with tp=1; expected tp > 1. Drop sp.")

    @property
    def size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    def __str__(self) -> str:
        text = f"d{self.dp}t{self.tp}p{self.pp}"
        for letter, value in (("c", self.cp), ("e", self.ep)):
            text += f"{letter}{value}" if value > 1 else ""
        text += f"x{self.etp}" if self.etp is not None else ""
        text += f"v{self.vpp}" if self.vpp > 1 else ""
        text += "l" + ".".join(map(str, self.layers)) if self.layers is not None else ""
        return text + ("s" if self.sp else "")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read the text form, e.g. ``d2t2p2``, ``d1t1p2v2``, ``d1t1p2l1.3``.

        Raises:
            PlanError: the text is not a layout.
        """
        match = _TEXT.match(text)
        if match is None:
            raise PlanError(
                f"layout: found {text!r}; expected dNtNpN, then optionally cN eN xN vN lN.N s, "
                "for example d2t2p2 or d1t2p2v2s."
            )
        got = match.groupdict()
        return cls(
            **{name: int(got[name] or 1) for name in ("dp", "tp", "pp", "cp", "ep", "vpp")},
            etp=int(got["etp"]) if got["etp"] else None,
            layers=tuple(map(int, got["layers"].split("."))) if got["layers"] else None,
            sp=got["sp"] is not None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Where a rank stands inside a mesh, per axis of the decoder grid."""

    tp: int
    cp: int
    dp: int
    pp: int


def format_placement(mesh: Mesh, layout: Layout) -> str:
    """The text form of a layout on a mesh, e.g. ``d2t2p2@0-7`` (the window is printed with its last rank)."""
    return f"{layout}@{mesh}"


def parse_placement(text: str) -> tuple[Mesh, Layout]:
    """Read ``d2t2p2@0-7``; the inverse of `format_placement`.

    Raises:
        PlanError: the text is malformed, or the degrees do not multiply to the window.
    """
    layout_text, _, window = text.partition("@")
    match = _WINDOW.match(window)
    if match is None:
        raise PlanError(f"layout: found window {window!r} in {text!r}; expected FIRST-LAST, for example 0-7.")
    mesh = Mesh(int(match["first"]), int(match["last"]) + 1)
    layout = Layout.parse(layout_text)
    if layout.size != mesh.size:
        raise PlanError(
            f"layout: {text!r} needs {layout.size} ranks (dp*tp*pp*cp); the window names {mesh.size}."
        )
    return mesh, layout


def coordinates_of(rank: int, mesh: Mesh, layout: Layout) -> Coordinates:
    """Coordinates of global `rank`, which must lie in `mesh`."""
    if rank not in mesh:
        raise PlanError(f"layout: rank {rank} is not in the mesh {mesh}.")
    rest, tp = divmod(rank - mesh.start, layout.tp)
    rest, cp = divmod(rest, layout.cp)
    pp, dp = divmod(rest, layout.dp)
    return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp)


def rank_of(at: Coordinates, mesh: Mesh, layout: Layout) -> int:
    """Global rank at `at`: the inverse of `coordinates_of`."""
    return mesh.start + at.tp + layout.tp * (at.cp + layout.cp * (at.dp + layout.dp * at.pp))


def rank_groups(mesh: Mesh, layout: Layout, *axes: str) -> Iterator[tuple[int, ...]]:
    """The groups of ranks that differ only in `axes` (of ``tp cp dp pp``), in order of their first rank."""
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp}
    unknown = set(axes) - set(sizes)
    if unknown:
        raise PlanError(f"layout: found axes {sorted(unknown)}; expected some of {sorted(sizes)}.")
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in mesh.ranks:
        at = coordinates_of(rank, mesh, layout)
        key = tuple(getattr(at, name) for name in sizes if name not in axes)
        groups.setdefault(key, []).append(rank)
    yield from sorted(map(tuple, groups.values()))


def stage_layers(num_layers: int, layout: Layout) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Decoder layers (0-based) by pipeline stage and model chunk: ``result[pp_rank][chunk]``.

    Chunk ``c`` of stage ``s`` is virtual stage ``c * pp + s`` in model order (Megatron's interleaving).

    Raises:
        PlanError: the layers do not divide, or `layout.layers` does not sum to `num_layers`.
    """
    virtual_stages = layout.pp * layout.vpp
    if layout.layers is None:
        if num_layers % virtual_stages:
            raise PlanError(
                f"layout {layout}: {num_layers} layers do not divide over pp*vpp = {virtual_stages} stages "
                f"({num_layers % virtual_stages} would be left over). Choose a divisor of {num_layers}, or give "
                "the layers of each stage in `layers`."
            )
        counts = (num_layers // virtual_stages,) * virtual_stages
    else:
        counts = layout.layers
        if sum(counts) != num_layers:
            raise PlanError(
                f"layout {layout}: layers {list(counts)} sum to {sum(counts)}; the model has {num_layers}."
            )
    starts = [sum(counts[:index]) for index in range(virtual_stages)]
    return tuple(
        tuple(
            tuple(
                range(
                    starts[chunk * layout.pp + stage],
                    starts[chunk * layout.pp + stage] + counts[chunk * layout.pp + stage],
                )
            )
            for chunk in range(layout.vpp)
        )
        for stage in range(layout.pp)
    )
