"""Python source of users: found, read, parsed and written back byte for byte; notebooks too. Needs no torch."""
