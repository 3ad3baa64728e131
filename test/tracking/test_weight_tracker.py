"""Which writes through ``parameter.data`` show in the values that a tracker compares."""

import pytest
import torch
from torch import nn

from dpa.tracking import WeightTracker

LARGE = {
    "convolution": lambda: nn.Conv1d(160, 96, 5),
    "transposed": lambda: nn.ConvTranspose1d(96, 160, 4),
    "linear": lambda: nn.Linear(130, 512),
    "thin": lambda: nn.Linear(64, 1030),
    "one tap": lambda: nn.Conv1d(256, 128, 1),
}


@pytest.fixture(params=LARGE)
def layer(request, device):
    return LARGE[request.param]().to(device)


def _shows(layer, place):
    """Whether a write of a place shows, and no longer once it is remembered."""
    tracker = WeightTracker([(layer, "weight")])
    tracker.remember()
    tracker.start()
    assert not tracker.values_changed()
    layer.weight.data[place] += 1.0
    tracker.start()
    shown = tracker.values_changed()
    tracker.remember()
    tracker.start()
    assert not tracker.values_changed() and not tracker.changed()
    return shown


def test_every_row_channel_and_tap_shows(layer):
    for dim, size in enumerate(layer.weight.shape):
        for at in range(0, size, 1 if size < 200 else 7):
            assert _shows(layer, (slice(None),) * dim + (at,)), (dim, at)


def test_blocks_show(layer):
    rows, columns = layer.weight.shape[:2]
    for fraction in (2, 3, 4):
        for at in range(fraction):
            low = slice(at * rows // fraction, (at + 1) * rows // fraction)
            for side in range(fraction):
                right = slice(side * columns // fraction, (side + 1) * columns // fraction)
                assert _shows(layer, (low, right)), (low, right)


def test_channels_last_shows(device):
    layer = nn.Conv1d(96, 128, 5).to(device)
    layer.weight.data = layer.weight.data.transpose(1, 2).contiguous().transpose(1, 2)
    assert all(_shows(layer, at) for at in range(128))
    assert all(_shows(layer, (slice(None), at)) for at in range(96))


def test_all_of_a_small_one_shows(device):
    layer = nn.Conv1d(32, 48, 5).to(device)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        place = [int(torch.randint(n, (), generator=generator)) for n in layer.weight.shape]
        assert _shows(layer, tuple(place)), place


def test_all_of_a_small_one_shows_in_any_order_of_memory(device):
    layer = nn.Conv2d(16, 24, 3).to(device, memory_format=torch.channels_last)
    assert not layer.weight.is_contiguous()
    for place in ((1, 2, 0, 1), (23, 15, 2, 2), (5, 9, 1, 0)):
        assert _shows(layer, place), place


@pytest.mark.parametrize("mode", ["tracked", "checked", "frozen"])
@pytest.mark.parametrize(
    "view",
    [
        lambda weight: weight.transpose(0, 1),
        lambda weight: weight[:1].expand_as(weight),
        lambda weight: weight.as_strided(weight.shape, (5, 160, 1)),
    ],
)
def test_other_strides_at_the_same_address_show(view, mode, device):
    layer = nn.Conv1d(32, 32, 5).to(device)
    tracker = WeightTracker([(layer, "weight")], mode)
    tracker.remember()
    assert not tracker.moved() and not tracker.changed()
    layer.weight.data = view(layer.weight.data)
    assert tracker.moved() and tracker.changed()
    tracker.remember()
    tracker.start()
    assert not tracker.moved() and not tracker.changed() and not tracker.values_changed()
    layer.weight.data[3, 4, 2] += 1
    tracker.start()
    assert tracker.values_changed() == (mode != "frozen")


def test_a_parameter_that_is_gone_shows(device):
    layer = nn.Linear(4, 4).to(device)
    tracker = WeightTracker([(layer, "weight"), (layer, "bias")])
    tracker.remember()
    layer.bias = None
    assert tracker.changed()


def test_a_few_elements_inside_a_large_one_show_where_all_is_checked(device):
    layer = nn.Linear(512, 512).to(device)
    place = (100, 357)
    assert not _shows(layer, place)
    tracker = WeightTracker([(layer, "weight")], "checked")
    tracker.remember()
    layer.weight.data[place] += 1.0
    tracker.start()
    assert tracker.values_changed()


@pytest.mark.parametrize("mode", ["tracked", "checked"])
def test_parameters_of_several_dtypes(mode):
    """One element that alone is compared, of a dtype beside others, shows by its bytes."""
    layers = nn.ModuleList(
        [nn.Conv1d(200, 100, 1), nn.Linear(8, 8).double(), nn.Linear(3, 2).half()]
    )
    layers[0].weight.data = layers[0].weight.data.transpose(0, 1).contiguous().transpose(0, 1)
    layers[1].register_buffer("count", torch.tensor([2**53]))
    slots = [(layer, "weight") for layer in layers] + [(layers[1], "count")]
    tracker = WeightTracker(slots, mode)
    for layer, name in slots:
        tracker.remember()
        assert not tracker.values_changed()
        getattr(layer, name).data.view(-1)[:1].add_(
            1
        ) if name == "count" else layer.weight.data.mul_(2)
        assert tracker.values_changed()
