"""An algorithm of one's own in one file: best-of-n distillation.

The actor answers each prompt several times and is then fine-tuned on its best answers alone: RAFT (Dong et al. 2023,
arXiv:2304.06767), rejection sampling in Llama 2 (arXiv:2307.09288, section 3.2.2). No critic, no reference, no ratio.

    PYTHONPATH=examples megatron-real train algorithm.name=custom_algorithm:BEST_OF_N \
        algorithm.samples_per_prompt=8 reward=rewards:vowel_share data.prompts=prompts.jsonl \
        plan=symmetric cluster=cpu2 iterations=10

It is a graph (who computes what from what), a class with its mathematics, and a definition that names the two and the
options. Everything else is as for the built-in algorithms: ``megatron-real search algorithm.name=...`` finds a plan for
it, any plan runs it, rewards that do not come are masked, runs resume.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_real.algorithms.base import TrainingAlgorithm, moments
from megatron_real.algorithms.configs import TrainingConfig
from megatron_real.algorithms.losses import SFTObjective
from megatron_real.algorithms.options import option
from megatron_real.algorithms.registry import AlgorithmDefinition
from megatron_real.backend import KEPT, Goal, Sampling
from megatron_real.batch import Batch
from megatron_real.dataflow import Call, CallType, Graph, Input, KeySpec, Per, Scope
from megatron_real.errors import Problem

__all__ = ["BEST_OF_N", "BestOfN", "BestOfNConfig", "best_of_n_graph", "best_of_groups"]


def best_of_n_graph(reward: Literal["model", "function"] = "function") -> Graph:
    """Generate, score, train.

    A rank of the training works on its shard of the tokens, but which responses are the best of their group follows
    from the rewards of all of them.
    """
    return Graph(
        name="best_of_n",
        calls=(
            Call(name="actor_gen", model="actor", type=CallType.GENERATE, outputs=("tokens",)),
            Call(
                name="rew_inf",
                model="reward" if reward == "model" else None,
                type=CallType.INFERENCE,
                inputs=(Input(key="tokens"),),
                outputs=("rewards",),
            ),
            Call(
                name="actor_train",
                model="actor",
                type=CallType.TRAIN,
                inputs=(Input(key="tokens"), Input(key="rewards", scope=Scope.FULL)),
            ),
        ),
        keys=(
            KeySpec(name="tokens", per=Per.TOKEN, dtype="int64"),
            KeySpec(name="rewards", per=Per.SEQUENCE, dtype="float32"),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BestOfNConfig(TrainingConfig):
    """Options: ``algorithm.NAME=VALUE``. `TrainingConfig` has the numbers of minibatches and epochs."""

    samples_per_prompt: int = option(8, at_least=2)
    """Responses to each prompt."""
    num_best: int = option(1, at_least=1)
    """How many of them are trained on."""
    max_new_tokens: int = option(128, at_least=1)
    """Longest response, the end token included."""
    temperature: float = option(1.0, above=0)
    """Of sampling; the training is on plain log-probabilities."""
    seed: int = 0
    """Of sampling; the run's, if it is not given."""

    def problems(self) -> Iterator[Problem]:
        """Adds that something is left out."""
        yield from TrainingConfig.problems(self)
        if self.num_best >= self.samples_per_prompt:
            yield Problem(
                path="num_best",
                found=str(self.num_best),
                expected=f"fewer than samples_per_prompt={self.samples_per_prompt}",
            )


class BestOfN(TrainingAlgorithm[BestOfNConfig]):
    """Cross entropy of the best responses; the other ones are masked out of the loss."""

    goal = Goal(metric="reward")

    @property
    def samples_per_prompt(self) -> int:
        """Responses to each prompt, with consecutive sequence ids."""
        return self.config.samples_per_prompt

    def sampling(self, call: Call) -> Sampling:
        """How ``actor_gen`` samples."""
        config = self.config
        return Sampling(
            max_new_tokens=config.max_new_tokens,
            end_token=self.end_token,
            temperature=config.temperature,
            seed=config.seed,
        )

    def prepare(self, call: Call, iteration: int, scalars: Batch) -> tuple[Batch, dict[str, float]]:
        """Keep the best responses to each prompt. The same on every rank: nothing here is random, and ties are not."""
        prepared, metrics = super().prepare(call, iteration, scalars)
        rewards = scalars.data["rewards"]
        kept = best_of_groups(rewards, self.config.samples_per_prompt, self.config.num_best)
        prepared.put(KEPT, kept.to(rewards))
        came = ~rewards.isnan()
        return prepared, {
            **metrics,
            **moments("reward", rewards[came]),
            **moments("reward_best", rewards[kept]),
            "reward_missing": 1.0 - came.double().mean().item(),
        }

    def objective(self, call: Call) -> SFTObjective:
        """The actor's loss."""
        return SFTObjective()


def best_of_groups(rewards: torch.Tensor, group_size: int, num_best: int) -> torch.Tensor:
    """Which sequences have one of the highest rewards of their group; of equal ones the first.

    Args:
        rewards: [S], groups of consecutive sequences; NaN where one did not come, which is never among the best.
        group_size: sequences of a group.
        num_best: how many to take of each.

    Returns:
        [S] bool.
    """
    groups = rewards.nan_to_num(nan=-torch.inf).view(-1, group_size)
    order = groups.argsort(dim=1, descending=True, stable=True)
    best = torch.zeros_like(groups, dtype=torch.bool).scatter(1, order[:, :num_best], value=True)
    return best.flatten() & ~rewards.isnan()


BEST_OF_N = AlgorithmDefinition(
    name="best_of_n", graph=best_of_n_graph, config=BestOfNConfig, algorithm=BestOfN
)
"""What ``algorithm.name=custom_algorithm:BEST_OF_N`` finds."""
