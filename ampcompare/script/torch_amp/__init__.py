"""Behind `torch.autocast` and `GradScaler` of a script: autocast, O1, and arms with 16-bit weights."""
