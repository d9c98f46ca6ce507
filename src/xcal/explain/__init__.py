"""Explanations and what is measured on them: stateless functions on tensors and arrays."""
