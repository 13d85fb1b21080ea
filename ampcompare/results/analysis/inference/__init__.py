"""From differences to verdicts, for any quantity: effects, tests, margins, error rates, sample sizes."""
