import collections
import dataclasses
import types
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import nn

import zerolite
from zerolite.precision.dtypes import GraphBoundary, Precision
from zerolite.utils.nested import find_in_objects, find_tensors, map_tensors, named_leaves

Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    extra: object = None


class Encoding(collections.UserDict):
    """Batch as Hugging Face's tokenizers give: entries in ``data``, further attributes, items as attributes."""

    def __init__(self, data=None, encodings=None):
        super().__init__(data)
        self._encodings = encodings

    def __getattr__(self, name):
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


@dataclasses.dataclass
class ModelOutput(collections.OrderedDict):
    """Output as Hugging Face's models give: fields that are entries as well; None is none."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self):
        callable_, _, *rest = super().__reduce__()
        return callable_, tuple(getattr(self, field.name) for field in dataclasses.fields(self)), *rest


class Batch(list):
    """A list with attributes and a constructor of its own."""

    def __init__(self, first, second, source):
        super().__init__([first, second])
        self.source = source


class Table(Mapping):
    """A mapping that is no dict, and whose copies share its entries."""

    def __init__(self, entries):
        self._entries = dict(entries)

    def __getitem__(self, key):
        return self._entries[key]

    def __setitem__(self, key, value):
        self._entries[key] = value

    def __iter__(self) -> Iterator:
        return iter(self._entries)

    def __len__(self):
        return len(self._entries)


INPUTS = {
    "dict": lambda: {"x": torch.ones(2), "ids": torch.arange(2), "flag": True},
    "list": lambda: [torch.ones(1), [torch.ones(1), "s"], None],
    "tuple": lambda: (torch.ones(1), torch.tensor([True]), 3.5),
    "named tuple": lambda: Pair(torch.ones(1), torch.arange(2)),
    "dataclass": lambda: Output(torch.ones(1), {"more": torch.arange(2)}),
    "UserDict": lambda: Encoding({"x": torch.ones(2), "input_ids": torch.arange(2)}, encodings=["kept"]),
    "ModelOutput": lambda: ModelOutput(logits=torch.ones(2)),
    "OrderedDict": lambda: collections.OrderedDict(b=torch.ones(1), a=torch.arange(1)),
    "defaultdict": lambda: collections.defaultdict(list, x=[torch.ones(1)]),
    "mapping proxy": lambda: types.MappingProxyType({"x": torch.ones(1)}),
    "other mapping": lambda: Table({"x": torch.ones(1), "y": 2}),
    "list subclass": lambda: Batch(torch.ones(1), 2, source="file"),
    "torch's result": lambda: torch.ones(2, 2).max(0),
    "packed sequence": lambda: nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_all_walks_meet_the_same_tensors_in_the_same_order(kind):
    value = {"nested": [INPUTS[kind](), slice(0, 1), {}], "after": nn.Parameter(torch.ones(1))}
    met = []
    map_tensors(lambda t: met.append(t) or t, value)
    leaves = named_leaves(value)
    assert len(met) >= 2 and len(dict(leaves)) == len(leaves)
    for found in (find_tensors(value), [leaf for _, leaf in leaves if isinstance(leaf, torch.Tensor)]):
        assert list(map(id, found)) == list(map(id, met))
    assert set(map(id, find_in_objects(value))) >= set(map(id, met))
    assert list(map(id, find_tensors(value, nn.Parameter))) == [id(value["after"])]
    assert leaves[-1] == ("after", value["after"]) and ("nested.2", {}) in leaves


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_of_any_shape_are_cast_and_never_changed(kind):
    compute = torch.bfloat16
    precision = Precision(compute=compute, separate_masters=True)
    value = INPUTS[kind]()
    before = find_tensors(value)
    result = precision.cast({"nested": [value]})["nested"][0]
    assert type(result) is type(value) and result is not value
    assert all(new is old for new, old in zip(find_tensors(value), before, strict=True)), "the user's own is untouched"
    after = find_tensors(result)
    assert [t.dtype for t in after] == [compute if t.is_floating_point() else t.dtype for t in before]
    assert all(new is old for new, old in zip(after, before, strict=True) if not old.is_floating_point())
    for attribute in ("_encodings", "source", "default_factory"):
        assert getattr(result, attribute, None) == getattr(value, attribute, None)
    if kind == "ModelOutput":
        assert result.logits is result["logits"] and result.loss is None and list(result) == ["logits"]
    if isinstance(value, Mapping):
        assert list(result) == list(value)


def scaled_by_8():
    return GraphBoundary(lambda: None, lambda: 8.0, Precision())


def test_outputs_come_back_in_fp32_and_watched():
    begun = []
    watch = GraphBoundary(lambda: begun.append(1), None, Precision())
    w = torch.ones(3, requires_grad=True)
    out = watch.leave({"h": (w * 2).bfloat16(), "n": torch.arange(3)})
    assert out["h"].dtype is torch.float32 and out["n"].dtype is torch.long
    out["h"].mul_(2)  # they may be changed in place
    out["h"][0] = 0
    out["h"].sum().backward()
    assert begun and torch.equal(w.grad, torch.tensor([0.0, 4.0, 4.0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_loss_scale_enters_once_and_leaves_again(dtype):
    watch = scaled_by_8()
    before, w, after = (torch.ones(3, requires_grad=True) for _ in range(3))
    h = watch.leave(watch.enter(before * 1).to(dtype) * w.to(dtype))
    (h * after).sum().backward()
    assert watch.scaled and torch.equal(w.grad, torch.full((3,), 8.0))
    assert torch.equal(before.grad, torch.ones(3)) and torch.equal(after.grad, torch.ones(3))


def test_an_output_inside_the_graph_of_another_or_fed_back_is_scaled_once():
    watch = scaled_by_8()
    w = torch.ones(3, requires_grad=True)
    logits = w * 2
    loss, out, again = watch.leave((logits.sum(), logits, logits))
    loss.backward(retain_graph=True)
    assert torch.equal(w.grad, torch.full((3,), 16.0))
    w.grad = None
    (loss + out.sum() + again.sum()).backward()
    assert torch.equal(w.grad, torch.full((3,), 48.0))
    watch = scaled_by_8()
    w = torch.ones(1, requires_grad=True)
    first = watch.leave(watch.enter(torch.ones(1)) * w)
    watch.leave(watch.enter(first) * w).sum().backward()
    assert torch.equal(w.grad, torch.tensor([16.0]))


def test_a_graph_that_missed_the_scale_is_an_error_in_every_step():
    config = {"train_micro_batch_size_per_gpu": 2, "fp16": {"enabled": True}, "steps_per_print": None}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    engine = zerolite.initialize(torch.nn.Linear(3, 1), config)
    x = torch.ones(2, 3)
    for backward in (engine.backward, torch.Tensor.backward):
        engine.backward(engine(x).mean())  # meets the scale, which says nothing of the next backward
        engine.step()
        with pytest.raises(RuntimeError, match="'(weight|bias)'.*engine"):
            backward(engine.module(x.half()).float().mean())
        engine.zero_grad()


@pytest.mark.parametrize(
    "pack",
    [
        lambda loss, logits: [logits, {"ids": torch.arange(2), "losses": (loss,)}],
        lambda loss, logits: Output(logits, extra=loss),
        ModelOutput,
    ],
)
@pytest.mark.parametrize("loss_dtype", [torch.bfloat16, torch.float64])
def test_beside_a_loss_outputs_keep_their_dtype(pack, loss_dtype):
    logits = (torch.ones(3, requires_grad=True) * 2).bfloat16()
    outputs = pack(logits.mean().to(loss_dtype), logits)
    kept, widened = {}, torch.promote_types(loss_dtype, torch.float32)
    for option in (None, True, False):
        watch = GraphBoundary(lambda: None, None, Precision(outputs_in_fp32=option))
        found = find_tensors(watch.leave(outputs))
        kept[option] = ({t.dtype for t in found if t.dim() == 0}, any(t is logits for t in found))
    assert kept == {None: ({widened}, True), True: ({widened}, False), False: ({widened}, True)}


def test_a_gradient_that_the_loss_scale_reaches_too_late_is_an_error():
    watch = scaled_by_8()
    w = torch.ones(3, requires_grad=True)
    loss, logits = watch.leave((w.mean().half(), (w * 2).half()))
    loss.backward(retain_graph=True)
    assert torch.equal(w.grad, torch.full((3,), 8 / 3))
    with pytest.raises(RuntimeError, match=r'fp32 outputs, got one through a torch.float16 .*"output_dtype": "fp32"'):
        logits.float().sum().backward()
