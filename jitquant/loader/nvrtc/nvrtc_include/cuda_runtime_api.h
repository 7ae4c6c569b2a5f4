// Only host code uses it, and NVRTC compiles none.
