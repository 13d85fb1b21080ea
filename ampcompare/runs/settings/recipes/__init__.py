"""Complete, named configurations with the figures that others published for them."""
