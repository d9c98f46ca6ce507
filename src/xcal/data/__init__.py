"""Data sets, their partitions over clients, and the draws of a step."""
