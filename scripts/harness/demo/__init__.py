"""The demo: a trained model's linear layers in NVFP4. ``python -m harness.demo --help``."""
