"""The benchmark: prompts and datasets, interleaved runs, metrics, report."""
