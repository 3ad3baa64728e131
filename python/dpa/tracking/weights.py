"""What weights were at the last check: where they lie, how often written, and their values."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from dpa.library.checks import require
from dpa.library.graphs import Replayed, captured

_version = operator.attrgetter("_version")
MODES = ("tracked", "checked", "frozen")
_WHOLE = 1 << 13  # elements of a matrix that is compared as a whole; of a thin one four times that
_SPREAD = 256  # elements, spread over all of a larger one
_GOLDEN = 0.618

Places = tuple[list[int], list[tuple[int, ...]]]
Stamp = tuple[Places, list[int]]
# The event behind an answer, the answer, and what is compared: a graph that compares keeps it.
Comparison = tuple[torch.cuda.Event, Tensor, Tensor, list[Tensor]]


def stamp_of(tensors: list[Tensor]) -> Stamp:
    """Where tensors lie, by which strides, and how often each was written, where that is counted.

    A tensor whose ``data`` is made a transposed view of it has the same address and version.
    """
    try:
        versions = list(map(_version, tensors))
    except RuntimeError:  # tensors made in inference mode count no versions
        versions = []
    return (list(map(Tensor.data_ptr, tensors)), list(map(Tensor.stride, tensors))), versions


def version_of(tensor: Tensor) -> Hashable:
    """What a write in place changes.

    Tensors made in inference mode count no versions: on the CPU their values are read, on a GPU
    nobody can read them without waiting.
    """
    if not tensor.is_inference():
        return tensor._version
    return tuple(tensor.flatten().tolist()) if tensor.device.type == "cpu" else None


class WeightTracker:
    """Parameters, or buffers, by where they are held, and as of the last :meth:`remember`.

    A write is noticed by three signs. A parameter that is another tensor lies elsewhere. A write in
    place counts in its version. A write through ``parameter.data`` shows in the values alone:
    of these, all of a vector and of a small matrix or kernel are compared, and of a larger one an
    element of each row and column, and some 256 that are spread over all of it. So a write of a
    row, a channel, a tap or a block shows, and not one of a few elements inside a large matrix.
    ``checked`` compares a checksum of every element besides.

    Args:
        slots: (module, name of the parameter or buffer in it), or (dict, name of a tensor in it).
        mode: "tracked"; "checked"; or "frozen", which compares nothing, as long as the parameters
            stay where they are.

    """

    def __init__(
        self, slots: Sequence[tuple[nn.Module | dict[str, Tensor], str]], mode: str = "tracked"
    ):
        require(mode in MODES, "weights", f"be one of {', '.join(MODES)}", repr(mode))
        self.mode = mode
        self._homes = [_home(*slot) for slot in slots]
        self._names = [name for _, name in slots]
        self._stamp: Stamp | None = None
        self._elements: list[Tensor] = []
        self._values: Tensor | None = None
        self._graph: Replayed | None = None

    def tensors(self) -> list[Tensor]:
        """The parameters that there are now."""
        return list(map(operator.getitem, self._homes, self._names))

    @property
    def placement(self) -> tuple[torch.device, torch.dtype]:
        """Device and dtype, by the first parameter."""
        first = self._homes[0][self._names[0]]
        return first.device, first.dtype

    def slots(self) -> Iterator[tuple[int, str]]:
        """Yield where each parameter is held: the ``id`` of the dict, and the name in it."""
        return zip(map(id, self._homes), self._names, strict=True)

    def _now(self) -> Stamp | None:
        try:
            return stamp_of(self.tensors())
        except (AttributeError, KeyError, TypeError):  # of None, of what was taken out
            return None

    def moved(self) -> bool:
        """Whether a parameter lies elsewhere or is gone."""
        now = self._now()
        return now is None or self._stamp is None or now[0] != self._stamp[0]

    def changed(self) -> bool:
        """Whether a parameter lies elsewhere or is gone, or was written in a way that counts."""
        if self.mode == "frozen":
            return self.moved()
        return self._stamp is None or self._now() != self._stamp

    @torch.inference_mode(False)
    @torch.no_grad()
    def remember(self) -> None:
        """Remember what the weights are now."""
        before, self._stamp = self._stamp, stamp_of(self.tensors())
        if self.mode == "frozen":
            return
        if self._values is not None and before is not None and before[0] == self._stamp[0]:
            self._values.copy_(_bytes(self._compared()))
            return
        # Views: they show what is written through parameter.data as well.
        self._parameters = [parameter.detach() for parameter in self.tensors()]
        self._elements = [view for one in self._parameters for view in _sampled(one)]
        self._values = _bytes(self._compared())
        self._graph = None
        if self._values.is_cuda:
            self._answered = torch.cuda.Event()
            with torch.device("cpu"):
                self._answer = torch.zeros((), dtype=torch.bool, pin_memory=True)
            with contextlib.suppress(RuntimeError):  # then it runs kernel by kernel
                (self._graph,), _ = captured(
                    self._values.device,
                    lambda: self._answer.copy_(self._differ(), non_blocking=True),
                )

    @contextlib.contextmanager
    def remembered(self) -> Iterator[None]:
        """Remember what the weights are now, for what is made of them inside.

        A write that comes in between counts as one that came after, and is noticed. Where something
        is raised nothing was made: they count as changed.
        """
        self.remember()
        try:
            yield
        except BaseException:
            self._stamp = None
            raise

    def _compared(self) -> list[Tensor]:
        """The elements that are compared and, where all is checked, a checksum a parameter."""
        if self.mode != "checked":
            return self._elements
        return self._elements + [torch.hash_tensor(p) for p in self._parameters]

    def _differ(self) -> Tensor:
        return torch.ops.dpa.values_differ(self._compared(), self._values)

    def start(self) -> None:
        """Begin to compare values, on a GPU by one launch; :meth:`values_changed` has the answer.

        The work comes after what the current stream did and before what it is given next, while the
        host goes on. Threads that share this object hold a lock from here to the answer.
        """
        if self._values is None or not self._values.is_cuda:  # None where nothing is compared
            return
        device = self._values.device
        with torch.cuda.device(device):
            if self._graph is None:
                self._answer.copy_(self._differ(), non_blocking=True)
            else:
                self._graph.replay()
            self._answered.record(torch.cuda.current_stream(device))

    def captured_start(self) -> Comparison | None:
        """Put the comparison into the capture of the current stream; None where there is none.

        A launch of the graph, once :meth:`started` agreed, stands for :meth:`start`.
        """
        if self._values is None:
            return None
        self._answer.copy_(self._differ(), non_blocking=True)
        answered = torch.cuda.Event(external=True)
        answered.record()
        return answered, self._answer, self._values, self._elements

    def started(self, comparison: Comparison) -> bool:
        """Take the answer of a graph with this comparison; False where it compares what was."""
        answered, answer, values, elements = comparison
        if values is not self._values or elements is not self._elements:
            return False
        self._answered, self._answer = answered, answer
        return True

    def values_changed(self) -> bool:
        """Whether values are others than those remembered, as of the last :meth:`start`."""
        if self._values is None:
            return False
        if not self._values.is_cuda:
            return bool(self._differ())
        self._answered.synchronize()
        return bool(self._answer)


def _home(holder: nn.Module | dict[str, Tensor], name: str) -> Mapping[str, Tensor | None]:
    """Return the dict that holds a tensor."""
    if isinstance(holder, dict):
        return holder
    return holder._parameters if name in holder._parameters else holder._buffers


def _bytes(values: list[Tensor]) -> Tensor:
    """The bytes of values, one after the other."""
    alike = itertools.groupby(values, operator.attrgetter("dtype"))
    kind = values[0].device.type if values else "cpu"
    with torch.autocast(kind, enabled=False):  # whose cat refuses some dtypes
        parts = [torch.cat([v.reshape(-1) for v in part]).view(torch.uint8) for _, part in alike]
        return torch.cat(parts)


def _sampled(parameter: Tensor) -> list[Tensor]:
    """The elements of a parameter that are compared, as views of one dimension."""
    if parameter.numel() == 0:
        return []
    if parameter.dim() < 2:
        return [parameter.reshape(-1) if parameter.dim() == 0 else parameter]
    (rows, columns), (row, column) = parameter.shape[:2], parameter.stride()[:2]
    side, longer = min(rows, columns), max(rows, columns)
    dense = parameter.permute(sorted(range(parameter.dim()), key=parameter.stride, reverse=True))
    if dense.is_contiguous():  # in whatever order of its dimensions
        if parameter.numel() <= (4 * _WHOLE if longer > 8 * side else _WHOLE):
            return [dense.view(-1)]
        spread = dense.view(-1)[:: _spacing(dense.shape[0], dense.numel() // dense.shape[0])]
    else:
        spread = parameter[0, 0].reshape(-1) if parameter.dim() > 2 else parameter[0, :1]
    middle = sum(
        size // 2 * stride
        for size, stride in zip(parameter.shape[2:], parameter.stride()[2:], strict=True)
    )
    along = row if rows >= columns else column
    diagonals = [
        parameter.as_strided(
            (min(side, longer - start),),
            (row + column,),
            parameter.storage_offset() + middle + start * along,
        )
        for start in range(0, longer, side)
    ]
    return [spread, *diagonals]


def _spacing(rows: int, width: int) -> int:
    """Return the distance of elements that are spread evenly over rows, columns and taps."""
    ratio = rows / _SPREAD
    # Rows apart by a golden ratio of a width: no few columns meet all of them.
    ratio = int(ratio) + _GOLDEN if ratio >= 1 else 1 / (int(1 / ratio) + _GOLDEN)
    spacing = round(ratio * width)
    while math.gcd(spacing, rows * width) > 1:
        spacing += 1
    return spacing
