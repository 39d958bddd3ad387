"""PPO in plain PyTorch, one process, one sequence at a time: the independent reference of the end-to-end tests.

It shares no code with megatron_real and imports nothing of it or of Megatron, so that equal numbers mean something.
It is written to be evidently right, not fast: loops over sequences, heads and time steps, formulas as in the papers.

Weights are dicts from Megatron's parameter names (of an unsharded `GPTModel` with the local layer spec) to tensors.
Shape legend: T tokens of one sequence, R of them response, H hidden, D per head, V real vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Weights = Mapping[str, torch.Tensor]
Sample = tuple[Sequence[int], Sequence[int]]
"""Prompt tokens, response tokens."""


@dataclass(frozen=True, kw_only=True)
class PlainShape:
    """What the weights do not say about a model."""

    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int
    """Real tokens; rows beyond it are padding that no log-softmax sees."""
    rotary_base: float = 10_000.0
    rotary_percent: float = 1.0
    norm_epsilon: float = 1e-5
    head_key: str = "output_layer.weight"
    """Output weights, [V, H] of a language model or [1, H] of a critic; a tied language model has none."""


@dataclass(frozen=True, kw_only=True)
class PlainConfig:
    """Options of one iteration, under the names that megatron_real's PPO uses, then those of the optimizer."""

    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    clip_ratio: float = 0.2
    value_clip: float | None = 0.2
    value_coefficient: float = 1.0
    entropy_coefficient: float = 0.0
    kl_coefficient: float = 0.1
    reward_bias: float = 0.0
    reward_scale: float = 1.0
    reward_clip: float | None = None
    num_minibatches: int = 1
    num_epochs: int = 1
    temperature: float = 1.0
    actor_learning_rate: float = 1e-3
    critic_learning_rate: float = 1e-3
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    """0 does not clip."""
    dtype: str = "float64"


# --- the model ------------------------------------------------------------------------------------------------------


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """[T, H] -> [T, H]."""
    return weight * x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + epsilon)


def rotate(x: torch.Tensor, shape: PlainShape) -> torch.Tensor:
    """Rotary embedding of one head, [T, D]: dimension i is paired with i + half (not interleaved)."""
    rotary = int(x.shape[1] * shape.rotary_percent)
    half = rotary // 2
    angles = torch.tensor(
        [
            [position / shape.rotary_base ** (2 * i / rotary) for i in range(half)]
            for position in range(x.shape[0])
        ],
        dtype=torch.float64,
    )
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second, rest = x[:, :half], x[:, half:rotary], x[:, rotary:]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], dim=1)


