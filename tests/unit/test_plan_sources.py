"""Models, batches and losses by name: what is found, and the sentence for what is not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from zerolite.planning.result import PlanError
from zerolite.planning.sources import load_function, load_model_fn, parse_input_spec


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a package with modules of all kinds; forgotten after the test."""
    name = f"pkg_{tmp_path.name.replace('-', '_')}"
    home = tmp_path / name
    home.mkdir()
    for module, text in {
        "__init__": "",
        "good": "import torch\nclass Maker:\n    def make(): return 1\n"
        "def build_model(): return torch.nn.Linear(2, 2)\ndef sized(width, *rest, depth=2, **more): ...\n"
        "model = torch.nn.Linear(2, 2)\nnumber = 7\n",
        "missing": "import nonsuch_package\n",
        "inner": f"import {name}.nonsuch_module\n",
        "broken": "x = 1\ny = x / 0\n",
        "syntax": "def f(:\n",
        "leaving": "import sys\nsys.exit('no options given')\n",
    }.items():
        (home / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for known in [known for known in sys.modules if known.startswith(name)]:
        monkeypatch.delitem(sys.modules, known)
    return name


def test_objects_are_found(package: str) -> None:
    assert load_function(f"{package}.good:Maker.make", "--batch")() == 1
    assert load_function("math:sqrt", "--loss")(4) == 2
    assert isinstance(load_model_fn(f"{package}.good:build_model")(), torch.nn.Linear)
    assert load_model_fn("torch.nn:Identity") is torch.nn.Identity


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [("", "--model expects a function as in 'package.module:name', and got ''"), ("PKG.good", "and got 'PKG.good'"),
     ("PKG.good:", "and got 'PKG.good:'"), ("models/gpt:build", "and got 'models/gpt:build'"),
     ("nonsuch_top.gpt:f", "importing it failed with ModuleNotFoundError: No module named 'nonsuch_top'"),
     ("PKG.good.deep:f", "ModuleNotFoundError: No module named 'PKG.good.deep'; 'PKG.good' is not a package"),
     ("PKG.missing:f", "No module named 'nonsuch_package' (HOME/missing.py, line 1)"),
     ("PKG.broken:f", "ZeroDivisionError: division by zero (HOME/broken.py, line 2)"),
     ("PKG.syntax:f", "SyntaxError: invalid syntax (syntax.py, line 1)"),
     ("PKG.leaving:f", "(HOME/leaving.py, line 2)"),
     ("PKG.good:bild_model", "module 'PKG.good' has no attribute 'bild_model'"),
     ("PKG.good:Maker.male", "type object 'Maker' has no attribute 'male'")],
)  # fmt: skip
def test_what_is_missing_is_named(package: str, tmp_path: Path, spec: str, sentence: str) -> None:
    with pytest.raises(PlanError) as raised:
        load_function(spec.replace("PKG", package), "--model")
    expected = sentence.replace("HOME", str(tmp_path / package)).replace("PKG", package)
    assert str(raised.value).startswith("--model") and expected in str(raised.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("number", "expected a function, and it is of type int"),
        ("model", "this is a model, which has memory; name a function that makes it"),
        ("sized", "expected a function without arguments, and it needs width; write one"),
    ],
)
def test_what_makes_no_model(package: str, name: str, sentence: str) -> None:
    with pytest.raises(PlanError, match=f"--model {package}.good:{name}: {sentence}"):
        load_model_fn(f"{package}.good:{name}")
    with pytest.raises(PlanError, match="--loss .*: expected a function, and it is of type int"):
        load_function(f"{package}.good:number", "--loss")


def test_inputs_by_name_and_in_order() -> None:
    named = parse_input_spec("input_ids:int64[4,8]  mask:bool[4, 8],pixels:bfloat16[2,3]")()
    assert isinstance(named, dict)
    assert {name: (value.dtype, tuple(value.shape)) for name, value in named.items()} == {
        "input_ids": (torch.int64, (4, 8)),
        "mask": (torch.bool, (4, 8)),
        "pixels": (torch.bfloat16, (2, 3)),
    }
    assert int(named["input_ids"].sum()) == 0 and bool(named["mask"].all()) and float(named["pixels"].sum()) == 6
    ordered = parse_input_spec("float32[3] int32[]")()
    assert [(value.dtype, tuple(value.shape)) for value in ordered] == [(torch.float32, (3,)), (torch.int32, ())]


def test_the_micro_batch_size_stands_in_a_shape() -> None:
    made = parse_input_spec("x:float32[B,5] y:int64[B] z:float32[2]")(7)
    assert [tuple(value.shape) for value in made.values()] == [(7, 5), (7,), (2,)]
    with pytest.raises(TypeError):
        parse_input_spec("x:float32[B,5]")()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [(" ", "expected one or more tensors"), ("x:int64", "expected name:dtype[sizes] for each tensor"),
     ("x:int64", "got 'x:int64'"), ("x:int64[3", "got 'x:int64[3'"), ("x:int64[3] y", "got 'y'"),
     ("x:long[3]", "int8, uint8, bool, got 'long'"), ("x:int46[3]", "got 'int46'; did you mean 'int64'?"),
     ("x:int64[3,-1]", "got 'x:int64[3,-1]'"), ("x:int64[3,]", "got 'x:int64[3,]'"), ("[3]", "got '['"),
     ("x:int64[3,n]", "(sizes are whole numbers, B for the micro-batch size, or S for --seq-len), got 'x:int64[3,n]'"),
     ("x:int64[3] int64[3]", "for every tensor or for none"), ("x:int64[3] x:bool[3]", "a name of its own")],
)  # fmt: skip
def test_inputs_that_cannot_be_read(text: str, sentence: str) -> None:
    with pytest.raises(PlanError) as raised:
        parse_input_spec(text)
    assert str(raised.value).startswith("--input-spec") and sentence in str(raised.value)


TINY_LLAMA = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
TINY_LLAMA |= {"num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 50}


@pytest.mark.slow
@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], None])
def test_hugging_face_configs(tmp_path: Path, architectures: list[str] | None) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA | {"architectures": architectures}))
    for spec in (tmp_path, tmp_path / "config.json"):
        assert type(load_model_fn(str(spec))()).__name__ == "LlamaForCausalLM"


def test_hugging_face_configs_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in (tmp_path, tmp_path / "config.json", Path("nonsuch.json")):
        with pytest.raises(PlanError, match="there is no file .*; expected a Hugging Face config.json or its dir"):
            load_model_fn(str(spec))
    (tmp_path / "config.json").write_text('{"model_type": "nonsuch"}')
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        with pytest.raises(PlanError, match=r"pip install 'zerolite\[transformers\]'"):
            load_model_fn(str(tmp_path))
    pytest.importorskip("transformers")
    with pytest.raises(PlanError, match="transformers cannot read .*nonsuch"):
        load_model_fn(str(tmp_path))
