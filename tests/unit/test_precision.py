import collections
import dataclasses

import pytest
import torch

from zerolite.runtime.precision import GraphBoundary, Precision, map_tensors

Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    extra: object = None


class Config(dict):
    """A mapping type of somebody's own."""


def test_map_tensors_reaches_every_depth_and_keeps_types():
    value = {
        "x": [torch.ones(2), (torch.ones(1), "s")],
        "p": Pair(torch.ones(1), 3),
        "o": Output(torch.ones(1), [torch.ones(1)]),
    }
    value["c"] = Config(k=torch.ones(1), n=5)
    value["od"] = collections.OrderedDict(a=torch.ones(1))
    result = map_tensors(lambda t: t * 2, value)
    found = []
    map_tensors(lambda t: found.append(t) or t, result)
    assert len(found) == 7 and all((t == 2).all() for t in found)
    assert isinstance(result["p"], Pair) and isinstance(result["o"], Output) and isinstance(result["c"], Config)
    assert isinstance(result["od"], collections.OrderedDict) and result["c"]["n"] == 5
    assert (value["x"][0] == 1).all(), "the original is not changed"


def test_map_tensors_returns_the_same_object_where_nothing_changes():
    for value in ({"a": [1, "b"]}, Pair(1, 2), Output(torch.ones(1)), [torch.ones(1)], None, 5, object()):
        assert map_tensors(lambda t: t, value) is value


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
def test_cast_touches_floating_inputs_only(compute):
    precision = Precision(compute=compute, separate_masters=True)
    x, i, b = torch.ones(2), torch.ones(2, dtype=torch.long), torch.tensor([True])
    (cast_x, cast_i), kwargs = precision.cast(((x, i), {"mask": b, "y": x.double()}))
    assert cast_x.dtype == compute and cast_i is i and kwargs["mask"] is b and kwargs["y"].dtype == compute
    assert Precision().cast(x) is x


def test_dtype_table():
    mixed = Precision(compute=torch.bfloat16, separate_masters=True)
    low = Precision(compute=torch.bfloat16)
    lowest = Precision(compute=torch.bfloat16, update_in_fp32=False)
    plain = Precision()
    fp32, bf16 = torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)
    assert mixed.compute_dtype(fp32) is torch.bfloat16 and plain.compute_dtype(bf16) is torch.bfloat16
    assert mixed.compute_dtype(torch.zeros(1, dtype=torch.int8)) is torch.int8
    assert [p.master_dtype(torch.bfloat16) for p in (mixed, low, lowest, plain)] == [torch.float32] + [
        torch.bfloat16
    ] * 3
    assert mixed.update_dtype(torch.float32) is torch.float32
    assert low.update_dtype(torch.bfloat16) is torch.float32
    assert (
        lowest.update_dtype(torch.bfloat16) is torch.bfloat16 and plain.update_dtype(torch.bfloat16) is torch.bfloat16
    )


def boundary(scale=None):
    begun = []
    return GraphBoundary(lambda: begun.append(1), None if scale is None else lambda: scale), begun


def test_outputs_come_back_in_fp32_and_watched():
    watch, begun = boundary()
    w = torch.ones(3, requires_grad=True)
    out = watch.leave({"h": (w * 2).bfloat16(), "n": torch.arange(3)})
    assert out["h"].dtype is torch.float32 and out["n"].dtype is torch.long
    out["h"].sum().backward()
    assert begun and torch.equal(w.grad, torch.full((3,), 2.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_loss_scale_enters_once_and_leaves_again(dtype):
    watch, _ = boundary(scale=8.0)
    before = torch.ones(3, requires_grad=True)
    w = torch.ones(3, requires_grad=True)
    after = torch.ones(3, requires_grad=True)
    h = watch.leave(watch.enter(before * 1).to(dtype) * w.to(dtype))
    (h * after).sum().backward()
    assert watch.scaled
    assert torch.equal(w.grad, torch.full((3,), 8.0))
    assert torch.equal(before.grad, torch.ones(3)) and torch.equal(after.grad, torch.ones(3))


def test_an_output_inside_the_graph_of_another_is_scaled_once():
    watch, _ = boundary(scale=8.0)
    w = torch.ones(3, requires_grad=True)
    logits = w * 2
    loss, out, again = watch.leave((logits.sum(), logits, logits))
    loss.backward(retain_graph=True)
    assert torch.equal(w.grad, torch.full((3,), 16.0))
    w.grad = None
    (loss + out.sum() + again.sum()).backward()
    assert torch.equal(w.grad, torch.full((3,), 48.0))


def test_an_output_fed_back_is_scaled_once():
    watch, _ = boundary(scale=8.0)
    w = torch.ones(1, requires_grad=True)
    first = watch.leave(watch.enter(torch.ones(1)) * w)
    second = watch.leave(watch.enter(first) * w)
    second.sum().backward()
    assert torch.equal(w.grad, torch.tensor([16.0]))


def test_a_graph_that_missed_the_scale_is_an_error():
    watch, _ = boundary(scale=8.0)
    with pytest.raises(RuntimeError, match="'head.weight'.*engine"):
        watch.check_scaled("head.weight")
    boundary()[0].check_scaled("head.weight")


def test_a_parameter_returned_from_forward_gets_no_lasting_hook():
    watch, begun = boundary()
    w = torch.ones(3, requires_grad=True)
    assert watch.leave(w) is w
    w.sum().backward()
    assert not begun


def test_outputs_may_be_changed_in_place():
    watch, _ = boundary()
    w = torch.ones(3, requires_grad=True)
    out = watch.leave(w * 3)
    out.mul_(2)
    out[0] = 0
    out.sum().backward()
    assert torch.equal(w.grad, torch.tensor([0.0, 6.0, 6.0]))
