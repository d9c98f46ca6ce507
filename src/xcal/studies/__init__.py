"""Grids of experiments."""
