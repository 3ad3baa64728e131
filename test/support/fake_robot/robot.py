"""The robot: it goes where it is sent, at once, and remembers what it was sent."""

from typing import ClassVar

import numpy as np
from lerobot.robots.robot import Robot

from .config import StillRobotConfig

JOINTS = ("x.pos", "y.pos")
PIXELS = 32


class StillRobot(Robot):
    """Two joints and a camera."""

    config_class, name = StillRobotConfig, "still_robot"
    sent: ClassVar[list[dict[str, float]]] = []

    def __init__(self, config):
        super().__init__(config)
        self.cameras, self._at, self._on = {}, dict.fromkeys(JOINTS, 0.0), False

    @property
    def observation_features(self):
        return {**dict.fromkeys(JOINTS, float), "front": (PIXELS, PIXELS, 3)}

    @property
    def action_features(self):
        return dict.fromkeys(JOINTS, float)

    @property
    def is_connected(self):
        return self._on

    @property
    def is_calibrated(self):
        return True

    def connect(self, calibrate=True):
        self._on = True

    def disconnect(self):
        self._on = False

    def calibrate(self):
        pass

    def configure(self):
        pass

    def get_observation(self):
        image = np.random.default_rng(0).integers(0, 255, (PIXELS, PIXELS, 3), np.uint8)
        return {**self._at, "front": image}

    def send_action(self, action):
        self._at = {name: float(action[name]) for name in JOINTS}
        self.sent.append(self._at)
        return action
