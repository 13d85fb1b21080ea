"""The Python interface: each function does what the command of that name does, without the command line.

`ampcompare` itself has all names of these modules. Only `precision` imports torch: elsewhere the functions that need it
start processes or import it themselves.
"""
