"""Prices from a device's constants: a roofline with measured efficiency curves. Needs no profile.

A matrix product takes the longer of its arithmetic (peak times the efficiency of its rows or of its narrower side) and
its traffic; norms, residuals, rotary positions and activations take their traffic; attention takes its causal
arithmetic, or the reading of the cache in a decode step. Collectives are those that Megatron issues: two all-reduces
per layer and pass under tensor parallelism (all-gather and reduce-scatter under sequence parallelism), a ring of keys
and values under context parallelism, two all-to-alls under expert parallelism. What Megatron hides behind the
gradient of the weights or behind attention is counted as far as it sticks out.

Launches are not in `layer`: a pass takes no less than `pass_floor`, a decode step no less than `decode_step_floor`.

Invariants (tests/unit/plan_search/test_analytic.py):
    - closed forms by hand of layers, heads and collectives;
    - a price never falls with tokens, context or layers, and nothing costs zero but a group of one;
    - the same arguments give the same object: prices are cached.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from megatron_real.dataflow import CallType
from megatron_real.plan_search.cluster import Device
from megatron_real.plan_search.costs.links import Links, Lookup
from megatron_real.plan_search.costs.operations import Collective, Grid, Group, MicroBatch, OpTime, Pass
from megatron_real.plan_search.costs.training import exposed_seconds
from megatron_real.plan_search.models import ModelSpec

__all__ = ["AnalyticCost"]

_CACHE = 1 << 17
_NORM_ELEMENTS = 10
"""Times that a layer's forward reads or writes the hidden vector of a token: two norms (read, write) and two
residuals (two reads, one write)."""
_SCORE_PASSES = 6
"""Times that unfused attention reads or writes the scores, forward: product, softmax, dropout, product."""
_LOSS_BYTES = 24
"""Per logit, forward: the cast to fp32, maximum, shifted copy, exponentials and sum of Megatron's cross entropy."""
_LOSS_BACKWARD_BYTES = 10
"""Per logit: the gradient in fp32, read and written, and its cast."""
_FORWARD_KERNELS = 6
"""Of a layer beside its products and attention: norms, residuals, rotary positions, activation."""
_FUSED_BACKWARD = 2.5
"""FLOPs of a fused attention's backward over its forward's: scores are computed again (arXiv:2205.14135)."""


class _Product(NamedTuple):
    """Seconds of a matrix product, and of its two gradients."""

    forward: float
    data: float
    weight: float


