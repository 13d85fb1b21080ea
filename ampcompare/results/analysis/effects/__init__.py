"""What speaks for a verdict, by quantity: accuracy, training loss, step time, single samples, other precisions."""
