import pytest
import torch
from hypothesis import strategies as st
from proofs import OpProofs, Sample
from strategies import roundoff
from torch.testing import assert_close

import dpa


def _bytes(device, *size):
    return torch.randint(0, 256, size, dtype=torch.uint8, device=device)


class TestResizeCropNormalize(OpProofs):
    op = torch.ops.dpa.resize_crop_normalize
    reference = dpa.reference.resize_crop_normalize
    contiguous_output = False

    @staticmethod
    def samples(device, dtype):
        new = lambda *size: torch.rand(size, device=device, dtype=dtype)  # noqa: E731
        channels = lambda n: (new(n), new(n) + 0.5)  # noqa: E731
        yield Sample((new(2, 3, 9, 11), (4, 5), (1, 0, 2, 4), *channels(3)))
        yield Sample((new(1, 4, 5, 2), (7, 6), None, None, new(2) + 0.5, False, True))
        yield Sample((new(2, 3, 6, 7), None, (2, 3, 4, 4), None, new(3) + 0.5))
        yield Sample((_bytes(device, 2, 6, 8, 3), (3, 4), None, *channels(3), True, True, dtype))

    @staticmethod
    def rejected(device):
        x = torch.rand(2, 3, 6, 8, device=device)
        head = r"^dpa::resize_crop_normalize: "
        yield (
            head + r"image must have 4 dimensions \(B, C, H, W\), got shape \[3, 6, 8\]",
            Sample((x[0],)),
        )
        yield (
            head + r"image must have 4 dimensions \(B, H, W, C\)",
            Sample((x[0],), {"hwc": True}),
        )
        yield head + r"image must be uint8, float64.*got Int", Sample((x.int(),))
        yield head + r"size must be \(height, width\), got \[4\]", Sample((x, (4,)))
        yield head + r"size must be at least 1 each way, got \[0, 4\]", Sample((x, (0, 4)))
        yield head + r"image must have at least one pixel", Sample((x[..., :0], (4, 4)))
        yield head + r"crop must be \(top, left, height, width\)", Sample((x, None, (0, 0, 3)))
        yield (
            head + r"crop must lie in the image of height 6 and width 8, got \[0, 1, 6, 8\]",
            Sample((x, None, (0, 1, 6, 8))),
        )
        yield head + r"crop must lie in the image of height 4", Sample((x, (4, 4), (-1, 0, 2, 2)))
        yield (
            head + r"mean must have shape \(C\) = \[3\], got \[2\]",
            Sample((x, None, None, x[0, 0, 0, :2])),
        )
        yield (
            head + r"std must be float64",
            Sample((x, None, None, None, torch.ones(3, device=device).int())),
        )
        yield head + r"dtype must be float64.*got Byte", Sample((x,), {"dtype": torch.uint8})
        # Channels last in the shape, taken for (B, C, H, W).
        yield (
            head + r"mean must have shape \(C\) = \[6\]",
            Sample((x.permute(0, 2, 3, 1), None, None, x[0, :, 0, 0])),
        )
        if device.type == "cuda":
            on_host = Sample((x, None, None, torch.ones(3)))
            yield head + r"mean must be on the device", on_host

    @staticmethod
    def batches(device):
        for batch, height in [(2, 9), (3, 12), (5, 16), (7, 11)]:
            x = torch.rand(batch, 3, height, 8, device=device)
            yield Sample((x, (5, 4), (1, 0, 4, 4), x[0, :, 0, 0], x[0, :, 0, 0] + 0.5))

    @staticmethod
    def drawn(d):
        batch, channels = d(st.integers(0, 3)), d(st.integers(1, 4))
        height, width = d(st.integers(1, 12)), d(st.integers(1, 12))
        hwc = d(st.booleans())
        shape = (batch, height, width, channels) if hwc else (batch, channels, height, width)
        # Rounding decides whether a border's pixel counts nothing or next to nothing.
        image = d.tensor(*shape, low=-1.0, high=1.0)
        size = (d(st.integers(1, 12)), d(st.integers(1, 12))) if d(st.booleans()) else None
        inner = size or (height, width)
        crop = None
        if d(st.booleans()):
            h, w = (d(st.integers(1, n)) for n in inner)
            crop = (d(st.integers(0, inner[0] - h)), d(st.integers(0, inner[1] - w)), h, w)
        mean = d.tensor(channels, low=-1.0, high=1.0) if d(st.booleans()) else None
        std = d.tensor(channels, low=0.5, high=2.0) if d(st.booleans()) else None
        return Sample((image, size, crop, mean, std, d(st.booleans()), hwc))

    @staticmethod
    def rounding(sample, finite):
        """The places of the windows are rounded as well, by one in 12 pixels."""
        return 32 * roundoff(sample, accumulated=True)


