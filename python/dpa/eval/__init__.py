"""LeRobot checkpoints in closed loop in simulators from PyPI: success, latency, video."""

from .environments import Environment
from .episodes import Episode, run_episode
from .policies import LeRobotPolicy

__all__ = ["Environment", "Episode", "LeRobotPolicy", "run_episode"]
