"""The published image encoders, each by the names of its parts.

A class is known by its name and by what its forward names, what it holds by being there; whether it
computes what this says, the first call tells, which runs the original too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EncoderVariant:
    """A module from images to features.

    Attributes:
        policies: who has it, for the documentation.
        classes: the names of its class.
        parts: what its forward runs, one after the other: names of modules, each of which may be
            absent or None; a name in parentheses is a function of PyTorch.
        names: what its forward, and the methods that it calls, name.
        backbone: the module that holds the residual network alone, without random crops and
            without what a forward keeps; "" for the encoder itself.
        branches: whether its forward has branches, on what it was made with.

    """

    policies: str
    classes: tuple[str, ...]
    parts: tuple[str, ...]
    names: tuple[str, ...]
    backbone: str = ""
    branches: bool = True


@dataclass(frozen=True)
class BlockVariant:
    """A residual block: convolutions with their norms, ReLU between them and after the sum.

    Attributes:
        classes: the names of its class.
        layers: (convolution, norm) by their names, in order.
        shortcut: the name of what the sum's other operand goes through, where that is not None.

    """

    classes: tuple[str, ...]
    layers: tuple[tuple[str, str], ...]
    shortcut: str = "downsample"

    @property
    def names(self) -> tuple[str, ...]:
        """What its forward names."""
        return (*(name for pair in self.layers for name in pair), "relu", self.shortcut)


_STEM = ("conv1", "bn1", "relu", "maxpool")
_STAGES = ("layer1", "layer2", "layer3", "layer4")

ENCODERS = (
    EncoderVariant(
        "LeRobot",
        ("DiffusionRgbEncoder",),
        ("resize", "center_crop", "backbone", "pool", "(flatten)", "out", "relu"),
        (
            *("resize", "do_crop", "training", "maybe_random_crop", "center_crop", "backbone"),
            *("pool", "torch", "flatten", "out", "relu"),
        ),
        "backbone",
    ),
    EncoderVariant(
        "robomimic, diffusion_policy's hybrid policies",
        ("VisualCore",),
        ("nets",),
        (
            *("len", "input_shape", "tuple", "shape", "super", "VisualCore", "forward", "list"),
            *("output_shape", "ValueError", "str", "nets", "backbone", "pool", "flatten"),
            *("feature_dimension", "np", "prod", "NotImplementedError"),
        ),
        "nets.0",
    ),
    EncoderVariant(
        "diffusion_policy's MultiImageObsEncoder, and whoever takes torchvision's",
        ("ResNet",),
        (*_STEM, *_STAGES, "avgpool", "(flatten)", "fc"),
        ("_forward_impl", *_STEM, *_STAGES, "avgpool", "torch", "flatten", "fc"),
        branches=False,
    ),
)

BLOCKS = (
    BlockVariant(("BasicBlock",), (("conv1", "bn1"), ("conv2", "bn2"))),
    BlockVariant(("Bottleneck",), (("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3"))),
)

# Classes that run what they hold as ``nets``, or their children, one after the other.
CHAINS = ("Sequential", "ResNet18Conv", "ResNet50Conv")
# Keypoints: an optional convolution ``nets`` in front, and a ``temperature`` or none.
KEYPOINTS = ("SpatialSoftmax",)
# What runs as it is: it holds no convolution, and is the same in every call in evaluation.
AS_THEY_ARE = (
    *("ReLU", "MaxPool2d", "AvgPool2d", "AdaptiveAvgPool2d", "Identity", "Flatten", "Linear"),
    *("SpatialMeanPool", "Normalize", "Dropout"),
)
