"""Measure a profile: every rank runs the same list of measurements, rank 0 writes the file as it goes.

Each measurement runs on all ranks at once, in groups of as many ranks as its tensor parallelism: so times are those of
a node at work. A layer's time is the difference between a model of several layers and one of fewer, which alternate.
The rest of a pass is what the smaller one takes beyond its layers. What the file has already is not measured again.

Invariants (tests/e2e/test_profile.py):
    - an interrupted profile goes on where it stopped; a file of another device or other versions is left alone;
    - ranks agree on what is measured, and on how often.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import socket
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_real
from megatron_real.errors import ConfigError
from megatron_real.hooks import cpu_device
from megatron_real.hooks.launch import configure_logging, initialize_distributed
from megatron_real.hooks.pinning import is_pinned, num_cores
from megatron_real.hooks.profiling.blocks import Block, Unit, Work
from megatron_real.hooks.profiling.clock import median, quartile_range
from megatron_real.hooks.profiling.models import Copies, describe_roles
from megatron_real.hooks.profiling.units import blocks
from megatron_real.plan_search.cluster import device_names
from megatron_real.plan_search.profile_db import Entry, ProfileDatabase, Provenance
from megatron_real.plan_search.profile_options import ProfileOptions
from megatron_real.process_groups import ProcessGroups

__all__ = ["Progress", "run_profile"]

_TIMEOUT_S = 600.0
_WRITTEN_S = 2.0
"""Between two writes of the file, at least: to write a long one takes as long as a short measurement."""
Progress = Callable[[str, int, int], None]
"""Called on rank 0 with what is measured next, how many measurements are done, and how many there are."""
Samples = list[list[Mapping[str, float]]]
"""By work, then repetition: seconds by name."""


def run_profile(options: ProfileOptions, progress: Progress | None = None) -> ProfileDatabase:
    """Measure what ``options.output`` does not have yet. Collective over WORLD, which need not be initialised.

    Returns:
        The whole database, on every rank.

    Raises:
        ConfigError: an option is wrong, or the file is of another device or other versions; on every rank.
    """
    cpu_device.install_cpu_device()
    configure_logging(int(os.environ.get("RANK", "0")))
    roles, args = describe_roles(options)
    initialize_distributed()
    if dist.get_world_size() != options.num_ranks:
        raise ConfigError(
            f"profile: found {dist.get_world_size()} ranks; expected num_nodes x devices_per_node = "
            f"{options.num_ranks}."
        )
    session = _Session(options, _provenance(options, args))
    groups = ProcessGroups(timeout_s=_TIMEOUT_S)
    copies = Copies(groups)
    shared = session.database.provenance.shares_cores
    everything = list(blocks(options, roles, copies, groups, cores_shared=shared))
    session.run(everything, progress)
    copies.close()
    dist.barrier()
    return session.database


class _Session:
    """The database as it grows; equal on all ranks, since all know all samples."""

    def __init__(self, options: ProfileOptions, provenance: Provenance) -> None:
        self._options = options
        self._rank = dist.get_rank()
        self.database = self._agree(provenance)
        self._written_s = time.monotonic()

    def _agree(self, provenance: Provenance) -> ProfileDatabase:
        """What rank 0 found in the file, or an empty database of this device. Collective over WORLD.

        Raises:
            ConfigError: the file is no profile, or of another device; on every rank.
        """
        found: list[Any] = [None]
        if self._rank == 0:
            try:
                found = [_open(self._options.output, provenance).dumps()]
            except ConfigError as error:
                found = [error]
        dist.broadcast_object_list(found, src=0)
        if isinstance(found[0], ConfigError):
            raise found[0]
        return ProfileDatabase.loads(found[0])

    def run(self, everything: Sequence[Block], progress: Progress | None) -> None:
        """Measure. Collective over WORLD."""
        total = sum(len(block.units) for block in everything)
        done = 0
        for block in everything:
            missing = [unit for unit in block.units if not self._has(unit)]
            done += len(block.units) - len(missing)
            if not missing:
                continue
            with block.built() as shared:
                for unit in missing:
                    if progress is not None and self._rank == 0:
                        progress(f"{block.name}: {unit.name}", done, total)
                    if not self._has(unit):  # another one may have made the same entries meanwhile
                        self._measure(unit, shared)
                        self._write(every_s=_WRITTEN_S)
                    done += 1
            self._write()
        if progress is not None and self._rank == 0:
            progress("done", total, total)

    def _has(self, unit: Unit) -> bool:
        keys = self.database.known()
        return all(target.key in keys for target in unit.targets)

    def _measure(self, unit: Unit, shared: Any) -> None:
        samples = self._repeat(unit, shared)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, samples)
        taking_part = [one for one in gathered if any(one[0])]
        keys = self.database.known()
        entries = []
        for target in unit.targets:
            if target.key in keys:
                continue
            by_rank = [[target.value(works) for works in zip(*one, strict=True)] for one in taking_part]
            entries.append(
                Entry(
                    operation=target.operation,
                    kind=target.kind,
                    shape=target.shape,
                    at=target.at,
                    median_s=_rounded(sum(map(median, by_rank)) / len(by_rank)),
                    spread_s=_rounded(sum(map(quartile_range, by_rank)) / len(by_rank)),
                    repetitions=len(by_rank[0]),
                )
            )
        self.database = self.database.merged(entries)

    def _write(self, every_s: float = 0.0) -> None:
        """Write the file on rank 0, if the last time is so long ago."""
        if self._rank == 0 and time.monotonic() - self._written_s >= every_s:
            self.database.dump(self._options.output)
            self._written_s = time.monotonic()

    def _repeat(self, unit: Unit, shared: Any) -> Samples:
        """Warm up, then run the unit's works in turn, as often on every rank.

        The warm-up of a long one counts as its first repetition: the median leaves it out where it is slower.
        """
        works = unit.works(shared)
        dist.barrier()
        first, first_s = self._once(works)
        fewest, most = self._options.repetitions
        if first_s > self._options.seconds:
            samples, repetitions = [[one] for one in first], fewest
        else:
            again, once_s = self._once(works)
            samples = [[one] for one in again]
            repetitions = min(most, max(fewest, int(self._options.seconds / max(once_s, 1e-6))))
        for _ in range(repetitions - 1):
            for work, found in zip(works, samples, strict=True):
                found.append(work())
        return samples

    @staticmethod
    def _once(works: Sequence[Work]) -> tuple[list[Mapping[str, float]], float]:
        """One repetition, and how long the slowest rank took for it. Collective over WORLD."""
        began_s = time.monotonic()
        found = [work() for work in works]
        took = torch.tensor([time.monotonic() - began_s])
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return found, float(took)


def _open(path: Path, provenance: Provenance) -> ProfileDatabase:
    """The file's database, or a new one.

    Raises:
        ConfigError: it is no profile, or its measurements do not go with new ones; or the folder is not there.
    """
    if not path.exists():
        fresh = ProfileDatabase(provenance=provenance)
        fresh.dump(path)
        return fresh
    database = ProfileDatabase.load(path)
    differences = database.provenance.differences(provenance)
    if differences:
        raise ConfigError(
            f"{path}: found measurements of another set-up; here it is {'; '.join(differences)}. Give another output, "
            "or remove the file to measure anew."
        )
    return database


def _provenance(options: ProfileOptions, args: Namespace) -> Provenance:
    on_cuda = torch.cuda.is_available()
    cpu_model = _cpu_model()
    device_model = torch.cuda.get_device_name() if on_cuda else cpu_model
    return Provenance(
        device=options.device or _device_name(device_model, on_cuda=on_cuda),
        device_model=device_model,
        cpu_model=cpu_model,
        host=socket.gethostname(),
        num_cores=num_cores(),
        threads=torch.get_num_threads(),
        pinned=is_pinned(),
        backend=str(dist.get_backend()),
        num_ranks=options.num_ranks,
        ranks_per_node=options.devices_per_node,
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            # Its ``__version__`` ends with the commit of whatever repository the command is run in.
            "megatron-core": importlib.metadata.version("megatron-core"),
            "megatron-real": megatron_real.__version__,
        },
        implementation="local" if cpu_device.is_active() else str(args.transformer_impl),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _device_name(device_model: str, *, on_cuda: bool) -> str:
    """The file of the device in ``plan_search/devices`` whose words are all in the driver's name; else that itself."""
    if not on_cuda:
        return "cpu"
    text = device_model.lower()
    fitting = [name for name in device_names() if all(word in text for word in name.split("-"))]
    return max(fitting, key=len) if fitting else "-".join(text.split())


def _cpu_model() -> str:
    for line in _lines(Path("/proc/cpuinfo")):
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _lines(path: Path) -> Iterator[str]:
    try:
        yield from path.read_text().splitlines()
    except OSError:
        return


def _rounded(seconds: float) -> float:
    """At least 0: a difference of two noisy times may fall below."""
    return float(f"{max(seconds, 0.0):.6g}")
