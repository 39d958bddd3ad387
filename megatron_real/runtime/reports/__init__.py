"""What a run tells: metrics, samples, display, summary, drift from the plan."""
