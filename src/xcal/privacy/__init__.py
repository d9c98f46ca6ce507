"""The guarantee: accounting, calibration, filter, ledger, noise, statement."""
