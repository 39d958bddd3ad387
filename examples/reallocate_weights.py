"""The weights of one GPT in two layouts, moved from one to the other: `megatron_real.realloc_ops` as a library.

    torchrun --nproc-per-node 4 examples/reallocate_weights.py

The training model has tensor and pipeline parallelism of two, the rollout model tensor parallelism of four. Neither a
plan nor our runtime is involved: the models are Megatron's, built with Megatron's own process groups. What takes the
place of `megatron.core.resharding.swap_model_weights` is the few lines in `move`.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference.shards import build_inference_pg_collection
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_real.hooks.cpu_device import install_cpu_device
from megatron_real.realloc_ops import Reallocator, ReallocOptions, swap_model_weights

VOCAB, LENGTH = 64, 16


def move(train, rollout):
    """Two steps, each followed by a reallocation; yields what this rank did in each."""
    realloc = Reallocator(  # once per pair of models, on all ranks: they exchange what they hold, and plan
        train,
        rollout,
        options=ReallocOptions(verify="checksum"),
    )
    for step in (1, 2):
        training_step(train, step)
        yield realloc.run(version=step)  # on all ranks: `rollout` now has the weights of `train`
    training_step(train, 3)
    yield swap_model_weights(train, rollout, "nccl")  # the same, called as Megatron's function


@torch.no_grad()
def training_step(model, step):
    """Stands for one: it changes all weights."""
    for parameter in model.parameters():
        parameter.mul_(1 + 0.1 * step)


def build(groups):
    """One pipeline stage of the GPT, in the layout of `groups`."""
    stage, num_stages = groups.pp.rank(), groups.pp.size()
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=128,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=groups.tp.size(),
        pipeline_model_parallel_size=num_stages,
        pipeline_dtype=torch.float32,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        pre_process=stage == 0,
        post_process=stage == num_stages - 1,
        position_embedding_type="rope",
        pg_collection=groups,
    )
    return model.cuda().eval()


@torch.no_grad()
def logits_of(model, groups):
    """Logits of some tokens on the ranks of the last stage, None elsewhere; runs on Megatron's schedule."""
    device = next(model.parameters()).device
    tokens = torch.arange(2 * LENGTH, device=device).view(2, LENGTH) * 7 % VOCAB
    positions = torch.arange(LENGTH, device=device).expand(2, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=device).triu(1)
    found = get_forward_backward_func(groups.pp.size(), None)(
        forward_step_func=lambda _, chunk: (
            chunk(tokens, positions, mask, runtime_gather_output=True),
            lambda output, non_loss_data: output,
        ),
        data_iterator=None,
        model=[model],
        num_microbatches=1,
        seq_length=LENGTH,
        micro_batch_size=2,
        forward_only=True,
        collect_non_loss_data=True,
        pg_collection=groups,
        p2p_communicator=P2PCommunicator(groups.pp, model.config) if groups.pp.size() > 1 else None,
    )
    return found[0] if found else None


def main() -> None:
    """Build both models, move weights three times, and compare the logits after each move."""
    install_cpu_device()  # without CUDA, lets Megatron run on the CPU
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1234)
    train_groups = ProcessGroupCollection.use_mpu_process_groups()
    rollout_groups = build_inference_pg_collection(
        4, tp_size=4, pp_size=1, cp_size=1, ep_size=1, expt_tp_size=1
    )
    train, rollout = build(train_groups), build(rollout_groups)
    for number, report in enumerate(move(train, rollout), start=1):
        trained, rolled_out = logits_of(train, train_groups), logits_of(rollout, rollout_groups)
        expected = trained if trained is not None else torch.empty_like(rolled_out)
        dist.broadcast(expected, src=dist.get_world_size() - 1)  # from the last stage
        difference = (rolled_out - expected).abs().max().item()
        print(
            f"move {number}: rank {rank}: {report.bytes_moved:,} bytes received of {report.bytes_bound:,} needed, "
            f"{report.bytes_local:,} kept, {report.messages} messages, {report.staging_peak_bytes:,} bytes of staging, "
            f"{1e3 * report.seconds:.1f} ms; logits {rolled_out.norm().item():.4f}, differ by {difference:.1e}",
            flush=True,
        )
        assert difference < 1e-4, "the rollout model computes something else than the training model"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
