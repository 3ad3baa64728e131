"""Fast registered operators for Diffusion Policy in PyTorch.

Importing the package loads the library and registers ``torch.ops.dpa.*``, unless
``DPA_LIBRARY=jit`` in the environment leaves that to :func:`dpa.jit.load`.
"""

from importlib import import_module
from importlib.util import find_spec

from dpa.library.starting import is_command

__version__ = "0.1.0"

if is_command():  # `dpa --help` waits for neither PyTorch nor the library, `dpa doctor` needs none

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if find_spec(f"dpa.{name}"):
            return import_module(f"dpa.{name}")
        public = import_module("dpa.public")
        globals().update({each: getattr(public, each) for each in public.__all__})
        return getattr(public, name)

else:
    from dpa.public import *  # noqa: F403
    from dpa.public import __all__ as __all__
