"""Which launcher trains which cell: on this machine, under Slurm or Ray; and the command that trains one anywhere."""
