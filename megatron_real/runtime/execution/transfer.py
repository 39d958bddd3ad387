"""Moves batch data between calls: executes this rank's messages of the transfer plans, point to point.

Sends are posted right after their producer ran and never waited for there; receives are waited for right
before their consumer runs. Messages of a pair of ranks match by order alone, so both sides must post in one
order:

- A sender posts when the producer has run. A rank runs its calls in the global order of the program and a
  transfer stands right after its producer, so its messages to any one peer leave in the order of the
  instructions' indices.
- A receiver waits in the order of its *consumers*, which may be another one. Before it waits for the transfer
  with index k it therefore posts the receives of all its transfers up to k that are not posted yet, in the
  order of their indices.
- Each set of sequences has groups of its own, on which this order holds: how large its messages are is known
  when its lengths are, and one generation need not wait for another's.

Why nothing deadlocks: posting never blocks, so a rank can only stand in a collective of a call or realloc, in
the wait for a message, or in a fence. Of all instructions that some rank has not finished, take the first in
the global order (iteration, index). If it is a call or a realloc, every earlier instruction is done, so all
its ranks are there or on their way. If a rank waits for message m before its consumer, then the producer of m
is earlier in the order than the consumer; so it has finished and m is posted, and so are all messages of that
pair before m. At a fence all receives of the iteration belong to earlier instructions. (A gloo send completes
only when it is received; that delays nothing but the fence and `end_iteration`, which waits for the sends of
the iteration *before*: their receivers need nothing that this rank does later.)

Nothing runs on WORLD, on which Megatron's pipeline schedule exchanges messages of its own.
"""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron_real.data_plan import Lengths, Message, TransferPlan
from megatron_real.errors import PeerError, RealError
from megatron_real.layout import Mesh
from megatron_real.process_groups import ProcessGroups
from megatron_real.program import Program, Transfer
from megatron_real.runtime.execution.data_store import DataStore, message_bytes, pack, unpack

