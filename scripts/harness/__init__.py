"""What the demo and the benchmark are made of. Not part of the installed package."""
