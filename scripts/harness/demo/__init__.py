"""The demo: a trained language model in several formats. ``python -m harness.demo --help``."""
