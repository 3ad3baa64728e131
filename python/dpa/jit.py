"""Builds the library at run time: :func:`dpa.jit.load`."""

from dpa.library.jit import load

__all__ = ["load"]
