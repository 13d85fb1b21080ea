"""What 16 bits do to a script beyond its losses: seen in some steps and said in its record; nothing is changed."""
