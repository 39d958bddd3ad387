"""A run whose input was read and checked: plans, arguments, checkpoints, prompts, batch sizes.

Nothing here is collective. Every rank reads and checks the same, so what is wrong is refused on all of them alike.
`launch.run` runs it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_real.algorithms.registry import find_algorithm
from megatron_real.backend import Algorithm, Head, Minibatching
from megatron_real.capabilities import capability_problems
from megatron_real.data_plan import Lengths, assign
from megatron_real.dataflow import CallType, Graph
from megatron_real.errors import ConfigError, PlanError, raise_problems
from megatron_real.hooks import checkpoint, cpu_device, roles
from megatron_real.hooks.copy_model import check_copies
from megatron_real.hooks.megatron_backend import RoleSetup
from megatron_real.hooks.model_builder import RoleModel
from megatron_real.hooks.replan import check_change, copy_changes
from megatron_real.hooks.tokenizer import build_tokenizer
from megatron_real.hooks.training_options import (
    Training,
    require_droppable,
    require_movable,
    require_state_offloadable,
)
from megatron_real.plan import Plan
from megatron_real.program import Program, compile_program
from megatron_real.runtime.data.dataset import DataBatch, Dataset, DatasetOptions, Tokenizer
from megatron_real.runtime.evaluation.best import Best
from megatron_real.runtime.evaluation.evaluator import evaluated_calls
from megatron_real.runtime.liveness.faults import Fault, parse_faults, ranks_by_instruction
from megatron_real.runtime.rewards.functions import RewardFunctions
from megatron_real.runtime.run_state import state_to_resume

if TYPE_CHECKING:
    from megatron_real.config import RunOptions

__all__ = ["Job", "evaluation_of", "prepare"]

_INIT_SEED_OFFSET = {"critic": 1, "reward": 2}
"""Fresh critics and reward models differ from the actor; the reference equals it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run whose input was checked; nothing collective has happened."""

    options: RunOptions
    program: Program
    """Of the first iteration that is run."""
    later: Mapping[int, Program]
    """Programs that take its place, by their first iteration."""
    algorithm: Algorithm
    rewards: RewardFunctions | None
    """The functions that score responses; None where a model does, or nothing is scored."""
    tokenizer: Tokenizer
    data: Dataset
    held_out: Dataset | None
    """What evaluations are made on; None makes none."""
    batches: tuple[DataBatch, ...]
    """Of the held-out data."""
    roles: Mapping[str, RoleSetup]
    loads: Mapping[str, Path]
    """Iteration folders of the roles' checkpoints."""
    faults: tuple[Fault, ...]
    resume: Mapping[str, Any] | None
    """The run's state at its last save."""
    best: Best | None
    """Of a run that goes on: the best checkpoint so far."""

    @property
    def save_folder(self) -> Path:
        return self.options.output / "checkpoints"

    @property
    def best_folder(self) -> Path:
        return self.options.output / "best"

    @property
    def first_iteration(self) -> int:
        return int(self.resume["iteration"]) if self.resume is not None else 0


def prepare(options: RunOptions) -> Job:
    """Read and check everything that a run needs. No collective; the same on every rank.

    Raises:
        RealError: the plan, an option or a file is wrong.
    """
    definition, config = find_algorithm(options.algorithm.name), options.algorithm_config()
    rewards = None
    if options.reward is not None:
        rewards = RewardFunctions.of(options.reward, stuck_after_s=options.liveness.stuck_after_s)
    graph = definition.graph_for(config, reward="model" if rewards is None else "function")
    state = state_to_resume(options.output, resume=options.resume)
    programs = _programs(options, graph)
    base = roles.parse_arguments(options.megatron, options.plan)
    tokenizer = build_tokenizer(base)
    algorithm = definition.build(config, end_token=tokenizer.end_token, scorer=rewards)
    setups, loads = _roles(options, list(programs.values()), base, algorithm)
    for start, program in programs.items():
        _check_program(program, str(_plan_paths(options)[start]), setups)
        _check_batch(program, algorithm, _num_sequences(algorithm, options.data.batch_size))
    first = int(state["iteration"]) if state is not None else 0
    program = programs[max(start for start in programs if start <= first)]
    data = Dataset.load(options.data.prompts, tokenizer, _dataset_options(options, algorithm))
    held_out = _held_out(options, tokenizer, algorithm)
    for source in (data, *([held_out] if held_out is not None else [])):
        _check_lengths(setups, source, algorithm)
    batches = held_out.batches() if held_out is not None else ()
    if held_out is not None:
        _check_evaluation(list(programs.values()), algorithm, len(batches[0].records))
    return Job(
        options=options,
        program=program,
        later={start: later for start, later in programs.items() if start > first},
        algorithm=algorithm,
        rewards=rewards,
        tokenizer=tokenizer,
        data=data,
        held_out=held_out,
        batches=batches,
        roles=setups,
        loads=loads,
        faults=parse_faults(
            options.fault,
            names=_fault_names(program, algorithm, evaluates=held_out is not None),
            world_size=program.world_size,
            num_iterations=options.iterations,
        ),
        resume=_checked_resume(options, state, program, setups),
        best=_best(options, algorithm) if state is not None else None,
    )


