"""Python source of users: found, read, resolved and written back byte for byte; notebooks too. Needs no torch."""
