"""Which runs count, which belong together, and what differs between them, before anything is tested."""
