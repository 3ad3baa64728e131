"""Gives a wheel a local version, such as 0.1.0+cpu: local_version.py WHEEL LABEL.

So pip's list says which wheel is installed. auditwheel, which comes after, renews the hashes.
"""

import re
import sys
import zipfile
from pathlib import Path


def relabel(wheel: Path, label: str) -> Path:
    """Write the wheel again as NAME-VERSION+LABEL-TAGS.whl and remove the original."""
    name, version, tags = wheel.name.split("-", 2)
    old, new = f"{name}-{version}", f"{name}-{version}+{label}"
    result = wheel.with_name(f"{new}-{tags}")
    folder = f"{old}.dist-info/"
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(result, "w") as target:
        for entry in source.infolist():
            data = source.read(entry)
            if entry.filename == f"{folder}METADATA":
                data = re.sub(
                    rb"^(Version: .*)$", rb"\1+" + label.encode(), data, count=1, flags=re.M
                )
            if entry.filename == f"{folder}RECORD":
                data = data.replace(folder.encode(), f"{new}.dist-info/".encode())
            if entry.filename.startswith(folder):
                entry.filename = entry.filename.replace(old, new, 1)
            target.writestr(entry, data, zipfile.ZIP_DEFLATED)
    wheel.unlink()
    return result


if __name__ == "__main__":
    relabel(Path(sys.argv[1]), sys.argv[2])
