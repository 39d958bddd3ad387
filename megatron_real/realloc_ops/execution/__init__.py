"""Moving bytes by a plan."""
