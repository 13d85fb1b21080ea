"""The verdicts on each quantity: accuracy, training loss, step time, single samples, other precisions."""