__all__ = ["DataTransfers", "TransferGroups", "acquire_groups"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferGroups:
    """The process groups of the transfers.

    Over NCCL both directions of a pair would share one stream, in which a large send waits for its receiver
    while the receiver's own send waits for us; so each direction has a group. Over gloo both may be the same
    group.
    """

    ascending: Mapping[str, dist.ProcessGroup]
    """By set of sequences, over all ranks, for messages to a higher rank."""
    descending: Mapping[str, dist.ProcessGroup]
    """By set of sequences, over all ranks, for messages to a lower rank."""
    meshes: Mapping[Mesh, dist.ProcessGroup] = field(default_factory=dict)
    """The group of each generating mesh, for the lengths of its responses."""

    def toward(self, src: int, dst: int, sequences: str) -> dist.ProcessGroup:
        return (self.ascending if src < dst else self.descending)[sequences]

    @property
    def fence(self) -> dist.ProcessGroup:
        """Over all ranks, for the words of a fence."""
        return next(iter(self.ascending.values()))


def acquire_groups(groups: ProcessGroups, program: Program, backend: str | None = None) -> TransferGroups:
    """Make the groups of a program's transfers.

    Collective over WORLD.
    """
    world = range(program.world_size)
    name = backend or dist.get_backend()
    ascending = {
        sequences: groups.acquire(world, purpose=f"transfer of {sequences}", backend=backend)
        for sequences in program.graph.sequence_sets
    }
    descending = ascending
    if name != "gloo":
        descending = {
            sequences: groups.acquire(world, purpose=f"transfer back of {sequences}", backend=backend)
            for sequences in program.graph.sequence_sets
        }
    meshes = {
        mesh: groups.acquire(mesh.ranks, purpose="lengths", backend=backend)
        for mesh in dict.fromkeys(
            program.plan.calls[call.name].mesh for call in program.graph.calls if call.type == "generate"
        )
    }
    return TransferGroups(ascending=ascending, descending=descending, meshes=meshes)


@dataclass(slots=True, kw_only=True)
class _Posted:
    """A message on its way. The buffer lives until the work is done."""

    iteration: int
    name: str
    peer: int
    buffer: torch.Tensor
    work: dist.Work
    message: Message | None = None
    """None: the lengths of a generation."""


class DataTransfers:
    """This rank's side of all transfers.

    Args:
        device: where the data store keeps tensors.
        payload_device: where messages are packed; the CPU for gloo.
        timeout_s: limit of every single wait, in seconds.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        groups: TransferGroups,
        *,
        device: torch.device | None = None,
        payload_device: torch.device | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.device = device or torch.device("cpu")
        self._payload_device = payload_device or self.device
        self._program = program
        self._rank = rank
        self._groups = groups
        self._timeout_s = timeout_s
        self._incoming: dict[str, list[tuple[int, Transfer]]] = {}
        """By set of sequences: the transfers to this rank with their indices, in order."""
        for index, instruction in enumerate(program.instructions):
            if isinstance(instruction, Transfer) and rank in instruction.targets:
                self._incoming.setdefault(self._sequences(instruction), []).append((index, instruction))
        self._sent: list[_Posted] = []
        self._posted: dict[int, list[_Posted]] = {}
        self._unposted: dict[str, deque[tuple[int, Transfer]]] = {}
        """Of `_incoming`, in this iteration."""
        self._iteration = -1
        self._num_sequences = 0
        self._lengths: dict[str, Lengths] = {}
        self._plans: dict[tuple[str, str], TransferPlan] = {}

    def _sequences(self, transfer: Transfer) -> str:
        """The set of sequences that a transfer brings data of."""
        return self._program.graph.call(transfer.producer).sequences

    def connect(self) -> None:
        """Let every pair of ranks exchange a byte, in one order.

        Needed once with NCCL, where the first message of a pair blocks until the other side posts its own.
        Collective over WORLD.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=self._payload_device)
        for low in range(self._program.world_size):
            for high in range(low + 1, self._program.world_size):
                if self._rank in (low, high):
                    for sequences in self._groups.ascending:
                        for pair in ((low, high), (high, low)):
                            group = self._groups.toward(*pair, sequences)
                            self._wait(self._post_on(group, pair, byte.clone(), "connect"))

    def begin(self, iteration: int, num_sequences: int) -> None:
        """Start an iteration of `num_sequences` sequences."""
        self._iteration = iteration
        self._num_sequences = num_sequences
        self._lengths.clear()
        self._plans.clear()
        self._unposted = {name: deque(transfers) for name, transfers in self._incoming.items()}
        self._posted.clear()

    def set_plans(
        self, sequences: str, lengths: Lengths, plans: Mapping[tuple[str, str], TransferPlan]
    ) -> None:
        """The transfer plans of a set of sequences in this iteration, known once its lengths are."""
        self._lengths[sequences] = lengths
        self._plans.update(plans)

    def gather_lengths(self, mesh: Mesh, mine: Mapping[int, int]) -> tuple[int, ...]:
        """Response lengths of all sequences, from what each rank of the generating mesh knows.

        Collective over `mesh`.

        Args:
            mesh: of the generate call.
            mine: sequence id -> length, on one rank of each data-parallel shard; empty on the others.
        """
        flat = torch.zeros(self._num_sequences, dtype=torch.int64)
        if mine:
            flat[torch.tensor(list(mine))] = torch.tensor(list(mine.values()))
        flat = flat.to(self._payload_device)
        if mesh.size > 1:
            with self._peer_errors(f"lengths of the responses on ranks {mesh}", None):
                work = dist.all_reduce(flat, group=self._groups.meshes[mesh], async_op=True)
                work.wait(datetime.timedelta(seconds=self._timeout_s))
        return tuple(flat.tolist())

    def send_lengths(self, transfer: Transfer, response: tuple[int, ...]) -> None:
        """Post the lengths to the ranks outside the generating mesh that fall to this one."""
        mesh = transfer.source
        for target in transfer.targets:
            if mesh.start + target % mesh.size == self._rank:
                flat = torch.tensor(response, dtype=torch.int64, device=self._payload_device)
                self._sent.append(self._post(self._rank, target, flat, transfer))

    def senders(self, transfer: Transfer) -> tuple[int, ...]:
        """Ranks with a message of `transfer` to this one; of the lengths at once, else once they are known."""
        if transfer.consumer is None:
            return (self._lengths_source(transfer),)
        return tuple(dict.fromkeys(message.src for message in self._plan(transfer).receives(self._rank)))

    def receive_lengths(self, index: int) -> tuple[int, ...]:
        """Wait for the lengths that the transfer with this index brings."""
        self._post_receives(index)
        (posted,) = self._posted.pop(index)
        self._wait(posted)
        return tuple(posted.buffer.tolist())

    def post_sends(self, transfer: Transfer, store: DataStore) -> int:
        """Pack and post this rank's messages of a transfer; never blocks.

        Returns:
            Bytes posted.
        """
        lengths, total = self._known_lengths(transfer), 0
        for message in self._plan(transfer).sends(self._rank):
            flat = pack(message, self._program.graph, lengths, store, self._payload_device)
            self._sent.append(self._post(self._rank, message.dst, flat, transfer))
            total += flat.numel()
        return total

    def receive(self, index: int, store: DataStore) -> int:
        """Wait for the messages of the transfer with this index and put them into `store`.

        Returns:
            Bytes received.

        Raises:
            PeerError: a message did not come in time; names the peer and the instruction.
        """
        self._post_receives(index)
        total = 0
        for posted in self._posted.pop(index):
            self._wait(posted)
            assert posted.message is not None, "only the lengths come without a message"
            flat = posted.buffer.to(self.device)
            transfer = self._program.instructions[index]
            assert isinstance(transfer, Transfer), "the index is a transfer's"
            unpack(flat, posted.message, self._program.graph, self._known_lengths(transfer), store)
            total += flat.numel()
        return total

    def end_iteration(self) -> None:
        """Let go of the sends that are done; wait for those of the iteration before.

        So a rank holds the buffers of two iterations at most. gloo does not say that a send is done unless
        one waits for it.
        """
        assert not any(self._unposted.values()), "every receive is posted in its iteration"
        assert not self._posted, "every message is received in its iteration"
        for posted in self._sent:
            if posted.iteration < self._iteration:
                self._wait(posted)
        self._sent = [posted for posted in self._sent if not posted.work.is_completed()]

    def fence(self) -> None:
        """Wait until all that this rank sent is received.

        Raises:
            PeerError: a peer did not take its message in time.
        """
        for posted in self._sent:
            self._wait(posted)
        self._sent.clear()

    def meet(self) -> None:
        """Return when every rank has come here. Only at a fence.

        Collective over WORLD's ranks.

        Raises:
            PeerError: a rank did not come in time.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=self._payload_device)
        with self._peer_errors("fence", None):
            work = dist.all_reduce(byte, group=self._groups.fence, async_op=True)
            work.wait(datetime.timedelta(seconds=self._timeout_s))
            int(byte)  # NCCL's wait is one of the stream only

    def gather_numbers(self, mine: Mapping[int, float], count: int) -> tuple[float, ...]:
        """Numbers 0 to `count` - 1, each told by one rank, on every rank; they may be NaN. Only at a fence.

        Collective over WORLD's ranks.
        """
        flat = torch.zeros(count, dtype=torch.float64)
        if mine:
            flat[torch.tensor(list(mine))] = torch.tensor(list(mine.values()), dtype=torch.float64)
        flat = flat.to(self._payload_device)
        with self._peer_errors("fence", None):
            work = dist.all_reduce(flat, group=self._groups.fence, async_op=True)
            work.wait(datetime.timedelta(seconds=self._timeout_s))
        return tuple(flat.tolist())

    def broadcast_bytes(self, payload: bytes, src: int) -> bytes:
        """What rank `src` gives, on every rank. Only at a fence.

        Collective over WORLD's ranks.
        """
        size = torch.tensor([len(payload)], dtype=torch.int64, device=self._payload_device)
        self._broadcast(size, src)
        data = torch.empty(int(size), dtype=torch.uint8, device=self._payload_device)
        if src == self._rank:
            data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        self._broadcast(data, src)
        return bytes(data.tolist())

    def _broadcast(self, tensor: torch.Tensor, src: int) -> None:
        with self._peer_errors("fence", src):
            work = dist.broadcast(tensor, src, group=self._groups.fence, async_op=True)
            work.wait(datetime.timedelta(seconds=self._timeout_s))

    def _post_receives(self, index: int) -> None:
        """Post, in order, the receives of all transfers of these sequences up to `index` that are not posted yet."""
        transfer = self._program.instructions[index]
        assert isinstance(transfer, Transfer), "the index is a transfer's"
        unposted = self._unposted[self._sequences(transfer)]
        while unposted and unposted[0][0] <= index:
            at, transfer = unposted.popleft()
            self._posted[at] = [
                self._post(src, self._rank, buffer, transfer, message)
                for src, buffer, message in self._expected(transfer)
            ]

    def _expected(self, transfer: Transfer) -> list[tuple[int, torch.Tensor, Message | None]]:
        """(source, empty buffer, message) of each message of `transfer` to this rank."""
        if transfer.consumer is None:
            buffer = torch.empty(self._num_sequences, dtype=torch.int64, device=self._payload_device)
            return [(self._lengths_source(transfer), buffer, None)]
        lengths = self._known_lengths(transfer)
        return [
            (
                message.src,
                torch.empty(
                    message_bytes(message, self._program.graph, lengths),
                    dtype=torch.uint8,
                    device=self._payload_device,
                ),
                message,
            )
            for message in self._plan(transfer).receives(self._rank)
        ]

    def _lengths_source(self, transfer: Transfer) -> int:
        return transfer.source.start + self._rank % transfer.source.size

    def _plan(self, transfer: Transfer) -> TransferPlan:
        assert transfer.consumer is not None, "the lengths have no plan"
        return self._plans[transfer.producer, transfer.consumer]

    def _known_lengths(self, transfer: Transfer) -> Lengths:
        lengths = self._lengths.get(self._sequences(transfer))
        if lengths is None:
            raise RealError(
                f"{transfer.name} on rank {self._rank}: the lengths of the responses are not known yet; expected the "
                "generation, or its lengths, to come first in the program."
            )
        return lengths

    def _post(
        self, src: int, dst: int, buffer: torch.Tensor, transfer: Transfer, message: Message | None = None
    ) -> _Posted:
        return self._post_on(
            self._groups.toward(src, dst, self._sequences(transfer)),
            (src, dst),
            buffer,
            transfer.name,
            message,
        )

    def _post_on(
        self,
        group: dist.ProcessGroup,
        pair: tuple[int, int],
        buffer: torch.Tensor,
        name: str,
        message: Message | None = None,
    ) -> _Posted:
        src, dst = pair
        peer = dst if src == self._rank else src
        with self._peer_errors(name, peer):
            work = (
                dist.isend(buffer, dst, group=group)
                if src == self._rank
                else dist.irecv(buffer, src, group=group)
            )
        assert work is not None, "both ranks are in the group"
        return _Posted(
            iteration=self._iteration, name=name, peer=peer, buffer=buffer, work=work, message=message
        )

    def _wait(self, posted: _Posted) -> None:
        with self._peer_errors(posted.name, posted.peer, posted.iteration):
            posted.work.wait(datetime.timedelta(seconds=self._timeout_s))

    @contextmanager
    def _peer_errors(self, name: str, peer: int | None, iteration: int | None = None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch raises plain ones for a timeout and for a lost connection
            who = "a rank of the mesh" if peer is None else f"rank {peer}"
            raise PeerError(
                f"{name} (iteration {self._iteration if iteration is None else iteration}): rank "
                f"{self._rank} waited "
                f"for {who} in vain (limit {self._timeout_s:g} s): {str(error).splitlines()[0]}. Look at "
                f"{who} first."
            ) from error
