"""The version, readable without anything else."""

VERSION = "0.1.0"
