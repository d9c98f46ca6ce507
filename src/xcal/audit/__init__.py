"""Attacks that try to break the guarantee."""
