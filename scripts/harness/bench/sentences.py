"""The numbers and GPUs within sentences of README and docs, made from results/summary.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from harness.bench import goals, summary
from harness.bench.summary import Record

Sections = dict[str, Record]


@dataclass(frozen=True)
class Sentence:
    """A part of a sentence whose numbers and GPUs follow from the summary.

    Attributes:
        document: from the root of the repository.
        text: as in the document, with ``{}`` for each of them; line breaks do not matter.
        numbers: the numbers, and the GPUs as in "H100".
    """

    document: str
    text: str
    numbers: Callable[[Sections], list[str]]


def updated(document: str, text: str, sections: Sections) -> str:
    """The text of a document with the numbers of its sentences updated.

    Raises:
        LookupError: a sentence is not in the text, or the summary lacks what it needs.
    """
    for sentence in SENTENCES:
        if sentence.document == document:
            text = _updated(sentence, text, sections)
    return text


def _updated(sentence: Sentence, text: str, sections: Sections) -> str:
    parts = [r"\s+".join(map(re.escape, part.split(" "))) for part in sentence.text.split("{}")]
    found = re.search(r"([A-Z]?\d[\d.]*)".join(parts), text)
    if found is None:
        raise LookupError(
            f"{sentence.document} lacks the sentence {sentence.text!r}; write it there, or adapt "
            "scripts/harness/bench/sentences.py"
        )
    try:
        numbers = sentence.numbers(sections)
    except KeyError as error:
        raise LookupError(f"the sentence {sentence.text!r} needs {error}") from error
    for i, number in reversed(list(enumerate(numbers, 1))):
        text = text[: found.start(i)] + number + text[found.end(i) :]
    return text


def _span(ratios: Iterable[float], form: str = ".2f") -> list[str]:
    """The least and the most."""
    values = list(ratios)
    if not values:
        raise KeyError("rows that were not measured")
    return [format(min(values), form), format(max(values), form)]


def _over_peer(op: str, form: str = ".1f") -> Callable[[Sections], list[str]]:
    """How many times as fast as the best peer an op is with 16384 rows."""
    return lambda sections: [
        format(goals.OVER_PEER.of(goals.peer_rows(sections), op, goals.M), form)
    ]


def _peers(sections: Sections) -> list[str]:
    rows = goals.peer_rows(sections)
    timed = (op for op in goals.with_peers(rows) if goals.best_peer(rows, op, goals.M))
    return _span(goals.OVER_PEER.of(rows, op, goals.M) for op in timed)


def _gpu(section: Record) -> str:
    return str(section["gpu"].removeprefix("NVIDIA ").split()[0])


def _gpus(sections: Sections) -> list[str]:
    """Where the best peers were timed, and that of the norm of NVFP4."""
    return [_gpu(sections[name]) for name in ("kernels-fp8-peers", goals.norm_section(sections))]


def _products(least: int, most: int, form: str = ".2f") -> Callable[[Sections], list[str]]:
    """How many times as fast as bf16 products of so many rows are: the least and the most."""
    return lambda sections: _span(
        (
            row["bf16"] / row["weight_only"]
            for row in sections["linear"]["rows"]
            if least <= row["rows"] <= most
        ),
        form,
    )


def _peers_of_products(sections: Sections, rows: int) -> list[str]:
    """How many times as fast as the better of Marlin and humming."""
    return _span(
        min(row[name] for name in summary.LIBRARIES if name in row) / row["weight_only"]
        for row in summary.products(sections)
        if row["rows"] == rows
    )


def _compiled(sections: Sections) -> list[str]:
    section = sections["rmsnorm-compiled"]
    rows = goals.rows_of(section).values()
    return [*_span((row["plain_us"] / row["us"] for row in rows), ".1f"), _gpu(section)]


def _tensor_gsa(sections: Sections) -> list[str]:
    rows = goals.rows_of(sections["kernels"])
    return [f"{1 / rows['quantize-tensor', m]['of_floor']:.2f}" for m in (1024, 2048)]


def _host(sections: Sections) -> list[str]:
    rows = [row for row in sections["host"]["rows"] if not row["name"].startswith("torch")]
    return _span((ratio for row in rows for ratio in (row["ratio"], row["out_ratio"])), ".1f")


def _decoded(sections: Sections) -> list[str]:
    """How many times as fast as the same decoder in bf16 one sequence is with NVFP4 weights."""
    made = []
    for name in ("model-llama-8b", "model-qwen3-32b"):
        us = {row["format"]: row["us"] for row in sections[name]["rows"] if row["sequences"] == 1}
        made.append(f"{us['bf16-few'] / us['w4a16']:.1f}")
    return made


_NORM_FP8 = _over_peer("fp8-rmsnorm")
_SWIGLU_FP8 = _over_peer("fp8-silu-group")
_NORM_NVFP4 = _over_peer("rmsnorm")


def _norms(sections: Sections) -> list[str]:
    fp8, nvfp4 = _gpus(sections)
    return [*_NORM_FP8(sections), fp8, *_NORM_NVFP4(sections), nvfp4]


SENTENCES = (
    Sentence("README.md", "a copy on their own GPU, an {} (RMSNorm + NVFP4: an {});", _gpus),
    Sentence(
        "README.md",
        "RMSNorm + FP8 is {} times as fast as the best peer on an {}, RMSNorm + NVFP4 {} times on "
        "an {}.",
        _norms,
    ),
    Sentence(
        "README.md",
        "decodes one sequence {} times as fast as the same code in bf16, Qwen3-32B {} times.",
        _decoded,
    ),
    Sentence(
        "docs/status.md",
        "SwiGLU + FP8 is {} times and RMSNorm + FP8 {} times as fast as the best peer on an {}, "
        "RMSNorm + NVFP4 {} times on an {}.",
        lambda sections: [*_SWIGLU_FP8(sections), *_norms(sections)],
    ),
    Sentence("docs/status.md", "{} to {} times bf16's speed up to 16 rows", _products(1, 16)),
    Sentence("docs/status.md", "{} to {} times with 32 to 128 rows", _products(32, 128)),
    Sentence("docs/status.md", "{} to {} times with more", _products(129, 1 << 30)),
    Sentence(
        "docs/performance.md",
        "beside jitquant in one run on an {}; for RMSNorm + NVFP4, torch.compile on an {}.",
        _gpus,
    ),
    Sentence("docs/performance.md", "is {} to {} times as fast as the best peer", _peers),
    Sentence(
        "docs/performance.md", "{} to {} times as fast as `torch.compile` on an {}.", _compiled
    ),
    Sentence("docs/performance.md", "{} and {} times the floor. The amax", _tensor_gsa),
    Sentence("docs/performance.md", "takes {} to {} times as long on the host", _host),
    Sentence(
        "docs/performance.md", "{} to {} times as fast as bf16 with up to 16 rows", _products(1, 16)
    ),
    Sentence("docs/performance.md", "{} to {} times with 32 to 128", _products(32, 128)),
    Sentence("docs/performance.md", "{} to {} times with more", _products(129, 1 << 30)),
    Sentence(
        "docs/measurements.md",
        "{} to {} times as fast as the better of them with one row, {} to {} times with 16, and {} "
        "to {} times with 64",
        lambda sections: [x for rows in (1, 16, 64) for x in _peers_of_products(sections, rows)],
    ),
    Sentence("docs/measurements.md", "With one row it is {} to {} times", _products(1, 1, ".1f")),
    Sentence("docs/measurements.md", "with 16 rows {} to {} times", _products(16, 16, ".1f")),
)
