// What device code uses of it is built into NVRTC.
