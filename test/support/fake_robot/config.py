"""The robot's configuration, in LeRobot's registry."""

from dataclasses import dataclass

from lerobot.robots.config import RobotConfig


@RobotConfig.register_subclass("still_robot")
@dataclass
class StillRobotConfig(RobotConfig):
    """It has no settings."""
