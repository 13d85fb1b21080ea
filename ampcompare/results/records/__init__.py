"""What runs and comparisons leave behind, as data: to and from strict JSON."""
