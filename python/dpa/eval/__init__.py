"""LeRobot checkpoints in closed loop in simulators from PyPI: success, latency, video."""

from dpa.eval.environments import Environment
from dpa.eval.episodes import Episode, run_episode
from dpa.eval.policies import LeRobotPolicy

__all__ = ["Environment", "Episode", "LeRobotPolicy", "run_episode"]