@pytest.mark.parametrize("hwc", [False, True])
def test_uint8_is_what_a_policy_makes_of_it(device, hwc):
    """As torchvision's transforms do it, one by one, on an image in 0..1."""
    torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
    image = _bytes(device, 2, 3, 48, 64)
    t = torchvision.transforms
    steps = t.Compose(
        [t.Resize((30, 40)), t.CenterCrop((24, 32)), t.Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.1])]
    )
    given = image.permute(0, 2, 3, 1).contiguous() if hwc else image
    mean, std = torch.tensor([[0.4, 0.5, 0.6], [0.2, 0.3, 0.1]], device=device)
    got = dpa.ops.resize_crop_normalize(given, (30, 40), (3, 4, 24, 32), mean, std, hwc=hwc)
    assert got.is_contiguous(memory_format=torch.channels_last) and got.dtype == torch.float32
    assert_close(got, steps(image.double() / 255).float(), rtol=1e-5, atol=1e-5)


def test_what_the_crop_leaves_out_is_not_read(device):
    image = torch.full((1, 1, 8, 8), float("nan"), device=device)
    image[:, :, 2:6, 2:6] = 1.0
    got = dpa.ops.resize_crop_normalize(image, None, (2, 2, 4, 4))
    assert torch.equal(got, torch.ones(1, 1, 4, 4, device=device))


def test_no_images(device):
    got = dpa.ops.resize_crop_normalize(_bytes(device, 0, 8, 8, 3), (4, 4), (0, 0, 2, 2), hwc=True)
    assert got.shape == (0, 3, 2, 2)


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize(
    "size, resized, crop",
    [
        ((48, 64), (30, 40), (3, 4, 24, 32)),
        ((300, 5), (1, 7), None),
        ((7, 250), (9, 3), (2, 1, 4, 2)),
        ((31, 33), (31, 33), (5, 0, 20, 33)),
        ((5, 6), (64, 50), None),
    ],
)
def test_gradients_of_any_size(device, size, resized, crop, antialias):
    """Values are the same where a gradient is wanted, and gradients are PyTorch's on a CPU."""
    x = torch.rand(2, 3, *size, dtype=torch.float64, device=device)
    values = dpa.ops.resize_crop_normalize(x, resized, crop, antialias=antialias)
    exact, ours = x.cpu().requires_grad_(), x.requires_grad_()
    want = dpa.reference.resize_crop_normalize(exact, resized, crop, antialias=antialias)
    assert_close(values.cpu(), want, rtol=1e-9, atol=1e-9)
    got = dpa.ops.resize_crop_normalize(ours, resized, crop, antialias=antialias)
    assert_close(got.cpu(), want, rtol=1e-9, atol=1e-9)
    weights = torch.randn_like(want)
    (expected,) = torch.autograd.grad(want, exact, weights)
    for _ in range(3):
        (gradient,) = torch.autograd.grad(got, ours, weights.to(device), retain_graph=True)
        assert_close(gradient.cpu(), expected, rtol=1e-9, atol=1e-9)


def test_gradients_repeat(device):
    """They are sums in one order."""
    x = torch.rand(2, 3, 120, 160, device=device, requires_grad=True)
    out = dpa.ops.resize_crop_normalize(x, (50, 60), (3, 2, 40, 48))
    weights = torch.randn_like(out)
    first, *others = (torch.autograd.grad(out, x, weights, retain_graph=True)[0] for _ in range(4))
    assert all(torch.equal(first, other) for other in others)


def test_one_infinite_pixel(device):
    """It reaches the pixels that it is a part of, with a gradient as without one."""
    x = torch.zeros(1, 1, 12, 12, device=device)
    x[0, 0, 5, 5] = float("inf")
    values = dpa.ops.resize_crop_normalize(x, (6, 6))
    got = dpa.ops.resize_crop_normalize(x.clone().requires_grad_(), (6, 6))
    assert_close(got.detach(), values)
    assert got.isfinite().sum() >= 27
