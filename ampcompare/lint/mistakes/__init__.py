"""The texts of mistakes in mixed precision, which `lint` and the guards share: what, why, remedy, examples."""
