"""fp32_modules: which modules, and what the casts around them do. With engines: tests/distributed/test_precision.py."""

import copy

import pytest
import torch
from torch import nn

from zerolite.config import ConfigError
from zerolite.precision.dtypes import Precision
from zerolite.precision.fp32_modules import Fp32Modules
from zerolite.utils.nested import find_tensors


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(4), nn.Linear(4, 4)
        self.router = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))

    def forward(self, x):
        return self.up(self.router(self.norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


def kept(model, *patterns, compute=torch.bfloat16, autocast=None):
    """``model`` with these modules in fp32, as the engine makes it."""
    modules = Fp32Modules(model, patterns, compute, autocast, "cpu")
    precision = Precision(compute=compute, separate_masters=True, keeps_fp32=modules.holds)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(precision.compute_dtype(parameter))
    modules.attach()
    return modules


def check_equal(out, wanted, model, plain):
    """Outputs and gradients are those of the plain model."""
    assert torch.equal(out, wanted)
    out.float().square().sum().backward()
    wanted.float().square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


class Seen(nn.Module):
    """Notes the dtypes of its arguments; has a parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *args, **kwargs):
        self.dtypes = [t.dtype for t in find_tensors((args, kwargs))]
        return self.answer(*args, **kwargs)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [("*.norm", {"norm", "blocks.0.norm", "blocks.1.norm"}), ("norm", {"norm"}), ("blocks", {"blocks.0", "blocks.1"}),
     ("blocks.?.router", {"blocks.0.router", "blocks.1.router"}), ("*", {"embed", "blocks.0", "blocks.1", "norm"}),
     ("blocks.[1].*", {"blocks.1.norm", "blocks.1.router", "blocks.1.up"})],
)  # fmt: skip
def test_patterns_are_of_qualified_names_and_take_what_is_inside(pattern, names):
    model = Net()
    kept(model, pattern)
    for name, parameter in model.named_parameters():
        inside = any(name.startswith(f"{n}.") for n in names)
        assert parameter.dtype is (torch.float32 if inside else torch.bfloat16), name
    assert model(torch.arange(5)).dtype is torch.bfloat16


def test_a_pattern_that_matches_nothing_is_an_error_in_every_precision():
    for compute in (torch.bfloat16, None):
        with pytest.raises(ConfigError) as caught:
            Fp32Modules(Net(), ["*.norm", "*.ruoter", "Norm"], compute, None, "cpu")
        assert [path for path, _ in caught.value.errors] == ["fp32_modules"] * 2
        first, second = (sentence for _, sentence in caught.value.errors)
        assert '"*.ruoter"' in first and '"blocks.1.router"' in first
        assert '"Norm"' in second and '"norm"' in second
    with pytest.raises(ConfigError, match="no modules in it"):
        Fp32Modules(nn.Linear(2, 2), ["x"], torch.bfloat16, None, "cpu")


def test_a_parameter_on_both_sides_is_an_error_where_dtypes_differ():
    model = Net()
    model.head = nn.Linear(4, 5)
    model.head.weight = model.embed.weight
    for pattern, names in (("embed", ("'embed.weight'", "'head.weight'")), ("head", ("'head.weight'", "'embed."))):
        with pytest.raises(ConfigError, match=f"fp32_modules.*{names[0]}.*also {names[1]}.*bfloat16.*name both"):
            Fp32Modules(model, [pattern], torch.bfloat16, None, "cpu")
        Fp32Modules(model, [pattern], None, torch.bfloat16, "cpu")
        Fp32Modules(model, [pattern], None, None, "cpu")
    kept(model, "embed", "head")
    assert model.head.weight.dtype is torch.float32
    for pattern in ("norm", "other"):
        shared = Net()
        shared.other = shared.norm  # one module with two names is not two modules
        kept(shared, pattern)
        assert shared.norm.weight.dtype is torch.float32 and shared.embed.weight.dtype is torch.bfloat16


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_is_off_inside(half):
    inner = Seen()
    inner.answer = lambda x: (x @ torch.ones(2, 2), torch.is_autocast_enabled("cpu"))
    model = nn.ModuleDict({"m": inner})
    kept(model, "m", compute=None, autocast=half)
    with torch.autocast("cpu", dtype=half):
        out, on = model["m"](torch.ones(2, 2))
        assert out.dtype is torch.float32 and not on and torch.is_autocast_enabled("cpu")
        out, on = model["m"](torch.ones(2, 2, dtype=half))
        assert inner.dtypes == [torch.float32] and out.dtype is torch.float32 and not on
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is half

        inner.answer = lambda x: 1 / 0
        with pytest.raises(ZeroDivisionError):
            model["m"](torch.ones(1))
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_copies_cast_for_themselves_and_are_free_to_change():
    model = Net()
    modules = kept(model, "*.norm", "embed")
    for copied in (copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model))):
        with torch.no_grad():
            copied.norm.weight.zero_()
        x = torch.ones(2, 4).bfloat16()
        assert not copied.norm(x).any() and model.norm(torch.randn(2, 4).bfloat16()).any()
        assert copied.norm(x).dtype is torch.bfloat16
        assert copied.float()(torch.arange(5)).dtype is torch.float32, "nothing is rounded in a copy made fp32"
        again = kept(copied, "*.router", compute=torch.float16)
        assert "forward" not in vars(copied.norm), "the casts of another engine are gone"
        assert again.handles and copied(torch.arange(5)).dtype is torch.float16
    for handle in modules.handles:
        handle.remove()
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(("pattern", "inside"), [("*.norm?", "norm2"), ("*.linear1", "linear1"), ("*.self_attn", None)])
def test_torchs_transformer_layer_calls_its_modules(pattern, inside):
    """Its evaluation in one operation would not."""
    model = nn.ModuleDict({"layer": nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)})
    calls = []
    if inside:
        module = getattr(model["layer"], inside)
        module.forward = lambda x: calls.append(x.dtype) or type(module).forward(module, x)
    modules = kept(model, pattern)
    x = torch.randn(2, 3, 8).bfloat16()
    with torch.no_grad():
        wanted = model["layer"](x)
        torch.testing.assert_close(model.eval()["layer"](x), wanted, rtol=2**-6, atol=2**-6)
    assert not inside or calls == [torch.float32] * 2
    count = len(modules.handles)
    modules.attach()
    assert len(modules.handles) == count
    for handle in modules.handles:
        handle.remove()
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_is_refused():
    model = nn.ModuleDict({"fine": nn.Linear(2, 2), "script": torch.jit.script(nn.Linear(2, 2))})
    kept(model, "fine")
    with pytest.raises(ConfigError, match="fp32_modules: .*'script', which is TorchScript"):
        kept(model, "script")


@pytest.mark.slow
@pytest.mark.parametrize(("how", "when"), [("module", "before"), ("inside", "after"), ("wrapper", "before")])
def test_compiled_modules_are_cast_too(how, when):
    """Eager as the backend: what dynamo makes of the casts is what matters here."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    kept(plain, "*.norm", "*.router")

    def compile_model():
        if how == "module":
            model.compile(backend="eager")
        elif how == "wrapper":
            model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
        else:
            model.norm.compile(backend="eager")

    ids = torch.arange(5)
    if when == "before":
        compile_model()
        model(ids)  # what was traced before must not be used
    kept(model, "*.norm", "*.router")
    if when == "after":
        compile_model()
    out, wanted = model(ids), plain(ids)
    assert out.dtype is torch.bfloat16
    check_equal(out, wanted, model, plain)
