"""Differential privacy for any torch training loop: `engine.PrivacyEngine` is the entry.

`steps.py` is what the four objects of a loop share: it charges, draws, clips and releases, in that
order. `wrappers.py` are network, criterion and optimizer, `loader.py` the data loader. It knows no
experiment, method or explanation.
"""
