"""The layers of ``jitquant.nn`` in parallel: what they give is what the whole layer gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from samples import byte_view, randn
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as torch_parallel
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from jitquant import nn as jnn
from jitquant.nn import parallel

from .ranks import Here

HIDDEN, WIDE, TOKENS = 384, 512, 24


class Mlp(nn.Module):
    """Norm, up, activation, down: what tensor parallelism divides column-wise, then row-wise."""

    def __init__(self, here: Here, dtype: torch.dtype, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.LayerNorm(HIDDEN, device=here.device, dtype=dtype)
        self.up = nn.Linear(HIDDEN, WIDE, bias, device=here.device, dtype=dtype)
        self.down = nn.Linear(WIDE, HIDDEN, bias, device=here.device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


def model(here: Here, recipe: str, dtype: torch.dtype, bias: bool = True) -> Mlp:
    made = Mlp(here, dtype, bias)
    assert len(jnn.convert(made, recipe).replaced) == 2
    return made


def tokens(here: Here, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return randn(2, TOKENS, HIDDEN, dtype=dtype, seed=seed).to(here.device)


def close(a: Tensor, b: Tensor, what: str = "", limit: float = 3e-4) -> None:
    """But for the order of sums, and, of what is rounded in between, a few codes."""
    noise = (a.double() - b.double()).square().sum() / b.double().square().sum().clamp(min=1e-30)
    assert a.shape == b.shape, what
    assert noise < limit, (what, float(noise))


def sums(here: Here) -> float:
    """Noise of sums of the same products: tensor cores add up FP8 products in fewer bits."""
    return 1e-10 if here.device.type == "cpu" else 1e-6


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def plans(styles: Any) -> dict[str, dict[str, Any]]:
    col, row = styles.ColwiseParallel, styles.RowwiseParallel
    return {
        "tensor": {"up": col(), "down": row()},
        "sequence": {
            "norm": SequenceParallel(),
            "up": col(input_layouts=Shard(1)),
            "down": row(output_layouts=Shard(1)),
        },
    }


def case_float8_column_wise_is_a_part(here: Here) -> None:
    """To the bit but for the product's own sums, which a CPU does in an order of its own."""
    layer = jnn.Float8BlockwiseLinear(HIDDEN, WIDE, device=here.device)
    nn.init.normal_(layer.weight, generator=torch.Generator(here.device).manual_seed(1))
    x = randn(TOKENS, HIDDEN, dtype=torch.float32).to(here.device)
    want = layer(x)
    part = parallelize_module(
        copy.deepcopy(layer), here.mesh, torch_parallel.ColwiseParallel(use_local_output=False)
    )
    # The weight as it is quantized, which is kept.
    part(x)
    kept = part._cache._kept
    assert kept is not None
    mine, all_of_it = kept[2].data, layer._cache._kept[2].data  # type: ignore[index]
    rows = slice(here.rank * WIDE // here.world, (here.rank + 1) * WIDE // here.world)
    assert torch.equal(byte_view(mine.data), byte_view(all_of_it.data[rows].contiguous()))
    y = part(x)
    assert y.placements == (Shard(1),)
    close(y.full_tensor(), want, limit=sums(here))
    assert part._cache._kept is kept  # the weight is not quantized again
    with torch.no_grad():
        part.weight.mul_(2)
    doubled = part(x).full_tensor() - part.bias.full_tensor()
    close(doubled, 2 * (want - layer.bias), limit=sums(here))


def case_float8_in_parallel(here: Here) -> None:
    for dtype, bias in ((torch.float32, True), (torch.bfloat16, False)):
        reference = model(here, "fp8_block", dtype, bias)
        x = tokens(here, dtype)
        inputs = x.clone().requires_grad_()
        want = reference(inputs)
        grad = randn(*want.shape, dtype=dtype, seed=9).to(here.device)
        want.backward(grad)
        for styles in (torch_parallel, parallel):
            for name, plan in plans(styles).items():
                divided = parallelize_module(model(here, "fp8_block", dtype, bias), here.mesh, plan)
                cut = name == "sequence"

                def part(t: Tensor, cut: bool = cut) -> Tensor:
                    return t.chunk(here.world, 1)[here.rank] if cut else t

                mine = part(x).clone().requires_grad_()
                y = divided(mine)
                close(y, part(want), f"{name} output")
                y.backward(part(grad))
                assert inputs.grad is not None
                assert mine.grad is not None
                close(mine.grad, part(inputs.grad), f"{name} input's gradient")
                for (key, p), q in zip(
                    divided.named_parameters(), reference.parameters(), strict=True
                ):
                    assert p.grad is not None
                    assert q.grad is not None
                    close(whole(p.grad), q.grad, f"{name} {key}")


def case_float8_trains_in_parallel(here: Here) -> None:
    """The kept weights follow the optimizer, divided as whole."""
    models = [model(here, "fp8_block", torch.float32) for _ in range(2)]
    parallelize_module(models[1], here.mesh, plans(torch_parallel)["tensor"])
    losses = []
    for made in models:
        # Not foreach: it takes no list of tensors and DTensors, and the norm here is whole.
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3, foreach=False)
        mine = []
        for step in range(4):
            optimizer.zero_grad()
            for half in range(2):  # accumulated
                loss = made(tokens(here, torch.float32, 2 * step + half)).square().mean()
                loss.backward()
            mine.append(loss.item())
            optimizer.step()
        losses.append(mine)
    assert losses[0][-1] < 0.8 * losses[0][0], losses
    torch.testing.assert_close(losses[1], losses[0], rtol=0.02, atol=0)