def evaluation_of(program: Program, algorithm: Algorithm) -> Program:
    """The program of an evaluation under the plan of another one."""
    calls = evaluated_calls(program.graph, algorithm.goal)
    return compile_program(program.graph, program.plan, evaluation=calls)


def _check_evaluation(programs: Sequence[Program], algorithm: Algorithm, num_sequences: int) -> None:
    """Whether the calls of an evaluation can cut a batch of held-out data."""
    try:
        for program in programs:
            _check_batch(evaluation_of(program, algorithm), algorithm, num_sequences)
    except PlanError as error:
        raise ConfigError(f"evaluation: a batch of data.eval_batch_size: {error}") from error


def _fault_names(program: Program, algorithm: Algorithm, *, evaluates: bool) -> dict[str, list[int]]:
    """Where faults may be injected: instructions, and in evaluations those behind ``eval:``, with their ranks."""
    names = ranks_by_instruction(program)
    if not evaluates:
        return names
    inside = ranks_by_instruction(evaluation_of(program, algorithm)) | {"save": names["save"]}
    return names | {f"eval:{name}": ranks for name, ranks in inside.items()}


def _held_out(options: RunOptions, tokenizer: Tokenizer, algorithm: Algorithm) -> Dataset | None:
    if options.data.eval_prompts is None:
        return None
    chosen = replace(_dataset_options(options, algorithm), batch_size=1, samples_per_prompt=1)
    lines = Dataset.load(options.data.eval_prompts, tokenizer, chosen)
    # As many sequences as in training, which the plan can cut.
    size = min(options.data.batch_size * algorithm.samples_per_prompt, lines.num_lines)
    return Dataset(
        lines.records,
        batch_size=options.data.eval_batch_size or size,
        unit=algorithm.graph.data.unit,
    )


def _best(options: RunOptions, algorithm: Algorithm) -> Best | None:
    best = Best.read(options.output / "best")
    return best if best is not None and best.metric == algorithm.goal.metric else None


def _dataset_options(options: RunOptions, algorithm: Algorithm) -> DatasetOptions:
    return DatasetOptions(
        kind=algorithm.graph.data,
        samples_per_prompt=algorithm.samples_per_prompt,
        seed=options.seed,
        **options.data.model_dump(exclude={"prompts", "eval_prompts", "eval_batch_size"}),
    )


def _plan_paths(options: RunOptions) -> dict[int, Path]:
    """The plans of the run, by their first iteration."""
    following = options.next_plan
    return {0: options.plan, **({following.iteration: following.plan} if following is not None else {})}


def _programs(options: RunOptions, graph: Graph) -> dict[int, Program]:
    """The programs of the run's plans, by their first iteration."""
    plans = {start: Plan.load(path) for start, path in _plan_paths(options).items()}
    for start, plan in plans.items():
        if start > 0:
            check_change(plans[0], plan, source=str(_plan_paths(options)[start]))
    return {start: compile_program(graph, plan) for start, plan in plans.items()}


def _check_program(program: Program, source: str, setups: Mapping[str, RoleSetup]) -> None:
    """Whether the models can be cut as the plan says."""
    shapes = {name: setup.model.shape() for name, setup in setups.items()}
    program.plan.check(program.graph, shapes, source=source)
    raise_problems(capability_problems(program.graph, program.plan), subject=source)
    check_copies(program, {name: setup.model for name, setup in setups.items()})


def _num_sequences(algorithm: Algorithm, batch_size: int) -> int:
    return batch_size * algorithm.graph.data.unit * algorithm.samples_per_prompt


