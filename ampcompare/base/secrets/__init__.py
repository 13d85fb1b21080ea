"""Keep secrets out of files: what they are, how they are masked, and which files of a script name them."""