def case_compiled_in_parallel(here: Here) -> None:
    """Without a break, and once for all steps."""
    made = [model(here, "fp8_block", torch.float32) for _ in range(2)]
    losses: list[list[float]] = [[], []]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m, mine in zip(made, losses, strict=True):
            parallelize_module(m, here.mesh, plans(torch_parallel)["tensor"])
            call = torch.compile(m, backend="aot_eager", fullgraph=True) if m is made[1] else m
            optimizer = torch.optim.AdamW(m.parameters(), lr=1e-3, foreach=False)
            for _ in range(3):
                loss = call(tokens(here, torch.float32)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                mine.append(loss.item())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=0)
    assert losses[1][-1] < losses[1][0]
    torch._dynamo.reset()
    packed = model(here, "nvfp4", torch.float32).eval()
    parallelize_module(packed, here.mesh, plans(parallel)["sequence"])
    x = tokens(here, torch.float32).chunk(here.world, 1)[here.rank].contiguous()
    with torch.no_grad():
        close(torch.compile(packed, backend="aot_eager", fullgraph=True)(x), packed(x))
    torch._dynamo.reset()


def case_nvfp4_in_parallel(here: Here) -> None:
    dtype = torch.bfloat16
    for granularity, layout in (
        ("tensor", "linear"),
        ("row", "linear"),
        ("tensor", "swizzled_128x4"),
    ):
        plain = Mlp(here, dtype)
        made = [copy.deepcopy(plain) for _ in range(3)]
        for m in made:
            for name in ("up", "down"):
                layer = jnn.NVFP4Linear.from_linear(
                    getattr(m, name),
                    granularity=granularity,  # type: ignore[arg-type]
                    scale_layout=layout,  # type: ignore[arg-type]
                )
                setattr(m, name, layer)
            m.eval()
        x = tokens(here, dtype)
        with torch.no_grad():
            want = made[0](x)
            for m, (name, plan) in zip(made[1:], plans(parallel).items(), strict=True):
                parallelize_module(m, here.mesh, plan)
                cut = name == "sequence"
                part = x.chunk(here.world, 1)[here.rank] if cut else x
                y = m(part)
                # What rounds up here and down there is a code further, and a GPU's sums differ.
                limit = 3e-4 if here.device.type == "cpu" else 2e-3
                close(y, want.chunk(here.world, 1)[here.rank] if cut else want, name, limit)
        bytes_of = [sum(b.nbytes for b in m.buffers()) for m in made[:2]]
        assert bytes_of[1] < (1 / here.world + 0.01) * bytes_of[0] + 16


def case_nvfp4_gradients_in_parallel(here: Here) -> None:
    """Of the input: an adapter before or beside the layers is trained by it."""
    dtype = torch.float32
    reference = model(here, "nvfp4", dtype).eval()
    x = tokens(here, dtype).requires_grad_()
    grad = randn(*x.shape, dtype=dtype, seed=9).to(here.device)
    reference(x).backward(grad)
    assert x.grad is not None
    for name, plan in plans(parallel).items():
        divided = parallelize_module(model(here, "nvfp4", dtype).eval(), here.mesh, plan)
        count = here.world if name == "sequence" else 1
        mine = x.detach().chunk(count, 1)[here.rank % count].clone().requires_grad_()
        divided(mine).backward(grad.chunk(count, 1)[here.rank % count])
        assert mine.grad is not None
        # Codes of what lies between the layers differ, see case_nvfp4_in_parallel.
        close(mine.grad, x.grad.chunk(count, 1)[here.rank % count], name, 2e-3)


