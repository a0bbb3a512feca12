"""DeepSpeed is imported in the process of the tests; no ranks are launched."""
