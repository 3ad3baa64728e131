"""Accelerate the policies that people already run, in place, and undo it."""

from .api import accelerate, explain, repack, restore

__all__ = ["accelerate", "explain", "repack", "restore"]
