"""The version, readable without anything else."""

VERSION = "0.2.0"
