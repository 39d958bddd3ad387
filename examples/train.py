"""A run, as a Megatron launch script: Megatron's own arguments describe the actor, `--real-*` say the rest.

    torchrun --nproc-per-node 4 -m megatron_real examples/train.py <usual Megatron arguments> \
        --real-plan examples/plans/ppo.json --real-prompts prompts.jsonl --real-reward rewards:vowel_share \
        --real-batch-size 64 --real-iterations 40 --real-output runs/ppo --load checkpoints/actor

`--load` takes a Megatron dist checkpoint written under any layout. The same run from Hydra: `megatron-real train`.
"""

import sys

from megatron_real.config import RunOptions
from megatron_real.hooks.install import install

if __name__ == "__main__":
    install()
    from megatron_real.hooks import launch

    launch.run(RunOptions.from_argv(sys.argv[1:]))
