"""What the record of a script's cell holds besides losses and steps: first weights, batches, scalars, files, memory."""
