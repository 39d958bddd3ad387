"""The invariants of `megatron_real.program`, over random graphs and plans: order, no deadlock, versions."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_real.data_plan import build_transfer_plans
from megatron_real.dataflow import Call, CallType, Graph, Input, KeySpec, Per
from megatron_real.plan import CopyKey, Plan
from megatron_real.program import (
    Mix,
    Offload,
    Program,
    Realloc,
    Reload,
    Run,
    Save,
    Side,
    Step,
    Transfer,
    compile_program,
)
from tests.property.strategies import assign_all, graphs, lengths, plans

SEQUENCES = 32
Time = tuple[int, int]
"""(iteration, index of the instruction)."""


@st.composite
def programs(draw: st.DrawFn) -> Program:
    graph = draw(graphs())
    return compile_program(graph, draw(plans(graph, draw(st.sampled_from([1, 2, 3, 4, 6, 8])))))


@dataclass
class Machine:
    """Ranks that block wherever a rank can block.

    A call, a realloc, an offload and a save need all their ranks at once. A send is posted without waiting and
    done when it is received (gloo). A receive is posted in the order that `runtime.transfer` keeps, and waited
    for. Messages of a pair match by order alone. A streamed realloc is started without waiting, and is done when all
    its ranks have started it; its call waits for that, and so do its other ranks before what changes its source.
    """

    program: Program
    messages: dict[int, list[tuple[int, int]]]
    """(src, dst) of each message by the index of its transfer."""
    saves: set[int]
    """Iterations that save."""
    sent: dict[tuple[int, int], list[Time]] = field(default_factory=lambda: defaultdict(list))
    posted: dict[tuple[int, int], list[Time]] = field(default_factory=lambda: defaultdict(list))
    started: dict[Time, set[int]] = field(default_factory=lambda: defaultdict(set))

    def run(self, iterations: int) -> None:
        waiting = {rank: list(self._actions(rank, iterations)) for rank in range(self.program.world_size)}
        at = dict.fromkeys(waiting, 0)
        moved = True
        while moved:
            moved = False
            for rank, actions in waiting.items():
                while at[rank] < len(actions) and self._can(rank, actions[at[rank]], waiting, at):
                    at[rank] += 1
                    moved = True
            moved |= self._meet(waiting, at)
        stuck = {rank: actions[at[rank]] for rank, actions in waiting.items() if at[rank] < len(actions)}
        assert not stuck, f"deadlock: {stuck}"
        assert self.sent == self.posted, "messages of a pair are sent and received in one order"

    def _actions(self, rank: int, iterations: int) -> Iterator[tuple[str, Time, tuple[int, ...]]]:
        """(kind, time, ranks) of everything that the rank does."""
        incoming = [
            index
            for index, instruction in enumerate(self.program.instructions)
            if isinstance(instruction, Transfer) and rank in instruction.targets
        ]
        streams = {
            f"run:{one.call}": (index, one.ranks)
            for index, one in enumerate(self.program.instructions)
            if isinstance(one, Realloc) and one.stream
        }
        for iteration in range(iterations):
            unposted, late = list(incoming), list[Realloc]()
            for step in self.program.steps(rank):
                time = (iteration, step.index)
                if isinstance(step.instruction, Mix) and not step.instruction.update.due(iteration):
                    late += step.finish
                    continue
                for realloc in step.finish:
                    index, ranks = streams[f"run:{realloc.call}"]
                    yield "finish", (iteration, index), ranks
                if step.name in streams:
                    index, ranks = streams[step.name]
                    yield "finish", (iteration, index), ranks
                match step:
                    case Step(instruction=Realloc(stream=True)):
                        yield "start", time, ()
                    case Step(instruction=Save()):
                        if iteration in self.saves:
                            yield "drain", time, ()
                            yield "meet", time, step.instruction.ranks
                    case Step(side=Side.SEND):
                        yield "send", time, ()
                    case Step(side=Side.RECEIVE):
                        while unposted and unposted[0] <= step.index:
                            yield "post", (iteration, unposted.pop(0)), ()
                        yield "wait", time, ()
                    case _:
                        yield "meet", time, step.instruction.ranks
            for realloc in late:
                index, ranks = streams[f"run:{realloc.call}"]
                yield "finish", (iteration, index), ranks
            assert not unposted, "every transfer is received in its iteration"
            yield "drain", (iteration - 1, len(self.program.instructions)), ()
        yield "drain", (iterations, 0), ()

    def _can(self, rank: int, action: tuple[str, Time, tuple[int, ...]], waiting: object, at: object) -> bool:
        kind, (iteration, index), ranks = action
        match kind:
            case "send" | "post":
                side = self.sent if kind == "send" else self.posted
                for src, dst in self.messages.get(index, []):
                    if rank == (src if kind == "send" else dst):
                        side[src, dst].append((iteration, index))
                return True
            case "start":
                self.started[iteration, index].add(rank)
                return True
            case "finish":
                return self.started[iteration, index] >= set(ranks)
            case "wait":
                for src, dst in self.messages.get(index, []):
                    if dst == rank:
                        place = self.posted[src, dst].index((iteration, index))
                        if place >= len(self.sent[src, dst]):
                            return False
                        assert self.sent[src, dst][place] == (iteration, index), (
                            "another message would be taken for it"
                        )
                return True
            case "drain":
                return all(
                    len(self.posted[pair]) > place
                    for pair, times in self.sent.items()
                    if pair[0] == rank
                    for place, time in enumerate(times)
                    if time < (iteration, index)
                )
        return ranks == (rank,)

    def _meet(self, waiting: dict[int, list[tuple[str, Time, tuple[int, ...]]]], at: dict[int, int]) -> bool:
        for rank, actions in waiting.items():
            if at[rank] == len(actions) or actions[at[rank]][0] != "meet":
                continue
            wanted = actions[at[rank]]
            if all(at[o] < len(waiting[o]) and waiting[o][at[o]] == wanted for o in wanted[2]):
                for other in wanted[2]:
                    at[other] += 1
                return True
        return False


def _messages(program: Program, data: st.DataObject) -> dict[int, list[tuple[int, int]]]:
    graph, plan = program.graph, program.plan
    known = data.draw(lengths(SEQUENCES))
    transfers = build_transfer_plans(graph, plan, assign_all(graph, plan, known, 1))
    messages: dict[int, list[tuple[int, int]]] = {}
    for index, instruction in enumerate(program.instructions):
        match instruction:
            case Transfer(consumer=None, source=source, targets=targets):
                messages[index] = [(source.start + rank % source.size, rank) for rank in targets]
            case Transfer(producer=producer, consumer=str(consumer)):
                messages[index] = [(m.src, m.dst) for m in transfers[producer, consumer].messages]
    return messages


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_no_program_deadlocks_and_messages_match(data: st.DataObject) -> None:
    program = data.draw(programs())
    saves = data.draw(st.sets(st.integers(0, 2)))
    Machine(program=program, messages=_messages(program, data), saves=saves).run(3)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_messages_only_go_where_the_instruction_says(data: st.DataObject) -> None:
    program = data.draw(programs())
    for index, pairs in _messages(program, data).items():
        transfer = program.instructions[index]
        assert isinstance(transfer, Transfer)
        for src, dst in pairs:
            assert src in transfer.source
            assert dst in transfer.targets


def test_consumers_may_run_in_another_order_than_producers() -> None:
    """Rank 0 produces a, then b; rank 1 consumes b, then a. The receive of a must be posted first."""
    names = ("gen", "make_a", "make_b", "use_b", "use_a")
    inputs = {"make_a": "tokens", "make_b": "tokens", "use_b": "b", "use_a": "a"}
    outputs = {"gen": "tokens", "make_a": "a", "make_b": "b", "use_b": "c", "use_a": "d"}
    graph = Graph(
        name="cross",
        calls=tuple(
            Call(
                name=name,
                model="m",
                type=CallType.GENERATE if name == "gen" else CallType.INFERENCE,
                inputs=(Input(key=inputs[name]),) if name in inputs else (),
                outputs=(outputs[name],),
            )
            for name in names
        ),
        keys=tuple(KeySpec(name=key, per=Per.TOKEN, dtype="int64") for key in outputs.values()),
    )
    ranks = {name: [1, 2] if name.startswith("use") else [0, 1] for name in names}
    cluster = {"devices_per_node": 2}
    plan = Plan.loads(
        json.dumps(
            {
                "algorithm": "cross",
                "cluster": cluster,
                "calls": {name: {"ranks": ranks[name]} for name in names},
            }
        )
    )
    program = compile_program(graph, plan)
    received = [step.name for step in program.steps(1) if step.side is Side.RECEIVE]
    assert received == ["transfer:gen>lengths", "transfer:make_b>use_b", "transfer:make_a>use_a"]
    messages = {
        index: [(0, 1)]
        for index, i in enumerate(program.instructions)
        if isinstance(i, Transfer) and 1 in i.targets
    }
    machine = Machine(program=program, messages=messages, saves=set())
    machine.run(2)
    order = [program.instructions[index].name for iteration, index in machine.posted[0, 1] if iteration == 0]
    assert order == ["transfer:gen>lengths", "transfer:make_a>use_a", "transfer:make_b>use_b"]


def test_the_machine_can_deadlock() -> None:
    """Two ranks that meet in opposite orders are seen to block."""
    machine = Machine(program=None, messages={}, saves=set())  # type: ignore[arg-type]
    a, b = ("meet", (0, 0), (0, 1)), ("meet", (0, 1), (0, 1))
    assert not machine._meet({0: [a, b], 1: [b, a]}, {0: 0, 1: 0})
    assert machine._meet({0: [a, b], 1: [a, b]}, {0: 0, 1: 0})


@settings(deadline=None, max_examples=40)
@given(programs())
def test_steps_follow_the_global_order(program: Program) -> None:
    everywhere: dict[int, set[int]] = defaultdict(set)
    for rank in range(program.world_size):
        steps = program.steps(rank)
        own = [step.index for step in steps if step.side is not Side.RECEIVE]
        assert own == sorted(set(own)), "a subsequence of the global order"
        received = [step.index for step in steps if step.side is Side.RECEIVE]
        assert len(set(received)) == len(received)
        for place, step in enumerate(steps):
            everywhere[step.index].add(rank)
            if step.side is Side.RECEIVE:
                after = next(s for s in steps[place:] if s.side is not Side.RECEIVE)
                assert isinstance(after.instruction, Run), "receives stand right before a run"
                assert step.index < after.index
                assert isinstance(step.instruction, Transfer)
                assert step.instruction.consumer in (None, after.instruction.call)
    for index, instruction in enumerate(program.instructions):
        assert everywhere[index] == set(instruction.ranks), "every rank that an instruction names takes part"


@settings(deadline=None, max_examples=40)
@given(programs())
def test_lengths_arrive_before_anything_needs_them(program: Program) -> None:
    generates = {
        call.name: program.plan.calls[call.name].mesh
        for call in program.graph.calls
        if call.type == "generate"
    }
    for rank in range(program.world_size):
        knows = False
        for step in program.steps(rank):
            match step.instruction:
                case Transfer(consumer=None) if step.side is Side.RECEIVE:
                    knows = True
                case Run(call=call) if call in generates:
                    knows = True
                case Run() | Transfer():
                    assert knows, f"rank {rank} is at {step.name} without the lengths"


@dataclass
class Weights:
    """Versions of all copies, by walking the instructions in their global order."""

    program: Program
    versions: dict[CopyKey, int | None] = field(default_factory=dict)
    """None: the storage is free, its values are on the host or in the optimizer."""
    kept: dict[CopyKey, int] = field(default_factory=dict)
    parked: set[CopyKey] = field(default_factory=set)
    """Copies whose optimizer state is on the host."""
    sending: dict[str, CopyKey] = field(default_factory=dict)
    """Sources of streamed reallocs, by the call that they go on beside."""
    updated: dict[str, int] = field(default_factory=dict)
    """By model that is updated: the iterations whose training is in its weights."""

    def __post_init__(self) -> None:
        self.versions = dict.fromkeys(_homes(self.program), 0)

    def walk(self, iteration: int) -> None:
        trained = defaultdict(int)
        for instruction in self.program.instructions:
            match instruction:
                case Run(copy=None):
                    pass
                case Run(call=name, copy=copy) as run:
                    call = self.program.graph.call(name)
                    count = self.updated.get(copy.model, 0)
                    if _whole(self.program).trained(copy.model):
                        count = iteration + trained[copy.model]
                    assert self.versions.get(copy) == count, f"{run.name} in iteration {iteration}"
                    assert run.version_offset == trained[copy.model]
                    self.sending.pop(name, None)
                    if call.trains and self.program.whole is None:
                        assert copy == self.program.home(copy.model)
                        assert copy not in self.sending.values(), "the source of a stream"
                        assert copy not in self.parked, "a training has its optimizer's state"
                        trained[copy.model] += 1
                        self.versions[copy] = count + 1
                    if run.release:
                        assert copy not in _homes(self.program)
                        del self.versions[copy]
                case Realloc(source=source, target=target, call=call, stream=stream):
                    if stream:
                        self.sending[call] = source
                    assert self.versions.get(source) is not None, "the source has weights"
                    assert self.versions.get(target) != self.versions[source], "nothing is filled twice"
                    self.versions[target] = self.versions[source]
                case Mix(update=update, source=source, target=target, from_host=from_host):
                    if update.due(iteration):
                        assert self.versions[source] == iteration + 1, "after the training"
                        assert (self.versions[target] is None) == from_host, "on the host, or there"
                        assert target not in self.sending.values(), "the source of a stream"
                        where = self.kept if from_host else self.versions
                        assert where[target] == self.updated.get(update.target, 0)
                        where[target] = self.updated[update.target] = iteration + 1
                case Offload(copy=copy, what="state"):
                    self.parked.add(copy)
                case Reload(copy=copy, what="state"):
                    self.parked.remove(copy)
                case Offload(copy=copy):
                    version = self.versions[copy]
                    assert version is not None
                    assert copy not in self.sending.values(), "the source of a stream"
                    self.kept[copy] = version
                    self.versions[copy] = None
                case Reload(copy=copy, source="node"):
                    assert copy not in self.versions, "nothing is filled twice"
                    self.versions[copy] = 0
                case Reload(copy=copy):
                    if copy in self.kept:
                        assert copy not in self.parked, (
                            "main parameters are there when weights are made of them"
                        )
                        self.versions[copy] = self.kept.pop(copy)


@settings(deadline=None, max_examples=40)
@given(programs())
def test_calls_run_on_the_weights_that_the_graph_asks_for(program: Program) -> None:
    homes = _homes(program)
    weights = Weights(program=program)
    weights.parked = {
        home
        for home in homes
        if program.graph.trained(home.model)
        and program.plan.calls[program.graph.home_call(home.model).name].offload == "host"
    }
    resting = set(weights.parked)
    for iteration in range(3):
        weights.walk(iteration)
        assert set(weights.versions) == homes, "only home copies outlive an iteration"
        assert weights.parked == resting
        for copy in homes:
            if program.graph.trained(copy.model):
                assert weights.versions[copy] == iteration + 1, "a trained model can be saved"
            for update in program.graph.updates:
                age = iteration + 1 - weights.updated.get(update.target, 0)
                assert 0 <= age < update.every
                assert weights.updated.get(update.target, 0) == program.graph.version(
                    update.target, iteration + 1
                )


@settings(deadline=None, max_examples=40)
@given(programs())
def test_compile_is_deterministic_and_names_are_unique(program: Program) -> None:
    again = compile_program(program.graph, Plan.loads(program.plan.dumps()))
    assert again == program
    names = [i.name for i in program.instructions if not isinstance(i, Offload | Reload)]
    assert len(set(names)) == len(names), "progress, traces and faults name instructions"


def _whole(program: Program) -> Graph:
    """The graph of the algorithm, also of the program of an evaluation."""
    return program.whole or program.graph


def _homes(program: Program) -> set[CopyKey]:
    """Copies that are there between iterations: not of models that are in the nodes' host stores."""
    return {
        program.home(model)
        for model in program.graph.models
        if program.plan.calls[_whole(program).home_call(model).name].offload != "node"
    }


