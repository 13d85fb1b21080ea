"""Lists of tensors, and optimizer steps that a flag on the device skips: what every engine builds on."""
