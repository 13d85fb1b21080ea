"""`--record`: write what every backward pass and step of a script did, and summarize it."""
