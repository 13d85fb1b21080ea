"""How a script is called: what is run, with which settings and words, and the lines on stderr that say so."""
