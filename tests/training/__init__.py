"""Multi-process ZeRO-3 training: stock DeepSpeed against z3ext in one run, bit for bit."""
