"""Flower as an engine: it carries bytes; `answer` and the coordinator do the rest.

Imported only where the extra `flower` is installed.
"""
