"""Complete, named configurations with the figures that others published for them, and how settings come together."""
