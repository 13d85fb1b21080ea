"""`--compat-torch`: restore what changed in torch, numpy and Python since a script was written."""
