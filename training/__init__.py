"""Training of drafting heads and draft models."""
