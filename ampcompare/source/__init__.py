"""Python source of users: found, read, checked (`lint`), rewritten (`migrate`), notebooks too. Needs no torch."""
