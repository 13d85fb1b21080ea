"""What the verdicts come to in words: headline, recommendation, and what to do next."""
