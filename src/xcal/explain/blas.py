"""Keeping SciPy's linear algebra on one thread while it solves many small systems."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

from scipy.linalg import cython_lapack

# OpenBLAS under the names it has in SciPy's own wheels and in system builds.
_NAMES = ("scipy_openblas_{}_num_threads", "openblas_{}_num_threads")


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """One thread for SciPy's OpenBLAS inside; the number it had before on leaving.

    On systems of a few thousand unknowns its threads gain nothing, and wherever another process
    wants the cores they wait for each other most of the time: a hundred systems were seen to take
    twenty seconds instead of half a one. With another BLAS this does nothing.
    """
    found = _thread_functions()
    if found is None:
        yield
        return
    read, write = found
    before = read()
    write(1)
    try:
        yield
    finally:
        write(before)


@cache
def _thread_functions() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    # Looking a name up in SciPy's extension also finds it in the library that it is linked to.
    library = ctypes.CDLL(cython_lapack.__file__)
    for name in _NAMES:
        try:
            read = library[name.format("get")]
            write = library[name.format("set")]
        except AttributeError:
            continue
        read.restype, read.argtypes = ctypes.c_int, []
        write.restype, write.argtypes = None, [ctypes.c_int]
        return read, write
    return None
