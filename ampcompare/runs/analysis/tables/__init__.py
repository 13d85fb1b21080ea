"""Tables of figures that someone else measured, read and judged: the command `judge`."""
