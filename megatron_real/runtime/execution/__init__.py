"""One rank's walk through the program: calls, transfers, stored data."""
