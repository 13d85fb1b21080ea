"""Results as data: what runs leave, what several of them say, and how that is shown."""
