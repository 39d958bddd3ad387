"""What modules keep that is derived from their weights, to be computed again when other weights arrived.

Invariants (tests/hooks/test_realloc_hybrid.py):
    - after `refresh_caches` a module computes with its weights of now.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["refresh_caches"]


def refresh_caches(modules: Iterable[torch.nn.Module]) -> None:
    """Let every module that keeps something derived from its weights compute it again. On this rank only.

    Args:
        modules: the chunks of a model.
    """
    for chunk in modules:
        for module in chunk.modules():
            refresh = getattr(module, "refresh_cache", None)
            if callable(refresh):
                refresh()
            elif hasattr(module, "_A_neg_exp_cache_stale"):  # Mamba's mixer before it had refresh_cache
                module._A_neg_exp_cache_stale = True
