"""What users do to image encoders, in small: actions as those of ``user_actions``.

The encoder has the classes and attributes that LeRobot's has, and a few channels.
"""

import copy

import torch
from torch import nn


class CenterCrop(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, x):
        top, left = ((x.shape[i - 2] - self.size[i]) // 2 for i in (0, 1))
        return x[..., top : top + self.size[0], left : left + self.size[1]]


class BasicBlock(nn.Module):
    def __init__(self, before, channels, stride, norm):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, channels, 3, stride, 1, bias=False), norm(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False), norm(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1:
            conv = nn.Conv2d(before, channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, norm(channels))

    def forward(self, x):
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(x)) + shortcut)


class SpatialSoftmax(nn.Module):
    def __init__(self, channels, height, width, keypoints):
        super().__init__()
        self.nets = nn.Conv2d(channels, keypoints, 1)
        self._in_h, self._in_w = height, width
        y, x = torch.meshgrid(
            torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij"
        )
        self.register_buffer("pos_grid", torch.stack([x, y], -1).reshape(height * width, 2))

    def forward(self, x):
        x = self.nets(x)
        return x.flatten(2).softmax(-1) @ self.pos_grid


class DiffusionRgbEncoder(nn.Module):
    """From images (B, 3, H, W) of 13 to 16 pixels each way to (B, features)."""

    def __init__(self, features, norm=nn.BatchNorm2d):
        super().__init__()
        self.do_crop, self.center_crop = True, CenterCrop((15, 15))
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False), norm(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
            BasicBlock(8, 8, 1, norm), BasicBlock(8, 16, 2, norm), nn.Dropout(0.5),
        )  # fmt: skip
        self.pool = SpatialSoftmax(16, 2, 2, 6)
        self.out, self.relu = nn.Linear(12, features), nn.ReLU()
        for name, tensor in self.state_dict().items():  # norms as training leaves them
            if tensor.dim() == 1 and name.endswith(("weight", "bias", "mean", "var")):
                low = 0.7 if name.endswith(("weight", "var")) else -0.3
                tensor.uniform_(low, low + 0.6)
        nn.init.constant_(self.out.bias, 0.5)

    def forward(self, x):
        if self.do_crop:
            x = self.center_crop(x)
        return self.relu(self.out(torch.flatten(self.pool(self.backbone(x)), 1)))


def group_norm(channels):
    return nn.GroupNorm(4, channels)


def _of(kind):
    """The modules of a class in a policy's encoder, in an order that does not depend on history."""

    def found(policy):
        held = getattr(policy, "encoder", None)
        modules = [] if held is None else sorted(held.named_modules(), key=lambda pair: pair[0])
        return [module for _, module in modules if isinstance(module, kind)]

    return found


_norms, _convolutions = _of(nn.BatchNorm2d), _of(nn.Conv2d)


def _to_a_norm(change):
    def act(policy, random):
        norms = _norms(policy)
        if norms:
            change(random.choice(norms), random)

    return act


def _tensors(norm, random):
    tensors = [t for t in (norm.running_mean, norm.running_var, norm.weight) if t is not None]
    return random.choice(tensors) if tensors else torch.zeros(1)


@torch.no_grad()
def _write_statistics(norm, random):
    _tensors(norm, random).mul_(1.5)


def _write_through_data(norm, random):
    data = _tensors(norm, random).data
    data[random.randrange(len(data))] += 0.5


def _new_statistics(norm, random):
    if norm.running_mean is not None:
        norm.running_mean = norm.running_mean + 0.3


def _no_affine(norm, random):
    norm.weight = None if norm.weight is not None else nn.Parameter(norm.running_var * 0 + 1.5)


def _no_statistics(norm, random):
    if random.random() < 0.3:
        norm.running_mean = norm.running_var = None


def _settings(norm, random):
    norm.eps, norm.momentum = random.choice((1e-5, 0.1, 0.5)), random.choice((0.1, 0.9))


def _trained(policy, random):
    """A pass in training mode, which writes statistics."""
    encoder = getattr(policy, "encoder", None)
    if encoder is None:
        return
    weight = next(encoder.parameters())
    modes = [module.training for module in encoder.modules()]
    generator = torch.Generator().manual_seed(random.randrange(100))
    images = torch.rand(2, 3, 16, 16, generator=generator).to(weight)
    with torch.random.fork_rng(), torch.autocast(weight.device.type, torch.bfloat16, False):
        torch.manual_seed(3)
        encoder.train()(images)
    for module, mode in zip(encoder.modules(), modes, strict=True):
        module.training = mode


def _mode(policy, random):
    if hasattr(policy, "encoder"):
        policy.encoder.train(not policy.encoder.training)


def _mode_of_a_layer(policy, random):
    modules = _of((nn.BatchNorm2d, nn.Dropout, nn.Sequential, SpatialSoftmax))(policy)
    if modules:
        module = random.choice(modules)
        module.train(not module.training)


def _bias(policy, random):
    if convolutions := _convolutions(policy):
        conv = random.choice(convolutions)
        ones = nn.Parameter(torch.ones_like(conv.weight[:, 0, 0, 0]))
        conv.bias = ones if conv.bias is None else None


def _channels_last(policy, random):
    if hasattr(policy, "encoder"):
        policy.encoder.to(memory_format=torch.channels_last)


def _to_keypoints(change):
    def act(policy, random):
        for pool in _of(SpatialSoftmax)(policy):
            change(pool)

    return act


class _Doubled(SpatialSoftmax):
    def forward(self, x):
        return super().forward(x) * 2


def _own_forward(layer):
    own = layer.forward
    layer.forward = lambda x: own(x) * 0.5


def _own_forward_of_blocks(policy, random):
    for block in _of(BasicBlock)(policy):
        _own_forward(block)


def _other_keypoints(pool):
    pool.nets = copy.deepcopy(pool.nets)
    with torch.no_grad():
        pool.nets.weight.mul_(2)


def _crop(policy, random):
    if hasattr(policy, "encoder"):
        policy.encoder.do_crop = not policy.encoder.do_crop


def _crop_size(policy, random):
    for crop in _of(CenterCrop)(policy):
        crop.size = random.choice(((15, 15), (14, 13)))


ACTIONS = {
    "statistics": _to_a_norm(_write_statistics),
    "statistics through data": _to_a_norm(_write_through_data),
    "new statistics": _to_a_norm(_new_statistics),
    "no affine": _to_a_norm(_no_affine),
    "no statistics": _to_a_norm(_no_statistics),
    "settings of a norm": _to_a_norm(_settings),
    "training writes statistics": _trained,
    "mode of the encoder": _mode,
    "mode of a layer": _mode_of_a_layer,
    "bias": _bias,
    "channels last": _channels_last,
    "grid": _to_keypoints(lambda pool: pool.pos_grid.mul_(1.5)),
    "grid through data": _to_keypoints(lambda pool: pool.pos_grid.data.mul_(1.5)),
    "new grid": _to_keypoints(lambda pool: setattr(pool, "pos_grid", pool.pos_grid * 1.5)),
    "class of keypoints": _to_keypoints(lambda pool: setattr(pool, "__class__", _Doubled)),
    "forward of keypoints": _to_keypoints(_own_forward),
    "forward of blocks": _own_forward_of_blocks,
    "other keypoints": _to_keypoints(_other_keypoints),
    "crop": _crop,
    "size of the crop": _crop_size,
}
