"""What compiling and linking need of another torch: fetch_torch.py VERSION FOLDER.

PyPI's torch brings CUDA's libraries, 3 GB; of its own package, 1 GB, headers and four libraries do.
"""

import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

LIBRARIES = ("torch_cpu", "c10", "torch_cuda", "c10_cuda")
WANTED = (
    "torch/include/",
    "torch/__init__.py",
    "torch/version.py",
    *(f"torch/lib/lib{name}.so" for name in LIBRARIES),
)


def fetch(version: str, folder: Path) -> None:
    """Unpack torch/ into the folder, unless it is there; torch/version.py comes last."""
    if (folder / "torch" / "version.py").is_file():
        return
    print(f"fetching torch {version}: 1 GB", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download"]
    with TemporaryDirectory(dir=folder) as temporary:
        subprocess.run([*pip, "--no-deps", "--dest", temporary, f"torch=={version}"], check=True)
        (wheel,) = Path(temporary).glob("torch-*.whl")
        with zipfile.ZipFile(wheel) as package:
            names = [name for name in package.namelist() if name.startswith(WANTED)]
            names.sort(key="torch/version.py".__eq__)
            package.extractall(folder, names)


if __name__ == "__main__":
    fetch(sys.argv[1], Path(sys.argv[2]))
