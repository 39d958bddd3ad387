"""Where a rank's shards lie: storages that are freed and allocated, and host memory."""
