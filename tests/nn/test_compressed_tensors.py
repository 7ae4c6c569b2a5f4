"""Files in the layout of compressed-tensors, read by that library and written by it."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from samples import randn
from torch import Tensor, nn

import jitquant
from jitquant.nn import (
    Float8BlockwiseExperts,
    Float8BlockwiseLinear,
    MXFP4Linear,
    NVFP4Experts,
    NVFP4Linear,
    NVFP4TrainingLinear,
    convert,
    load_compressed_tensors,
    quantize_checkpoint,
    report,
    save_compressed_tensors,
)
from jitquant.nn._compressed_tensors import compressed_tensors
from jitquant.nn.experts import SwiGLUExperts

from .helpers import UnknownExperts, spread, sqnr

BF16 = torch.bfloat16


def layers(*, dtype: torch.dtype = BF16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 160, dtype=dtype), nn.GELU(), nn.Linear(160, 48, bias=False, dtype=dtype)
    ).eval()


def library() -> Any:
    pytest.importorskip("compressed_tensors")
    import compressed_tensors.compressors as compressors
    import compressed_tensors.quantization as quantization

    return compressors, quantization


def decompressed(model: nn.Module) -> Tensor:
    """The weight of the first layer as the library has it, from what would be in the files."""
    compressors, quantization = library()
    tensors, config = compressed_tensors(model)
    parsed = quantization.QuantizationConfig.model_validate(config)
    (scheme,) = parsed.config_groups.values()
    kind = compressors.BaseCompressor.get_value_from_registry(scheme.format)
    assert kind.can_compress(nn.Linear, scheme)
    own = {k.removeprefix("0."): v for k, v in tensors.items() if k.startswith("0.")}
    assert set(kind.compression_param_names(scheme)) == set(own) - {"bias"}
    weight: Tensor = kind.decompress(own, scheme)["weight"]
    return weight


def ulps(a: Tensor, b: Tensor) -> Tensor:
    """How many numbers of their dtype lie between two tensors of equal signs."""
    size = torch.int16 if a.element_size() == 2 else torch.int32
    return (a.view(size).int() - b.view(size).int()).abs()


@pytest.mark.parametrize("power", [-9, 0, 3])
@pytest.mark.parametrize("scale_layout", ["linear", "swizzled_128x4"])
def test_nvfp4_is_read_bit_for_bit(power: int, scale_layout: Any) -> None:
    """With a gsa that is a power of two nothing rounds: layout, nibbles, signs and scales are."""
    linear = nn.Linear(96, 40, dtype=BF16)
    with torch.no_grad():
        w = spread(40, 96, 3)
        w *= 2000 * 2.0**power / w.abs().max()
        w[7, 5] = -2688 * 2.0**power  # the amax
        w[8] = 0
        linear.weight.copy_(w)
    model = nn.Sequential(NVFP4Linear.from_linear(linear, scale_layout=scale_layout))
    assert model[0].weight_gsa.item() == 2.0**power
    got = decompressed(model)
    want = model[0].weight.dequantize(BF16)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    assert got.unique().numel() > 100


@pytest.mark.parametrize("recipe", ["te", "vllm"])
def test_nvfp4_is_read(recipe: Any) -> None:
    """The file has the reciprocal of the gsa, and the library divides by it: an ulp of fp32, which
    may become one of bf16 where a value is all but halfway."""
    linear = nn.Linear(512, 512, dtype=BF16)
    model = nn.Sequential(NVFP4Linear.from_linear(linear, recipe=recipe))
    tensors, _ = compressed_tensors(model)
    assert tensors["0.weight_packed"].dtype == torch.uint8
    assert tensors["0.weight_packed"].shape == (512, 256)
    assert tensors["0.weight_scale"].dtype == torch.float8_e4m3fn
    assert tensors["0.weight_scale"].shape == (512, 32)
    assert tensors["0.weight_global_scale"].shape == (1,)
    scale = tensors["0.weight_global_scale"]
    assert ulps(scale, 2688 / linear.weight.detach().float().abs().max().reshape(1)) <= 1
    got, want = decompressed(model), model[0].weight.dequantize(BF16)
    apart = ulps(got, want)
    assert apart.max() <= 1
    assert apart.count_nonzero() < 1e-3 * apart.numel()
    by_hand = model[0].weight
    exact = jitquant.dequantize_nvfp4(by_hand.x_fp4, by_hand.x_sf, torch.ones(1), torch.float32)
    codes = exact / by_hand.x_sf.float().repeat_interleave(16, 1).clamp(min=2**-9)
    factor = by_hand.x_sf.to(BF16) / scale
    assert torch.equal(got, (codes * factor.repeat_interleave(16, 1)).to(BF16))


@pytest.mark.parametrize("shape", [(128, 256), (200, 300), (64, 96)], ids=str)
def test_fp8_is_read_bit_for_bit(shape: tuple[int, int]) -> None:
    linear = nn.Linear(shape[1], shape[0], dtype=BF16)
    with torch.no_grad():
        linear.weight.copy_(spread(*shape))
    model = nn.Sequential(Float8BlockwiseLinear.from_linear(linear))
    tensors, _ = compressed_tensors(model)
    assert tensors["0.weight"].dtype == torch.float8_e4m3fn
    assert tensors["0.weight_scale"].dtype == torch.float32
    got = decompressed(model)
    want = jitquant.quantize_block(linear.weight.detach()).dequantize(torch.float32)
    assert torch.equal(got, want)
    # What the layer multiplies with is what is in the file.
    cached, _ = model[0]._cache.get(model[0].weight, False)
    inner = cached.dequantize(torch.float32)[: shape[0], : shape[1]]
    assert torch.equal(inner, got)


def test_zeros() -> None:
    linear = nn.Linear(32, 16, dtype=BF16)
    with torch.no_grad():
        linear.weight.zero_()
    assert (decompressed(nn.Sequential(NVFP4Linear.from_linear(linear))) == 0).all()


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_block"])
def test_files(recipe: Any, tmp_path: Path) -> None:
    """What is written, and that it is read back."""
    model, x = layers(), randn(8, 64)
    convert(model, recipe, filter=lambda name, _: name != "2")
    save_compressed_tensors(model, tmp_path / "new" / "folder")
    described = json.loads((tmp_path / "new" / "folder" / "config.json").read_text())
    config = described["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert config["ignore"] == ["2"]
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]
    expected = {
        "nvfp4": {"weight_packed", "weight_scale", "weight_global_scale", "bias"},
        "fp8_block": {"weight", "weight_scale", "bias"},
    }[recipe]
    names = load_file(tmp_path / "new" / "folder" / "model.safetensors")
    assert set(names) == {f"0.{part}" for part in expected} | {"2.weight"}

    back = layers()
    with torch.no_grad():
        for parameter in back.parameters():
            parameter.fill_(torch.nan)
    done = load_compressed_tensors(back, tmp_path / "new" / "folder")
    assert done.replaced == ["0"]
    assert done.skipped == {"2": "its weight is not quantized in the files"}
    assert type(back[0]) is type(model[0])
    if recipe == "nvfp4":
        assert torch.equal(back[0].weight_packed, model[0].weight_packed)
        assert torch.equal(back[0].weight_scale.float(), model[0].weight_scale.float())
        assert ulps(back[0].weight_gsa, model[0].weight_gsa) <= 1
        assert done.bytes_after < 0.3 * done.bytes_before
    else:
        q = jitquant.quantize_block(model[0].weight.detach())
        assert torch.equal(back[0].weight.detach(), q.dequantize(BF16))
    assert sqnr(back(x).detach(), model(x).detach()) > 40
    assert not back.training


def test_products_in_fp8_of_files(tmp_path: Path) -> None:
    """`compute` reaches the layers whose inputs stay as they are, and no others."""

    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64, dtype=BF16), nn.Linear(64, 64, dtype=BF16))

    model = made()
    convert(model, "nvfp4a16", targets=("0",))
    convert(model, "nvfp4", targets=("1",))
    save_compressed_tensors(model, tmp_path)
    for compute in ("exact", "fp8"):
        read = made()
        load_compressed_tensors(read, tmp_path, compute=compute)  # type: ignore[arg-type]
        assert [layer.compute for layer in read.children()] == [compute, "exact"]
    with pytest.raises(ValueError, match=r"compute.*'int8'"):
        load_compressed_tensors(made(), tmp_path, compute="int8")  # type: ignore[arg-type]


def test_both_in_one_model(tmp_path: Path) -> None:
    _, quantization = library()
    model, x = layers(), randn(8, 64)
    convert(model, "nvfp4", filter=lambda name, _: name == "0")
    convert(model, "fp8_block")
    save_compressed_tensors(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert [g["targets"] for g in config["config_groups"].values()] == [["0"], ["2"]]
    quantization.QuantizationConfig.model_validate(config)
    back = layers()
    assert load_compressed_tensors(back, tmp_path).replaced == ["0", "2"]
    assert sqnr(back(x).detach(), model(x).detach()) > 30


def test_several_files(tmp_path: Path) -> None:
    model, x = layers(), randn(8, 64)
    convert(model, "nvfp4")
    save_compressed_tensors(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in ("part-0.safetensors", "part-1.safetensors"):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, tmp_path / file)
    (tmp_path / "model.safetensors").unlink()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    name = next(n for n in tensors if weight_map[n] == "part-0.safetensors")
    path = tmp_path / "part-1.safetensors"
    save_file({**load_file(path), name: torch.zeros_like(tensors[name])}, path)  # not the index's
    back = layers()
    load_compressed_tensors(back, tmp_path)
    assert sqnr(back(x), model(x)) > 40
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"part-1\.safetensors: .* it is truncated"):
        load_compressed_tensors(layers(), tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"has no part-1\.safetensors"):
        load_compressed_tensors(layers(), tmp_path)


def sharded(folder: Path) -> None:
    """The unquantized weights of `layers` in two files, beside one that the index does not list."""
    state = layers().state_dict()
    files = {name: f"model-0000{name[0]}.safetensors" for name in state}
    for file in {*files.values()}:
        save_file({n: t for n, t in state.items() if files[n] == file}, folder / file)
    save_file(state, folder / "other.safetensors")
    weight_map = {**files, "a": "../elsewhere.safetensors", "b": "config.json", "c": "gone", "d": 3}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def test_a_sharded_checkpoint_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "elsewhere.safetensors").touch()
    sharded(folder)
    model, back = layers(), layers()
    convert(model, "nvfp4")
    save_compressed_tensors(model, folder)
    names = {"config.json", "model.safetensors", "other.safetensors"}
    assert {path.name for path in folder.iterdir()} == names
    assert (tmp_path / "elsewhere.safetensors").exists()
    assert load_compressed_tensors(back, folder).replaced == ["0", "2"]


@pytest.mark.parametrize("steps", range(6))
def test_a_save_that_is_cut_short(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is deleted the folder loads as it was, then it does not load."""
    old, new, back = layers(), layers(), layers()
    convert(old, "fp8_block")
    convert(new, "nvfp4")
    save_compressed_tensors(old, tmp_path)
    save_file(load_file(tmp_path / "model.safetensors"), tmp_path / "part.safetensors")
    index = {"weight_map": dict.fromkeys(old.state_dict(), "part.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    done: list[str] = []

    def counted(function: Any) -> Any:
        def step(path: Path, *args: Any, **kwargs: Any) -> Any:
            if len(done) == steps:
                raise KeyboardInterrupt
            done.append(path.name)
            return function(path, *args, **kwargs)

        return step

    with monkeypatch.context() as patch:
        for name in ("unlink", "replace"):
            patch.setattr(Path, name, counted(getattr(Path, name)))
        if steps < 5:
            with pytest.raises(KeyboardInterrupt):
                save_compressed_tensors(new, tmp_path)
        else:
            save_compressed_tensors(new, tmp_path)
    assert done[3:] == ["config.json.tmp", "model.safetensors.tmp"][: max(0, steps - 3)]
    if 2 <= steps < 5:
        with pytest.raises(FileNotFoundError, match="which has neither"):
            load_compressed_tensors(back, tmp_path)
        return
    load_compressed_tensors(back, tmp_path)
    assert type(back[0]) is (NVFP4Linear if steps == 5 else Float8BlockwiseLinear)


def test_a_save_whose_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_file(tensors: Any, path: Path, **_: Any) -> None:
        path.write_bytes(b"a part")
        raise OSError("No space left on device")

    sharded(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model = layers()
    convert(model, "nvfp4")
    functions = "jitquant.nn._compressed_tensors.safetensors_functions"
    monkeypatch.setattr(functions, lambda: (None, save_file))
    with pytest.raises(OSError, match="No space left"):
        save_compressed_tensors(model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_weights_that_are_older_than_their_config(tmp_path: Path) -> None:
    model, back = layers(), layers()
    convert(model, "nvfp4")
    save_compressed_tensors(model, tmp_path)
    save_file(layers().state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"directory: expected quantized weights, .* none are"):
        load_compressed_tensors(back, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["config_groups"] = {}  # as with a cache alone in FP8
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_compressed_tensors(back, tmp_path).replaced == []


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("text", ["{broken", "[]"])
def test_a_folder_that_is_broken_is_left_alone(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / "model.safetensors").write_bytes(b"old")
    model = layers()
    convert(model, "nvfp4")
    with pytest.raises(ValueError, match=rf"directory: expected a JSON object in .*{name}.*Repair"):
        save_compressed_tensors(model, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {
        name: text.encode(),
        "model.safetensors": b"old",
    }


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = layers()
    convert(model, "nvfp4")
    with pytest.raises(FileExistsError, match=r"directory: expected a folder, .*another path"):
        save_compressed_tensors(model, tmp_path / "file")
    with pytest.raises(NotADirectoryError, match=r"directory: expected a folder, .*another path"):
        save_compressed_tensors(model, tmp_path / "file" / "folder")


@pytest.mark.parametrize(
    "layer",
    [
        NVFP4Linear(64, 160),
        MXFP4Linear(64, 160),
        Float8BlockwiseLinear(64, 160),
        NVFP4TrainingLinear(64, 160),
        NVFP4Experts.from_parts(SwiGLUExperts(2, 32, 32), {}),
        Float8BlockwiseExperts(SwiGLUExperts(2, 32, 32)),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_converted_model_is_refused(layer: nn.Module, tmp_path: Path) -> None:
    kind = type(layer).__name__
    with pytest.raises(ValueError, match=f"model: expected an unconverted .* got {kind} at '0'"):
        load_compressed_tensors(nn.Sequential(layer), tmp_path)


def test_a_load_that_fails_changes_nothing(tmp_path: Path) -> None:
    """With names that lack or are too many, also where a layer has codes, and wrong shapes."""
    model, plain = layers(), layers().append(nn.BatchNorm1d(48, dtype=BF16))
    convert(model, "nvfp4", ignore="2")
    save_compressed_tensors(model, tmp_path)
    norm = {f"3.{n}": t for n, t in plain[3].state_dict().items() if "num" not in n}
    good = load_file(tmp_path / "model.safetensors") | norm
    load = tmp_path / "model.safetensors"
    for changed, says in (
        ({"3.bias": None}, "the files lack 3.bias and have nothing"),
        ({"4.bias": torch.ones(3)}, "the files lack nothing and have 4.bias"),
        ({"0.weight": torch.ones(160, 64)}, "the files lack nothing and have 0.weight"),
        ({"2.weight": torch.ones(48, 16)}, "size mismatch for 2.weight"),
        ({"0.bias": torch.ones(159)}, "size mismatch for 0.bias"),
    ):
        save_file({n: t for n, t in (good | changed).items() if t is not None}, load)
        back = layers().append(nn.BatchNorm1d(48, dtype=BF16))
        before = dict(back.named_modules()), dict(back.named_parameters()), [*back.buffers()]
        values = {n: t.clone() for n, t in back.state_dict().items()}
        with pytest.raises(
            ValueError, match=rf"directory: expected the files of this (.|\n)*{says}"
        ):
            load_compressed_tensors(back, tmp_path)
        assert (dict(back.named_modules()), dict(back.named_parameters())) == before[:2]
        assert all(a is b for a, b in zip(back.buffers(), before[2], strict=True))
        assert all(torch.equal(values[n], t) for n, t in back.state_dict().items())
    save_file(good, load)
    assert load_compressed_tensors(back, tmp_path).replaced == ["0"]


def test_weights_that_are_tiny(tmp_path: Path) -> None:
    """Files have the reciprocal of a gsa, which has to be a number of fp32."""
    model = layers(dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e-36)
    want, back = model[0].weight.detach().clone(), layers(dtype=torch.float32)
    apart = nn.Sequential(NVFP4Linear.from_linear(model[0]))
    convert(model, "nvfp4")
    save_compressed_tensors(model, tmp_path / "folder")
    load_compressed_tensors(back, tmp_path / "folder")
    assert sqnr(back[0].weight.dequantize(torch.float32), want) > 18
    with pytest.raises(ValueError, match=r"0\.weight_global_scale: expected a finite .*too small"):
        save_compressed_tensors(apart, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_what_the_library_writes(tmp_path: Path) -> None:
    """The other way: quantized and packed by the library, with a scale for activations."""
    compressors, quantization = library()
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = quantization.preset_name_to_scheme("NVFP4", ["Linear"])
    weight = randn(48, 64).float()
    global_scale = generate_gparam(weight.amin(), weight.amax())
    rows = weight.unflatten(-1, (-1, 16))
    scale, _ = calculate_qparams(
        rows.amin(-1), rows.amax(-1), scheme.weights, global_scale=global_scale
    )
    kind = compressors.BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}
    packed = kind.compress(state, scheme)
    want = kind.decompress(packed, scheme)["weight"]
    files = {f"0.{k}": v.contiguous() for k, v in packed.items()}
    save_file({**files, "0.input_global_scale": torch.ones(1)}, tmp_path / "model.safetensors")
    config = quantization.QuantizationConfig(config_groups={"group_0": scheme})
    described = {"quantization_config": json.loads(config.model_dump_json())}
    (tmp_path / "config.json").write_text(json.dumps(described))
    model = nn.Sequential(nn.Linear(64, 48, bias=False))
    load_compressed_tensors(model, tmp_path)
    got = model[0].weight.dequantize(BF16)
    assert ulps(got, want).max() <= 1
    assert sqnr(got, weight) > 18


def test_tied_weights(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(32, 64)
            self.inner = nn.Linear(64, 64)
            self.head = nn.Linear(64, 32, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            y: Tensor = self.head(self.inner(self.embed(tokens)))
            return y

    model, tokens = Tied().eval(), torch.arange(32)
    convert(model, "fp8_block")
    save_compressed_tensors(model, tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert names["embed.weight"].dtype == torch.float32
    assert "head.weight" not in names
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["head"]
    back = Tied().eval()
    assert load_compressed_tensors(back, tmp_path).replaced == ["inner"]
    assert back.head.weight is back.embed.weight
    assert torch.equal(back.embed.weight, model.embed.weight)
    assert sqnr(back(tokens).detach(), model(tokens).detach()) > 25


def test_experts_that_are_not_converted_are_named(tmp_path: Path) -> None:
    """Those of another forward as well: engines look for all of them in ignore."""
    model = nn.ModuleDict({"experts": UnknownExperts(), "inner": nn.Linear(32, 32)})
    assert convert(model, "nvfp4").skipped == {"experts": "its forward is not known"}
    save_compressed_tensors(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert sorted(config["ignore"]) == [
        f"experts.{e}.{p}" for e in range(2) for p in ("down_proj", "gate_proj", "up_proj")
    ]


def test_one_layer_at_two_places(tmp_path: Path) -> None:
    linear = nn.Linear(32, 32, dtype=BF16)
    model = nn.Sequential(linear, nn.Tanh(), linear).eval()
    convert(model, "nvfp4")
    save_compressed_tensors(model, tmp_path)
    assert {"0.weight_packed", "2.weight_packed"} <= set(load_file(tmp_path / "model.safetensors"))
    apart = nn.Sequential(
        *(nn.Linear(32, 32, dtype=BF16), nn.Tanh(), nn.Linear(32, 32, dtype=BF16))
    )
    load_compressed_tensors(apart.eval(), tmp_path)
    assert sqnr(apart(randn(4, 32)), model(randn(4, 32))) > 40


@pytest.mark.parametrize("recipe", ["nvfp4a16", "mxfp4", "fp8_block"])
def test_one_layer_at_two_places_is_read(recipe: Any, tmp_path: Path) -> None:
    def made() -> nn.Sequential:
        linear = nn.Linear(32, 32, dtype=BF16)
        return nn.Sequential(linear, nn.Tanh(), linear).eval()

    model, back, x = made(), made(), randn(4, 32)
    convert(model, recipe)
    save_compressed_tensors(model, tmp_path)
    assert load_compressed_tensors(back, tmp_path).replaced == ["0"]
    assert back[0] is back[2]
    assert torch.equal(back[0].bias, model[0].bias)
    assert sqnr(back(x).detach(), model(x).detach()) > 30


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("recipe", ["nvfp4a16", "mxfp4", "fp8_block"])
def test_a_subclass_of_linear_is_not_replaced(recipe: Any, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    convert(model, recipe)
    save_compressed_tensors(model, tmp_path)
    back = nn.Sequential(Doubled(32, 32))
    with pytest.raises(ValueError, match=r"model: expected a torch\.nn\.Linear .* it is a Doubled"):
        load_compressed_tensors(back, tmp_path)
    assert type(back[0]) is Doubled


def test_a_linear_itself_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    convert(model, "nvfp4a16")
    save_compressed_tensors(model[0], tmp_path)
    for root in (nn.Linear(32, 32), UnknownExperts()):
        with pytest.raises(
            ValueError, match=r"model: expected a module that contains linear layers"
        ):
            load_compressed_tensors(root, tmp_path)


@pytest.mark.parametrize("wrapper", ["compiled", "checkpointed", "parallel"])
def test_wrappers_that_rename_layers_are_refused(wrapper: str, tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

    model = layers()
    convert(model, "nvfp4a16")
    save_compressed_tensors(model, tmp_path / "good")

    def wrapped(model: nn.Sequential) -> nn.Module:
        if wrapper == "parallel":
            return nn.DataParallel(model)
        compiled = wrapper == "compiled"
        model[0] = (torch.compile if compiled else checkpoint_wrapper.checkpoint_wrapper)(model[0])
        return model

    with pytest.raises(ValueError, match=r"model: expected modules under their own names"):
        save_compressed_tensors(wrapped(model), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match=r"model: expected modules under their own names"):
        load_compressed_tensors(wrapped(layers()), tmp_path / "good")


def test_weights_on_meta_are_not_saved(tmp_path: Path) -> None:
    model = layers()
    convert(model, "nvfp4a16", ignore="2")
    model[2].to("meta")
    with pytest.raises(ValueError, match=r"model: expected weights with values, got 2\.weight on"):
        save_compressed_tensors(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    """As in DeepSeek-V3.1. Layers multiply with the codes of the files, and save them again."""

    def made() -> nn.ModuleDict:
        experts = SwiGLUExperts(2, 128, 128).to_empty(device="cpu")
        for parameter in experts.parameters():
            parameter.copy_(randn(*parameter.shape))
        return nn.ModuleDict({"linear": nn.Linear(256, 256, False, dtype=BF16), "experts": experts})

    model, back = made(), made()
    model["linear"] = Float8BlockwiseLinear.from_linear(model["linear"], scale_format="ue8m0")
    model["experts"] = Float8BlockwiseExperts(model["experts"], scale_format="ue8m0")
    save_compressed_tensors(model, tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    assert all((t.frexp().mantissa == 0.5).all() for n, t in files.items() if n.endswith("scale"))
    load_compressed_tensors(back, tmp_path)
    again, _ = compressed_tensors(back)
    assert again.keys() == files.keys()
    assert all(torch.equal(again[name].float(), t.float()) for name, t in files.items())
    steps = files["linear.weight_scale"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    want = files["linear.weight"].float() * steps
    assert torch.equal(back["linear"](torch.eye(256, dtype=BF16)).float(), want.t())


def llama(inner: int = 256) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).to(BF16).eval()


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_block"])
def test_transformers_reads_them(recipe: Any, tmp_path: Path) -> None:
    """A directory that from_pretrained loads, through the library, and that computes the same."""
    library()
    import transformers

    model, tokens = llama(), torch.arange(40).reshape(2, 20)
    convert(model, recipe, filter=lambda name, _: name != "lm_head")
    save_compressed_tensors(model, tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    assert described["architectures"] == ["LlamaForCausalLM"]
    assert described["dtype"] == "bfloat16"
    assert described["quantization_config"]["ignore"] == ["lm_head"]
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16).eval()
    with torch.no_grad():
        got = read(tokens).logits  # decompresses on the first call
        want = model(tokens).logits
    name = "model.layers.1.mlp.down_proj"
    weight = read.get_submodule(name).weight
    assert type(read.get_submodule(name)) is nn.Linear
    if recipe == "nvfp4":
        layer = model.get_submodule(name)
        assert ulps(weight, layer.weight.dequantize(BF16)).max() <= 1
    else:
        q = jitquant.quantize_block(model.get_submodule(name).weight.detach())
        assert sqnr(weight, q.dequantize(torch.float32)) > 50  # scales go through bf16 there
    # Activations in NVFP4 are the layers' own, transformers leaves them in bf16; in FP8 it rounds
    # their scales to bf16.
    assert sqnr(got, want) > (14 if recipe == "nvfp4" else 25)
    back = llama()
    done = load_compressed_tensors(back, tmp_path)
    assert len(done.replaced) == 14
    assert done.skipped == {"lm_head": "its weight is not quantized in the files"}
    with torch.no_grad():
        assert sqnr(back(tokens).logits, want) > (30 if recipe == "nvfp4" else 25)


@pytest.mark.parametrize(("whole", "mixed"), [(False, False), (False, True), (True, False)])
def test_transformers_reads_a_model_with_other_names_than_its_files(
    whole: bool, mixed: bool, tmp_path: Path
) -> None:
    """Llava's files have language_model.lm_head and vision_tower, its model lm_head and
    model.vision_tower, which transformers looks for in the configuration."""
    library()
    import transformers

    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4}
    text = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=1, pad_token_id=0, **sizes)
    vision = transformers.CLIPVisionConfig(
        num_hidden_layers=1, image_size=16, patch_size=8, **sizes
    )
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_id=63)
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).to(BF16).eval()
    inputs = {
        "input_ids": torch.cat((torch.full((1, 4), 63), torch.arange(1, 20)[None]), 1),
        "pixel_values": randn(1, 3, 16, 16),
    }
    ignore = ["lm_head", "re:.*vision_tower"]
    if whole:
        model.save_pretrained(tmp_path / "plain")
        quantize_checkpoint(tmp_path / "plain", tmp_path / "out", ignore=ignore)
    convert(model, "nvfp4a16", ignore=[*ignore, "down_proj"] if mixed else ignore)
    if mixed:
        convert(model, "fp8_block", targets="down_proj")
    if not whole:
        save_compressed_tensors(model, tmp_path / "out")
    read = type(model).from_pretrained(tmp_path / "out", dtype=BF16).eval()
    with torch.no_grad():
        assert sqnr(read(**inputs).logits, model(**inputs).logits) > (25 if mixed else 35)


@pytest.mark.parametrize("whole", [False, True])
def test_transformers_reads_columns_that_are_no_whole_blocks(whole: bool, tmp_path: Path) -> None:
    """In FP8 blocks, saved from memory and by `quantize_checkpoint`."""
    library()
    import transformers

    model, tokens, name = llama(inner=192), torch.arange(40).reshape(2, 20), "mlp.down_proj"
    if whole:
        model.save_pretrained(tmp_path / "plain")
        done = quantize_checkpoint(tmp_path / "plain", tmp_path / "out", format="fp8_block")
        why = done.why[f"model.layers.0.{name}"]
        assert why == "its 192 columns are not a multiple of 128"
    want = model(tokens).logits.detach()
    if not whole:
        convert(model, "fp8_block")
        want = model(tokens).logits.detach()
        save_compressed_tensors(model, tmp_path / "out")
    described = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    groups = described["config_groups"].values()
    assert [g["input_activations"] is None for g in groups] == ([False] if whole else [False, True])
    downs = [f"model.layers.{i}.{name}" for i in range(2)]
    assert (described["ignore"][1:-1] if whole else [*groups][1]["targets"]) == downs
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=BF16).eval()
    with torch.no_grad():
        assert sqnr(read(tokens).logits, want) > 20
    back = llama(inner=192)
    done = load_compressed_tensors(back, tmp_path / "out")
    assert len(done.replaced) == (12 if whole else 14)
    assert sqnr(back(tokens).logits.detach(), want) > 20


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4a16", "fp8_block"])
def test_a_model_on_meta(recipe: Any, tmp_path: Path) -> None:
    """Every weight comes from the files, tied ones stay one, and buffers are computed."""
    pytest.importorskip("transformers", minversion="5.0")
    model, tokens = llama(), torch.arange(40).reshape(2, 20)
    done = convert(model, recipe)
    save_compressed_tensors(model, tmp_path)
    with torch.device("meta"):
        back = llama()
    assert all(t.is_meta for t in (*back.parameters(), *back.buffers()))
    read = load_compressed_tensors(back, tmp_path)
    assert read.replaced == done.replaced
    assert not any(t.is_meta for t in (*back.parameters(), *back.buffers()))
    with torch.no_grad():
        assert sqnr(back(tokens).logits, model(tokens).logits) > (
            25 if recipe == "fp8_block" else 50
        )


@pytest.mark.parametrize("moved", [False, True])
def test_a_model_of_several_on_meta(moved: bool, tmp_path: Path) -> None:
    """Gemma 3 has buffers that no file has, beside its embedding and in its vision tower."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.Gemma3Config(
        text_config={**sizes, "vocab_size": 64, "num_attention_heads": 2, "head_dim": 32},
        vision_config={**sizes, "num_attention_heads": 2, "image_size": 32, "patch_size": 8},
        mm_tokens_per_image=4,
        tie_word_embeddings=not moved,  # to("meta") unties them
    )

    def made() -> Any:
        return transformers.Gemma3ForConditionalGeneration(config).to(BF16).eval()

    model, want = made(), made()
    convert(model, "nvfp4a16")
    save_compressed_tensors(model, tmp_path)
    load_compressed_tensors(want, tmp_path)
    with torch.device("cpu" if moved else "meta"):
        back = made().to("meta")
    load_compressed_tensors(back, tmp_path)
    for values in ("named_parameters", "named_buffers"):
        found = dict(getattr(back, values)())
        for name, tensor in getattr(want, values)():
            assert torch.equal(found[name].float(), tensor.float()), name


def test_experts_whose_layout_is_not_known(tmp_path: Path) -> None:
    """Files of GraniteMoe have the experts of a layer in one tensor of another name."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.GraniteMoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        num_experts_per_tok=2,
        pad_token_id=0,
    )

    def made() -> Any:
        return transformers.GraniteMoeForCausalLM(config).to(BF16).eval()

    model, tokens = made(), torch.arange(20)[None]
    convert(model, "nvfp4a16")
    with pytest.raises(ValueError, match=r"experts\.down_proj: expected a weight that files store"):
        save_compressed_tensors(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    model, back = made(), made()
    convert(model, "nvfp4a16", ignore=("lm_head", "experts", "router"))
    save_compressed_tensors(model, tmp_path)
    done = load_compressed_tensors(back, tmp_path)
    assert {"lm_head", "model.layers.0.block_sparse_moe.experts"} <= done.skipped.keys()
    with torch.no_grad():
        assert sqnr(back(tokens).logits, model(tokens).logits) > 50


@pytest.mark.parametrize(
    ("targets", "of_inputs", "weight_only"),
    [
        (["Linear"], None, True),
        (["Linear"], {}, False),
        (["re:.*nothing"], {}, False),  # the only group that has inputs in NVFP4
        (["0"], {"num_bits": 8, "group_size": None}, True),
    ],
    ids=str,
)
def test_inputs_of_other_schemes(
    targets: list[str], of_inputs: dict[str, Any] | None, weight_only: bool, tmp_path: Path
) -> None:
    """Other tools name classes as targets, and have inputs in FP8 beside weights in NVFP4."""
    model, back = layers(), layers()
    convert(model, "nvfp4a16", ignore="2")
    convert(model, "fp8_block")
    save_compressed_tensors(model, tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    nvfp4, fp8 = described["quantization_config"]["config_groups"].values()
    inputs = None if of_inputs is None else {**nvfp4["weights"], **of_inputs}
    nvfp4 |= {"targets": targets, "input_activations": inputs}
    fp8 |= {"targets": ["re:2"], "input_activations": {**fp8["weights"], "dynamic": True}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    load_compressed_tensors(back, tmp_path)
    assert back[0].weight_only == weight_only


@pytest.mark.parametrize(("location", "refused"), [("input", True), ("weight_input", False)])
def test_transforms(location: str, refused: bool, tmp_path: Path) -> None:
    """Those of weights are in the weights already."""
    model, back = layers(), layers()
    convert(model, "nvfp4a16")
    save_compressed_tensors(model, tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    group = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": location}]}
    described["quantization_config"]["transform_config"] = {"config_groups": {"a": group}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    if not refused:
        load_compressed_tensors(back, tmp_path)
        return
    with pytest.raises(ValueError, match=r"transform_config in .*: expected .* got those at input"):
        load_compressed_tensors(back, tmp_path)
    assert type(back[0]) is nn.Linear


def test_inputs_are_quantized_where_they_were(tmp_path: Path) -> None:
    """The scheme of the files says weights alone; engines and compressed-tensors see no more."""
    x = randn(8, 64)
    model = layers()
    convert(model, "nvfp4", ignore="2")
    convert(model, "nvfp4a16")
    assert (model[0].weight_only, model[2].weight_only) == (False, True)
    save_compressed_tensors(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["input_activations"] is None
    assert config["jitquant_dynamic_inputs"] == ["0"]
    back = layers()
    load_compressed_tensors(back, tmp_path)
    assert (back[0].weight_only, back[2].weight_only) == (False, True)
    assert torch.equal(back(x), model(x))

    one = layers()
    convert(one, "nvfp4a16")
    save_compressed_tensors(one, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert "jitquant_dynamic_inputs" not in config
    back = layers()
    load_compressed_tensors(back, tmp_path)
    assert back[0].weight_only
    assert back[2].weight_only


@pytest.mark.parametrize(
    ("recipe", "name"),
    [("nvfp4", "0.bias"), ("nvfp4", "0.weight_scale"), ("mxfp4", "0.bias"), ("fp8", "0.weight")],
)
def test_a_part_that_is_missing(recipe: Any, name: str, tmp_path: Path) -> None:
    model = layers()
    convert(model, "fp8_block" if recipe == "fp8" else recipe)
    save_compressed_tensors(model, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    save_file({n: t for n, t in found.items() if n != name}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"the files lack {re.escape(name)}"):
        load_compressed_tensors(layers(), tmp_path)


def test_meta_without_values_in_the_files(tmp_path: Path) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)
            self.register_buffer("angles", torch.ones(4), persistent=False)

    model = Positions()
    convert(model, "nvfp4")
    save_compressed_tensors(model, tmp_path)
    with torch.device("meta"):
        back = Positions()
    with pytest.raises(
        ValueError, match=r"model: expected buffers with values, .* got angles on meta"
    ):
        load_compressed_tensors(back, tmp_path)
    assert type(back.linear) is nn.Linear
    back.angles = torch.ones(4)
    load_compressed_tensors(back, tmp_path)
    assert not back.linear.bias.is_meta


def test_save_pretrained_of_a_converted_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    library()
    model, tokens = llama(), torch.arange(40).reshape(2, 20)
    convert(model, "nvfp4")
    model.save_pretrained(tmp_path)
    back = llama()
    load_compressed_tensors(back, tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16).eval()
    with torch.no_grad():
        want = model(tokens).logits
        assert sqnr(back(tokens).logits, want) > 50
        assert sqnr(read(tokens).logits, want) > 14  # its activations stay in bf16


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4"])
@pytest.mark.parametrize("aside", [False, True])
def test_files_of_modelopt(aside: bool, algorithm: str, tmp_path: Path) -> None:
    model, x = layers(), randn(8, 64)
    convert(model, "nvfp4" if algorithm == "NVFP4" else "nvfp4a16")
    state = model.state_dict()
    tensors = {}
    for name in ("0", "2"):
        tensors[f"{name}.weight"] = state[f"{name}.weight_packed"]
        tensors[f"{name}.weight_scale"] = state[f"{name}.weight_scale"]
        tensors[f"{name}.weight_scale_2"] = state[f"{name}.weight_gsa"][0]
        tensors[f"{name}.input_scale"] = torch.tensor(0.5)
    save_file({**tensors, "0.bias": state["0.bias"]}, tmp_path / "model.safetensors")
    described = {"quant_algo": algorithm, "group_size": 16}
    config = {"quantization_config": {"quant_method": "modelopt", **described}}
    (tmp_path / "config.json").write_text(json.dumps({} if aside else config))
    if aside:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": described}))
    back = layers()
    assert load_compressed_tensors(back, tmp_path).replaced == ["0", "2"]
    dynamic = model(x)
    for layer in (model[0], model[2]):
        layer.input_gsa = torch.tensor([0.5])
    assert torch.equal(back(x), model(x))
    assert torch.equal(back(x), dynamic) == back[0].weight_only


def test_awq_of_modelopt_is_refused(tmp_path: Path) -> None:
    """Without its factors of the inputs the products would be wrong."""
    factors = {"0.pre_quant_scale": torch.ones(64), "0.weight": torch.zeros(1)}
    save_file(factors, tmp_path / "model.safetensors")
    described = {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": described}))
    with pytest.raises(ValueError, match=r"got 0\.pre_quant_scale in .*: AWQ, whose inputs are"):
        load_compressed_tensors(layers(), tmp_path)


def test_other_algorithms_of_modelopt_are_refused(tmp_path: Path) -> None:
    model, back = layers(), layers()
    convert(model, "nvfp4")
    save_compressed_tensors(model, tmp_path)
    described = {"quant_method": "modelopt", "quant_algo": "W4A8_NVFP4_FP8"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": described}))
    with pytest.raises(ValueError, match=r"quant_algo of 0: expected .* got 'W4A8_NVFP4_FP8'"):
        load_compressed_tensors(back, tmp_path)
    assert type(back[0]) is nn.Linear


def test_scales_of_caches_are_not_read(tmp_path: Path) -> None:
    model, x = layers(), randn(8, 64)
    convert(model, "nvfp4")
    save_compressed_tensors(model, tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), "attn.k_scale": torch.ones(1), "attn.v_scale": x}, path)
    back = layers()
    load_compressed_tensors(back, tmp_path)
    assert torch.equal(back(x), model(x))


def test_files_of_deepseek(tmp_path: Path) -> None:
    model, x = layers(), randn(8, 64)
    convert(model, "fp8_block")
    tensors, _ = compressed_tensors(model)
    tensors = {n.replace("weight_scale", "weight_scale_inv"): t for n, t in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    back = layers()
    assert load_compressed_tensors(back, tmp_path).replaced == ["0", "2"]
    assert sqnr(back(x).detach(), model(x).detach()) > 40


def test_activations_in_nvfp4(tmp_path: Path) -> None:
    """With amaxes from calibration the scheme is the library's "NVFP4"; it computes as we do."""
    _, quantization = library()
    import transformers

    model, tokens = llama(), torch.arange(40).reshape(2, 20)
    found = report(model, tokens, formats=["nvfp4"])
    plain = model(tokens).logits.detach()
    convert(model, "nvfp4", filter=lambda name, _: name != "lm_head")
    amaxes = {layer.name: layer.input_amax for layer in found.layers}
    save_compressed_tensors(model, tmp_path, input_amax=amaxes)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    (scheme,) = quantization.QuantizationConfig.model_validate(config).config_groups.values()
    preset = quantization.preset_name_to_scheme("NVFP4", ["Linear"])
    assert scheme.weights == preset.weights
    assert scheme.input_activations == preset.input_activations
    name = "model.layers.1.mlp.down_proj"
    scales = load_file(tmp_path / "model.safetensors")[f"{name}.input_global_scale"]
    assert scales.item() == pytest.approx(2688 / amaxes[name])
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16).eval()
    with torch.no_grad():
        got, want = read(tokens).logits, model(tokens).logits
    assert sqnr(got, want) > sqnr(want, plain) + 3  # nearer to ours than ours to bf16
    assert load_compressed_tensors(llama(), tmp_path).replaced == list(amaxes)[:-1]


def test_amaxes_that_are_wrong(tmp_path: Path) -> None:
    model = layers()
    convert(model, "nvfp4")
    for wrong in ({"0": 1.0}, {"0": 1.0, "2": 0.0}, {"0": 1.0, "2": torch.nan}):
        with pytest.raises(
            ValueError,
            match=r"input_amax\['2'\]: expected a positive number, .*report\(model, inputs\)",
        ):
            save_compressed_tensors(model, tmp_path, input_amax=wrong)
    assert not list(tmp_path.iterdir())
    with pytest.raises(TypeError, match=r"input_amax: expected amaxes by .*, got 448\.0\. For one"):
        save_compressed_tensors(model, tmp_path / "number", input_amax=448.0)  # type: ignore[arg-type]


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"model: expected layers that are NVFP4Linear, .* got none"
    ):
        save_compressed_tensors(layers(), tmp_path)
    odd = nn.Sequential(NVFP4Linear(40, 16))
    with pytest.raises(ValueError, match=r"0\.in_features: expected a multiple of 16, .* got 40"):
        save_compressed_tensors(odd, tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    with pytest.raises(FileNotFoundError):
        load_compressed_tensors(layers(), tmp_path)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    with pytest.raises(
        ValueError,
        match=r"expected one of 'compressed-tensors', 'modelopt', 'fp8', 'mxfp4', got 'gptq'",
    ):
        load_compressed_tensors(layers(), tmp_path)

    model = layers()
    convert(model, "nvfp4")
    save_compressed_tensors(model, tmp_path)
    assert "gptq" not in (tmp_path / "config.json").read_text()
    good = load_file(tmp_path / "model.safetensors")

    def load(target: nn.Module | None = None, **changed: Tensor | None) -> None:
        tensors = {k: v for k, v in (good | changed).items() if v is not None}
        save_file(tensors, tmp_path / "model.safetensors")
        load_compressed_tensors(layers() if target is None else target, tmp_path)

    load()
    with pytest.raises(
        ValueError,
        match=r"0\.weight_packed: expected NVFP4 for the linear's \(160, 64\) \(uint8, a scale",
    ):
        load(**{"0.weight_global_scale": None})
    with pytest.raises(
        ValueError,
        match=r"0\.weight_packed: expected NVFP4 for the linear's \(160, 64\) \(uint8, a scale",
    ):
        load(**{"0.weight_packed": good["0.weight_packed"][:, :16].contiguous()})
    for part, wrong in itertools.product(
        ("weight", "input"), ([0.0], [torch.nan], [torch.inf], [-2.0], [1.0] * 3)
    ):
        name = f"0.{part}_global_scale"
        with pytest.raises(ValueError, match=f"{name}: expected one positive number, got "):
            load(**{name: torch.tensor(wrong)})
    codes = torch.ones(48, 160, dtype=torch.float8_e4m3fn)
    without = {f"2.{n}": None for n in ("weight_packed", "weight_scale", "weight_global_scale")}
    with pytest.raises(
        ValueError, match=r"codes with scales, for 2\.weight, got torch\.float8_e4m3fn"
    ):
        load(**{**without, "2.weight": codes})
    with pytest.raises(ValueError, match=r"0\.weight_packed: .* with scales torch\.float32"):
        load(**{"0.weight_scale": good["0.weight_scale"].float()})
    with pytest.raises(ValueError, match=r"have 3\.weight besides"):
        load(**{"3.weight": torch.ones(2)})
    with pytest.raises(ValueError, match=r"the files lack 3\.weight, 3\.bias"):
        load(layers().append(nn.LayerNorm(48)))
    with pytest.raises(
        ValueError,
        match=r"2\.weight: expected float8_e4m3fn with a scale for each 128x128 block, \(1, 2\),",
    ):
        load(
            **{
                **{f"2.{part}": None for part in ("weight_packed", "weight_global_scale")},
                "2.weight": torch.ones(48, 160),
                "2.weight_scale": torch.ones(48, 1),
            }
        )
