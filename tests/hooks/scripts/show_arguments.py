"""A script on Megatron's own parser: prints the arguments that a plan decides, as one JSON line."""

import json
import sys

from megatron.training.arguments import parse_and_validate_args

if __name__ == "__main__":
    before = "megatron_real.auto" in sys.modules
    args = parse_and_validate_args()
    names = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "data_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "sequence_parallel",
        "pipeline_model_parallel_layout",
        "micro_batch_size",
        "global_batch_size",
        "recompute_granularity",
        "world_size",
    )
    print("ARGS " + json.dumps({name: getattr(args, name) for name in names}), flush=True)
