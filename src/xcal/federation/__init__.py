"""Rounds of clients and server: an engine-free core and the engines that run it."""
