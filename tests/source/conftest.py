"""What the tests of source files share."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator

import pytest

VERSION = 0x20080522  # of the structures, of 64 bits
FILE_RIGHTS = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: files are opened whatever their mode


@pytest.fixture
def modes_count() -> Iterator[None]:
    """Have the modes of files bind this process, even if it is the superuser's: that right is put aside for a test."""
    if os.name != "posix":
        pytest.skip("modes of POSIX")
    if os.getuid() != 0:
        yield
        return
    if sys.platform != "linux":
        pytest.skip("the superuser may open every file")
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: the lower half of each, then the upper

    def call(function: str) -> None:
        if getattr(libc, function)(ctypes.byref(header), ctypes.byref(sets)):
            raise OSError(ctypes.get_errno(), function)

    call("capget")
    before = sets[0]
    sets[0] = before & ~FILE_RIGHTS
    call("capset")
    yield
    sets[0] = before
    call("capset")
