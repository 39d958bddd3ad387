"""The dataflow graphs of the algorithms. No torch: `show`, `search` and the presets read them.

A train call takes tokens of its own sequences only, but of what its advantages are made of *all* sequences: advantages
are whitened over the whole batch, and each train call derives them itself instead of waiting for another. What a data
set holds (prompts, preference pairs) is no key: every call reads its part of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal

from megatron_real.dataflow import Call, CallType, Graph, Input, KeySpec, Per, Scope
from megatron_real.errors import PlanError

__all__ = [
    "GRAPHS",
    "dpo_graph",
    "graph_of",
    "grpo_graph",
    "ppo_graph",
    "remax_graph",
    "reward_graph",
    "sft_graph",
]

_TOKENS = (Input(key="tokens"),)
_PER = {
    "tokens": Per.TOKEN,
    "greedy_tokens": Per.TOKEN,
    "logprobs": Per.RESPONSE,
    "ref_logprobs": Per.RESPONSE,
    "values": Per.RESPONSE,
    "rewards": Per.SEQUENCE,
    "greedy_rewards": Per.SEQUENCE,
}


def ppo_graph(
    reward: Literal["model", "function"] = "model", *, reference: bool = True, extra_rewards: int = 0
) -> Graph:
    """PPO's calls: generate, score, three inferences, two trainings.

    Args:
        reward: whether ``rew_inf`` is a call of the model ``reward`` or of a Python function.
        reference: whether there is a reference model to hold the actor to (``ref_inf``).
        extra_rewards: further frozen reward models: ``rew2_inf`` of the model ``reward2`` makes ``rewards2``, and so
            on. For studies of the search on larger graphs; `algorithms.ppo` trains on the first one.

    Raises:
        PlanError: `reward` is neither, or `extra_rewards` is negative.
    """
    if extra_rewards < 0:
        raise PlanError(f"graph ppo: found extra_rewards={extra_rewards}; expected at least 0.")
    extra = range(2, 2 + extra_rewards)
    scalars = [
        "logprobs",
        *(["ref_logprobs"] if reference else []),
        "values",
        "rewards",
        *(f"rewards{number}" for number in extra),
    ]
    train_inputs = (*_TOKENS, *_full(scalars))
    calls = (
        _generation(),
        _scoring("rew_inf", _reward_model("ppo", reward), "tokens", "rewards"),
        *(_scoring(f"rew{number}_inf", f"reward{number}", "tokens", f"rewards{number}") for number in extra),
        *(_reference() if reference else ()),
        _scoring("critic_inf", "critic", "tokens", "values"),
        Call(name="actor_train", model="actor", type=CallType.TRAIN, inputs=train_inputs),
        Call(name="critic_train", model="critic", type=CallType.TRAIN, inputs=train_inputs),
    )
    return Graph(name="ppo", calls=calls, keys=_keys(["tokens", *scalars]))


def grpo_graph(reward: Literal["model", "function"] = "model", *, reference: bool = True) -> Graph:
    """GRPO's calls (arXiv:2402.03300): generate groups, score, hold to the reference in the loss, train.

    The group's rewards make the advantage, so rewards of all sequences are needed; log-probabilities only of the
    rank's own.

    Args:
        reward: whether ``rew_inf`` is a call of the model ``reward`` or of a Python function.
        reference: whether there is a reference model (``ref_inf``).

    Raises:
        PlanError: `reward` is neither.
    """
    own = ["logprobs", *(["ref_logprobs"] if reference else [])]
    inputs = (*_TOKENS, *(Input(key=key) for key in own), *_full(["rewards"]))
    calls = (
        _generation(),
        _scoring("rew_inf", _reward_model("grpo", reward), "tokens", "rewards"),
        *(_reference() if reference else ()),
        Call(name="actor_train", model="actor", type=CallType.TRAIN, inputs=inputs),
    )
    return Graph(name="grpo", calls=calls, keys=_keys(["tokens", *own, "rewards"]))


def remax_graph(reward: Literal["model", "function"] = "model", *, reference: bool = False) -> Graph:
    """ReMax's calls (arXiv:2310.10505): sampled and greedy responses to the same prompts, both scored, one training.

    The greedy response's reward is the baseline of the sampled one's. Nothing passes between the two generations,
    nor between the two scorings: they may run at the same time, each on a copy of its own.

    Args:
        reward: whether ``rew_inf`` and ``greedy_rew_inf`` are calls of the model ``reward`` or of a Python function.
        reference: whether there is a reference model (``ref_inf``).

    Raises:
        PlanError: `reward` is neither.
    """
    model = _reward_model("remax", reward)
    own = ["logprobs", *(["ref_logprobs"] if reference else [])]
    rewards = ["rewards", "greedy_rewards"]
    inputs = (*_TOKENS, *(Input(key=key) for key in own), *_full(rewards))
    calls = (
        _generation(),
        Call(name="greedy_gen", model="actor", type=CallType.GENERATE, outputs=("greedy_tokens",)),
        _scoring("rew_inf", model, "tokens", "rewards"),
        _scoring("greedy_rew_inf", model, "greedy_tokens", "greedy_rewards"),
        *(_reference() if reference else ()),
        Call(name="actor_train", model="actor", type=CallType.TRAIN, inputs=inputs),
    )
    return Graph(name="remax", calls=calls, keys=_keys(["tokens", "greedy_tokens", *own, *rewards]))


def dpo_graph() -> Graph:
    """DPO's calls (arXiv:2305.18290): the reference's log-probabilities of the data set's pairs, then the training."""
    calls = (
        Call(name="ref_inf", model="ref", type=CallType.INFERENCE, outputs=("ref_logprobs",)),
        Call(name="actor_train", model="actor", type=CallType.TRAIN, inputs=(Input(key="ref_logprobs"),)),
    )
    return Graph(name="dpo", calls=calls, keys=_keys(["ref_logprobs"]))