def case_nvfp4_keywords_in_parallel(here: Here) -> None:
    linear = nn.Linear(WIDE, 32, device=here.device)
    layer = jnn.NVFP4Linear.from_linear(linear).eval()
    x = randn(3, WIDE, dtype=torch.float32).to(here.device)
    part = x.chunk(here.world, 1)[here.rank].contiguous()
    rows = parallelize_module(copy.deepcopy(layer), here.mesh, parallel.RowwiseParallel())
    torch.testing.assert_close(rows(x=part), layer(x), rtol=1e-4, atol=1e-4)
    for name in ("residual", "out"):
        with pytest.raises(ValueError, match=f"{name}: expected None, got a tensor"):
            rows(part, **{name: torch.zeros(3, 32, device=here.device)})
    columns = parallelize_module(copy.deepcopy(layer), here.mesh, parallel.ColwiseParallel())
    own = slice(here.rank * 32 // here.world, (here.rank + 1) * 32 // here.world)
    residual = randn(3, 32, dtype=torch.float32, seed=1).to(here.device)
    with torch.no_grad():
        mine = columns(x, residual=residual[:, own].contiguous())
        torch.testing.assert_close(mine, layer(x, residual=residual)[:, own])


def case_nvfp4_quantizes_what_the_whole_layer_does(here: Here) -> None:
    """Row-wise: the parts of the activation have the amax of the whole."""
    linear = nn.Linear(WIDE, 32, device=here.device)
    layer = jnn.NVFP4Linear.from_linear(linear, scale_layout="linear").eval()
    seen: list[Any] = []
    plain = jnn.NVFP4Linear._run

    def spy(self: Any, q: Any, *rest: Any) -> Tensor:
        seen.append(q)
        return plain(self, q, *rest)

    x = randn(3, WIDE, dtype=torch.float32).to(here.device)
    x[1, -1] = 50
    part = parallelize_module(copy.deepcopy(layer), here.mesh, parallel.RowwiseParallel())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jnn.NVFP4Linear, "_run", spy)
        want = layer(x)
        y = part(x.chunk(here.world, 1)[here.rank].contiguous())
    for name in ("x_fp4_bytes", "x_sf_bytes"):
        mine, all_of_it = getattr(seen[1], name), getattr(seen[0], name)
        assert torch.equal(mine, all_of_it.chunk(here.world, 1)[here.rank])
    assert torch.equal(seen[1].gsa, seen[0].gsa)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
    assert torch.equal(part.weight_packed, layer.weight_packed.chunk(here.world, 1)[here.rank])


def case_blocks_that_would_be_divided(here: Here) -> None:
    if here.world == 1:
        return  # nothing is
    make = jnn.Float8BlockwiseLinear
    x = torch.ones(2, 192, device=here.device)
    layer = parallelize_module(
        make(192, 256, device=here.device), here.mesh, torch_parallel.RowwiseParallel()
    )
    with pytest.raises(
        ValueError, match=r"in_features: expected a multiple of 128 on each of 2 ranks, got 96"
    ):
        layer(x.chunk(here.world, 1)[here.rank])
    layer = parallelize_module(
        make(192, 192, device=here.device), here.mesh, torch_parallel.ColwiseParallel()
    )
    with pytest.raises(
        ValueError, match="out_features: expected a multiple of 128 on each of 2 ranks"
    ):
        layer(x)
    layer.weight = nn.Parameter(layer.weight.redistribute(here.mesh, [Replicate()]))
    with pytest.raises(TypeError, match="x and weight: expected two DTensors"):
        layer.forward(x)  # past the hooks
    packed = jnn.NVFP4Linear(48, 32, device=here.device)
    with pytest.raises(
        ValueError, match="in_features: expected a multiple of 16 on each of 2 ranks, got 24"
    ):
        parallelize_module(packed, here.mesh, parallel.RowwiseParallel())


def case_a_weight_that_is_whole(here: Here) -> None:
    layer = jnn.Float8BlockwiseLinear(128, 64, device=here.device)
    x = randn(8, 128, dtype=torch.float32).to(here.device)
    want = layer(x)
    want.sum().backward()
    parts = copy.deepcopy(layer)
    parts.zero_grad()
    for name, p in list(parts.named_parameters()):
        everywhere = distribute_tensor(p.detach(), here.mesh, [Replicate()])
        parts.register_parameter(name, nn.Parameter(everywhere))
    rows = distribute_tensor(x, here.mesh, [Shard(0)])
    y = parts(rows)
    assert y.placements == (Shard(0),)
    close(y.full_tensor(), want, limit=sums(here))
    y.sum().backward()
    assert parts.weight.grad is not None
    assert layer.weight.grad is not None
    # Groups of rows are those of a rank: what is rounded is another.
    close(whole(parts.weight.grad), layer.weight.grad, "weight", 2e-3)


