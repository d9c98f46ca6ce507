"""Studies: declared grids of experiments, run cell by cell, resumable, compared in pairs."""