@st.composite
def evaluations(draw: st.DrawFn) -> tuple[Program, Program]:
    """A program, and that of an evaluation with some of its calls."""
    program = draw(programs())
    graph, names = program.graph, set[str]()
    left = draw(st.lists(st.sampled_from(graph.calls), min_size=1, max_size=2))
    while left:
        call = left.pop()
        names.add(call.name)
        left += graph.parents(call)
    return program, compile_program(graph, program.plan, evaluation=names)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_an_evaluation_has_its_calls_and_ends(data: st.DataObject) -> None:
    program, evaluation = data.draw(evaluations())
    runs = [one.call for one in evaluation.instructions if isinstance(one, Run)]
    in_order = [one.call for one in program.instructions if isinstance(one, Run) and one.call in runs]
    assert runs == in_order == [call.name for call in evaluation.graph.ordered(evaluation.plan.order)]
    assert set(evaluation.copies()) <= set(program.copies()), "it has no copies of its own"
    Machine(program=evaluation, messages=_messages(evaluation, data), saves=set()).run(2)


@settings(deadline=None, max_examples=40)
@given(evaluations())
def test_an_evaluation_leaves_all_weights_as_they_were(both: tuple[Program, Program]) -> None:
    program, evaluation = both
    weights = Weights(program=program)
    for home in _homes(program):
        if program.plan.calls[program.graph.home_call(home.model).name].offload != "host":
            continue
        if program.graph.trained(home.model):
            weights.parked.add(home)
        else:
            weights.versions[home], weights.kept[home] = None, 0
    for iteration in range(3):
        before = dict(weights.versions), dict(weights.kept), set(weights.parked)
        weights.program = evaluation
        weights.walk(iteration)
        assert (weights.versions, weights.kept, weights.parked) == before
        weights.program = program
        weights.sending.clear()  # an evaluation ends what it began
        weights.walk(iteration)