def case_fsdp(here: Here) -> None:
    """Training with parameters that are gathered for each use, as with whole ones."""
    for policy, reshard in (
        (None, True),
        (None, False),
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), True),
    ):
        made = model(here, "fp8_block", torch.float32)
        sharded = copy.deepcopy(made)
        keywords: dict[str, Any] = {"mesh": here.mesh, "reshard_after_forward": reshard}
        if policy is not None:
            keywords["mp_policy"] = policy
        for layer in (sharded.up, sharded.down):
            fully_shard(layer, **keywords)
        fully_shard(sharded, **keywords)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (made, sharded)]
        for step in range(3):
            batch = tokens(here, torch.float32, step)
            losses = []
            for m, x in ((made, batch), (sharded, batch.chunk(here.world)[here.rank])):
                loss = m(x).float().square().mean()
                loss.backward()
                losses.append(loss.detach())
            torch.distributed.all_reduce(losses[1])
            losses[1] /= here.world
            tolerance = 1e-3 if policy is None else 0.02
            torch.testing.assert_close(losses[1], losses[0], rtol=tolerance, atol=0)
            if policy is None:
                for (name, p), q in zip(made.named_parameters(), sharded.parameters(), strict=True):
                    assert p.grad is not None
                    assert q.grad is not None
                    # A rank quantizes the gradients of its rows in groups of its own.
                    noise = (whole(q.grad) - p.grad).norm() / p.grad.norm()
                    assert noise < 0.06, (name, float(noise))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for p, q in zip(made.parameters(), sharded.parameters(), strict=True):
                p.data.copy_(whole(q.detach()))  # the next step begins alike
            jnn_clear(made)


def jnn_clear(m: Mlp) -> None:
    for layer in (m.up, m.down):
        layer.weight_changed()  # type: ignore[operator]


def case_fsdp_sees_weights_that_no_optimizer_wrote(here: Here) -> None:
    for reshard in (True, False):
        made = model(here, "fp8_block", torch.float32)
        for layer in (made.up, made.down):
            fully_shard(layer, mesh=here.mesh, reshard_after_forward=reshard)
        fully_shard(made, mesh=here.mesh)
        x = tokens(here, torch.float32)
        with torch.no_grad():
            first = made(x)
            assert torch.equal(made(x), first)
        if not reshard:
            made.up.reshard()  # type: ignore[operator]
            made.down.reshard()  # type: ignore[operator]
        with torch.no_grad():
            made.down.weight.to_local().mul_(2)
            made.down.bias.to_local().mul_(2)
            second = made(x)
        torch.testing.assert_close(second, 2 * first, rtol=1e-5, atol=1e-6)


def case_weights_in_parallel_are_loaded_in_place(here: Here) -> None:
    """As torch.distributed.checkpoint writes to the tensors of a state_dict."""
    layer = nn.Linear(HIDDEN, WIDE, bias=False, device=here.device)
    style = torch_parallel.ColwiseParallel()
    made = parallelize_module(jnn.Float8BlockwiseLinear.from_linear(layer), here.mesh, style)
    x = tokens(here, torch.float32)
    with torch.no_grad():
        before = made(x)
        made.state_dict()["weight"].to_local().detach().mul_(2)
        assert torch.equal(made(x), 2 * before)


def case_nvfp4_training_refuses_dtensors(here: Here) -> None:
    layer = jnn.NVFP4TrainingLinear(WIDE, HIDDEN, device=here.device)
    made = parallelize_module(layer, here.mesh, torch_parallel.ColwiseParallel())
    with pytest.raises(TypeError, match="weight: expected a tensor, got a DTensor"):
        made(torch.ones(16, WIDE, device=here.device))


def case_a_divided_model_is_not_converted(here: Here) -> None:
    made = Mlp(here, torch.float32)
    fully_shard(made, mesh=here.mesh)
    for recipe in ("fp8_block", "nvfp4", jnn.NVFP4TrainingRecipe()):
        with pytest.raises(ValueError, match=r"weight of \w+: expected a tensor, got a DTensor"):
            jnn.convert(made, recipe)  # type: ignore[arg-type]


