"""The benchmark: kernels by graph replay, and the loader. ``python -m harness.bench --help``."""
