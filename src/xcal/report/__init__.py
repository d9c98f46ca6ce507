"""Reads results and draws them; never trains."""
