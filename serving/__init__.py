"""Serving of jspec engines over the network."""
