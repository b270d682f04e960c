"""Compiles whole speculation steps for TPUs and GPUs that are not there: `jspec compile-check`."""
