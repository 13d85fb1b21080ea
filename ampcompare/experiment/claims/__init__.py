"""Published claims: how each is reproduced at a small size and judged."""
