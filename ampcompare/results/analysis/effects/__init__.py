"""What speaks for a verdict, by quantity: quality, training loss, step time, single samples, other precisions."""
