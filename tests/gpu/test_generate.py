"""Models of transformers that decode on a GPU with a static cache, in CUDA graphs."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from nn.helpers import sqnr
from torch import Tensor

from jitquant.nn import convert

transformers: Any = pytest.importorskip("transformers", minversion="5.0")
RECIPES = ["nvfp4", "nvfp4a16"]
MOST, NEW = 32, 12


def llama(recipe: Any, device: str) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).to(device, torch.bfloat16).eval()
    convert(model, recipe)
    return model


class Decoder:
    """A step of one token whose state stays in place: what a CUDA graph can replay."""

    def __init__(self, model: Any, prompt: Tensor) -> None:
        self.model = model
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=MOST)
        takes = inspect.signature(model.model.forward).parameters
        self.takes_position = "cache_position" in takes
        at = torch.arange(prompt.shape[1], device=prompt.device)
        seen = torch.arange(MOST, device=prompt.device) <= at[:, None]
        self.position = at[-1:].clone()
        self.token = self._run(prompt, at, seen)

    def _run(self, tokens: Tensor, at: Tensor, seen: Tensor) -> Tensor:
        more = {"cache_position": at} if self.takes_position else {}
        out = self.model(
            input_ids=tokens,
            attention_mask=seen[None, None],
            position_ids=at[None],
            past_key_values=self.cache,
            use_cache=True,
            **more,
        )
        best: Tensor = out.logits[:, -1].argmax(-1, keepdim=True)
        return best

    def step(self) -> None:
        self.position += 1
        seen = torch.arange(MOST, device=self.token.device) <= self.position[:, None]
        self.token.copy_(self._run(self.token, self.position, seen))


@torch.no_grad()
def decoded(recipe: str, device: str, graph: bool) -> list[int]:
    """The tokens after a prompt; the first step is run twice for a graph, to warm it up."""
    model = llama(recipe, device)
    prompt = torch.arange(1, 6, device=device)[None]
    decoder = Decoder(model, prompt)
    found = [int(decoder.token)]
    replay = decoder.step
    if graph:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            Decoder(model, prompt).step()  # compiles, and loads kernels
        torch.cuda.current_stream().wait_stream(side)
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            decoder.step()
        replay = recorded.replay
    for _ in range(NEW - 1):
        replay()
        found.append(int(decoder.token))
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_in_a_cuda_graph(recipe: str) -> None:
    assert decoded(recipe, "cuda", True) == decoded(recipe, "cuda", False)


@pytest.mark.parametrize("recipe", RECIPES)
def test_generate_with_a_static_cache(recipe: str) -> None:
    """transformers compiles the step, and Inductor records it in a CUDA graph.

    Sums are fused there, so the logits of the first step are close to those without a compiler.
    """
    model = llama(recipe, "cuda")
    prompt = torch.arange(1, 6, device="cuda")[None]
    how = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    how |= {"cache_implementation": "static", "return_dict_in_generate": True}
    plain = model.generate(prompt, disable_compile=True, **how)
    compiled, again = model.generate(prompt, **how), model.generate(prompt, **how)
    assert torch.equal(compiled.sequences, again.sequences)
    assert sqnr(compiled.logits[0], plain.logits[0]) > 20
