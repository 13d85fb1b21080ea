"""Files that users wrote, read within bounds; and files that this package writes, in one move."""
