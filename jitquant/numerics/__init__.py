"""What every op computes, in plain PyTorch: specification, CPU backend and oracle in one.

Nothing here is tuned: each function is the recipe of ``docs/numerics.md``, one operation a line, in
fp32. Everything runs on the device of its input, so the same functions check a kernel on its GPU.
Arguments are taken as valid; ``jitquant.ops`` checks them, and says which ops are made of what.
"""
