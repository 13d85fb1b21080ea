"""Where numbers of a training step overflow, what is lost below their range, and what to keep in fp32."""
