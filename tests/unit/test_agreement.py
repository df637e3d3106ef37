"""Values as texts that are equal on all ranks where the values are, and sentences about those that are not."""

import functools

import torch

from zerolite.diagnostics.agreement import Description, describe_optimizer, differences, joined, plain_text


class Opaque:
    pass


def test_texts_do_not_depend_on_the_process() -> None:
    assert plain_text([1, 2.5, "a", None, True]) == "[1, 2.5, 'a', None, True]"
    assert (
        plain_text({"lr": torch.tensor(0.5), "table": torch.zeros(2, 3)})
        == "{lr: 0.5, table: a tensor of shape (2, 3)}"
    )
    assert plain_text(Opaque()) == plain_text(Opaque()) == f"{__name__}.Opaque"
    assert plain_text(torch.optim.SGD) == "torch.optim.sgd.SGD"
    assert plain_text(functools.partial(torch.zeros, 3, dtype=torch.int8)).endswith("with [3, {dtype: torch.int8}]")
    assert plain_text(torch.bfloat16) == "torch.bfloat16"


def test_differences_are_sentences() -> None:
    first = Description({"parameter 'w'": {"shape": "(2,)"}, "key": {"": "1"}}, {"all": ["w"]})
    second = joined(first, Description({"parameter 'v'": {"shape": "(1,)"}, "key": {"": "2"}}))
    assert list(differences({0: first, 1: second, 2: first})) == [
        "key is 1 on ranks 0 and 2, but 2 on rank 1",
        "parameter 'v' exists on rank 1 only",
    ]


def test_orders() -> None:
    ranks = [Description(orders={"the parameters": names}) for names in (["a", "b", "c"], ["a", "c", "b"])]
    assert list(differences(dict(enumerate(ranks)))) == [
        "the parameters come in another order: number 1 is 'b' on rank 0, but 'c' on rank 1"
    ]


def test_a_tied_parameter_has_one_name_in_its_group() -> None:
    model = torch.nn.Linear(2, 2)
    model.alias = model.weight
    found = describe_optimizer(None, [{"params": list(model.parameters()), "lr": 0.1}], model)
    assert found.orders == {"param group 0": ["weight", "bias"]}
    assert found.items["param group 0"] == {"a size of": "2", "lr": "0.1"}
    assert found.items["the param group of 'weight'"] == {"": "0"}
