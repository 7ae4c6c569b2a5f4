"""The layers of this project in other libraries; each module needs the library of its name.

- `jitquant.integrations.transformers`: ``from_pretrained(..., quantization_config=...)``.
- `jitquant.integrations.peft`: LoRA on top of quantized layers.
- `jitquant.integrations.torchao`: ``quantize_(model, config)``.
- `jitquant.integrations.vllm` and `jitquant.integrations.sglang`: plug-ins, which these engines
  find by themselves.

None is imported automatically.
"""
