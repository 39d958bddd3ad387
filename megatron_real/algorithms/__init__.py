"""What an iteration computes: dataflow graphs, advantages, losses, KL control.

Plain torch in one process, no Megatron. `megatron_real.algorithms.graphs` imports no torch, so that
planning can use it; README.md in this folder has the call chain.
"""