def _roles(
    options: RunOptions, programs: Sequence[Program], base: Namespace, algorithm: Algorithm
) -> tuple[dict[str, RoleSetup], dict[str, Path]]:
    program = programs[0]
    _check_heads(algorithm)
    setups: dict[str, RoleSetup] = {}
    loads: dict[str, Path] = {}
    for name in options.model:
        if name not in program.graph.models:
            raise ConfigError(
                f"model.{name}: found a role that the algorithm does not have; it has {list(program.graph.models)}."
            )
    for name in program.graph.models:
        role = options.role(name)
        folder = role.load if role.load is not None or name != "ref" else options.role("actor").load
        stored = None
        if folder is not None:
            loads[name] = checkpoint.find_checkpoint(folder)
            stored = checkpoint.read_common(loads[name]).get("args")
        own_shape = name != "actor" and role.load is not None  # the command line describes the actor
        args = roles.role_arguments(
            base, stored=stored if own_shape else None, overrides=role.megatron, role=name
        )
        if stored is not None:
            checkpoint.check_architecture(name, args, stored, loads[name])
        model = roles.role_model(
            name,
            args,
            scalar_head=program.graph.has_scalar_head(name),
            tp_sizes=[placement.layout.tp for each in programs for placement in each.plan.calls.values()],
            seed=options.seed + _INIT_SEED_OFFSET.get(name, 0),
            use_te=args.transformer_impl == "transformer_engine" and not cpu_device.is_active(),
        )
        if name in loads:
            checkpoint.check_tensors(model, loads[name])
        trained = program.graph.trained(name)
        optimizer = roles.optimizer_config(name, args) if trained else None
        if optimizer is not None:
            _check_training(name, model, Training(optimizer=optimizer), programs)
        setups[name] = RoleSetup(
            model=model,
            args=args,
            optimizer=optimizer,
            schedule=roles.learning_schedule(name, args, _num_steps(options, program.graph, algorithm, name))
            if trained
            else None,
        )
    return setups, loads


def _check_heads(algorithm: Algorithm) -> None:
    """Whether every call asks of its model what the graph says that it returns."""
    for call in algorithm.graph.calls:
        if call.model is None:
            continue
        head = Head.LOGPROBS
        if call.type is not CallType.GENERATE:
            head = algorithm.objective(call).head if call.trains else algorithm.head(call)
        if (head is Head.LOGPROBS) == algorithm.graph.has_scalar_head(call.model):
            raise ConfigError(
                f"graph {algorithm.graph.name}: {call.name}: found a call for {head} of {call.model}, which the graph "
                f"gives {'a scalar' if head is Head.LOGPROBS else 'a language-model'} head; expected one kind of head "
                "for each model. Name the models that return numbers in Graph.scalar_heads."
            )


def _num_steps(options: RunOptions, graph: Graph, algorithm: Algorithm, model: str) -> int:
    """Optimizer steps of a trained model in the whole run."""
    cut = algorithm.minibatching(graph.home_call(model))
    return options.iterations * cut.num_minibatches * cut.num_epochs


def _check_training(name: str, model: RoleModel, training: Training, programs: Sequence[Program]) -> None:
    """Whether a trained model can be dropped and moved as the plans say."""
    home_call = programs[0].graph.home_call(name).name
    if any(program.plan.calls[home_call].drop_trained_weights for program in programs):
        require_droppable(model, training)
    if any(program.plan.calls[home_call].offload == "host" for program in programs):
        require_state_offloadable(model, training)
    if any(copy_changes(name, programs[0], program).moves for program in programs[1:]):
        require_movable(model, training)


def _check_batch(program: Program, algorithm: Algorithm, num_sequences: int) -> None:
    """Whether every call can cut the batch, whatever the lengths will be."""
    lengths = Lengths(prompt=(1,) * num_sequences, response=(1,) * num_sequences)
    for call in program.graph.calls:
        cut = algorithm.minibatching(call) if call.trains else Minibatching()
        steps = cut.num_minibatches if program.whole is None else 1  # an evaluation takes a batch at once
        assign(call, program.plan.calls[call.name], lengths, steps, unit=cut.unit)


def _check_lengths(setups: Mapping[str, RoleSetup], data: Dataset, algorithm: Algorithm) -> None:
    generations = [call for call in algorithm.graph.calls if call.type is CallType.GENERATE]
    max_new_tokens = max((algorithm.sampling(call).max_new_tokens for call in generations), default=0)
    longest = max(len(record.tokens) + len(record.response) for record in data.records) + max_new_tokens
    added = f"longest prompt and max_new_tokens={max_new_tokens}" if generations else "prompt and answer"
    for name, setup in setups.items():
        limit = setup.model.max_sequence_length
        if longest > limit:
            raise ConfigError(
                f"{name}: found sequences of up to {longest} tokens ({added}); expected at most "
                f"--max-position-embeddings={limit}."
            )


def _checked_resume(
    options: RunOptions, state: dict[str, Any] | None, program: Program, setups: Mapping[str, RoleSetup]
) -> dict[str, Any] | None:
    if state is None:
        return None
    folder = options.output / "checkpoints"
    for model in program.graph.models:
        if program.graph.changes(model):
            found = checkpoint.find_checkpoint(folder / model, int(state["iteration"]))
            checkpoint.check_tensors(setups[model].model, found)
    return state
