"""What operations, calls and moves cost: seconds on a device."""
