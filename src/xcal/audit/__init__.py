"""Attacks on the project's own training: canaries, membership, gradient inversion."""
