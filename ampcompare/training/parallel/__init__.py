"""Models on several processes or GPUs: replicas, shards, synchronized batch norm, and what ranks exchange."""
