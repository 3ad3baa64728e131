"""LeRobot's names of parameters."""

import re


def lerobot_name(name):
    """Return LeRobot's name of what the original names ``name``."""
    name = re.sub(r"\bblocks\.([01])\.block\b", lambda m: f"conv{int(m[1]) + 1}.block", name)
    return re.sub(r"((?:down|up)_modules\.\d+\.2)\.conv\b", r"\1", name)
