"""Networks, their names, and which layer their explanations come from."""