def linear(x: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    """[T, in] -> [T, out], with a bias if the weights have one."""
    y = x @ weights[f"{name}.weight"].T
    bias = weights.get(f"{name}.bias")
    return y if bias is None else y + bias


def attention(x: torch.Tensor, weights: Weights, name: str, shape: PlainShape) -> torch.Tensor:
    """Causal grouped-query attention, [T, H] -> [T, H].

    Megatron stores linear_qkv by group: the group's queries, then its key, then its value.
    """
    queries_per_group = shape.num_attention_heads // shape.num_query_groups
    mixed = linear(x, weights, f"{name}.linear_qkv")
    head_size = mixed.shape[1] // (shape.num_query_groups * (queries_per_group + 2))
    pieces = list(mixed.split(head_size, dim=1))
    future = torch.ones(x.shape[0], x.shape[0]).triu(diagonal=1).bool()
    heads = []
    for _ in range(shape.num_query_groups):
        queries = [pieces.pop(0) for _ in range(queries_per_group)]
        key, value = rotate(pieces.pop(0), shape), pieces.pop(0)
        for query in queries:
            scores = rotate(query, shape) @ key.T / math.sqrt(head_size)
            heads.append(torch.softmax(scores.masked_fill(future, -math.inf), dim=-1) @ value)
    return linear(torch.cat(heads, dim=1), weights, f"{name}.linear_proj")


def swiglu_mlp(x: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    """[T, H] -> [T, H]; Megatron stores linear_fc1 as [gate; up]."""
    both = linear(x, weights, f"{name}.linear_fc1")
    gate, up = both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]
    return linear(gate * torch.sigmoid(gate) * up, weights, f"{name}.linear_fc2")


def hidden_states(tokens: Sequence[int], weights: Weights, shape: PlainShape) -> torch.Tensor:
    """Output of the final norm for one sequence, [T, H]."""
    x = weights["embedding.word_embeddings.weight"][torch.tensor(list(tokens))]
    for index in range(shape.num_layers):
        layer = f"decoder.layers.{index}"
        normed = rms_norm(x, weights[f"{layer}.input_layernorm.weight"], shape.norm_epsilon)
        x = x + attention(normed, weights, f"{layer}.self_attention", shape)
        normed = rms_norm(x, weights[f"{layer}.pre_mlp_layernorm.weight"], shape.norm_epsilon)
        x = x + swiglu_mlp(normed, weights, f"{layer}.mlp")
    return rms_norm(x, weights["decoder.final_layernorm.weight"], shape.norm_epsilon)


def logits(tokens: Sequence[int], weights: Weights, shape: PlainShape) -> torch.Tensor:
    """[T, V]: only the real vocabulary."""
    head = weights.get(shape.head_key, weights["embedding.word_embeddings.weight"])
    return hidden_states(tokens, weights, shape) @ head[: shape.vocab_size].T


def response_logprobs(
    sample: Sample, weights: Weights, shape: PlainShape, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each response token and entropy of the distribution that it is drawn from: [R], [R]."""
    prompt, response = sample
    distribution = torch.log_softmax(logits([*prompt, *response], weights, shape) / temperature, dim=-1)
    logprobs, entropies = [], []
    for index, token in enumerate(response):
        row = distribution[len(prompt) + index - 1]  # the position before a token predicts it
        logprobs.append(row[token])
        entropies.append(-(row.exp() * row).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def response_values(sample: Sample, weights: Weights, shape: PlainShape) -> torch.Tensor:
    """Value of the state before each response token, [R]."""
    prompt, response = sample
    outputs = hidden_states([*prompt, *response], weights, shape) @ weights[shape.head_key][0]
    return torch.stack([outputs[len(prompt) + index - 1] for index in range(len(response))])


# --- the algorithm --------------------------------------------------------------------------------------------------


def advantages_and_returns(
    logprobs: Sequence[Sequence[float]],
    ref_logprobs: Sequence[Sequence[float]],
    values: Sequence[Sequence[float]],
    rewards: Sequence[float],
    config: PlainConfig,
) -> tuple[list[list[float]], list[list[float]]]:
    """Advantages (whitened if asked for) and returns of every token, in Python floats."""
    advantages: list[list[float]] = []
    returns: list[list[float]] = []
    for sequence, reward in enumerate(rewards):
        score = (reward - config.reward_bias) * config.reward_scale
        if config.reward_clip is not None:
            score = max(-config.reward_clip, min(config.reward_clip, score))
        length = len(logprobs[sequence])
        result = [0.0] * length
        next_value = next_advantage = 0.0
        for t in reversed(range(length)):
            token_reward = -config.kl_coefficient * (logprobs[sequence][t] - ref_logprobs[sequence][t])
            if t == length - 1:
                token_reward += score
            delta = token_reward + config.gamma * next_value - values[sequence][t]
            result[t] = delta + config.gamma * config.lam * next_advantage
            next_value, next_advantage = values[sequence][t], result[t]
        advantages.append(result)
        returns.append([a + v for a, v in zip(result, values[sequence], strict=True)])
    if config.whiten:
        flat = [a for row in advantages for a in row]
        mean = sum(flat) / len(flat)
        variance = sum((a - mean) ** 2 for a in flat) / len(flat)
        advantages = [[(a - mean) / math.sqrt(variance + 1e-8) for a in row] for row in advantages]
    return advantages, returns


def policy_loss_of_sequence(
    sample: Sample,
    weights: Weights,
    old_logprobs: Sequence[float],
    advantages: Sequence[float],
    shape: PlainShape,
    config: PlainConfig,
) -> tuple[torch.Tensor, list[float]]:
    """Sum over the tokens of the clipped surrogate minus the entropy bonus, and the ratios."""
    logprobs, entropies = response_logprobs(sample, weights, shape, config.temperature)
    loss = torch.zeros((), dtype=logprobs.dtype)
    ratios = []
    for t, advantage in enumerate(advantages):
        ratio = torch.exp(logprobs[t] - old_logprobs[t])
        limited = torch.clamp(ratio, 1.0 - config.clip_ratio, 1.0 + config.clip_ratio)
        surrogate = torch.minimum(ratio * advantage, limited * advantage)
        loss = loss - surrogate - config.entropy_coefficient * entropies[t]
        ratios.append(ratio.item())
    return loss, ratios


def value_loss_of_sequence(
    sample: Sample,
    weights: Weights,
    old_values: Sequence[float],
    returns: Sequence[float],
    shape: PlainShape,
    config: PlainConfig,
) -> torch.Tensor:
    """Sum over the tokens of half the larger squared error, clipped or not."""
    values = response_values(sample, weights, shape)
    loss = torch.zeros((), dtype=values.dtype)
    for t, target in enumerate(returns):
        error = (values[t] - target) ** 2
        if config.value_clip is not None:
            low, high = old_values[t] - config.value_clip, old_values[t] + config.value_clip
            error = torch.maximum(error, (torch.clamp(values[t], low, high) - target) ** 2)
        loss = loss + config.value_coefficient * 0.5 * error
    return loss


class PlainAdamW:
    """AdamW with clipping by the global norm, as Megatron does it: no decay of biases and one-dimensional weights."""

    def __init__(self, weights: dict[str, torch.Tensor], learning_rate: float, config: PlainConfig) -> None:
        self._weights = weights
        self._learning_rate = learning_rate
        self._config = config
        self._steps = 0
        self._first = {name: torch.zeros_like(w) for name, w in weights.items()}
        self._second = {name: torch.zeros_like(w) for name, w in weights.items()}

    def step(self, gradients: Mapping[str, torch.Tensor]) -> float:
        """Change the weights in place; return the norm of the gradients before clipping."""
        config = self._config
        self._steps += 1
        norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients.values()))
        scale = 1.0
        if config.clip_grad > 0:
            scale = min(1.0, config.clip_grad / (norm + 1e-6))
        for name, weight in self._weights.items():
            gradient = gradients[name] * scale
            first, second = self._first[name], self._second[name]
            first.mul_(config.adam_beta1).add_(gradient * (1 - config.adam_beta1))
            second.mul_(config.adam_beta2).add_(gradient**2 * (1 - config.adam_beta2))
            mean = first / (1 - config.adam_beta1**self._steps)
            spread = (second / (1 - config.adam_beta2**self._steps)).sqrt()
            decays = weight.dim() > 1 and not name.endswith(".bias")
            with torch.no_grad():
                weight.mul_(1 - self._learning_rate * config.weight_decay * decays)
                weight.sub_(self._learning_rate * mean / (spread + config.adam_epsilon))
        return norm


def minibatches(num_sequences: int, config: PlainConfig) -> list[range]:
    """Sequences of each optimizer step: contiguous, nearly equal, the same in each epoch."""
    parts = config.num_minibatches
    once = [range(num_sequences * i // parts, num_sequences * (i + 1) // parts) for i in range(parts)]
    return once * config.num_epochs


def reference_iteration(
    actor_weights: Weights,
    critic_weights: Weights,
    ref_weights: Weights,
    shape: PlainShape,
    batch: Sequence[Sample],
    rewards: Sequence[float],
    config: Mapping[str, Any],
    critic_shape: PlainShape | None = None,
) -> dict[str, Any]:
    """One iteration of PPO on given responses.

    Args:
        actor_weights, critic_weights, ref_weights: by Megatron's names; not changed.
        shape: of actor and reference, and of the critic unless `critic_shape` says otherwise.
        batch: (prompt, response) of each sequence in id order.
        rewards: of each sequence.
        config: fields of `PlainConfig`.

    Returns:
        ``logprobs``, ``ref_logprobs``, ``values``, ``advantages``, ``returns``: a list per sequence; and under
        ``actor`` and ``critic`` a dict with ``losses`` and ``grad_norms`` (per optimizer step; norms before clipping),
        ``gradients`` (of the first step, before clipping, by name) and ``weights`` (at the end, by name). ``actor``
        has ``ratios`` too, of every token of the first step.
    """
    options = PlainConfig(**config)
    dtype = getattr(torch, options.dtype)
    critic_shape = critic_shape or shape
    actor = {name: w.detach().to(dtype, copy=True).requires_grad_() for name, w in actor_weights.items()}
    critic = {name: w.detach().to(dtype, copy=True).requires_grad_() for name, w in critic_weights.items()}
    ref = {name: w.detach().to(dtype) for name, w in ref_weights.items()}

    with torch.no_grad():
        logprobs = [response_logprobs(s, actor, shape, options.temperature)[0].tolist() for s in batch]
        ref_logprobs = [response_logprobs(s, ref, shape, options.temperature)[0].tolist() for s in batch]
        values = [response_values(s, critic, critic_shape).tolist() for s in batch]
    advantages, returns = advantages_and_returns(logprobs, ref_logprobs, values, rewards, options)

    def actor_loss(i: int) -> tuple[torch.Tensor, list[float]]:
        return policy_loss_of_sequence(batch[i], actor, logprobs[i], advantages[i], shape, options)

    def critic_loss(i: int) -> tuple[torch.Tensor, list[float]]:
        return value_loss_of_sequence(batch[i], critic, values[i], returns[i], critic_shape, options), []

    results: dict[str, Any] = {}
    for role, weights, loss_of, learning_rate in (
        ("actor", actor, actor_loss, options.actor_learning_rate),
        ("critic", critic, critic_loss, options.critic_learning_rate),
    ):
        optimizer = PlainAdamW(weights, learning_rate, options)
        role_result: dict[str, Any] = {"losses": [], "grad_norms": []}
        for ids in minibatches(len(batch), options):
            num_tokens = sum(len(batch[i][1]) for i in ids)
            loss, ratios = torch.zeros((), dtype=dtype), []
            for i in ids:
                part, part_ratios = loss_of(i)
                loss = loss + part / num_tokens
                ratios += part_ratios
            # A weight that no token used (padding of the vocabulary) has gradient zero.
            got = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
            gradients = dict(zip(weights, got, strict=True))
            role_result.setdefault("gradients", gradients)
            role_result.setdefault("ratios", ratios)
            role_result["losses"].append(loss.item())
            role_result["grad_norms"].append(optimizer.step(gradients))
        role_result["weights"] = {name: w.detach() for name, w in weights.items()}
        results[role] = role_result
    lists = {"logprobs": logprobs, "ref_logprobs": ref_logprobs, "values": values}
    return {**results, **lists, "advantages": advantages, "returns": returns}
