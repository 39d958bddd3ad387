"""Your own training loop over three layouts, without our runtime.

    torchrun --nproc-per-node 4 examples/own_trainer.py

A small GPT trains with tensor parallelism on ranks 0-1, infers with pipeline parallelism on ranks 2-3, and generates
with data parallelism on all four; its weights are reallocated before each use. Its logits are the same everywhere.
"""

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_real import Session
from megatron_real.hooks.model_builder import RoleModel
from megatron_real.plan import Plan

PLAN = """{"algorithm": "own", "cluster": {"devices_per_node": 4}, "calls": {
  "actor_gen":   {"ranks": [0, 4], "layout": {"dp": 4}},
  "actor_inf":   {"ranks": [2, 4], "layout": {"pp": 2}},
  "actor_train": {"ranks": [0, 2], "layout": {"tp": 2}}}}"""


@torch.no_grad()
def logits_of(stage, inputs):
    """One pass on Megatron's schedule; what the last pipeline stage returns, None elsewhere."""
    found = get_forward_backward_func(stage.layout.pp, None)(
        forward_step_func=lambda _, model: (
            model(*inputs, runtime_gather_output=True),
            lambda output, non_loss_data: output,
        ),
        data_iterator=None,
        model=stage.model,
        num_microbatches=1,
        seq_length=inputs[0].shape[1],
        micro_batch_size=inputs[0].shape[0],
        forward_only=True,
        collect_non_loss_data=True,
        pg_collection=stage.pg_collection,
        p2p_communicator=stage.p2p_communicator,
    )
    return found[0] if found else None


def train_step(stage, inputs, labels):
    """One optimizer step; the loss."""
    (module,) = stage.model
    module.zero_grad_buffer()
    loss = module(*inputs, labels=labels).mean()
    loss.backward()
    module.finish_grad_sync()
    stage.optimizer.step()
    return loss.item()


def main() -> None:
    """Three steps; each prints the loss, and the logits' norm in every layout."""
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = torch.distributed.get_rank()
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    real = Session(Plan.loads(PLAN))
    options = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64}
    config = TransformerConfig(**options, hidden_dropout=0.0, attention_dropout=0.0)
    role = RoleModel(role="actor", config=config, vocab_size=64, padded_vocab_size=64, max_sequence_length=16)
    real.add_model("actor", role, optimizer=OptimizerConfig(optimizer="adam", lr=1e-2))
    tokens = torch.randint(
        64, (2, 16), generator=torch.Generator().manual_seed(0)
    ).cuda()  # or where CPU stands in
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool, device=tokens.device).triu(1)
    inputs = (tokens, torch.arange(16, device=tokens.device).expand(2, -1), mask)
    for step in range(3):
        for call in ("actor_train", "actor_inf", "actor_gen"):  # ranks 0-1, then 2-3, then 0-3
            with real.call(call) as stage:  # the newest weights are there, in this call's layout
                if stage.model is None:
                    continue
                if stage.optimizer is not None:
                    print(
                        f"step {step}: rank {rank}: loss {train_step(stage, inputs, tokens.roll(-1, 1)):.4f}",
                        flush=True,
                    )
                logits = logits_of(stage, inputs)
                if logits is not None:
                    print(
                        f"step {step}: {call} on rank {rank}: logits {logits.norm().item():.4f}", flush=True
                    )
    real.close()


if __name__ == "__main__":
    main()