@settings(deadline=None, max_examples=40)
@given(programs())
def test_a_rank_has_sent_a_stream_before_its_source_changes(program: Program) -> None:
    for rank in range(program.world_size):
        sending: list[Realloc] = []
        for step in program.steps(rank):
            assert set(step.finish) <= set(sending)
            sending = [realloc for realloc in sending if realloc not in step.finish]
            match step.instruction:
                case Realloc() as realloc:
                    assert not sending, "reallocs follow each other"
                    if realloc.stream:
                        sending.append(realloc)
                case Run(call=call, copy=copy):
                    if program.graph.call(call).trains:
                        assert all(realloc.source != copy for realloc in sending)
                    sending = [realloc for realloc in sending if realloc.call != call]
                case Mix():
                    assert not sending, "it changes the source, or its messages would be taken for theirs"
                case Offload(copy=copy, what="weights"):
                    assert all(realloc.source != copy for realloc in sending)
                case _:
                    pass
        assert not sending, "an iteration ends what it began"


def test_the_weights_machine_can_fail() -> None:
    program = compile_program(*_tiny())
    broken = Program(
        graph=program.graph,
        plan=program.plan,
        instructions=tuple(i for i in program.instructions if not isinstance(i, Realloc)),
        world_size=program.world_size,
    )
    with pytest.raises(AssertionError, match="run:gen in iteration 0"):
        Weights(program=broken).walk(0)


def _tiny() -> tuple[Graph, Plan]:
    graph = Graph(
        name="tiny",
        calls=(
            Call(name="gen", model="m", type=CallType.GENERATE, outputs=("tokens",)),
            Call(name="train", model="m", type=CallType.TRAIN, inputs=(Input(key="tokens"),)),
        ),
        keys=(KeySpec(name="tokens", per=Per.TOKEN, dtype="int64"),),
    )
    text = (
        '{"algorithm": "tiny", "cluster": {"devices_per_node": 2}, "calls": {'
        '"gen": {"ranks": [0, 2], "layout": {"dp": 2}}, "train": {"ranks": [0, 2], "layout": {"tp": 2}}}}'
    )
    return graph, Plan.loads(text)
