import pytest
import torch

from zerolite.comm.initial_sync import content_hash


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("numel", [1, (1 << 18) + 7])
def test_one_changed_element_changes_the_hash(dtype, numel):
    values = torch.randint(0, 2, (numel,), generator=torch.Generator().manual_seed(0)).to(dtype)
    reference = content_hash(values)
    assert torch.equal(content_hash(values.clone()), reference)
    for index in {0, numel // 2, numel - 1}:
        changed = values.clone()
        changed[index] = 1 - int(changed[index].real if dtype.is_complex else changed[index])
        assert not torch.equal(content_hash(changed), reference)


def test_another_order_has_another_hash():
    values = torch.randn(1000)
    assert not torch.equal(content_hash(values), content_hash(values.flip(0)))
    assert not torch.equal(content_hash(torch.tensor([1.0, 2.0])), content_hash(torch.tensor([2.0, 1.0])))
    rows = torch.zeros(4, 1 << 14)
    turned = rows.clone()
    rows[1, 2] = turned[2, 1] = 1.0
    assert not torch.equal(content_hash(rows), content_hash(turned))


def test_strides_do_not_matter_and_signs_do():
    image = torch.randn(2, 3, 4, 5)
    assert torch.equal(content_hash(image), content_hash(image.to(memory_format=torch.channels_last)))
    assert not torch.equal(content_hash(torch.tensor([0.0])), content_hash(torch.tensor([-0.0])))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_signs_of_many_elements_do_not_cancel(dtype):
    """A sign is the highest bit of a word, and two highest bits add up to nothing."""
    values = torch.arange(1, 4097).to(dtype)
    changed = {content_hash(values).item(), content_hash(-values).item()}
    for pair in ((0, 1), (0, 2), (1, 3), (100, 4000)):
        other = values.clone()
        other[list(pair)] *= -1
        changed.add(content_hash(other).item())
    assert len(changed) == 6
