"""What an iteration computes: dataflow graphs, options, advantages, losses, KL control.

Plain torch in one process, no Megatron. Definitions, graphs and options import no torch, so that planning can use them;
README.md in this folder has the call chain.
"""
