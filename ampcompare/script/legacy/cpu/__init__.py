"""`--device cpu`: run on the CPU what a script does on CUDA."""
