"""Whether what arrived is what was sent, and one end for all ranks."""
