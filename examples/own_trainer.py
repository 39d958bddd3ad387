"""Your own training loop over three layouts, without our runtime.

    torchrun --nproc-per-node 4 examples/own_trainer.py

A small GPT trains with tensor parallelism on ranks 0-1, scores with pipeline parallelism on ranks 2-3, and generates
logits with data parallelism on all four; its weights are reallocated before each use.
"""

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_real import Session
from megatron_real.hooks.model_builder import RoleModel
from megatron_real.plan import Plan

PLAN = """{"algorithm": "own", "cluster": {"devices_per_node": 4}, "calls": {
  "actor_gen":   {"ranks": [0, 4], "layout": {"dp": 4}},
  "actor_inf":   {"ranks": [2, 4], "layout": {"pp": 2}},
  "actor_train": {"ranks": [0, 2], "layout": {"tp": 2}}}}"""


def main() -> None:
    """Three steps; each prints the loss and the logits' checksum in two layouts."""
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    real = Session(Plan.loads(PLAN))
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64)
    role = RoleModel(role="actor", config=config, vocab_size=64, padded_vocab_size=64, max_sequence_length=16)
    real.add_model("actor", role, optimizer=OptimizerConfig(optimizer="adam", lr=1e-2))
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
    inputs = (tokens, torch.arange(16).expand(2, -1), mask)
    for step in range(3):
        with real.call("actor_train") as stage:  # ranks 0-1
            if stage.model is not None:
                (module,) = stage.model
                module.zero_grad_buffer()
                loss = module(*inputs, labels=tokens.roll(-1, 1)).mean()
                loss.backward()
                module.finish_grad_sync()
                stage.optimizer.step()
                if torch.distributed.get_rank() == 0:
                    print(f"step {step}: loss {loss.item():.4f}", flush=True)
        with real.call("actor_gen") as stage, torch.no_grad():  # ranks 0-3, the new weights
            logits = stage.model[0](*inputs)
            print(
                f"step {step}: rank {torch.distributed.get_rank()} logits {logits.sum().item():.4f}",
                flush=True,
            )
    real.close()


if __name__ == "__main__":
    main()
