"""A robot for LeRobot's commands that has two joints and a camera, and no hardware."""

from .config import StillRobotConfig
from .robot import StillRobot

__all__ = ["StillRobot", "StillRobotConfig"]
