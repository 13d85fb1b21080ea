"""The guards, by subject. To add one, write a `Detector` with its `Guard` in a file of this folder: it is found there.

The files import torch inside functions, so that the texts of the guards can be listed without it.
"""
