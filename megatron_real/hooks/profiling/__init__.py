"""Measuring a profile: what the search prices with."""
