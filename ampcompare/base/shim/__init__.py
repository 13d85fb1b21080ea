"""Make `from apex import amp` work in an environment, by choice: what is missing is added, and probes see nothing."""
