"""Products with the NVFP4 weights of many experts."""

from __future__ import annotations

import torch
from torch import Tensor

from jitquant.numerics.linear import without_gsa


def _times(x: Tensor, fp4: Tensor, sf: Tensor, gsa: Tensor, expert: int) -> Tensor:
    """fp32 ``x W^T`` of one expert, with the sums in fp32 and then its gsa."""
    experts, rows = fp4.shape[:2]
    if gsa.numel() == experts * rows:
        scale = gsa.reshape(experts, rows)[expert]
    else:
        scale = gsa.reshape(-1).expand(experts)[expert]
    weight = without_gsa(fp4[expert], sf[expert])[:, : x.shape[1]]
    with torch.autocast(weight.device.type, enabled=False):  # which would round both to bf16
        return torch.mm(x, weight.t()) * scale


def nvfp4_grouped_linear(
    x: Tensor,
    w_fp4: Tensor,
    w_sf: Tensor,
    w_gsa: Tensor,
    offsets: Tensor,
    x_sf: Tensor | None = None,
    x_gsa: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor]:
    """``x W^T`` of each row with its expert's weight, with sums in fp32 and then the gsas.

    Args:
        x: (T, K) of bf16 or fp16, sorted by expert; or with ``x_sf`` the codes (T, K' / 2).
        w_fp4: codes (E, N, K' / 2), where K' is K up to a multiple of 16.
        w_sf: E4M3 scales (E, N, K' / 16).
        w_gsa: one for all, one an expert, or one for each of the E * N rows.
        offsets: (E,): where the rows of each expert end. Those that do not ascend are raised, and
            all are cut at T. Rows past the last one are zero.
        x_sf: scales (T, K' / 16) of x, or None.
        x_gsa: (1,), or one for each row of x.
        dtype: of the result.
    """
    values = x.float() if x_sf is None else without_gsa(x, x_sf)
    rows, begin = values.shape[0], 0
    y = torch.zeros(rows, w_fp4.shape[1], dtype=torch.float32, device=x.device)
    for expert, end in enumerate(offsets.clamp(0, rows).cummax(0).values.tolist()):
        if end > begin:
            y[begin:end] = _times(values[begin:end], w_fp4, w_sf, w_gsa, expert)
        begin = end
    if x_gsa is not None:
        y[:begin] *= x_gsa.reshape(-1, 1)[:begin]  # past the last end it may be anything
    if dtype is None:
        dtype = x.dtype if x_sf is None else torch.bfloat16
    return (y.to(dtype),)


def nvfp4_experts(
    x: Tensor,
    gate_up_fp4: Tensor,
    gate_up_sf: Tensor,
    gate_up_gsa: Tensor,
    down_fp4: Tensor,
    down_sf: Tensor,
    down_gsa: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor]:
    """The experts of a mixture: for each row the weighted sum of what its experts make of it.

    An expert makes ``down(h)`` of a row, ``h = silu(gate) * up`` in fp32, rounded to x's dtype.
    Products are as in `nvfp4_grouped_linear`, in fp32. Each is multiplied by its weight, and they
    are added up, in fp32.

    Args:
        x: (T, H) of bf16 or fp16.
        gate_up_fp4: codes (E, 2 I, H / 2): the I rows of gates, then those of ups.
        gate_up_sf: E4M3 scales (E, 2 I, H / 16).
        gate_up_gsa: one for all, one an expert, or one for each of the E * 2 I rows.
        down_fp4: codes (E, H, I / 2).
        down_sf: E4M3 scales (E, H, I / 16).
        down_gsa: one for all, one an expert, or one for each of the E * H rows.
        topk_ids: (T, k): an expert's number; numbers outside of 0 to E - 1 are ignored.
        topk_weights: (T, k).
        dtype: of the result.
    """
    experts, hidden = gate_up_fp4.shape[0], down_fp4.shape[1]
    y = torch.zeros(x.shape[0], hidden, dtype=torch.float32, device=x.device)
    made = torch.zeros(*topk_ids.shape, hidden, dtype=torch.float32, device=x.device)
    for expert in sorted(set(topk_ids.flatten().tolist())):
        if not 0 <= expert < experts:
            continue
        row, choice = (topk_ids == expert).nonzero(as_tuple=True)
        both = _times(x[row].float(), gate_up_fp4, gate_up_sf, gate_up_gsa, expert)
        gate, up = both.chunk(2, dim=-1)
        h = (torch.nn.functional.silu(gate) * up).to(x.dtype)
        made[row, choice] = _times(h.float(), down_fp4, down_sf, down_gsa, expert)
    for choice in range(topk_ids.shape[1]):
        here = ((topk_ids[:, choice] >= 0) & (topk_ids[:, choice] < experts))[:, None]
        weighted = made[:, choice] * topk_weights[:, choice, None].float()
        y = torch.where(here, y + weighted, y)
    return (y.to(x.dtype if dtype is None else dtype),)
