"""``python -m z3ext.demo``: the same training with and without z3ext, side by side."""