class AnalyticCost:
    """`OperationCosts` of a device, from its constants alone."""

    def __init__(
        self, device: Device, *, compute_scale: float = 1.0, decode_floor_scale: float = 1.0
    ) -> None:
        """Take a device's constants.

        Args:
            device: with the constants of `devices/*.json`.
            compute_scale: factor on the seconds of compute; above 1 for older kernels than those that were measured.
            decode_floor_scale: factor on `decode_step_floor`; below 1 for an engine with less overhead than Megatron's.

        Raises:
            PlanError: the device lacks a constant.
        """
        self.device = device
        self._compute_scale = compute_scale
        self._decode_floor_scale = decode_floor_scale
        self._links = Links(device)
        number = device.number
        self._peak = {2: number("peak_bf16_flops_per_s"), 4: number("peak_fp32_flops_per_s")}
        self._rows = Lookup(device.table("gemm_efficiency_by_tokens"))
        self._width = Lookup(device.table("gemm_efficiency_by_width"))
        self._best = max(share for _, share in device.table("gemm_efficiency_by_tokens"))
        self._attention = Lookup(device.table("attention_efficiency_by_length"))
        self._attention_backward = number("attention_backward_efficiency")
        memory = number("hbm_bytes_per_s")
        self._stream_bytes_per_s = memory * number("hbm_efficiency")
        self._weight_bytes_per_s = memory * number("weight_read_efficiency")
        self._cache_bytes_per_s = memory * number("kv_read_efficiency")
        self._kernel_s = number("kernel_s")
        self._cores = number("cores_per_node") if "cores_per_node" in device.constants else None
        self._slowdown = number("overlap_slowdown")
        self._layer = lru_cache(_CACHE)(self._price_layer)
        self._head = lru_cache(_CACHE)(self._price_head)

    @property
    def provenance(self) -> dict[str, str]:
        return {
            "costs": "analytic",
            "device": self.device.name,
            "compute_scale": f"{self._compute_scale:g}",
            "decode_floor_scale": f"{self._decode_floor_scale:g}",
        }

    @property
    def overlap_slowdown(self) -> float:
        """By how much compute and communication slow each other while both run."""
        return self._slowdown

    def layer(self, model: ModelSpec, layer: int, pass_: Pass, batch: MicroBatch, grid: Grid) -> OpTime:
        """One decoder layer on one rank. `batch` is of the data-parallel rank: context parallelism divides it here."""
        return self._layer(model, model.shape.has_experts(layer), pass_, batch, grid)

    def head(self, model: ModelSpec, pass_: Pass, batch: MicroBatch, grid: Grid) -> OpTime:
        """Final norm, logits or scalar, and the loss, log-probabilities or sampling over them."""
        return self._head(model, pass_, batch, grid)

    def embedding(self, model: ModelSpec, pass_: Pass, batch: MicroBatch, grid: Grid) -> OpTime:
        """Rows read and written (backward: added to the gradient buffer), and the reduction over the shards."""
        hidden, size = model.shape.hidden_size, model.param_itemsize
        tokens = batch.tokens / _context_parallel(pass_, grid)
        whole = tokens * hidden * size
        tp = Group(grid.tp, grid.tp_nodes)
        if pass_ is Pass.BACKWARD:
            traffic = tokens * hidden * (size + 2 * model.grad_itemsize)
            communication = self.collective(Collective.ALL_GATHER, whole, tp) if grid.sp else 0.0
        else:
            traffic = 2 * whole
            kind = Collective.REDUCE_SCATTER if grid.sp else Collective.ALL_REDUCE
            communication = self.collective(kind, whole, tp)
        return OpTime(self._busy(traffic / self._stream_bytes_per_s + self._kernel_s, grid), communication)

    def optimizer_step(self, model: ModelSpec, num_parameters: float, num_owned: float, grid: Grid) -> float:
        """Adam by its traffic.

        Per owned parameter: the gradient for the norm (4 B) and for the step (4), parameter and both moments read and
        written (24), the model's parameter written (2, where the optimizer has its own); per parameter of the shard
        the gradient buffer that is zeroed.
        """
        owned = 32 + (model.param_itemsize if model.has_main_params else 0)
        traffic = num_owned * owned + num_parameters * model.grad_itemsize
        floor = self.device.number("optimizer_floor_s")
        return self._busy(traffic / self._stream_bytes_per_s, grid) + floor

    def collective(self, kind: Collective, num_bytes: float, group: Group) -> float:
        """One collective; `num_bytes` of the whole tensor, in an all-to-all too (a rank holds ``num_bytes / size``)."""
        return self._links.collective(kind, num_bytes, group)

    def matrix_product(self, model: ModelSpec, rows: float, columns: float, inner: float) -> float:
        """``[rows, inner] x [inner, columns]`` in the model's dtype, weights read from memory."""
        return self._compute_scale * self._product(model, rows, columns, inner).forward

    def point_to_point(self, num_bytes: float, *, within_node: bool) -> float:
        return self._links.message(num_bytes, within_node=within_node)

    def bandwidth(self, *, within_node: bool) -> float:
        return self._links.bandwidth(within_node=within_node)

    def local_copy(self, num_bytes: float) -> float:
        """Read and written once."""
        return 2 * num_bytes / self._stream_bytes_per_s + self._kernel_s

    def host_copy(self, num_bytes: float) -> float:
        number = self.device.number
        return num_bytes / number("host_link_bytes_per_s") + number("host_link_latency_s")

    def decode_step_floor(self, model: ModelSpec, num_layers: int) -> float:
        """Measured on Megatron's engine, eager or with CUDA graphs; layers with experts by their share of the model."""
        how = "graph" if model.cuda_graph else "eager"
        dense, experts = _by_kind(model, num_layers)
        number = self.device.number
        seconds = dense * number(f"decode_{how}_s") + experts * number(f"decode_{how}_moe_s")
        return self._decode_floor_scale * seconds

    def pass_floor(self, model: ModelSpec, num_layers: int, pass_: Pass) -> float:
        """Python and launches of an eager pass; in `Pass.DECODE` the engine's floor."""
        if pass_ is Pass.DECODE:
            return self.decode_step_floor(model, num_layers)
        number = self.device.number
        one = number("launch_backward_s") if pass_ is Pass.BACKWARD else number("launch_forward_s")
        dense, experts = _by_kind(model, num_layers)
        return one * (dense + experts * number("launch_moe_factor"))

    def call_overhead(self, type_: CallType, grid: Grid) -> float:
        """Alike for all types and grids."""
        return self.device.number("call_overhead_s")

    def _price_layer(
        self, model: ModelSpec, experts: bool, pass_: Pass, batch: MicroBatch, grid: Grid
    ) -> OpTime:
        shape = model.shape
        tokens = batch.tokens / _context_parallel(pass_, grid)
        columns = shape.query_width / grid.tp + 2 * _local_key_width(model, grid)
        attention = self._attention_s(model, pass_, batch, grid)
        projections = self._product(model, tokens, columns, shape.hidden_size)
        output = self._product(model, tokens, shape.hidden_size, shape.query_width / grid.tp)
        compute = _of_pass(projections, pass_) + _of_pass(output, pass_) + attention
        compute += self._elementwise(model, pass_, tokens, grid)
        communication = self._tensor_parallel(model, pass_, tokens, grid, projections)
        communication += self._ring(model, pass_, tokens, grid, attention)
        if experts:
            feed_forward = self._experts(model, pass_, tokens, grid)
        else:
            feed_forward = self._dense(model, pass_, tokens, shape.ffn_hidden_size, grid)
        return OpTime(
            self._busy(compute + feed_forward.compute_s, grid), communication + feed_forward.communication_s
        )

    def _price_head(self, model: ModelSpec, pass_: Pass, batch: MicroBatch, grid: Grid) -> OpTime:
        shape, size = model.shape, model.param_itemsize
        parallel = _context_parallel(pass_, grid)
        tokens, positions = batch.tokens / parallel, batch.logit_positions / parallel
        columns = 1.0 if shape.scalar_head else shape.output_width / grid.tp
        backward = pass_ is Pass.BACKWARD
        product = self._product(model, positions, columns, shape.hidden_size)
        norm = 2 * tokens * shape.hidden_size * size / (grid.tp if grid.sp else 1)
        loss = positions * columns * (_LOSS_BACKWARD_BYTES if backward else _LOSS_BYTES)
        compute = _of_pass(product, pass_) + 2 * self._kernel_s
        compute += (norm * (2 if backward else 1) + loss) / self._stream_bytes_per_s
        tp, hidden = Group(grid.tp, grid.tp_nodes), positions * shape.hidden_size * size
        communication = 0.0
        if grid.sp:
            kind = Collective.REDUCE_SCATTER if backward else Collective.ALL_GATHER
            communication = self.collective(kind, hidden, tp)
        if not shape.scalar_head:
            if pass_ in (Pass.DECODE, Pass.PREFILL):
                logits = positions * shape.output_width * size
                communication += self.collective(Collective.ALL_GATHER, logits, tp)
            elif not backward:  # maximum, target logit and sum of exponentials
                communication += 3 * self.collective(Collective.ALL_REDUCE, 4 * positions, tp)
            elif not grid.sp:
                reduced = self.collective(Collective.ALL_REDUCE, hidden, tp)
                communication += exposed_seconds(reduced, product.weight, self._slowdown)
        return OpTime(self._busy(compute, grid), communication)

    def _product(
        self, model: ModelSpec, rows: float, columns: float, inner: float, count: float = 1.0
    ) -> _Product:
        """``[rows, inner] x [inner, columns]`` and its gradients; the weights' is added to the gradient buffer.

        Efficiency is the lower one of its rows' and its narrower side's: few rows measure the reading of weights, which
        a narrow matrix does not make worse. `count` products of a kind go in one launch, as experts' do.
        """
        size = model.param_itemsize
        efficiency = min(self._rows(rows), self._best * self._width(min(columns, inner)))
        arithmetic = 2 * rows * columns * inner / (self._peak[size] * efficiency)
        activations, weights = rows * (columns + inner) * size, columns * inner
        read = (activations + weights * size) / self._weight_bytes_per_s
        accumulated = (activations + weights * 2 * model.grad_itemsize) / self._weight_bytes_per_s
        once = count * max(arithmetic, read) + self._kernel_s
        return _Product(once, once, count * max(arithmetic, accumulated) + self._kernel_s)

    def _attention_s(self, model: ModelSpec, pass_: Pass, batch: MicroBatch, grid: Grid) -> float:
        shape = model.shape
        width = shape.query_width / grid.tp
        if pass_ is Pass.DECODE:
            cached = (
                batch.sequences * batch.context * 2 * _local_key_width(model, grid) * model.param_itemsize
            )
            arithmetic = 4 * width * batch.sequences * batch.context / self._peak[model.param_itemsize]
            return max(cached / self._cache_bytes_per_s, arithmetic) + self._kernel_s
        square = batch.square_length or batch.length**2
        beyond = max(0.0, batch.context - batch.length)  # cached positions before the first new one
        pairs = batch.sequences * (square / 2 + beyond * batch.length) / grid.cp
        backward = pass_ is Pass.BACKWARD
        peak = self._peak[model.param_itemsize]
        if model.fused_attention:
            speed = peak * self._attention(batch.length)
            if backward:
                return (
                    4 * width * pairs * _FUSED_BACKWARD / (speed * self._attention_backward) + self._kernel_s
                )
            return 4 * width * pairs / speed + self._kernel_s
        scores = batch.sequences * (square + beyond * batch.length) / grid.cp
        traffic = scores * shape.num_attention_heads / grid.tp * model.param_itemsize * _SCORE_PASSES
        speed = peak * min(self._rows(batch.length), self._best * self._width(shape.head_width))
        seconds = 4 * width * scores / speed + traffic / self._stream_bytes_per_s + 5 * self._kernel_s
        return 2 * seconds if backward else seconds

    def _elementwise(self, model: ModelSpec, pass_: Pass, tokens: float, grid: Grid) -> float:
        """Norms, residuals and rotary positions; the activation is priced with its MLP."""
        shape = model.shape
        elements = _NORM_ELEMENTS * shape.hidden_size / (grid.tp if grid.sp else 1)
        if not shape.learned_positions:
            elements += 2 * (shape.query_width / grid.tp + _local_key_width(model, grid))
        return self._streamed(model, pass_, tokens * elements) + self._kernels(pass_, _FORWARD_KERNELS)

    def _dense(self, model: ModelSpec, pass_: Pass, tokens: float, width: float, grid: Grid) -> OpTime:
        """An MLP over tensor-parallel ranks, with its collectives."""
        hidden, gates = model.shape.hidden_size, 2 if model.shape.gated_mlp else 1
        first = self._product(model, tokens, gates * width / grid.tp, hidden)
        second = self._product(model, tokens, hidden, width / grid.tp)
        compute = _of_pass(first, pass_) + _of_pass(second, pass_)
        compute += self._streamed(model, pass_, tokens * (gates + 1) * width / grid.tp)
        return OpTime(compute, self._tensor_parallel(model, pass_, tokens, grid, first))

    def _experts(self, model: ModelSpec, pass_: Pass, tokens: float, grid: Grid) -> OpTime:
        """Router, dispatch, balanced experts and their return; a shared expert beside them."""
        shape, size = model.shape, model.param_itemsize
        hidden, gates = shape.hidden_size, 2 if shape.gated_mlp else 1
        own = tokens / grid.tp * shape.experts_per_token  # copies of tokens that leave this rank
        rows = own * grid.etp  # that arrive: each of the ep ranks sends as many as it gets
        local = shape.num_experts / grid.ep
        picked = tokens / grid.tp * grid.ep * grid.etp
        touched = local * (1 - (1 - shape.experts_per_token / shape.num_experts) ** max(picked, 1.0))
        width = shape.expert_width / grid.etp
        first = self._product(model, rows / touched, gates * width, hidden, touched)
        second = self._product(model, rows / touched, hidden, width, touched)
        compute = _of_pass(first, pass_) + _of_pass(second, pass_)
        compute += self._streamed(model, pass_, rows * (gates + 1) * width + 6 * own * hidden)
        compute += _of_pass(self._product(model, tokens / grid.tp, shape.num_experts, hidden), pass_)
        compute += self._kernels(pass_, 2 * _FORWARD_KERNELS)
        moved = own * hidden * size
        expert_group, shard_group = Group(grid.ep, grid.ep_nodes), Group(grid.etp, grid.tp_nodes)
        communication = 2 * self.collective(Collective.ALL_TO_ALL, moved * grid.ep, expert_group)
        communication += self.collective(Collective.ALL_GATHER, moved * grid.etp, shard_group)
        communication += self.collective(Collective.REDUCE_SCATTER, moved * grid.etp, shard_group)
        total = OpTime(compute, communication)
        if shape.shared_expert_ffn_hidden_size:
            total += self._dense(model, pass_, tokens, shape.shared_expert_ffn_hidden_size, grid)
        return total

    def _tensor_parallel(
        self, model: ModelSpec, pass_: Pass, tokens: float, grid: Grid, first: _Product
    ) -> float:
        """Collectives of a column-parallel product (`first`) and the row-parallel one after it."""
        if grid.tp == 1:
            return 0.0
        group, whole = Group(grid.tp, grid.tp_nodes), tokens * model.shape.hidden_size * model.param_itemsize
        if not grid.sp:
            reduced = self.collective(Collective.ALL_REDUCE, whole, group)
            return (
                exposed_seconds(reduced, first.weight, self._slowdown) if pass_ is Pass.BACKWARD else reduced
            )
        gathered = self.collective(Collective.ALL_GATHER, whole, group)
        scattered = self.collective(Collective.REDUCE_SCATTER, whole, group)
        if pass_ is not Pass.BACKWARD:
            return gathered + scattered
        # The input is gathered again beside the data's gradient, which is scattered beside the weights'.
        hidden = exposed_seconds(gathered, first.data, self._slowdown) + exposed_seconds(
            scattered, first.weight, self._slowdown
        )
        return gathered + hidden

    def _ring(self, model: ModelSpec, pass_: Pass, tokens: float, grid: Grid, attention: float) -> float:
        """Keys and values that go round the context-parallel ranks beside attention (and their gradients)."""
        parallel = _context_parallel(pass_, grid)
        if parallel == 1:
            return 0.0
        block = 2 * tokens * _local_key_width(model, grid) * model.param_itemsize
        step = self.point_to_point(block, within_node=grid.cp_nodes == 1)
        rounds = (parallel - 1) * (2 if pass_ is Pass.BACKWARD else 1)
        return exposed_seconds(rounds * step, attention, self._slowdown)

    def _streamed(self, model: ModelSpec, pass_: Pass, elements: float) -> float:
        """Elements read or written by the forward pass; the backward pass moves twice as many."""
        factor = 2 if pass_ is Pass.BACKWARD else 1
        return factor * elements * model.param_itemsize / self._stream_bytes_per_s

    def _kernels(self, pass_: Pass, count: int) -> float:
        return count * self._kernel_s * (2 if pass_ is Pass.BACKWARD else 1)

    def _busy(self, seconds: float, grid: Grid) -> float:
        """Compute beside the node's other ranks, where they share its cores."""
        shared = max(1.0, grid.busy_ranks / self._cores) if self._cores is not None else 1.0
        return seconds * self._compute_scale * shared


def _of_pass(product: _Product, pass_: Pass) -> float:
    return product.data + product.weight if pass_ is Pass.BACKWARD else product.forward


def _context_parallel(pass_: Pass, grid: Grid) -> int:
    """Ranks that share a sequence's positions: all of them do the work of a single new position."""
    return 1 if pass_ is Pass.DECODE else grid.cp


def _local_key_width(model: ModelSpec, grid: Grid) -> float:
    """Columns of a rank's keys: a group that is not split further is repeated."""
    return max(model.shape.key_width / grid.tp, model.shape.head_width)


def _by_kind(model: ModelSpec, num_layers: int) -> tuple[float, float]:
    """Dense layers and layers with experts among `num_layers`, as in the whole model."""
    if not model.shape.num_experts:
        return num_layers, 0.0
    share = 1 - model.shape.num_dense_layers / model.shape.num_layers
    return num_layers * (1 - share), num_layers * share