def sft_graph() -> Graph:
    """Supervised fine-tuning: one training on the data set's sequences."""
    return Graph(name="sft", calls=(Call(name="actor_train", model="actor", type=CallType.TRAIN),), keys=())


def reward_graph() -> Graph:
    """Training a reward model: one training on the data set's pairs."""
    call = Call(name="reward_train", model="reward", type=CallType.TRAIN)
    return Graph(name="reward", calls=(call,), keys=())


GRAPHS: dict[str, Callable[..., Graph]] = {
    "ppo": ppo_graph,
    "grpo": grpo_graph,
    "remax": remax_graph,
    "dpo": dpo_graph,
    "sft": sft_graph,
    "reward": reward_graph,
}
"""By the algorithm's name, which is also the graph's."""


def graph_of(name: str, **options: Any) -> Graph:
    """The graph of an algorithm.

    Args:
        name: as in `GRAPHS` and in a plan's ``algorithm``.
        options: of that algorithm's function, such as ``reference=False``.

    Raises:
        PlanError: no such algorithm, or an option that it does not have or that is not one of its values.
    """
    if name not in GRAPHS:
        raise PlanError(f"algorithm: found {name!r}; expected one of {', '.join(GRAPHS)}.")
    make = GRAPHS[name]
    known = list(inspect.signature(make).parameters)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise PlanError(
            f"algorithm {name}: found the options {', '.join(unknown)}; expected "
            f"{'some of ' + ', '.join(known) if known else 'none'}."
        )
    return make(**options)


def _generation() -> Call:
    return Call(name="actor_gen", model="actor", type=CallType.GENERATE, outputs=("tokens", "logprobs"))


def _scoring(name: str, model: str | None, tokens: str, output: str) -> Call:
    return Call(
        name=name, model=model, type=CallType.INFERENCE, inputs=(Input(key=tokens),), outputs=(output,)
    )


def _reference() -> tuple[Call, ...]:
    return (_scoring("ref_inf", "ref", "tokens", "ref_logprobs"),)


def _reward_model(graph: str, reward: str) -> str | None:
    if reward not in ("model", "function"):
        raise PlanError(f"graph {graph}: found reward={reward!r}; expected 'model' or 'function'.")
    return "reward" if reward == "model" else None


def _full(keys: Iterable[str]) -> tuple[Input, ...]:
    return tuple(Input(key=key, scope=Scope.FULL) for key in keys)


def _keys(names: Iterable[str]) -> tuple[KeySpec, ...]:
    specs = []
    for name in names:
        per = _PER[name.rstrip("0123456789")]
        specs.append(KeySpec(name=name, per=per, dtype="int64" if per is Per.TOKEN else "float32"))
    return tuple(specs)
