"""What a script imports as Apex: which names it lacks, and the adapter of `migrate` and old classes, as they come."""
