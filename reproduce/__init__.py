"""The paper's tables and figures: `python -m reproduce` from a checkout. Not installed."""
