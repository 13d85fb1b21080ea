"""The catalog of mistakes in mixed precision: what each is, why it matters, the remedy. `lint` and the guards share it."""
