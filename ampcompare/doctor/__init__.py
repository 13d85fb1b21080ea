"""What this machine offers and what is wrong with it, each with its reason and a remedy that can be pasted.

Nothing here imports torch or Apex: whatever may be broken is imported in a child process with a time limit.
"""
