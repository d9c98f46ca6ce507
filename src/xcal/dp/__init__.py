"""Differential privacy for any torch training: it knows no experiment, method or explanation."""
