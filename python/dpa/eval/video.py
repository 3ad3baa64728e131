"""Frames of episodes as one GIF or MP4."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from dpa.library.files import replacing

FORMATS = (".gif", ".mp4")


def check_video(path: Path) -> None:
    """Raise ValueError for a name of another kind."""
    if path.suffix not in FORMATS:
        raise ValueError(f"video: must end in {' or '.join(FORMATS)}, got {path}")


def save_video(path: Path, frames: Sequence[np.ndarray], frame_rate: int) -> None:
    """Write frames (H, W, 3) in uint8.

    Raises:
        RuntimeError: what writes the format, Pillow or PyAV, is not installed.

    """
    try:
        with replacing(path) as temporary:
            write = _write_gif if path.suffix == ".gif" else _write_mp4
            write(temporary, frames, frame_rate)
    except ModuleNotFoundError as error:
        raise RuntimeError(f"writing {path} needs the package {error.name}") from None


def _write_gif(path: Path, frames: Sequence[np.ndarray], frame_rate: int) -> None:
    from PIL import Image

    first, *rest = [Image.fromarray(frame) for frame in frames]
    first.save(path, save_all=True, append_images=rest, duration=1000 // frame_rate, loop=0)


def _write_mp4(path: Path, frames: Sequence[np.ndarray], frame_rate: int) -> None:
    import av

    height, width = (size - size % 2 for size in frames[0].shape[:2])  # the codec wants even sizes
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(frame_rate))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for frame in frames:
            picture = np.ascontiguousarray(frame[:height, :width])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
