"""Who is there, who is stuck, who is dead; and faults on purpose."""
