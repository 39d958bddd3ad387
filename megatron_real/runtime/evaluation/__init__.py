"""Evaluations on held-out data, and the best checkpoint."""