def case_state_dict_of_fsdp_is_that_of_linear(here: Here) -> None:
    made = model(here, "fp8_block", torch.float32)
    names = {name: p.shape for name, p in made.state_dict().items()}
    fully_shard(made, mesh=here.mesh)
    assert {name: p.shape for name, p in made.state_dict().items()} == names


def nvfp4_training(here: Here) -> Mlp:
    made = Mlp(here, torch.float32)
    assert len(jnn.convert(made, jnn.NVFP4TrainingRecipe()).replaced) == 2
    for seed, layer in enumerate((made.up, made.down)):
        layer.seed_rounding(seed)  # type: ignore[operator]
    return made


def case_nvfp4_training_in_fsdp(here: Here) -> None:
    """Ranks with the same tokens and draws give what one does, in fp32 and in bf16."""
    for policy in (None, MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        made, sharded = nvfp4_training(here), nvfp4_training(here)
        names = {name: p.shape for name, p in made.state_dict().items()}
        for layer in (sharded.up, sharded.down):
            fully_shard(layer, mesh=here.mesh, **({"mp_policy": policy} if policy else {}))
        fully_shard(sharded, mesh=here.mesh, **({"mp_policy": policy} if policy else {}))
        assert {name: p.shape for name, p in sharded.state_dict().items()} == names
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (made, sharded)]
        for step in range(3):
            x = tokens(here, torch.float32, step)
            for m in (made, sharded):
                if policy is not None and m is made:
                    with torch.autocast(here.device.type, torch.bfloat16):
                        m(x).float().square().mean().backward()
                else:
                    m(x).float().square().mean().backward()
            # Inputs that differ by a rounding to bf16 take other codes here and there.
            limit = 1e-9 if policy is None else 0.06
            for (name, p), q in zip(made.named_parameters(), sharded.parameters(), strict=True):
                assert p.grad is not None
                assert isinstance(q.grad, DTensor)
                assert q.dtype == torch.float32, name
                close(whole(q.grad), p.grad, name, limit)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for p, q in zip(made.parameters(), sharded.parameters(), strict=True):
                p.data.copy_(whole(q.detach()))  # the next step begins alike
        assert int(sharded.up.rng_state[1]) == 3  # type: ignore[index]


def case_nvfp4_training_in_ddp(here: Here) -> None:
    """Each rank keeps the seed it was given, and gradients are the mean of those of the ranks."""
    layer = nn.Linear(64, 32, device=here.device)
    nn.init.normal_(layer.weight, generator=torch.Generator(here.device).manual_seed(1))
    made = jnn.NVFP4TrainingLinear.from_linear(layer)
    made.seed_rounding(100 + here.rank)
    ids = None if here.device.type == "cpu" else [here.device.index]
    wrapped = nn.parallel.DistributedDataParallel(
        made, device_ids=ids, process_group=here.group, broadcast_buffers=False
    )
    x = randn(32, 64, dtype=torch.float32).to(here.device)
    wrapped(x).square().sum().backward()
    assert made.rng_state.tolist() == [100 + here.rank, 1]
    assert made.weight.grad is not None
    wanted = torch.zeros_like(made.weight)
    for rank in range(here.world):
        alone = copy.deepcopy(made)
        alone.seed_rounding(100 + rank)
        alone.zero_grad()
        alone(x).square().sum().backward()
        assert alone.weight.grad is not None
        wanted += alone.weight.grad / here.world
    close(made.weight.grad, wanted, limit=1e-10)


def case_nvfp4_training_from_meta_in_fsdp(here: Here) -> None:
    """Weights that each rank makes a part of, and that a state_dict of linears fills."""
    plain = Mlp(here, torch.float32)
    with torch.device("meta"):
        made = Mlp(
            Here(here.rank, here.world, torch.device("meta"), here.group, here.mesh), torch.float32
        )
        jnn.convert(made, jnn.NVFP4TrainingRecipe(stochastic=False))
    fully_shard(made, mesh=here.mesh)
    made.to_empty(device=here.device)
    for module in made.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for (_, p), value in zip(made.named_parameters(), plain.parameters(), strict=True):
        p.data.copy_(distribute_tensor(value.data, here.mesh, p.placements))
    jnn.convert(plain, jnn.NVFP4TrainingRecipe(stochastic=False))
    x = tokens(here, torch.float32)
    close(made(x), plain(x), limit=1e-10)
    state = made.up.rng_state
    assert not isinstance(state, DTensor)
    assert int(state[1]) == 1
